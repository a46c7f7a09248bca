"""Samples for drafting heads: contexts in order, their masks, and the taps that a head needs."""

from pathlib import Path

import numpy as np
import pytest

import spile
from interop.export.conftest import STREAMS, Drafted
from spile.core.errors import ConfigError
from spile.dataset.maintain.shuffle import shuffle
from spile.interop.export import export
from spile.interop.export.drafting import draft_samples, layers_and_last
from spile.interop.export.export_source import ExportSource, choose_dtypes
from spile.objects import LocalObjects
from support import tiny


def source_of(path: Path, *taps: str) -> ExportSource:
    dataset = spile.open(str(path))
    chosen = taps or tuple(dataset.taps)
    allowed = ("float32", "bfloat16")
    return ExportSource(
        dataset, chosen, choose_dtypes(dataset, chosen, None, allowed, integers=False), 1
    )


def test_a_sample_is_a_context_and_a_chat_teaches_what_the_assistant_said(
    drafted: Drafted,
) -> None:
    samples = list(draft_samples(source_of(drafted.path)))
    for sample, tokens, mask in zip(samples, drafted.tokens, drafted.masks, strict=True):
        assert sample.tokens.tolist() == tokens.tolist()
        assert sample.loss_mask.tolist() == mask.tolist()
    assert 0 < sum(mask.sum() for mask in drafted.masks) < sum(map(len, drafted.tokens))


def test_contexts_come_by_document_and_offset_whatever_their_packing(packed: Path) -> None:
    source = source_of(packed)
    ds, found = source.dataset, dict[int, list[int]]()
    last = (-1, -1)
    for sample in draft_samples(source):
        index = ds.index(sample.start, sample.stop)
        assert len({*index["doc"].tolist()}) == 1
        assert index["pos"].tolist() == list(range(len(index)))
        place = (int(index["doc"][0]), int(index["offset"][0]))
        assert place > last
        last = place
        found.setdefault(place[0], []).extend(sample.tokens.tolist())
    wanted = {doc: ds.document(doc).index["token_id"].tolist() for doc in found}
    assert found == wanted and sum(map(len, found.values())) == ds.num_tokens
    assert any(len(ids) > 24 for ids in found.values())


def test_the_last_tap_is_the_verifiers(drafted: Drafted) -> None:
    assert layers_and_last(source_of(drafted.path, *STREAMS), None) == (
        [*STREAMS[:-1]], STREAMS[-1],
    )  # fmt: skip
    both = source_of(drafted.path, "resid_post.0", "resid_post.1", "final_norm")
    assert layers_and_last(both, "final_norm") == (["resid_post.0", "resid_post.1"], "final_norm")


@pytest.mark.parametrize(
    ("to", "taps"),
    [
        ("speculators", "resid_post:0"),
        ("speculators", "resid_post:all,final_norm"),
        ("specforge", "resid_post:all"),
        ("deepspec", "resid_post:0,final_norm"),
    ],
)
def test_other_taps_are_refused(drafted: Drafted, tmp_path: Path, to: str, taps: str) -> None:
    with pytest.raises(ConfigError, match="a drafting head takes layers of the stream"):
        export(str(drafted.path), tmp_path / "dest", to=to, taps=taps)


def test_tokens_without_rows_and_scattered_rows_are_refused(
    model: Path, packed: Path, tmp_path: Path
) -> None:
    recipe = spile.Recipe(model=str(model), corpus=str(tiny.write_corpus(tmp_path / "c.jsonl", 4)),
                          taps="resid_post:all", where="pos >= 1")  # fmt: skip
    spile.extract(recipe, str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="a drafting head learns from every token"):
        export(str(tmp_path / "out"), tmp_path / "dest", to="speculators")
    shuffle(LocalObjects(packed), LocalObjects(tmp_path / "shuffled"), seed=0)
    out = str(tmp_path / "shuffled")
    with pytest.raises(ConfigError, match="its contexts are scattered"):
        export(out, tmp_path / "dest", to="speculators", taps="resid_post:all")
    assert not (tmp_path / "dest").exists()
    assert np.array_equal(spile.open(str(packed)).index(0, 1)["pos"], [0])
