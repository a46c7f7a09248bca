"""The survey's counts of a corpus, compared with a run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.core.config import Recipe, Runtime
from spile.core.units import Unit
from spile.dataset.codec.shard import read_tensors
from spile.dataset.records.ledger import Ledger
from spile.objects import open_objects
from spile.plan import survey as surveying
from spile.plan.estimate import estimate
from spile.plan.job import ExtractionJob
from spile.plan.residency import Machine
from spile.plan.resolve import resolve
from spile.plan.survey import Counted, survey
from support import tiny

RUNTIME = Runtime(shard_bytes=20_000)


def job_of(
    model: Path, corpus: Path, out: Path, **fields: Any
) -> tuple[Recipe, ExtractionJob, Ledger]:
    asked = {"taps": "resid_post:0+2,logprob", "seq_len": 64, "unit_tokens": 1500, **fields}
    recipe = Recipe(model=str(model), corpus=str(corpus), **asked)
    ledger = Ledger(open_objects(str(out)))
    return recipe, resolve(recipe, ledger, "cpu"), ledger


@pytest.mark.full
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"store_dtype": "float8_e4m3", "min_tokens": 20, "where": "pos % 3 == 1"},
    ],
)
def test_a_corpus_that_was_read_whole_is_known_to_the_last_byte(
    fields: dict[str, Any], model: Path, corpus: Path, tmp_path: Path
) -> None:
    recipe, job, ledger = job_of(model, corpus, tmp_path / "out", **fields)
    found = survey(job, ledger, RUNTIME, exact=True)
    cost = estimate(job, RUNTIME, Machine("cpu"), done=set(), free_bytes=None, found=found)
    assert cost.exact and cost.tokens_error == 0
    made = spile.extract(recipe, str(tmp_path / "out"), RUNTIME)
    assert (cost.tokens, cost.rows, cost.total_bytes) == (made.tokens, made.rows, made.bytes)
    assert cost.remaining_bytes == made.bytes and cost.remaining_tokens == made.tokens
    done = [ledger.read_done(unit) for unit in ledger.done_units()]
    stored = [read_tensors(ledger.objects, each.documents_table.key) for each in done if each]
    kept = sum(a.nbytes for table in stored for name, a in table.items() if "kept/" in name)
    assert cost.kept_bytes == kept > 0
    # What is done is counted by its records.
    found = survey(job, ledger, RUNTIME)
    cost = estimate(
        job, RUNTIME, Machine("cpu"), done=ledger.done_units(), free_bytes=None, found=found
    )  # fmt: skip
    assert found.exact and (cost.tokens, cost.total_bytes) == (made.tokens, made.bytes)
    assert (cost.remaining_tokens, cost.remaining_bytes) == (0, 0)


def test_what_is_compressed_is_not_known_exactly(model: Path, corpus: Path, tmp_path: Path) -> None:
    _, job, ledger = job_of(model, corpus, tmp_path / "out")
    runtime = Runtime(compress=True)
    found = survey(job, ledger, runtime, exact=True)
    cost = estimate(job, runtime, Machine("cpu"), done=set(), free_bytes=None, found=found)
    assert cost.tokens_error == 0 and not cost.exact


def test_a_few_units_say_how_many_tokens_there_are_and_how_sure_that_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tiny.write_corpus(tmp_path / "c.jsonl", 1200, mean=3.0)
    _, job, ledger = job_of(model, corpus, tmp_path / "out", unit_tokens=5000)
    whole = survey(job, ledger, RUNTIME, exact=True)
    monkeypatch.setattr(surveying, "SECONDS", 0.0)
    part = survey(job, ledger, RUNTIME)
    assert part.units_counted == 4 < len(job.units)
    assert not part.exact and part.tokens_error
    assert abs(part.total.tokens - whole.total.tokens) <= 0.02 * whole.total.tokens
    assert abs(part.total.tokens - whole.total.tokens) <= part.tokens_error
    assert part.packing == pytest.approx(whole.packing, abs=0.02)


def draws(count: int) -> Iterator[tuple[float, float]]:
    """Estimates from samples of units whose tokens are known, and their errors."""
    rng = np.random.default_rng(0)
    guess = rng.integers(900, 1100, 400)
    tokens: list[float] = (guess * rng.normal(1.1, 0.1, 400)).tolist()
    units = [Unit(n, n, 1, int(g), ()) for n, g in enumerate(guess)]
    for _ in range(count):
        chosen = rng.choice(400, 12, replace=False)
        counted = {int(n): Counted(tokens[n], tokens[n], 1.0, tokens[n]) for n in chosen}
        found = surveying._concluded(units, {}, counted)
        assert found.tokens_error is not None
        yield found.total.tokens / sum(tokens), found.tokens_error / sum(tokens)


def test_the_error_that_is_stated_holds_in_about_95_of_100_cases() -> None:
    found = list(draws(400))
    inside = [abs(ratio - 1) <= error for ratio, error in found]
    assert 0.91 <= np.mean(inside) <= 0.985
    assert np.mean([ratio for ratio, _ in found]) == pytest.approx(1.0, abs=0.005)


def test_one_unit_says_nothing_of_the_error() -> None:
    units = [Unit(n, n, 1, 100, ()) for n in range(3)]
    found = surveying._concluded(units, {}, {0: Counted(90, 90, 10, 100)})
    assert found.tokens_error is None and found.total.tokens == 270
