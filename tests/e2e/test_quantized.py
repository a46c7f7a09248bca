"""Eight bits and compression from end to end: values are close, and runs resume safely."""

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from chaos.harness import Work, check_refused, check_same, check_sound, files, launch, run
from spile.core.config import STORE_DTYPES
from spile.core.tensors import write_tensors
from spile.dataset.format import COMPRESSED, SCALES
from spile.dataset.records.ledger import Ledger
from spile.objects import LocalObjects
from support import tiny
from support.marks import some

FORMS: dict[str, dict[str, Any]] = {
    "float8": {"store_dtype": "float8_e4m3"},
    "int8": {"store_dtype": "int8"},
    "compressed": {"store_dtype": "bfloat16", "compress": True},
}
LOSS = {"float8": 0.05, "int8": 0.03, "compressed": 0.01}  # of a tap's length, at most
OPTIONS: dict[str, Any] = {
    "taps": "embed,resid_post:0",
    "seq_len": 64,
    "unit_tokens": 400,
    "compute_dtype": "float32",
    "batch_tokens": 128,
}
MEASURING = "measuring the scale of each channel"


@dataclass(frozen=True)
class Made:
    """Uninterrupted runs of one recipe, in float32 and in every stored form."""

    work: Work
    plain: Path
    forms: dict[str, Path]


@pytest.fixture(scope="module")
def made(model: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    work, folder = Work(model, corpus, OPTIONS), tmp_path_factory.mktemp("made")
    work.extract(folder / "plain")
    for form, options in FORMS.items():
        work.extract(folder / form, **options)
    return Made(work, folder / "plain", {form: folder / form for form in FORMS})


def killed(work: Work, out: Path, place: str, nth: int, **options: Any) -> None:
    """The command, in a process that was killed at this place."""
    process = launch({"kill": place, "nth": nth}, "extract", *work.flags(out, **options))
    _, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, err


@pytest.fixture(scope="module")
def begun(
    made: Made, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Path], None]:  # fmt: skip
    """Copies of a form's dataset, begun by a process that was killed after three units."""
    folder = tmp_path_factory.mktemp("begun")

    def copy(form: str, out: Path) -> None:
        if not (folder / form).exists():
            killed(made.work, folder / form, "commit after", 3, **FORMS[form])
            assert len(list((folder / form / "done").glob("*/*"))) == 3
        shutil.copytree(folder / form, out)

    return copy


def shard_names(out: Path) -> list[str]:
    """Return the keys of the shards of finished units."""
    records = [json.loads(path.read_bytes()) for path in (out / "done").glob("*/*")]
    return [shard["key"] for record in records for shard in record["shards"]]


def check_close(found: np.ndarray, wanted: np.ndarray, loss: float, what: str) -> None:
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    error = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
    assert 0 < error < loss, f"{what}: {error}"


@pytest.mark.parametrize("form", FORMS)
def test_a_dataset_is_sound_and_close_to_what_was_computed(form: str, made: Made) -> None:
    out = made.forms[form]
    check_sound(out)
    found, wanted = spile.open(str(out)), spile.open(str(made.plain))
    count = wanted.num_tokens
    assert np.array_equal(found.index(0, count), wanted.index(0, found.num_tokens))
    assert found.taps == wanted.taps
    for tap in wanted.taps:
        assert found.stored_dtype(tap) == FORMS[form]["store_dtype"]
        rows = found.read(tap, 0, count)
        check_close(rows, wanted.read(tap, 0, count), LOSS[form], tap)
        statistics = found.statistics(tap)
        assert statistics.count == count
        # They are of the rows as they are read back.
        means = rows.astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(statistics.mean, means, rtol=1e-4, atol=1e-5)


def test_eight_bits_take_a_quarter_of_float32(made: Made) -> None:
    def stored(out: Path) -> int:
        """Return the bytes of rows alone: each shard also has a header of one page."""
        return sum((out / key).stat().st_size - 4096 for key in shard_names(out))

    rows, taps = spile.open(str(made.plain)).num_tokens, len(spile.open(str(made.plain)).taps)
    width = tiny.CONFIG["hidden_size"]
    assert stored(made.plain) == rows * taps * width * 4
    assert stored(made.forms["int8"]) == rows * taps * width
    assert stored(made.forms["float8"]) == rows * taps * (width + 4)


def test_compressed_rows_are_bit_for_bit_those_of_an_uncompressed_run(
    made: Made, tmp_path: Path
) -> None:
    made.work.extract(tmp_path / "out", store_dtype="bfloat16")
    assert not any(key.endswith(COMPRESSED) for key in shard_names(tmp_path / "out"))
    assert all(key.endswith(COMPRESSED) for key in shard_names(made.forms["compressed"]))
    check_same(made.forms["compressed"], tmp_path / "out")


@pytest.mark.full  # runs of other dtypes are killed in tests/chaos/test_kill.py
@pytest.mark.parametrize("form", FORMS)
def test_a_killed_run_goes_on_to_the_same_dataset(
    form: str, made: Made, begun: Callable[[str, Path], None], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    begun(form, out)
    before = files(out)
    result = run("extract", *made.work.flags(out, **FORMS[form]))
    assert result.code == 0, result.err
    kept = files(out)
    records = [name for name in before if name.startswith("done/") or name.count("/") == 0]
    assert {name: kept[name] for name in records} == {name: before[name] for name in records}
    check_same(out, made.forms[form])


@pytest.mark.full
@pytest.mark.parametrize("form", some(FORMS, "float8"))
def test_the_other_compression_may_go_on_and_rows_stay_the_same(
    form: str, made: Made, begun: Callable[[str, Path], None], tmp_path: Path
) -> None:
    out, compress = tmp_path / "out", FORMS[form].get("compress", False)
    begun(form, out)
    made.work.extract(out, **{**FORMS[form], "compress": not compress})
    compressed = [key.endswith(COMPRESSED) for key in shard_names(out)]
    assert set(compressed) == {True, False}
    assert compressed.count(compress) == 3 * len(spile.open(str(out)).taps)
    check_same(out, made.forms[form])


@pytest.mark.full
@pytest.mark.parametrize("place", some(["heartbeat", "commit before"], "commit before"))
def test_scales_that_a_killed_run_measured_are_the_next_ones(
    place: str, made: Made, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    killed(made.work, out, place, 1, store_dtype="int8")
    assert list(out.glob("done/*/*.json")) == []
    measured = (out / SCALES).read_bytes()
    resumed = tiny.spile("extract", *made.work.flags(out, store_dtype="int8"))
    assert MEASURING not in resumed.stderr, "once for a dataset"
    assert (out / SCALES).read_bytes() == measured
    check_same(out, made.forms["int8"])


@pytest.mark.full
def test_two_workers_at_once_agree_on_the_scales(made: Made, tmp_path: Path) -> None:
    out, gate = tmp_path / "out", tmp_path / "gate"
    gate.mkdir()
    flags = made.work.flags(out, store_dtype="int8")
    race = [launch({"gate": str(gate), "crowd": 2}, "extract", *flags) for _ in range(2)]
    told = [process.communicate(timeout=120)[1] for process in race]
    assert [process.returncode for process in race] == [0, 0], told
    assert any(MEASURING in err for err in told)
    workers = [json.loads(path.read_bytes()) for path in out.glob("workers/**/*.json")]
    assert len(workers) == 2
    assert all(worker["units_done"] for worker in workers)  # neither did it all alone
    assert (out / SCALES).read_bytes() == (made.forms["int8"] / SCALES).read_bytes()
    check_same(out, made.forms["int8"])


def test_a_worker_that_measured_too_late_uses_the_scales_that_came_first(
    made: Made, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = launch({}, "extract", *made.work.flags(out, store_dtype="int8"))
    assert process.stderr
    while MEASURING not in (told := process.stderr.readline()):
        assert told, "it ended before it measured"
    process.send_signal(signal.SIGSTOP)
    assert not (out / SCALES).exists()
    ledger = Ledger(LocalObjects(out))
    table = ledger.table()
    usual = Ledger(LocalObjects(made.forms["int8"])).read_scales(table)
    assert usual
    ledger.create_scales(table, {tap: 1.5 * scale for tap, scale in usual.items()})
    first = (out / SCALES).read_bytes()
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert (out / SCALES).read_bytes() == first
    check_sound(out)
    dataset, plain = spile.open(str(out)), spile.open(str(made.plain))
    for tap in dataset.taps:
        rows = dataset.read(tap, 0, dataset.num_tokens)
        steps = rows / (1.5 * usual[tap])
        np.testing.assert_allclose(steps, np.rint(steps), atol=1e-3)
        check_close(rows, plain.read(tap, 0, plain.num_tokens), 1.5 * LOSS["int8"], tap)


@pytest.mark.parametrize("form", FORMS)
def test_another_stored_form_is_refused_with_both(form: str, made: Made) -> None:
    out = made.forms[form]
    stored, before = FORMS[form]["store_dtype"], files(out)
    for asked in {*STORE_DTYPES} - {stored}:
        result = run("extract", *made.work.flags(out, store_dtype=asked))
        check_refused(result, 2, out, f"store_dtype: stored {stored!r}, now {asked!r}")
    assert files(out) == before


@pytest.mark.full  # tests/plan counts the bytes of every form
def test_plan_prices_every_form_about_as_it_is_then_stored(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", hidden_size=128, num_hidden_layers=1)
    corpus = tiny.write_corpus(tmp_path / "corpus.jsonl", 150, seed=4)
    options = {"taps": "embed", "seq_len": 128, "compute_dtype": "float32"}
    work = Work(model, corpus, options)
    flags = work.flags(tmp_path / "planned", store_dtype="bfloat16")
    printed = run("plan", "--calibrate", "off", *flags).out
    prices = run("plan", "--calibrate", "off", *flags, "--json").json["bytes_by_dtype"]
    assert set(prices) == set(STORE_DTYPES)
    lines = [line.split() for line in printed.splitlines()]
    for dtype in STORE_DTYPES:
        (line,) = (words for words in lines if dtype in words and "as" in words)
        assert any(word[0].isdigit() for word in line), line
    assert "with --compress" in printed
    for dtype in ("bfloat16", "float8_e4m3", "int8"):  # those without scales differ by their size
        price, out = prices[dtype], tmp_path / dtype
        made = run("extract", *work.flags(out, store_dtype=dtype), "--json").json
        found = sum((out / key).stat().st_size for key in files(out) if key.startswith("attempts"))
        assert made["bytes"] == found
        assert price == pytest.approx(found, rel=0.15), dtype


@pytest.fixture(scope="module")
def spoilt(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Work:
    """A model that gives NaN and infinity: in the embedding of two letters, at one place each."""
    model = tiny.write_model(tmp_path_factory.mktemp("spoilt") / "model")
    (model / "model.safetensors").unlink()
    tensors = tiny.random_tensors(tiny.CONFIG)
    alphabet = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    embeddings = tensors["model.embed_tokens.weight"]
    embeddings[alphabet["u"], 5] = np.nan
    embeddings[alphabet["l"], 7] = -np.inf
    write_tensors(model / "model.safetensors", tensors)
    options = {"taps": "embed,q:0", "seq_len": 64, "compute_dtype": "float32"}
    return Work(model, corpus, options)


def test_nan_is_refused_by_int8_even_where_it_is_allowed(spoilt: Work, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = spoilt.flags(out, taps="embed", store_dtype="int8", allow_nonfinite=True)
    refusal = run("extract", *flags)
    check_refused(refusal, 3, "embed", "NaN", "which int8 cannot hold")
    assert "--allow-nonfinite" not in refusal.err, "it would not help"
    audit = run("verify", out, "--partial", "--json").json
    assert (audit["faults"], audit["orphans"], audit["units_done"]) == ([], [], 0)


def test_float8_keeps_nan_where_it_was_and_nowhere_else(spoilt: Work, tmp_path: Path) -> None:
    # in a process of its own: numpy warns of infinity, and here warnings are errors
    tiny.spile("extract", *spoilt.flags(tmp_path / "plain", allow_nonfinite=True))
    refusal = run("extract", *spoilt.flags(tmp_path / "out", store_dtype="float8_e4m3"))
    check_refused(refusal, 3, "NaN", "--allow-nonfinite")
    spoilt.extract(tmp_path / "out", store_dtype="float8_e4m3", allow_nonfinite=True)
    check_sound(tmp_path / "out")
    found, wanted = spile.open(str(tmp_path / "out")), spile.open(str(tmp_path / "plain"))
    for tap in wanted.taps:
        rows = found.read(tap, 0, found.num_tokens)
        plain = wanted.read(tap, 0, wanted.num_tokens)
        finite = np.isfinite(plain)
        assert 0 < np.count_nonzero(~finite) < finite.size
        assert np.array_equal(np.isnan(rows), ~finite), tap
        check_close(rows[finite], plain[finite], LOSS["float8"], tap)
        assert found.statistics(tap).nonfinite == np.count_nonzero(~finite)
    letters = ~np.isfinite(wanted.read("embed", 0, wanted.num_tokens))
    assert set(np.nonzero(letters)[1]) == {5, 7}, "one value of a row, the others beside it"
