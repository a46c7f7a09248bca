"""`check` believes a healthy dataset and catches a planted fault, by the name of its tap."""

import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spile
from spile.check import compare, hf_arithmetic, load
from spile.check.compare import CheckReport, check
from spile.cli.model import check_text
from spile.core.config import Recipe
from spile.core.errors import ConfigError, CorruptError, DriftError, InputError, StoreError
from spile.core.tensors import read_header
from spile.dataset import format as fmt
from spile.dataset.maintain.gc import collect_garbage
from spile.dataset.maintain.verify import verify
from spile.dataset.records.ledger import Ledger
from spile.models.config.rope import Rope
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.lora import Adapter
from spile.models.forward import block, decoder, forward_pass
from spile.models.taps import Tap, all_taps
from spile.objects import LocalObjects
from spile.plan.resolve import resolve, store_table
from spile.status.listing import list_files
from support import tiny
from support.families import FAMILIES, randomised
from support.marks import some
from support.stored import Stored, flip, reseal

SEQ_LEN = 48
DOCUMENTS = 8  # some longer than a context, one of them than three
UNITS = 4
WHOLE = {"unit_tokens": 10_000}  # a single unit: compiled once, however many rows are kept
ROUGH = ("gemma2-gqa", "qwen3moe-gqa")
Folder = Callable[[str], Path]
Values = Callable[[str], list[np.ndarray]]
Plant = Callable[[Values], set[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return tmp_path_factory.mktemp


@pytest.fixture(scope="module")
def texts(folder: Folder) -> Path:
    path = folder("corpus") / "docs.jsonl"
    rng = np.random.default_rng(4)
    lengths = (6, 2, 40, 9, 3, 14, 30, 1)  # in words
    assert len(lengths) == DOCUMENTS
    path.write_text("".join(json.dumps({"text": tiny.words(rng, n)}) + "\n" for n in lengths))
    return path


@pytest.fixture(scope="module")
def llama(folder: Folder) -> Path:
    return write(folder("llama"), randomised(FAMILIES["llama-gqa"]))


@pytest.fixture(scope="module")
def healthy(llama: Path, texts: Path, folder: Folder) -> Path:
    """Every tap of a Llama in float32; tests that damage it use a copy."""
    return extract(folder("out") / "llama", llama, texts, compute_dtype="float32")


@pytest.fixture
def dataset(healthy: Path, tmp_path: Path) -> Path:
    return copied(healthy, tmp_path / "out")


@pytest.mark.full
def test_taps_of_some_heads_are_compared_with_those_heads(
    llama: Path, texts: Path, tmp_path: Path
) -> None:
    taps = "z:1.h0+h3,attn_pattern:0.h2,k:2.h1"
    out = extract(tmp_path / "out", llama, texts, taps, compute_dtype="float32")
    report = check(str(out), samples=3)
    assert report.ok and set(report.taps) == {"z.1.h0.h3", "attn_pattern.0.h2", "k.2.h1"}
    ds = spile.open(out)
    assert ds.shape("z.1.h0.h3")[0] == 2 and ds.shape("attn_pattern.0.h2") == (1, SEQ_LEN)


@pytest.fixture(scope="module")
def embeddings(llama: Path, texts: Path, folder: Folder) -> Path:
    """The same model with the embeddings as its only tap."""
    return extract(folder("out") / "embed", llama, texts, "embed", compute_dtype="float32")


@pytest.fixture
def small(embeddings: Path, tmp_path: Path) -> Path:
    return copied(embeddings, tmp_path / "out")


def copied(dataset: Path, out: Path) -> Path:
    """A copy to damage, without the result of an earlier check."""
    return Path(shutil.copytree(dataset, out, ignore=lambda *_: [fmt.CHECK]))


def write(directory: Path, model: Any) -> Path:
    model.save_pretrained(directory)
    tiny.write_tokenizer(directory)
    return directory


def extract(out: Path, model: Path, corpus: Path, taps: str | None = None, **options: Any) -> Path:
    """A dataset with one or a few documents in a unit; with every tap unless some are given."""
    every_tap = ",".join(tap.name for tap in all_taps(open_checkpoint(str(model)).arch))
    options = {"seq_len": SEQ_LEN, "unit_tokens": 120, **options}
    recipe = Recipe(model=str(model), corpus=str(corpus), taps=taps or every_tap, **options)
    spile.extract(recipe, str(out))
    return out


def opened(out: Path) -> Stored:
    """A dataset in the form that `reseal` takes."""
    table = Ledger(LocalObjects(out)).table()
    return Stored(out, table, [], np.zeros(0), {}, [])


@contextmanager
def forged(out: Path) -> Iterator[Values]:
    """Gives the stored values of a tap, unit by unit, to be changed in place: verify stays content.

    A name such as `index/offset` is a column of the index.
    """
    stored = opened(out)
    units = [stored.done(unit.id) for unit in stored.table.units]
    assert len(units) >= UNITS and all(done.rows for done in units)

    def values(tap: str) -> list[np.ndarray]:
        kind, _, name = tap.rpartition("/")
        return [
            np.memmap(out / file.key, info.dtype, "r+", info.start, info.shape)
            for done in units
            for file in ((done.index,) if kind else done.shards)
            if kind or file.tap == tap
            for info in [read_header(out / file.key)[name]]
        ]

    yield values
    for done in units:
        reseal(stored, done.unit)
    (out / fmt.CHECK).unlink(missing_ok=True)


def check_all(out: Path, **options: Any) -> CheckReport:
    """Check samples of every document, so that a fault in any of them is found."""
    return check(str(out), samples=5 * DOCUMENTS, **options)


def assert_healthy(report: CheckReport) -> None:
    found = {name: (tap.error, tap.allowed, tap.control) for name, tap in report.taps.items()}
    assert report.ok, {name: found[name] for name, tap in report.taps.items() if not tap.ok}
    assert found
    for name, (error, allowed, control) in found.items():
        assert 0 <= error <= allowed < control < math.inf, name


def faulty(report: CheckReport) -> set[str]:
    """Return the taps that are too far from the reference, without the unclear ones."""
    assert report.ok == all(tap.ok for tap in report.taps.values())
    return {name for name, tap in report.taps.items() if tap.error > tap.allowed}


# family, options, taps beside the usual
OPTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "the last token of each document": (
        "qwen3-gqa", {"where": "end", "pack": "none"}, "attn_pattern:1",
    ),
    "few rows": ("gemma2-gqa", {"where": "not bos", "every": 5}, "q_rot:1"),
    "long documents cut off": ("gpt2", {"long_docs": "truncate"}, "embed,q:0"),
    "stored in half the bits": (
        "olmo2-gqa", {"store_dtype": "bfloat16", "special_tokens": "none"}, "attn_pattern:0",
    ),
    "few rows in half the bits": (
        "olmo2-gqa", {"where": "not bos", "every": 5, "store_dtype": "bfloat16"},
        "attn_pattern:0,q_rot:1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", some(OPTIONS))
def test_whatever_was_asked_for_a_healthy_dataset_agrees(
    case: str, texts: Path, tmp_path: Path
) -> None:
    name, options, taps = OPTIONS[case]
    model = write(tmp_path / "model", randomised(FAMILIES[name]))
    taps = f"resid_post:1,logprob,{taps}"
    options = {"compute_dtype": "float32", **WHOLE, **options}
    report = check_all(out := extract(tmp_path / "out", model, texts, taps, **options))
    assert_healthy(report)
    dataset = spile.open(str(out))
    assert report.documents == len(np.unique(dataset.index(0, dataset.num_tokens)["doc"])) > 6
    rounded = "store_dtype" in options
    for name, tap in report.taps.items():
        assert (tap.floor > 1e-4) == (rounded and name != "logprob"), name


@pytest.fixture(scope="module")
def rough(request: pytest.FixtureRequest, texts: Path, folder: Folder) -> Path:
    """A dataset computed in bfloat16."""
    model = write(folder("model"), randomised(FAMILIES[request.param]))
    taps = "embed,attn_in:1,z:all,mlp_out:1,resid_post:all,entropy"
    return extract(folder("out") / "rough", model, texts, taps, compute_dtype="bfloat16")


@pytest.mark.full
@pytest.mark.parametrize("rough", some(ROUGH, "gemma2-gqa"), indirect=True)
def test_a_healthy_dataset_computed_in_bfloat16_agrees(rough: Path) -> None:
    for report in (check(str(rough)), check_all(rough)):
        assert_healthy(report)
        for tap in report.taps.values():
            assert 1e-4 < tap.floor <= tap.allowed / 2, "the reference has one, in bfloat16"


# (Experts are multiplied in float8 if they are wide enough.)
NARROW: dict[str, Any] = {}
IN_FLOAT8 = {
    "llama-gqa": NARROW, "gpt2": NARROW, "qwen3moe-gqa": NARROW, "glm4moe-gqa": NARROW,
    "qwen3moe-mha-unnormed": {"hidden_size": 128, "moe_intermediate_size": 128},
    "llama4-gqa": {"hidden_size": 128, "intermediate_size": 128},
}  # fmt: skip


@pytest.mark.parametrize("name", some(IN_FLOAT8))
def test_float8_products_agree_with_emulation_and_their_cost_is_reported(
    name: str, texts: Path, tmp_path: Path
) -> None:
    model = write(tmp_path / "model", randomised(partial(FAMILIES[name], **IN_FLOAT8[name])))
    taps = "embed,q:1,mlp_out:1,resid_post:all"
    out = extract(tmp_path / "out", model, texts, taps, compute_dtype="float8_e4m3")
    report = check(str(out))
    assert_healthy(report)
    assert (
        report.next_token and report.next_token["float8_e4m3"] > report.next_token["bfloat16"] > 0
    )
    for tap, found in report.taps.items():
        assert found.bfloat16 is not None
        in_float8 = tap != "embed"
        assert (found.floor > 3 * found.bfloat16) == in_float8, tap
        assert (found.error > 3 * found.bfloat16) == in_float8, tap
    with forged(out) as values:
        named = shifted("resid_post.0")(values)
    assert faulty(check(str(out))) == named


@pytest.mark.full
@pytest.mark.parametrize("rough", some(ROUGH, "gemma2-gqa"), indirect=True)
def test_a_fault_is_caught_in_bfloat16_too(rough: Path, tmp_path: Path) -> None:
    for plant in (
        scaled("attn_in.1", 1.05),
        scaled("resid_post.0", 0.97),
        heads_swapped("z.0"),
        shifted("mlp_out.1", "entropy"),
        other_layer,
    ):
        out = Path(shutil.copytree(rough, tmp_path / "out", dirs_exist_ok=True))
        with forged(out) as values:
            named = plant(values)
        report = check(str(out))
        assert faulty(report) == named
        assert not report.ok
        shutil.rmtree(out)


@pytest.mark.full
def test_more_documents_are_compared_below_float32_if_few_rows_are_kept(
    tmp_path: Path,
) -> None:
    """With one row per document, luck would decide whether bfloat16 seems rough enough."""
    path = tiny.write_corpus(tmp_path / "docs.jsonl", 40, mean=1.0)
    model = write(tmp_path / "model", randomised(FAMILIES["mixtral-gqa"]))
    taps = "expert_ids:all,mlp_out:2,entropy"
    options = {"where": "end", "pack": "none", "compute_dtype": "bfloat16", **WHOLE}
    out = extract(tmp_path / "out", model, path, taps, **options)
    report = check(str(out), samples=4)
    assert report.documents == 16
    assert_healthy(report)
    assert check(str(out), samples=20).documents == 20


@pytest.mark.full
def test_documents_are_spread_over_the_units_and_none_is_counted_twice(
    dataset: Path, texts: Path
) -> None:
    documents = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    tokens = [min(1 + len(text), 2 * SEQ_LEN) for text in documents]  # of long ones two contexts
    one, whole = check(str(dataset), samples=1), check_all(dataset)
    assert (one.documents, whole.documents) == (1, DOCUMENTS)
    assert one.tokens in tokens
    assert whole.tokens == sum(tokens)


def test_what_is_done_of_an_unfinished_dataset_is_checked(small: Path) -> None:
    (small / fmt.MANIFEST).unlink()
    (small / fmt.CURRENT.segment_key(0)).unlink()
    (small / fmt.CURRENT.done_key(0)).unlink()
    (small / fmt.CURRENT.done_key(2)).unlink()
    report = check_all(small)
    assert_healthy(report)
    assert 0 < report.documents < DOCUMENTS


@pytest.mark.full
def test_added_taps_are_checked_and_a_fault_in_one_is_named(small: Path) -> None:
    spile.extract(Recipe(add_taps="mlp_out:0", store_dtype="bfloat16"), str(small))
    report = check(str(small), samples=1)
    assert_healthy(report)
    assert {*report.taps} == {"embed", "mlp_out.0"} and report.documents == 1
    assert report.taps["embed"].loss.relative_l2 == 0 < report.taps["mlp_out.0"].loss.relative_l2
    (shard, *_) = (file for file in list_files(LocalObjects(small), tap="mlp_out.0") if file.rows)
    header = read_header(small / shard.key)["mlp_out.0"]
    rows = np.memmap(small / shard.key, header.dtype, "r+", header.start, header.shape)
    rows[:] = -rows
    rows.flush()
    assert faulty(check(str(small), samples=1)) == {"mlp_out.0"}


def other_layer(values: Values) -> set[str]:
    for ours, theirs in zip(values("resid_post.0"), values("resid_post.1"), strict=True):
        ours[:] = theirs
    return {"resid_post.0"}


def layers_swapped(values: Values) -> set[str]:
    for first, second in zip(values("mlp_hidden.1"), values("mlp_hidden.2"), strict=True):
        first[:], second[:] = second.copy(), first.copy()
    return {"mlp_hidden.1", "mlp_hidden.2"}


def before_the_mlp(values: Values) -> set[str]:
    for ours, theirs in zip(values("resid_post.2"), values("resid_mid.2"), strict=True):
        ours[:] = theirs
    return {"resid_post.2"}


def heads_swapped(*taps: str) -> Plant:
    def plant(values: Values) -> set[str]:
        for array in (array for tap in taps for array in values(tap)):
            array[:, :2] = array[:, [1, 0]]
        return set(taps)

    return plant


def rotary_halves_swapped(values: Values) -> set[str]:
    for array in values("k_rot.0"):
        array[:] = np.roll(array, array.shape[-1] // 2, axis=-1)
    return {"k_rot.0"}


def scaled(tap: str, factor: float) -> Plant:
    def plant(values: Values) -> set[str]:
        for array in values(tap):
            array *= array.dtype.type(factor)
        return {tap}

    return plant


def one_value(tap: str, change: float) -> Plant:
    """One value of the whole dataset changes, by a fraction of its usual size."""

    def plant(values: Values) -> set[str]:
        array = values(tap)[2].reshape(-1)
        usual = np.sqrt(np.mean(np.square(array, dtype=np.float64)) * values(tap)[2][0].size)
        array[len(array) // 3] += change * usual
        return {tap}

    return plant


def one_row_of_another_token_of(tap: str) -> Plant:
    def plant(values: Values) -> set[str]:
        array = values(tap)[1]
        array[3] = array[4]
        return {tap}

    return plant


one_row_of_another_token = one_row_of_another_token_of("attn_out.1")


def shifted(*taps: str) -> Plant:
    """Every row except the first is replaced by the one before it."""

    def plant(values: Values) -> set[str]:
        for array in (array for tap in taps for array in values(tap)):
            array[1:] = array[:-1].copy()
        return set(taps)

    return plant


def not_numbers(value: float) -> Plant:
    def plant(values: Values) -> set[str]:
        values("v.1")[0][2, 1] = value
        return {"v.1"}

    return plant


def beyond_the_context(values: Values) -> set[str]:
    """Attention weights on keys that a short document does not have."""
    columns = (values(name) for name in ("attn_pattern.1", "index/doc", "index/offset"))
    for array, docs, offsets in zip(*columns, strict=True):
        for doc in np.unique(docs):
            if offsets[docs == doc].max() < SEQ_LEN - 1:
                array[docs == doc, :, -1] = 0.01
    return {"attn_pattern.1"}


FAULTS: dict[str, Plant] = {
    "another layer's rows": other_layer,
    "two layers swapped": layers_swapped,
    "the stream before the MLP": before_the_mlp,
    "two heads swapped": heads_swapped("q.1", "z.2"),
    "two key heads swapped": heads_swapped("k_rot.0", "v.2"),
    "two heads' patterns swapped": heads_swapped("attn_pattern.0"),
    "rotary halves swapped": rotary_halves_swapped,
    "a scale off by a thousandth": scaled("mlp_in.1", 1.001),
    "logarithms to another base": scaled("entropy", 1 / math.log(2)),
    "one value off by a thousandth": one_value("resid_post.1", 1e-3),
    "one logit off": one_value("logits", 1e-4),
    "one row of another token": one_row_of_another_token,
    "rows shifted by a token": shifted("embed", "resid_pre.0", "q_rot.2", "logprob"),
    "patterns shifted by a token": shifted("attn_pattern.2"),
    "weights beyond the context": beyond_the_context,
    "a number that is none": not_numbers(np.nan),
    "infinity": not_numbers(-np.inf),
}
FEW_FAULTS = (  # of different taps
    "another layer's rows", "two heads swapped", "a scale off by a thousandth",
    "one row of another token", "rows shifted by a token", "weights beyond the context",
)  # fmt: skip


def test_every_tap_of_a_sound_dataset_agrees_and_planted_faults_are_named(
    healthy: Path, tmp_path: Path
) -> None:
    report = check(str(healthy))
    assert_healthy(report)
    assert set(report.taps) == set(spile.open(str(healthy)).taps)
    assert {tap.allowed for tap in report.taps.values()} == {2e-5}
    assert report.documents == 4
    assert report.fingerprint == spile.open(str(healthy)).fingerprint
    assert report.reference.startswith("transformers ") and "torch " in report.reference
    assert_caught(copied(healthy, tmp_path / "out"), *(FAULTS[case] for case in FEW_FAULTS))


@pytest.mark.full
@pytest.mark.parametrize("case", FAULTS)
def test_a_planted_fault_is_caught_by_the_name_of_its_tap(case: str, dataset: Path) -> None:
    finite = case not in ("a number that is none", "infinity")
    assert_caught(dataset, FAULTS[case], finite=finite)


def assert_caught(dataset: Path, *plants: Plant, finite: bool = True) -> None:
    """Each fault is reported under the name of its tap, and no other tap is."""
    with forged(dataset) as values:
        each = [plant(values) for plant in plants]
    named = set[str]().union(*each)
    assert len(named) == sum(map(len, each))
    assert verify(LocalObjects(dataset)).ok == finite, "no checksum tells"
    report = check_all(dataset)
    assert faulty(report) == named
    assert not report.ok
    stored = json.loads((dataset / fmt.CHECK).read_bytes())
    assert {name for name, tap in stored["taps"].items() if not tap["ok"]} == named
    assert stored["ok"] is False
    lines = check_text(str(dataset), report).splitlines()
    assert {line.split()[0] for line in lines if "  <- too far" in line} == named
    disagree = "1 tap disagrees" if len(named) == 1 else f"{len(named)} taps disagree"
    assert disagree in lines[-1]


@pytest.mark.full
def test_forging_nothing_changes_nothing(dataset: Path) -> None:
    with forged(dataset) as values:
        assert sum(map(len, values("embed"))) == spile.open(str(dataset)).num_tokens
    assert_healthy(check_all(dataset))


@pytest.mark.full
def test_one_wrong_expert_is_caught(texts: Path, tmp_path: Path) -> None:
    model = write(tmp_path / "model", randomised(FAMILIES["gptoss-gqa"]))
    taps = "expert_ids:0+1,expert_weights:1,resid_post:3"
    out = extract(tmp_path / "out", model, texts, taps, compute_dtype="float32")
    assert_healthy(check_all(out))
    with forged(out) as values:
        array = values("expert_ids.1")[2]
        array[5] = array[5, ::-1].copy()  # of one token, and all of them are there
    assert faulty(check_all(out)) == {"expert_ids.1"}


def sharp_gemma() -> Any:
    """Attention that depends on the last digits, and a few rows much longer than the others."""
    model = randomised(lambda: FAMILIES["gemma3-gqa"](num_hidden_layers=4))
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.q_norm.weight.add_(24.0)
        model.model.embed_tokens.weight[tiny.BOS].mul_(100.0)
    return model


@pytest.mark.full
def test_what_hfs_own_float32_cannot_tell_is_allowed_and_no_more(
    texts: Path, tmp_path: Path
) -> None:
    model = write(tmp_path / "model", sharp_gemma())
    taps = "resid_post:all,z:all,attn_out:2,q_rot:3,logprob"
    out = extract(tmp_path / "out", model, texts, taps, compute_dtype="float32")
    report = check_all(out)
    assert_healthy(report)
    assert report.reference.endswith(", in float64")
    assert max(tap.error for tap in report.taps.values()) > 2e-5, "a fixed limit would reject it"
    assert max(tap.allowed for tap in report.taps.values()) < 1e-2
    # after the first layer nothing has gone astray yet, so that it stays strict
    assert report.taps["resid_post.0"].allowed < report.taps["resid_post.3"].allowed
    with forged(out) as values:
        named = heads_swapped("z.3")(values) | scaled("resid_post.0", 1.002)(values)
        named |= one_row_of_another_token_of("attn_out.2")(values)
    assert faulty(check_all(out)) == named


@pytest.mark.parametrize(
    "case", some(["too little memory", "no float64 in its code"], "too little memory")
)
@pytest.mark.full
def test_without_float64_hfs_two_attentions_are_the_measure(
    case: str, dataset: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        if case == "too little memory":
            raise MemoryError("the model takes 99.0 GB in float64, and 1.0 GB are free")
        raise NotImplementedError("\"addmm_impl_cpu_\" not implemented for 'Double'\nat line 3")

    if case == "too little memory":
        monkeypatch.setattr(load, "_check_memory", refuse)
    else:
        monkeypatch.setattr(hf_arithmetic.InFloat64, "__torch_dispatch__", refuse)
    with forged(dataset) as values:
        named = heads_swapped("q_rot.1")(values) | one_row_of_another_token(values)
        named |= scaled("mlp_in.1", 1.001)(values)
    report = check_all(dataset)
    assert faulty(report) == named
    assert all(tap.ok for name, tap in report.taps.items() if name not in named)
    assert report.reference.endswith(", in float32, by the spread of eager and sdpa attention")
    (line,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert line.startswith("check compares in float32, by the spread of eager and sdpa attention")
    assert ("99.0 GB" if case == "too little memory" else "'Double'") in line and "\n" not in line


def test_a_model_that_does_not_fit_in_float64_is_told_by_its_size(
    llama: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(model=str(llama), corpus=str(texts), taps="embed", seq_len=SEQ_LEN)
    job = resolve(recipe, Ledger(LocalObjects(tmp_path)), "cpu")
    load._check_memory(job)
    monkeypatch.setattr(Path, "read_text", lambda _: "MemTotal: 9 kB\nMemAvailable: 100 kB\n")
    with pytest.raises(MemoryError, match=r"takes 0\.\d GB in float64, and 0\.0 GB are free"):
        load._check_memory(job)


def test_tokens_after_an_expert_choice_by_rounding_are_not_judged() -> None:
    exact = np.array([[3.0, 1, 0], [1, 3, 2], [2, 1, 1 - 1e-7], [5, 4, 0]])
    rough = exact + 1e-6
    before = compare._before_a_tie

    def judged(exact: np.ndarray, rough: np.ndarray, chosen: int) -> int:
        return before({"router_logits.0": exact}, {"router_logits.0": rough}, chosen)

    assert judged(exact, rough, 1) == 4, "the first choice is clear everywhere"
    assert judged(exact, rough, 2) == 2, "the second is not, from the third token on"
    assert judged(exact, exact, 2) == 4, "if rounding is smaller than the gap, it is"
    assert judged(exact[2:], rough[2:], 2) == 0
    assert judged(exact, rough, 3) == 4, "where all are chosen there is no choice"


SOME = "embed,resid_pre:1,attn_in:0,q_rot:0,v:0,resid_post:1"
AFTER = {"resid_pre.1", "resid_post.1"}


def scale_norms(patch: pytest.MonkeyPatch, factor: float = 1.01) -> set[str]:
    real = block.norm

    def scaled(*given: Any, **named: Any) -> Any:
        x = real(*given, **named)
        return x * np.asarray(factor, x.dtype)

    patch.setattr(block, "norm", scaled)
    return {"attn_in.0", "q_rot.0", "v.0", *AFTER}


def change_rotary_base(patch: pytest.MonkeyPatch) -> set[str]:
    real = Rope.frequencies

    def frequencies(self: Rope, *rest: int) -> Any:
        return real(dataclasses.replace(self, theta=self.theta * 1.5), *rest)

    patch.setattr(Rope, "frequencies", frequencies)
    return {"q_rot.0", *AFTER}


def miscount_layers(patch: pytest.MonkeyPatch) -> set[str]:
    def computed_as(tap: Tap) -> Tap:
        return Tap("resid_post", tap.layer) if tap.site == "resid_pre" else tap

    for module in (decoder, forward_pass):
        patch.setattr(module, "computed_as", computed_as)
    return {"resid_pre.1"}


ENGINE_FAULTS: dict[str, Callable[[pytest.MonkeyPatch], set[str]]] = {
    "norms off by a hundredth": scale_norms,
    "another rotary base": change_rotary_base,
    "layers miscounted": miscount_layers,
}


@pytest.mark.parametrize("case", some(ENGINE_FAULTS))
def test_a_fault_of_the_engine_is_caught_where_it_begins_and_after(
    case: str, llama: Path, texts: Path, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        named = ENGINE_FAULTS[case](patch)
        out = extract(tmp_path / "out", llama, texts, SOME, compute_dtype="float32")
    assert verify(LocalObjects(out)).ok
    assert faulty(check(str(out))) == named


@pytest.mark.full
def test_norms_off_by_a_twentieth_are_caught_in_bfloat16_too(
    llama: Path, texts: Path, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        named = scale_norms(patch, 1.05)
        out = extract(tmp_path / "out", llama, texts, SOME, compute_dtype="bfloat16")
    assert faulty(check(str(out))) == named


@pytest.mark.full
def test_a_tap_that_no_fault_would_show_in_is_unclear_and_not_ok(
    texts: Path, tmp_path: Path
) -> None:
    """Block 1 adds nothing, so its stream equals the one before it."""
    model = randomised(FAMILIES["llama-gqa"])
    with torch.no_grad():
        block = model.model.layers[1]
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    write(tmp_path / "model", model)
    # the sizes of another test, so that both share a program
    out = extract(tmp_path / "out", tmp_path / "model", texts, LORA_TAPS, compute_dtype="float32")
    report = check(str(out))
    assert {name for name, tap in report.taps.items() if not tap.ok} == {"resid_post.0"}
    assert report.taps["resid_post.0"].control <= report.taps["resid_post.0"].allowed
    assert (faulty(report), report.ok) == (set(), False)
    lines = check_text("out", report).splitlines()
    assert [line.split()[0] for line in lines if line.endswith("<- unclear")] == ["resid_post.0"]
    assert "agree" not in lines[-1], "it neither agrees nor disagrees"


@pytest.mark.full
def test_a_model_of_one_layer_is_compared_with_the_token_before(
    texts: Path, tmp_path: Path
) -> None:
    one = randomised(lambda: FAMILIES["qwen2"](num_hidden_layers=1))
    model = write(tmp_path / "model", one.to(torch.bfloat16))  # as most are published
    out = extract(tmp_path / "out", model, texts, "resid_post:0,z:0", compute_dtype="float32")
    assert_healthy(check(str(out)))
    with forged(out) as values:
        shifted("z.0")(values)
    assert faulty(check(str(out))) == {"z.0"}


LORA_TAPS = "embed,q:0,v:0,attn_out:1,mlp_hidden:2,resid_post:all"
EIGHT = ("float8_e4m3", "int8")
SHORT = "embed,resid_pre:1,z:0,resid_post:0,logprob"


@pytest.fixture(scope="module")
def eight_bits(request: pytest.FixtureRequest, llama: Path, texts: Path, folder: Folder) -> Path:
    """A dataset stored in eight bits; tests that damage it use a copy."""
    options = {"compute_dtype": "float32", "store_dtype": request.param}
    return extract(folder("out") / "eight", llama, texts, SHORT, **options)


@pytest.mark.parametrize("eight_bits", some(EIGHT, "int8"), indirect=True)
@pytest.mark.full
def test_eight_bits_agree_and_cost_what_they_should(eight_bits: Path) -> None:
    report = check_all(eight_bits)
    assert_healthy(report)
    dataset = spile.open(str(eight_bits))
    stored = json.loads((eight_bits / fmt.CHECK).read_bytes())["taps"]
    for name, tap in report.taps.items():
        loss = tap.loss
        assert stored[name]["loss"] == dataclasses.asdict(loss)
        assert {*stored[name]["loss"]} == {"relative_l2", "typical_channel", "cosine"}
        assert loss.cosine > 0.999
        if name == "logprob":
            assert (loss.relative_l2, loss.typical_channel, tap.allowed) == (0, 0, 2e-5)
            continue
        assert tap.floor > 1e-3, "more is allowed than float32 would be"
        if dataset.stored_dtype(name) == "int8":
            assert 1e-3 < loss.typical_channel < 0.03
        else:
            assert 0.02 < loss.relative_l2 < 0.04
            assert 0.02 < loss.typical_channel < 0.04


@pytest.mark.parametrize("eight_bits", some(EIGHT, "int8"), indirect=True)
@pytest.mark.full
def test_swapped_heads_are_caught_in_eight_bits(eight_bits: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(eight_bits, tmp_path / "out", ignore=lambda *_: [fmt.CHECK]))
    with forged(out) as values:
        named = heads_swapped("z.0")(values)
    assert verify(LocalObjects(out)).ok
    report = check(str(out))
    assert (faulty(report), report.ok) == (named, False)
    cosines = {name: tap.loss.cosine for name, tap in report.taps.items()}
    assert min(cosines, key=lambda name: cosines[name]) == "z.0"


@pytest.mark.full
@pytest.mark.parametrize("dtype", some(EIGHT, "int8"))
def test_a_wrong_layer_is_caught_in_eight_bits(
    dtype: str, llama: Path, texts: Path, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        named = miscount_layers(patch)
        out = extract(
            tmp_path / "out", llama, texts, SHORT, compute_dtype="float32", store_dtype=dtype
        )
    assert verify(LocalObjects(out)).ok
    assert faulty(check(str(out))) == named


def test_tokens_that_are_not_the_corpus_are_no_basis_for_a_comparison(small: Path) -> None:
    with forged(small) as values:
        for array in values("index/token_id"):
            array[:] = (array + 1) % 256
    with pytest.raises(StoreError, match=r"document \d+: its tokens differ from the corpus's"):
        check(str(small))
    assert not (small / fmt.CHECK).exists()


def test_offsets_beyond_a_document_are_no_basis_for_a_comparison(small: Path) -> None:
    with forged(small) as values:
        for array in values("index/offset"):
            array += 1000
    with pytest.raises(StoreError, match=r"document \d+: its tokens differ from the corpus's"):
        check(str(small))


def test_the_result_is_kept_beside_the_manifest_and_replaced_by_the_next(small: Path) -> None:
    objects = LocalObjects(small)
    before = {*objects.list()}
    first = check(str(small), samples=1)
    assert {*objects.list()} == before | {"check.json"}
    record = fmt.decode_record(fmt.CHECK, objects.get(fmt.CHECK), "check")
    assert record == json.loads(json.dumps(first.to_json()))
    taps = record["taps"]
    keys = {"error", "floor", "control", "loss", "allowed", "bfloat16", "really", "ok"}
    keys |= {"reconstruction"}
    assert (record["ok"], {frozenset(tap) for tap in taps.values()}) == (True, {frozenset(keys)})
    second = check(str(small), samples=3)
    assert {*objects.list()} == before | {"check.json"}
    replaced = fmt.decode_record(fmt.CHECK, objects.get(fmt.CHECK), "check")
    assert (replaced["documents"], replaced["tokens"]) == (3, second.tokens)
    assert collect_garbage(objects) == []
    report = verify(objects)
    assert (report.faults, report.orphans) == ([], [])


def test_damage_to_the_record_is_a_fault(small: Path) -> None:
    check(str(small), samples=1)
    objects = LocalObjects(small)
    for position in (0, (small / fmt.CHECK).stat().st_size // 2):
        flip(small / fmt.CHECK, position)
        (fault,) = verify(objects).faults
        assert fault.startswith("check.json: ")
        flip(small / fmt.CHECK, position)
    assert verify(objects).ok
    objects.replace(fmt.CHECK, objects.get(fmt.MANIFEST))
    assert verify(objects).faults == ["check.json: holds a 'manifest' record, expected 'check'"]
    with pytest.raises(CorruptError):
        fmt.decode_record(fmt.CHECK, objects.get(fmt.CHECK), "check")
    check(str(small), samples=1)
    assert verify(objects).ok, "a new check mends it"


def test_what_has_moved_is_found_where_it_is_now(llama: Path, texts: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    corpus = Path(shutil.copy(texts, tmp_path / "docs.jsonl"))
    out = extract(tmp_path / "out", model, corpus, "embed", compute_dtype="float32")
    moved_model, moved_corpus = tmp_path / "else" / "model", tmp_path / "else" / "texts.jsonl"
    (tmp_path / "else").mkdir()
    model.rename(moved_model)
    with pytest.raises(InputError, match=f"--model {model}: no such directory"):
        check(str(out))
    corpus.rename(moved_corpus)
    with pytest.raises(InputError, match=str(corpus)):
        check(str(out), recipe=Recipe(model=str(moved_model)))
    now = Recipe(model=str(moved_model), corpus=str(moved_corpus))
    assert_healthy(check(str(out), recipe=now))


def test_another_model_or_corpus_is_refused(small: Path, texts: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", randomised(FAMILIES["llama-gqa"], seed=1))
    with pytest.raises(DriftError, match="model weights: stored"):
        check(str(small), recipe=Recipe(model=str(other)))
    lines = texts.read_text().splitlines(keepends=True)
    (tmp_path / "docs.jsonl").write_text("".join(lines[::-1]))
    with pytest.raises(DriftError, match="corpus file .*docs.jsonl"):
        check(str(small), recipe=Recipe(corpus=str(tmp_path / "docs.jsonl")))
    assert not (small / fmt.CHECK).exists()


def test_a_dataset_without_a_finished_unit_is_refused(
    llama: Path, texts: Path, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match="out"):
        check(str(tmp_path / "out"))
    ledger = Ledger(LocalObjects(tmp_path / "out"))
    recipe = Recipe(model=str(llama), corpus=str(texts), taps="embed", seq_len=SEQ_LEN)
    store_table(resolve(recipe, ledger, "cpu"), ledger)
    with pytest.raises(StoreError, match="no unit is done yet, there is nothing to check"):
        check(str(tmp_path / "out"))
    assert not (tmp_path / "out" / fmt.CHECK).exists()


@pytest.mark.parametrize("missing", ["transformers", "torch"])
def test_without_transformers_the_error_says_what_to_install(
    missing: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError) as caught:
        check(str(small))
    message = str(caught.value)
    assert missing in message and message.endswith("pip install 'spile[check]'")
    assert "\n" not in message


@pytest.fixture(scope="module")
def adapter(folder: Folder) -> Path:
    """An adapter as PEFT saves it, far from the identity."""
    directory = folder("adapter")
    import peft  # (it takes seconds)  # noqa: PLC0415

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "up_proj"])
    wrapped: Any = peft.get_peft_model(randomised(FAMILIES["llama-gqa"]), config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    wrapped.save_pretrained(str(directory))
    return directory


@pytest.mark.full
@pytest.mark.parametrize("dtype", some(["float32", "bfloat16"], "float32"))
def test_an_adapters_dataset_agrees_with_peft(
    dtype: str, llama: Path, adapter: Path, texts: Path, tmp_path: Path
) -> None:
    at_first = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    out = extract(
        tmp_path / "out", llama, texts, LORA_TAPS, lora=str(at_first), compute_dtype=dtype
    )
    assert_healthy(check(str(out)))
    at_first.rename(tmp_path / "moved")
    with pytest.raises(InputError, match=f"{at_first}: no such directory"):
        check(str(out))
    assert_healthy(check(str(out), recipe=Recipe(lora=str(tmp_path / "moved"))))


@pytest.mark.full
def test_an_adapter_that_was_not_merged_is_caught(
    llama: Path, adapter: Path, texts: Path, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Adapter, "merge", lambda self, name, weight: weight)
        out = extract(
            tmp_path / "out", llama, texts, LORA_TAPS, lora=str(adapter), compute_dtype="float32"
        )
    streams = {f"resid_post.{layer}" for layer in range(3)}
    assert faulty(check(str(out))) == {"q.0", "attn_out.1", "mlp_hidden.2", *streams}


def test_without_peft_an_adapters_dataset_cannot_be_checked(
    llama: Path, adapter: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = extract(
        tmp_path / "out", llama, texts, "embed", lora=str(adapter), compute_dtype="float32"
    )
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="pip install peft$") as caught:
        check(str(out))
    assert "\n" not in str(caught.value)
