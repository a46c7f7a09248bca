"""The plan, compared with the outcome."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spile
from spile.core.config import STORE_DTYPES, Recipe, Runtime
from spile.core.errors import ConfigError
from spile.core.tensors import read_header
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.unit_table import UnitColumns
from spile.objects import open_objects
from spile.plan.estimate import batch_rows, estimate, refuse_if_too_large
from spile.plan.job import ExtractionJob
from spile.plan.residency import Machine
from spile.plan.resolve import resolve
from spile.plan.survey import survey
from support import tiny
from support.marks import some


def make_job(model: Path, corpus: Path, out: Path, **fields: Any) -> ExtractionJob:
    recipe = Recipe(
        model=str(model), corpus=str(corpus), taps="resid_post:all,logits", seq_len=64, **fields
    )
    return resolve(recipe, Ledger(open_objects(str(out))), "cpu")


def test_the_estimate_meets_the_outcome(model: Path, corpus: Path, tmp_path: Path) -> None:
    job = make_job(model, corpus, tmp_path / "out")
    cost = estimate(job, Runtime(), Machine("cpu"), done=set(), free_bytes=None)
    outcome = spile.extract(
        Recipe(model=str(model), corpus=str(corpus), taps="resid_post:all,logits", seq_len=64),
        str(tmp_path / "out"),
    )
    assert cost.documents == outcome.documents == 40
    assert abs(cost.tokens - outcome.rows) <= 0.05 * outcome.rows
    assert abs(cost.total_bytes - outcome.bytes) <= 0.15 * outcome.bytes
    per_row = {tap: size / cost.tokens for tap, size in cost.bytes_per_tap.items()}
    assert per_row["logits"] == 260 * 2
    assert per_row["resid_post.0"] == 32 * 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "every", "unit_tokens"),
    [
        (None, 3, None),
        ("not bos and pos >= 4", None, 500),
        ("end", None, 500),
        ("doc % 3 == 1", 2, None),
    ],
)
def test_the_estimate_of_filtered_rows_meets_the_outcome(
    model: Path,
    corpus: Path,
    tmp_path: Path,
    where: str | None,
    every: int | None,
    unit_tokens: int | None,
) -> None:
    fields = {"where": where, "every": every, "unit_tokens": unit_tokens}
    recipe = Recipe(
        model=str(model), corpus=str(corpus), taps="q:0,attn_pattern:0", seq_len=64, **fields
    )
    job = resolve(recipe, Ledger(open_objects(str(tmp_path / "out"))), "cpu")
    cost = estimate(job, Runtime(), Machine("cpu"), done=set(), free_bytes=None)
    outcome = spile.extract(recipe, str(tmp_path / "out"))
    assert outcome.rows < cost.tokens
    assert abs(cost.rows - outcome.rows) <= 0.1 * outcome.rows
    assert abs(cost.total_bytes - outcome.bytes) <= 0.25 * outcome.bytes
    assert cost.remaining_bytes == pytest.approx(cost.total_bytes, rel=0.01)


def write_long(folder: Path, kind: str) -> Path:
    """Documents, most of them several times as long as a context."""
    lengths = np.random.default_rng(0).lognormal(4.0, 0.7, 150).astype(int)
    texts = ["words " * length for length in lengths]
    if kind == "parquet":
        pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=50)
    elif kind == "long lines":  # the first one is longer than a sample
        texts = ["words " * 50_000, *texts]
        (folder / "a.txt").write_text("\n".join(texts))
    elif kind == "files":
        for number in range(3):
            (folder / f"{number}.txt").write_text("\n".join(texts * (6 + number)))
    else:
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / "a.jsonl").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("jsonl", {"min_tokens": 300, "long_docs": "truncate", "every": 3}),
        pytest.param("jsonl", {"long_docs": "truncate"}, marks=pytest.mark.full),
        pytest.param("parquet", {"long_docs": "truncate"}, marks=pytest.mark.full),
        pytest.param("long lines", {"long_docs": "truncate"}, marks=pytest.mark.full),
        pytest.param(
            "files", {"long_docs": "truncate", "text_documents": "file"}, marks=pytest.mark.full
        ),
        pytest.param(
            "jsonl", {"max_doc_tokens": 200, "where": "pos >= 10"}, marks=pytest.mark.full
        ),
    ],
)
def test_extract_expects_as_many_tokens_and_rows_as_plan_counts(
    kind: str, fields: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """`extract` predicts from the unit table and `plan` counts; both count what the model reads."""
    (tmp_path / "texts").mkdir()
    corpus = write_long(tmp_path / "texts", kind)
    job = make_job(model, corpus, tmp_path / "out", unit_tokens=5000, **fields)
    ledger = Ledger(open_objects(str(tmp_path / "out")))
    counted = estimate(
        job, Runtime(), Machine("cpu"), done=set(), free_bytes=None,
        found=survey(job, ledger, Runtime(), exact=True),
    )  # fmt: skip
    predicted = estimate(job, Runtime(), Machine("cpu"), done=set(), free_bytes=None)
    all_of_it = {"text_documents": fields.get("text_documents"), "unit_tokens": 5000}
    everything = make_job(model, corpus, tmp_path / "out", **all_of_it)
    assert counted.tokens < 0.8 * sum(unit.tokens for unit in everything.units), "most is cut"
    assert predicted.tokens == pytest.approx(counted.tokens, rel=0.1)
    assert predicted.rows == pytest.approx(counted.rows, rel=0.1)
    # Texts of a unit are held whole: it does not grow by what the model does not read.
    assert [unit.spans for unit in job.units] == [unit.spans for unit in everything.units]


def test_only_rows_that_are_kept_are_counted(model: Path, corpus: Path, tmp_path: Path) -> None:
    whole = make_job(model, corpus, tmp_path / "out")
    assert whole.table.kept == 1.0
    some = make_job(model, corpus, tmp_path / "out", where="pos % 4 == 0")
    assert some.table.kept == pytest.approx(0.25, abs=0.02)
    everything, part = (
        estimate(job, Runtime(), Machine("cpu"), done=set(), free_bytes=None)
        for job in (whole, some)
    )
    assert everything.rows == everything.tokens == part.tokens
    assert part.rows == int(part.tokens * some.table.kept)
    # Some row may be kept whole, whatever the share: memory is that of all rows.
    assert part.device_bytes == everything.device_bytes
    assert part.host_bytes == everything.host_bytes
    for tap, info in some.table.taps.items():
        assert part.bytes_per_tap[tap] == part.rows * info.row_bytes
        assert everything.bytes_per_tap[tap] == everything.tokens * info.row_bytes
    assert part.index_bytes == part.rows * 22
    # A disk may be too small for all rows, and large enough for those that are kept.
    free = everything.total_bytes // 2
    for job, fits in ((whole, False), (some, True)):
        cost = estimate(job, Runtime(), Machine("cpu"), done=set(), free_bytes=free)
        if fits:
            refuse_if_too_large(cost, "out")
        else:
            with pytest.raises(ConfigError, match="--ignore-space"):
                refuse_if_too_large(cost, "out")


def test_the_share_that_is_kept_is_that_of_the_documents_asked_for(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    job = make_job(model, corpus, tmp_path / "out", where="doc >= 4", max_docs=8)
    assert sum(unit.num_docs for unit in job.units) == 8
    cost = estimate(job, Runtime(), Machine("cpu"), done=set(), free_bytes=None)
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    assert cost.rows == pytest.approx(sum(len(text) + 1 for text in texts[4:8]), rel=0.1)


def test_a_sample_without_kept_rows_does_not_predict_an_empty_dataset(
    model: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "a.jsonl"
    padded = json.dumps({"x": "." * 3000, "text": "a few words"})
    corpus.write_text(f"{padded}\n" * 200)
    job = make_job(model, corpus, tmp_path / "out", where="doc >= 150")  # beyond what is sampled
    cost = estimate(job, Runtime(), Machine("cpu"), done=set(), free_bytes=10)
    assert cost.rows >= 50 * 12
    with pytest.raises(ConfigError, match="--ignore-space"):
        refuse_if_too_large(cost, "out")


def test_each_tap_counts_by_its_own_shape_and_dtype(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    recipe = Recipe(
        model=str(model), corpus=str(corpus), taps="embed,q:1,k:1,attn_pattern:0,logprob",
        seq_len=64, store_dtype="bfloat16",
    )  # fmt: skip
    job = resolve(recipe, Ledger(open_objects(str(tmp_path / "out"))), "cpu")
    cost = estimate(job, Runtime(), Machine("cpu"), done=set(), free_bytes=None)
    per_row = {tap: size / cost.rows for tap, size in cost.bytes_per_tap.items()}
    assert per_row == {
        "embed": 32 * 2, "q.1": 4 * 8 * 2, "k.1": 2 * 8 * 2, "attn_pattern.0": 4 * 64 * 2,
        "logprob": 4,
    }  # fmt: skip


def test_weights_are_counted_exactly(model: Path, corpus: Path, tmp_path: Path) -> None:
    job = make_job(model, corpus, tmp_path / "out")
    held = sum(info.stop - info.start for _, info in job.checkpoint.tensors.values())
    cost = estimate(job, Runtime(), Machine("cpu"), done=set(), free_bytes=None)
    assert cost.weights_bytes == held


def test_a_disk_too_small_is_refused_and_what_is_done_counts(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    job = make_job(model, corpus, tmp_path / "out", unit_tokens=500)
    fresh = estimate(job, Runtime(), Machine("cpu"), done=set(), free_bytes=10)
    with pytest.raises(ConfigError, match="--ignore-space"):
        refuse_if_too_large(fresh, "out")
    everything = {unit.id for unit in job.units}
    finished = estimate(job, Runtime(), Machine("cpu"), done=everything, free_bytes=10)
    refuse_if_too_large(finished, "out")


def test_a_step_is_never_larger_than_a_unit(model: Path, corpus: Path, tmp_path: Path) -> None:
    job = make_job(model, corpus, tmp_path / "out", unit_tokens=100)
    largest = max(unit.tokens for unit in job.units)
    rows = batch_rows(job, Runtime(batch_tokens=1_000_000), "cpu")
    assert rows == -(-largest // 64)
    assert batch_rows(job, Runtime(batch_tokens=1), "cpu") == 1


def test_a_step_is_halved_until_it_fits_the_device(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    job = make_job(model, corpus, tmp_path / "out")
    largest = batch_rows(job, Runtime(), "gpu")
    assert largest == -(-max(unit.tokens for unit in job.units) // 64) > 16

    def needed(rows: int) -> int:
        asked = Runtime(batch_tokens=rows * 64, weights="resident")
        cost = estimate(job, asked, Machine("gpu", 1), done=set(), free_bytes=None)
        assert cost.batch_rows == rows, "what was asked for is not halved"
        return cost.device_bytes

    halves = [largest, largest // 2, largest // 4, largest // 8]
    for rows, larger in zip(halves[1:], halves, strict=False):
        just_enough = math.ceil(needed(rows) / 0.9)
        assert just_enough < needed(larger)
        assert batch_rows(job, Runtime(), "gpu", just_enough) == rows
        assert batch_rows(job, Runtime(), "gpu", int(needed(larger) / 0.9) - 1) == rows
        assert batch_rows(job, Runtime(), "gpu", math.ceil(needed(larger) / 0.9)) == larger
        cost = estimate(job, Runtime(), Machine("gpu", just_enough), done=set(), free_bytes=None)
        assert (cost.batch_rows, cost.memory) == (rows, just_enough)
        assert cost.device_bytes <= 0.9 * just_enough
    assert batch_rows(job, Runtime(), "gpu", 1) == 1, "there is no smaller one"


def test_weights_that_the_device_cannot_hold_are_refused(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    job = make_job(model, corpus, tmp_path / "out")
    for memory, fits in ((None, True), (10**9, True), (10_000, False)):
        cost = estimate(job, Runtime(), Machine("gpu", memory), done=set(), free_bytes=None)
        if fits:
            refuse_if_too_large(cost, "out")
            continue
        with pytest.raises(
            ConfigError, match="the weights take .* GB, but the device has"
        ) as caught:
            refuse_if_too_large(cost, "out")
        assert "\n" not in str(caught.value)
        exactly = dataclasses.replace(cost, memory=cost.weights_bytes)
        refuse_if_too_large(exactly, "out")


@pytest.mark.parametrize("dtype", some(STORE_DTYPES, "bfloat16", "float8_e4m3"))
def test_every_stored_form_is_priced_as_it_turns_out(
    dtype: str, model: Path, corpus: Path, tmp_path: Path
) -> None:
    # `logprob` is float32 whatever is chosen.
    taps = "embed,logprob" if dtype == "float8_e4m3" else "embed"
    recipe = Recipe(model=str(model), corpus=str(corpus), taps=taps, seq_len=64, max_docs=10)
    job = resolve(recipe, Ledger(open_objects(str(tmp_path / "other"))), "cpu")
    priced = estimate(job, Runtime(), Machine("cpu"), done=set(), free_bytes=None)
    out = tmp_path / "out"
    outcome = spile.extract(dataclasses.replace(recipe, store_dtype=dtype), str(out))
    same = outcome.estimate
    assert priced.bytes_by_dtype == same.bytes_by_dtype, "whichever was chosen"
    assert set(same.bytes_by_dtype) == set(STORE_DTYPES)
    assert same.bytes_by_dtype[dtype] == same.total_bytes
    ledger = Ledger(open_objects(str(out)))
    done = [record for unit in job.units if (record := ledger.read_done(unit.id))]
    files = [out / file.key for record in done for file in (*record.shards, record.index)]
    stored = sum(info.stop - info.start for path in files for info in read_header(path).values())
    rows_alone = same.bytes_by_dtype[dtype] - same.overhead_bytes
    assert rows_alone * outcome.rows == stored * same.rows
    assert same.rows == pytest.approx(outcome.rows, rel=0.1)


@pytest.mark.parametrize(
    ("platform", "width", "tokens"),
    [
        ("cpu", 32, 1024), ("cpu", 2048, 1024),
        ("gpu", 32, 131072), ("gpu", 768, 65536), ("gpu", 2040, 32768), ("gpu", 2048, 16384),
        ("tpu", 32, 32768), ("tpu", 2048, 16384),
    ],
)  # fmt: skip
def test_a_step_holds_what_its_device_needs(
    platform: str, width: int, tokens: int, corpus: Path, tmp_path: Path
) -> None:
    shape = {"hidden_size": width, "head_dim": 8, "num_hidden_layers": 1}
    job = make_job(tiny.write_model(tmp_path / "model", **shape), corpus, tmp_path / "out")
    units = UnitColumns.of([dataclasses.replace(u, tokens=10**6) for u in job.table.units])
    job = dataclasses.replace(job, table=dataclasses.replace(job.table, units=units))
    assert batch_rows(job, Runtime(), platform) * 64 == tokens
    assert batch_rows(job, Runtime(batch_tokens=640), platform) * 64 == 640
