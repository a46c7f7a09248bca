"""docs/format.md is enough: a reader written from that page alone reads what Spile writes."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.core.index import FLAGS
from spile.dataset import format as fmt
from spile.dataset.codec.quantization import scales_to_json
from spile.dataset.format import FORMAT
from support import stored
from support.plain_reader import VERSION, PageReader, float8, scales_of

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def test_the_page_is_of_this_version_and_has_every_flag() -> None:
    assert PAGE.startswith(f"# The format, version {FORMAT}\n")
    assert VERSION == FORMAT
    bits = {name: int(bit) for name, bit in re.findall(r"`(\w+)`[a-z ]*\| (\d+) \|", PAGE)}
    assert {name: bit for name, bit in bits.items() if name in FLAGS} == FLAGS


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(("taps", "dtype"), [(stored.TAPS, "bfloat16"), (stored.SCALED, "int8")])
def test_a_reader_written_from_the_page_reads_every_bit(
    taps: Any, dtype: str, compress: bool, tmp_path: Path
) -> None:
    made = stored.build(
        tmp_path / "acts", taps=taps, dtype=dtype, compress=compress, keep=("id", "mixed")
    )
    read, ours = PageReader(made.path), spile.open(str(made.path))
    index = read.index()
    assert all((index[name] == made.index[name]).all() for name in made.index.dtype.names or ())
    assert {*read.table["taps"]} == {*taps}
    for tap in read.table["recipe"]["taps"]:
        wanted = made.rows[tap]
        wide = wanted.astype(np.float32) if wanted.dtype.name == "bfloat16" else wanted
        assert read.rows(tap).astype(wide.dtype).tobytes() == wide.tobytes(), tap
        stats = ours.statistics(tap)
        count, mean, m2 = read.statistics(tap)
        assert count == stats.count
        assert mean.tobytes() == stats.mean.tobytes()
        assert m2.tobytes() == stats.m2.tobytes()
    table = ours.documents()
    for name in ("doc", "tokens", "rows", "skipped", "preview"):
        assert [*read.documents(name)] == table.column(name).to_pylist()
    assert [*read.documents("kept/id")] == table.column("id").to_pylist()
    # of another type in each unit: read as text where they are joined
    assert [str(value) for value in read.documents("kept/mixed")] == table.column(
        "mixed"
    ).to_pylist()


@pytest.mark.parametrize(("done", "units"), [(5, 5), (4, 3)])
def test_it_reads_the_newest_generation_that_is_complete(
    done: int, units: int, tmp_path: Path
) -> None:
    dataset = stored.build(tmp_path / "out", grown=(3,), commit=range(done))
    reader = PageReader(dataset.path)
    assert [unit["unit"] for unit in reader.units] == [*range(units)]
    for tap, rows in dataset.rows.items():
        assert np.array_equal(reader.rows(tap), rows[: dataset.starts[units]])


def test_it_reads_the_taps_of_passes(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "acts", shard_bytes=200)
    _, scaled = stored.add_pass(made, {"q.0": stored.TapInfo((2, 3), "int8"), "logprob": 1})
    _, half = stored.add_pass(made, {"z.0": 4}, dtype="bfloat16")
    stored.add_pass(made, {"v.0": 4}, commit=(0, 1))  # not complete
    dropped, _ = stored.add_pass(made, {"k.0": 4})
    dropped.drop()
    read = PageReader(made.path)
    found, wanted = read.all_rows(), {**made.rows, **scaled, **half}
    assert {*found} == {*wanted} == {*spile.open(made.path).taps}
    for tap, rows in found.items():
        np.testing.assert_array_equal(rows, wanted[tap].astype(rows.dtype))
    for part in read.passes:
        for tap in part.table["taps"]:
            assert part.statistics(tap)[0] == len(made.index)


def test_it_reads_a_dataset_as_it_was_where_a_pass_lacks_later_units(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "acts", grown=(3,))
    added, rows = stored.add_pass(made, {"z.0": 4}, commit=range(3))
    stored.complete_before_growth(added)
    read = PageReader(made.path)
    assert [unit["unit"] for unit in read.units] == [0, 1, 2]
    np.testing.assert_array_equal(read.all_rows()["z.0"], rows["z.0"][: made.starts[3]])
    for unit in (3, 4):
        assert added.ledger.commit(stored.write_added(made, added, unit, rows))
    assert added.ledger.complete(added.ledger.table())
    assert np.array_equal(PageReader(made.path).all_rows()["z.0"], rows["z.0"])


def test_it_reads_what_is_done_of_an_unfinished_dataset(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "acts", commit=(0, 1), shard_bytes=200)
    read = PageReader(made.path)
    assert [unit["unit"] for unit in read.units] == [0, 1]
    rows = made.rows["resid_post.0"][: made.starts[2]]
    assert read.rows("resid_post.0").tobytes() == rows.tobytes()


def test_it_reads_what_a_model_gave(model: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "acts"
    recipe = spile.Recipe(
        model=str(model), corpus=str(corpus), taps="resid_post:0,q:0,embed", max_docs=6,
        seq_len=64, store_dtype="float8_e4m3",
    )  # fmt: skip
    spile.extract(recipe, str(out))
    read, ours = PageReader(out), spile.open(str(out))
    for tap in ours.taps:
        wanted = ours.read(tap, 0, ours.num_tokens)
        assert read.rows(tap).tobytes() == wanted.tobytes(), tap
    names = ("tokenizer.json", "tokenizer_config.json")
    assert read.tokenizer() == {name: (model / name).read_bytes() for name in names}


def test_the_scales_of_a_model_are_where_the_page_says(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "acts"
    recipe = spile.Recipe(
        model=str(model), corpus=str(corpus), taps="q:0,embed", max_docs=6, seq_len=64,
        store_dtype="int8",
    )  # fmt: skip
    spile.extract(recipe, str(out))
    read, ours = PageReader(out), spile.open(str(out))
    found = read.scales()
    assert {name: scale.shape for name, scale in found.items()} == {"q.0": (4, 8), "embed": (32,)}
    for tap, scale in found.items():
        wanted = ours.read(tap, 0, ours.num_tokens)
        assert read.rows(tap).tobytes() == wanted.tobytes(), tap
        # Few enough tokens that all of them were measured: none is clipped.
        assert ours.statistics(tap).clipped == 0
        codes = np.abs(wanted / scale).max(axis=0)
        assert (np.rint(codes) == np.rint(127 / 1.25)).all()


def test_the_example_of_scales_on_the_page_is_right() -> None:
    (text,) = re.findall(r'^"q\.1":"(.+)"$', PAGE, re.M)
    assert scales_of(text, [2, 2]).tolist() == [[0.5, 1.0], [0.25, 2.0]]
    assert fmt.encode_record("scales", {"q.1": text}).count(f'"q.1":"{text}"'.encode()) == 1
    assert scales_to_json({"q.1": np.array([[0.5, 1.0], [0.25, 2.0]])}) == {"q.1": text}


def test_every_float8_code_means_what_the_page_says() -> None:
    codes = np.arange(256, dtype=np.uint8)
    wanted = codes.view(stored.DTYPES_BY_NAME["float8_e4m3"]).astype(np.float32)
    np.testing.assert_array_equal(float8(codes), wanted)
