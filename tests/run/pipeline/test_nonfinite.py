"""A NaN is reported by its first tap, document and token, while the unit computes."""

from pathlib import Path
from typing import Any

import pytest

import spile
from spile.core.config import Recipe, Runtime
from spile.core.errors import DataError
from spile.dataset.format import CURRENT
from spile.dataset.records.ledger import Ledger
from spile.metrics import Counters
from spile.objects import LocalObjects
from support import metric_files, saes
from support.spoilt import AT, BEFORE, TOKEN, letter, write_corpus, write_model


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "spoilt")


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "docs.jsonl")


def fails(
    model: Path,
    corpus: Path,
    out: Path,
    runtime: Runtime,
    counters: Counters | None = None,
    **more: Any,
) -> str:
    fields: dict[str, Any] = {"taps": "resid_post:all", "seq_len": 64, "unit_tokens": 500, **more}
    recipe = Recipe(model=str(model), corpus=str(corpus), **fields)
    with pytest.raises(DataError) as caught:
        spile.extract(recipe, str(out), runtime, counters=counters)
    return str(caught.value)


def unit_of(out: Path, doc: int) -> int:
    units = Ledger(LocalObjects(out)).table().units
    return next(u.id for u in units if u.first_doc <= doc < u.first_doc + u.num_docs)


def test_tap_layer_unit_document_and_token_are_named(
    spoilt: Path, letters: Path, tmp_path: Path
) -> None:
    """Although it also spoils masked values, those of other documents of the step included."""
    out = tmp_path / "out"
    message = fails(spoilt, letters, out, Runtime(write_threads=3, batch_tokens=128))
    unit, token = unit_of(out, AT), TOKEN
    assert unit > 0, "a later one"
    assert message == (
        f"resid_post.0: NaN or infinity in unit {unit}, layer 0, document {AT} "
        f"(id 'the\\nthirtieth', url 'https://a.b/c', preview '{BEFORE}Zither'), token {token} "
        f"(id {letter(spoilt)}, position {token}); check the weights and the dtypes, or keep them "
        "with --allow-nonfinite"
    )
    done = sorted(path.name for path in (out / "done").glob("*/*"))
    assert done == [Path(CURRENT.done_key(number)).name for number in range(unit)], (
        "those before it stay"
    )


@pytest.mark.full
def test_a_token_of_which_nothing_is_kept_is_named_all_the_same(
    spoilt: Path, letters: Path, tmp_path: Path
) -> None:
    token = TOKEN
    where = f"offset > {token}"  # the letter's own row is dropped; later ones have read it
    message = fails(spoilt, letters, tmp_path / "out", Runtime(), where=where, taps="resid_post:1")
    assert message.startswith("resid_post.1: NaN or infinity in unit ")
    assert f"layer 1, document {AT} " in message and f"token {token} (id " in message


@pytest.mark.full
def test_what_int8_cannot_hold_is_named_though_it_does_not_hold_it(
    spoilt: Path, letters: Path, tmp_path: Path
) -> None:
    # (Scales are measured on the first units, which are sound.)
    message = fails(
        spoilt, letters, tmp_path / "out", Runtime(allow_nonfinite=True), taps="embed",
        store_dtype="int8",
    )  # fmt: skip
    assert message.startswith(f"embed: NaN or infinity in unit {unit_of(tmp_path / 'out', AT)}, ")
    assert f"document {AT} " in message and "which int8 cannot hold" in message


@pytest.mark.full
def test_it_is_named_by_the_tap_though_latents_are_stored(
    spoilt: Path, letters: Path, tmp_path: Path
) -> None:
    sae = saes.write_sae(tmp_path / "sae")
    message = fails(
        spoilt, letters, tmp_path / "out", Runtime(), taps="resid_post:1", encode=str(sae)
    )
    assert message.startswith("resid_post.1: NaN or infinity in unit ")
    assert f"layer 1, document {AT} " in message and f"token {TOKEN} (id " in message


@pytest.mark.full
def test_it_is_found_while_the_unit_computes(spoilt: Path, letters: Path, tmp_path: Path) -> None:
    """Only some steps of a large unit run, and the values counted in them are reported."""
    out, board, counters = tmp_path / "out", tmp_path / "board", Counters()
    runtime = Runtime(batch_tokens=64, queue_depth=1, metrics=f"tensorboard:{board}")
    message = fails(spoilt, letters, out, runtime, counters, unit_tokens=100_000, pack="none")
    assert f"in unit 0, layer 0, document {AT} " in message
    _, last = metric_files.tensorboard_reports(board / "out")[-1]
    assert not (out / "done").exists()
    assert any(last.get(f"tap/nonfinite/resid_post.{layer}", 0) > 0 for layer in range(3))
    assert last["progress/tokens"] <= counters["stepped"] < counters["prepared"]
