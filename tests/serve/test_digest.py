"""The digest covers all rows of a dataset, or up to its limit, also while the dataset grows."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import spile
from spile.dataset.format import TapInfo
from spile.dataset.read.opening import open_dataset
from spile.serve.digest import KEPT, Blocks, Digest, top_rows_kept
from support import stored, web_page

LARGE = 1 << 40


def finished(digest: Digest, until: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not until():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.parametrize("taps", [stored.SHAPED, stored.SCALED])
def test_every_row_of_every_tap_is_read_once(tmp_path: Path, taps: stored.Taps) -> None:
    written = stored.build(tmp_path / "out", taps=taps)
    digest = Digest(spile.open(str(written.path)), LARGE)
    digest.start()
    finished(digest, lambda: not digest.at_work)
    digest.close()
    assert digest.rows_read == digest.rows_wanted == len(written.index)
    assert digest.error is None
    assert {*written.rows} - {*digest.moments} == {"expert_ids.1"}, "its places are ranks"
    for tap in digest.moments:
        rows = written.rows[tap]
        wide = rows.reshape(len(rows), -1).astype(np.float64)
        moments = digest.moments[tap]
        assert moments.count == len(rows)
        np.testing.assert_allclose(moments.mean, wide.mean(axis=0), rtol=1e-4, atol=1e-4)
        assert moments.norm == pytest.approx(np.linalg.norm(wide, axis=1).mean(), rel=1e-4)
        value, unit, row = moments.high.of(0)[0]
        assert value == wide[:, 0].max()
        assert wide[written.starts[unit] + row, 0] == value


def test_latents_are_counted_by_their_ids_and_not_by_rank(tmp_path: Path) -> None:
    written = stored.build(tmp_path / "out", taps=stored.LATENTS, **stored.ENCODED)
    dataset = spile.open(str(written.path))
    digest = Digest(dataset, LARGE)
    digest.start()
    finished(digest, lambda: not digest.at_work)
    digest.close()
    assert digest.error is None
    assert [*digest.moments] == ["resid_post.0"]
    (moments,) = digest.latents.values()
    dense = dataset.latents("mlp_out.1", 0, 10**6).dense()
    assert moments.count == len(dense)
    fires = np.count_nonzero(dense, axis=0)
    np.testing.assert_array_equal(moments.fires, fires)
    np.testing.assert_array_equal(moments.largest, dense.max(axis=0))
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(moments.mean, dense.sum(axis=0, dtype=float) / fires)
    assert moments.active == pytest.approx(fires.sum() / len(dense))
    for latent in range(40):
        best = spile.top_rows(dataset, "mlp_out.1", latent, KEPT)
        hits = moments.high.of(latent)
        assert [value for value, _, _ in hits] == best.values.tolist()
        for value, unit, row in hits:
            assert dense[written.starts[unit] + row, latent] == value


def test_few_rows_are_kept_of_very_many_latents() -> None:
    assert [top_rows_kept(count) for count in (0, 16_384, 1 << 20, 1 << 23, 1 << 26)] == [
        24, 24, 16, 2, 1,
    ]  # fmt: skip


def test_ids_that_no_latent_has_are_said(tmp_path: Path) -> None:
    ids = TapInfo((4,), "int16", latents=41)  # drawn from one more than the values' encoder has
    taps = {**stored.LATENTS, "mlp_out_latent_ids.1": ids}
    written = stored.build(tmp_path / "out", taps=taps, **stored.ENCODED)
    digest = Digest(spile.open(str(written.path)), LARGE)
    digest.start()
    finished(digest, lambda: not digest.at_work)
    digest.close()
    assert digest.error is not None
    assert "has ids of latents that are not among 40" in digest.error


class _ClosedJustNow(threading.Event):
    """The digest is closed before its thread first checks for that."""

    def __init__(self, digest: Digest) -> None:
        super().__init__()
        self._digest = digest

    def clear(self) -> None:
        self._digest._stopped.set()
        self.set()
        super().clear()


def test_one_that_is_closed_as_it_looks_for_more_ends(tmp_path: Path) -> None:
    digest = Digest(spile.open(str(stored.build(tmp_path / "out").path)), LARGE)
    digest._changed = _ClosedJustNow(digest)
    digest._waiting = Blocks.of_rows(np.zeros(0, np.int64), np.zeros(0, np.int64), 1)
    digest.start()
    digest._thread.join(30)
    assert not digest._thread.is_alive()


def test_the_sample_holds_the_same_rows_of_all_taps(tmp_path: Path) -> None:
    written = stored.build(tmp_path / "out")
    digest = Digest(spile.open(str(written.path)), LARGE)
    digest.start()
    finished(digest, lambda: not digest.at_work)
    digest.close()
    sample = digest.sample
    assert len(sample) == len(written.index), "all of them, where they are few"
    rows = np.array(written.starts)[sample.units] + sample.rows
    np.testing.assert_array_equal(sample.index, written.index[rows])
    for tap, values in written.rows.items():
        np.testing.assert_array_equal(sample.values[tap], values[rows])


def test_a_sample_has_a_most_and_is_of_everything(tmp_path: Path) -> None:
    lengths = [np.zeros(500, np.int32)] * 20
    built = web_page.build(
        tmp_path / "out", [lengths] * 3, [[""] * 20] * 3, taps={"embed": 2}, seq_len=500
    )
    digest = Digest(spile.open(str(built.path)), LARGE)
    digest.start()
    finished(digest, lambda: not digest.at_work)
    digest.close()
    sample = digest.sample
    assert 3000 < len(sample) <= 4096, "of 30,000"
    shares = np.bincount(sample.units, minlength=3) / len(sample)
    assert (np.abs(shares - 1 / 3) < 0.05).all()
    assert np.mean(sample.index["pos"]) == pytest.approx(249.5, abs=20)


def test_no_more_is_read_than_is_allowed(tmp_path: Path) -> None:
    ids = [np.zeros(500, np.int32)] * 20
    built = web_page.build(tmp_path / "out", [ids] * 2, [[""] * 20] * 2, taps={"embed": 8})
    digest = Digest(spile.open(str(built.path)), 32 * 5000)  # 5,000 rows of 20,000
    digest.start()
    finished(digest, lambda: not digest.at_work)
    digest.close()
    assert 5000 <= digest.rows_read < 5000 + 1024
    assert {unit for _, unit, _ in digest.moments["embed"].high.of(0)} == {0, 1}


def test_units_that_come_later_are_read_too(tmp_path: Path, model: Path) -> None:
    built = web_page.build_texts(tmp_path / "out", model, web_page.texts(), commit=(1,))
    digest = Digest(open_dataset(str(built.path), partial=True), LARGE)
    digest.start()
    finished(digest, lambda: digest.rows_read == len(built.index[1]))
    built.commit(0, 2)
    digest.see(open_dataset(str(built.path), partial=True))
    finished(digest, lambda: digest.rows_read == sum(map(len, built.index)))
    digest.close()
    value, unit, row = digest.moments["resid_post.0"].high.of(web_page.LOUD)[0]
    loud = built.index[unit][row]
    assert loud["token_id"] == web_page.tokens(web_page.LOUD_TOKEN)[1]
    assert value == 500 + loud["offset"]


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    written = stored.build(tmp_path / "out")
    dataset = spile.open(str(written.path))
    (written.path / written.done(3).shards[0].key).unlink()
    digest = Digest(dataset, LARGE)
    digest.start()
    finished(digest, lambda: not digest.at_work)
    digest.close()
    assert digest.error is not None
    assert written.done(3).shards[0].key in digest.error
    assert digest.rows_read == len(written.index) - written.done(3).rows


def test_an_empty_dataset_has_nothing_to_read(tmp_path: Path) -> None:
    written = stored.build(tmp_path / "out", commit=())
    digest = Digest(open_dataset(str(written.path), partial=True), LARGE)
    digest.start()
    digest.close()
    assert digest.rows_read == 0
    assert len(digest.sample) == 0


def test_blocks_are_read_in_an_order_that_is_spread() -> None:
    blocks = Blocks.of_rows(np.array([0]), np.array([1000]), 1).spread()
    order = [blocks.take().first for _ in range(len(blocks))]
    assert sorted(order) == [*range(1000)]
    for first in (20, 100, 300):
        gaps = np.diff([-1, *sorted(order[:first]), 1000])
        assert gaps.max() < 4 * 1000 / first
