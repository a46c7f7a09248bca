"""Bad input is refused before it costs anything, by one line that names it and an exit code."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chaos.harness import Work, check_refused, check_sound, run
from spile.core.tensors import write_tensors
from support import tiny

OPTIONS = {"taps": "embed,resid_post:1", "seq_len": 64, "compute_dtype": "float32"}
GARBAGE = np.random.default_rng(5).bytes(1 << 16)
LINE = b'{"text": "a few words", "n": 3, "body": "others"}\n'


def parquet(**columns: list[object]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def damaged(data: bytes, start: float, stop: float) -> bytes:
    """Overwrite the bytes between two fractions of a file with zeros."""
    first, last = int(len(data) * start), int(len(data) * stop)
    return data[:first] + bytes(last - first) + data[last:]


TEXTS = parquet(text=[f"text {i} of some" for i in range(200)], n=list(range(200)))

# name of the file, its bytes, further options, and what the line must name
CORPORA: dict[str, tuple[str, bytes, dict[str, object], list[str]]] = {
    "an empty file": ("a.jsonl", b"", {}, ["a.jsonl", "empty"]),
    "an empty text file": ("a.txt", b"", {}, ["a.txt", "empty"]),
    "an empty compressed file": ("a.txt.gz", gzip.compress(b""), {}, ["a.txt.gz", "empty"]),
    "no rows": ("a.parquet", parquet(text=pa.array([], pa.string())), {}, ["a.parquet", "empty"]),
    "only blank lines": ("a.jsonl", b"\n\n\n", {}, ["no usable document", "3 empty"]),
    "garbage as jsonl": ("a.jsonl", GARBAGE, {}, ["a.jsonl"]),
    "garbage as text": ("a.txt", GARBAGE, {}, ["a.txt", "UTF-8"]),
    "garbage as one text": ("a.txt", GARBAGE, {"text_documents": "file"}, ["a.txt", "UTF-8"]),
    "garbage as parquet": ("a.parquet", GARBAGE, {}, ["a.parquet", "Parquet"]),
    "garbage as gz": ("a.jsonl.gz", GARBAGE, {}, ["a.jsonl.gz", "decompress"]),
    "garbage as zst": ("a.jsonl.zst", GARBAGE, {}, ["a.jsonl.zst", "decompress"]),
    "a truncated gz": ("a.jsonl.gz", gzip.compress(GARBAGE)[:999], {}, ["a.jsonl.gz"]),
    "a damaged gz": ("a.txt.gz", damaged(gzip.compress(LINE * 900), 0.2, 0.6), {}, ["a.txt.gz"]),
    "a truncated parquet": ("a.parquet", TEXTS[: len(TEXTS) // 2], {}, ["a.parquet", "Parquet"]),
    "damaged pages": ("a.parquet", damaged(TEXTS, 0.01, 0.5), {}, ["a.parquet", "Parquet"]),
    "a damaged footer": ("a.parquet", damaged(TEXTS, 0.8, 0.95), {}, ["a.parquet", "Parquet"]),
    "a missing key": ("a.jsonl", b'{"body": "x"}\n', {}, ["a.jsonl", "'text'", "body"]),
    "a missing column": ("a.jsonl", LINE, {"text_column": "nope"}, ["a.jsonl", "nope", "body"]),
    "a missing parquet column": ("a.parquet", TEXTS, {"text_column": "nope"}, ["nope", "text"]),
    "a column of numbers": ("a.parquet", TEXTS, {"text_column": "n"}, ["a.parquet", "'n'"]),
    "a key of numbers": ("a.jsonl", LINE, {"text_column": "n"}, ["a.jsonl", "'n'", "int"]),
    "no obvious column": ("a.parquet", parquet(a=["x"], b=["y"]), {}, ["a.parquet", "a, b"]),
    "a line that is not JSON": ("a.jsonl", LINE + b"{oops\n", {}, ["a.jsonl", "line 2"]),
    "a line that is a list": ("a.jsonl", LINE + b"[1]\n", {}, ["a.jsonl", "line 2"]),
    "an unknown kind of file": ("a.xml", b"<text>x</text>", {}, ["a.xml"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CORPORA)
def test_a_corpus_that_cannot_be_read_is_refused(case: str, model: Path, tmp_path: Path) -> None:
    name, data, options, named = CORPORA[case]
    (tmp_path / name).write_bytes(data)
    work = Work(model, tmp_path / name, {**OPTIONS, **options})
    check_refused(run("extract", *work.flags(tmp_path / "out")), 2, *named)


PAIRS = b"prompt,response,score\nwhat?,that,3\n"
# The obvious first try: the corpus, options, and what the line says to do instead.
TRIES: dict[str, tuple[str, bytes, dict[str, object], list[str]]] = {
    "a table of pairs": ("a.csv", PAIRS, {},
        ["prompt, response", "--prompt-column prompt --response-column response reads"]),
    "a parquet of pairs": ("a.parquet", parquet(question=["x"], answer=["y"]), {},
        ["--prompt-column question --response-column answer reads"]),
    "no strings": ("a.parquet", parquet(label=[1], emb=[[0.5]]), {},
        ["no column holds strings", "label: int64, emb: list<element: double>"]),
    "a condition on documents": ("a.jsonl", LINE, {"where": "label == 1"},
        ["'label'", "by a column, use --filter"]),
    "a typo in a jsonl key": ("a.jsonl", LINE, {"text_column": "boddy"}, ["body, n, text"]),
    "a typo in a csv column": ("a.csv", PAIRS, {"prompt_column": "promt"},
        ["prompt, response, score", "did you mean 'prompt'?"]),
    "a typo in a filter": ("a.parquet", TEXTS, {"filter": "nn == 1"}, ["n, text", "mean 'n'?"]),
    "a typo in a kept column": ("a.parquet", TEXTS, {"keep": "txt"}, ["n, text", "mean 'text'?"]),
}  # fmt: skip


@pytest.mark.parametrize("case", TRIES)
def test_an_obvious_first_try_is_led_on(case: str, model: Path, tmp_path: Path) -> None:
    name, data, options, told = TRIES[case]
    (tmp_path / name).write_bytes(data)
    given = {**OPTIONS, **options}
    if "prompt_column" in options:
        given["template"] = "none"
    work = Work(model, tmp_path / name, given)
    check_refused(run("extract", *work.flags(tmp_path / "out")), 2, *told)
    assert not (tmp_path / "out").exists()


def test_an_encoder_is_refused_as_what_it_is(corpus: Path, tmp_path: Path) -> None:
    work = Work(Path("bert-base-uncased"), corpus, OPTIONS)
    told = ("bert-base-uncased: is an encoder", "causal language model")
    check_refused(run("extract", *work.flags(tmp_path / "out")), 2, *told)


def test_bad_data_far_into_a_corpus_stops_the_run_and_spoils_nothing(
    model: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "a.jsonl"
    padded = json.dumps({"x": "." * 3000, "text": "a few words"}).encode() + b"\n"
    corpus.write_bytes(padded * 100 + b"{oops\n" + padded * 10)  # beyond what is sampled
    work = Work(model, corpus, {**OPTIONS, "unit_tokens": 200})
    out = tmp_path / "out"
    check_refused(run("extract", *work.flags(out)), 2, corpus, "line 101")
    audit = run("verify", out, "--partial", "--json").json
    assert (audit["faults"], audit["orphans"]) == ([], [])
    assert 0 < audit["units_done"] < audit["units"]


def test_a_corpus_that_is_not_there_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.md").write_text("x")
    for name in ("empty", "other", "absent", "*.jsonl"):
        work = Work(model, tmp_path / name, OPTIONS)
        check_refused(run("extract", *work.flags(tmp_path / "out")), 2, tmp_path / name)
    assert not (tmp_path / "out").exists()


def edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        config = json.loads((model / "config.json").read_bytes())
        (model / "config.json").write_text(json.dumps({**config, **changes}))

    return edit


def fewer_embeddings(model: Path) -> None:
    (model / "model.safetensors").unlink()
    tiny.write_model(model, vocab_size=200)


def edit_tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        tensors = tiny.random_tensors(tiny.CONFIG)
        change(tensors)
        (model / "model.safetensors").unlink()
        write_tensors(model / "model.safetensors", tensors)

    return edit


def write(name: str, data: str | bytes) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        (model / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return edit


def remove(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def truncate(name: str) -> Callable[[Path], None]:
    return lambda model: write(name, (model / name).read_bytes()[:5000])(model)


Q = "model.layers.1.self_attn.q_proj.weight"
LISTED = json.dumps({"weight_map": {Q: "model-00001-of-00002.safetensors"}})
ESCAPING = json.dumps({"weight_map": {Q: "../model.safetensors"}})

MODELS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "a missing tensor": (edit_tensors(lambda t: t.pop(Q)), ["missing", Q]),
    "an extra tensor": (edit_tensors(lambda t: t.update(odd=np.zeros(3, "f"))), ["odd"]),
    "a mis-shaped tensor": (
        edit_tensors(lambda t: t.update({Q: t[Q][:-1]})), [Q, "[31, 32]", "[32, 32]"],
    ),
    "a tensor of whole numbers": (
        edit_tensors(lambda t: t.update({Q: t[Q].astype(np.int8)})), [Q, "int8"],
    ),
    "an unknown architecture": (
        edit_config(architectures=["BertForMaskedLM"]), ["config.json", "BertForMaskedLM"],
    ),
    "an unknown config key": (edit_config(attn_twist=2), ["config.json", "attn_twist"]),
    "an unsupported value": (edit_config(hidden_act="mish"), ["hidden_act", "mish"]),
    "a size of zero": (edit_config(hidden_size=0), ["hidden_size", "0"]),
    "no config": (remove("config.json"), ["config.json"]),
    "a config that is not JSON": (write("config.json", "{"), ["config.json", "JSON"]),
    "no tokenizer": (remove("tokenizer.json"), ["tokenizer.json"]),
    "a broken tokenizer": (write("tokenizer.json", "{}"), ["tokenizer.json"]),
    "no weights": (remove("model.safetensors"), ["model.safetensors"]),
    "garbage for weights": (write("model.safetensors", GARBAGE), ["model.safetensors"]),
    "truncated weights": (truncate("model.safetensors"), ["model.safetensors"]),
    "a missing shard": (write("model.safetensors.index.json", LISTED), ["-00001-of-00002"]),
    "a shard elsewhere": (write("model.safetensors.index.json", ESCAPING), ["../model"]),
    "a vocabulary too small": (fewer_embeddings, ["tokenizer", "200"]),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_does_not_fit_is_refused_before_anything_is_written(
    case: str, corpus: Path, tmp_path: Path
) -> None:
    spoil, named = MODELS[case]
    model = tiny.write_model(tmp_path / "model")
    spoil(model)
    work, out = Work(model, corpus, OPTIONS), tmp_path / "out"
    check_refused(run("extract", *work.flags(out)), 2, *named)
    # Otherwise the model, once mended, would be refused as another one.
    assert not out.exists()


def test_pickled_weights_are_never_read(corpus: Path, tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    work = Work(model, corpus, OPTIONS)
    check_refused(run("extract", *work.flags(tmp_path / "out")), 2, "model.safetensors", "pickle")


def test_weights_that_give_nan_stop_the_run_unless_allowed(corpus: Path, tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    edit_tensors(lambda t: t[Q].__setitem__((3, 4), np.nan))(model)
    work, out = Work(model, corpus, OPTIONS), tmp_path / "out"
    refusal = run("extract", *work.flags(out))
    check_refused(refusal, 3, "resid_post.1", "NaN", "--allow-nonfinite")
    audit = run("verify", out, "--partial", "--json").json
    assert (audit["faults"], audit["orphans"], audit["units_done"]) == ([], [], 0)
    allowed = run("extract", *work.flags(out, allow_nonfinite=True))
    assert allowed.code == 0, allowed.err
    check_sound(out)


FLAGS: dict[str, tuple[dict[str, object], list[str]]] = {
    "an unknown site": ({"taps": "resid_pst:1"}, ["resid_pst", "resid_post"]),
    "a layer out of range": ({"taps": "resid_post:3"}, ["resid_post:3", "3 layers"]),
    "a layer far below": ({"taps": "mlp_out:-4"}, ["mlp_out:-4", "3 layers"]),
    "layers where there are none": ({"taps": "embed:1"}, ["embed"]),
    "no layers": ({"taps": "mlp_out"}, ["mlp_out"]),
    "an empty range": ({"taps": "mlp_out:2-1"}, ["2-1"]),
    "no taps": ({"taps": ","}, ["--taps"]),
    "a site of other models": ({"taps": "expert_ids:0"}, ["expert_ids", "llama", "no experts"]),
    "a stream beyond the last": ({"taps": "hidden_states[4]"}, ["hidden_states[4]", "[3]"]),
    "half an expression": ({"where": "pos >"}, ["--where"]),
    "an unknown name": ({"where": "not boss"}, ["--where", "'boss'", "'bos'"]),
    "a filter that is a number": ({"where": "pos + 1"}, ["--where", "pos + 1"]),
    "a program for a filter": ({"where": "__import__('os')"}, ["--where", "__import__"]),
    "division by zero": ({"where": "pos % 0 == 0"}, ["--where", "zero"]),
    "none of the rows": ({"every": 0}, ["--every", "0"]),
    "an absent adapter": ({"lora": "absent"}, ["absent"]),
    "not a number": ({"seq_len": "long"}, ["--seq-len", "long"]),
    "too short": ({"seq_len": 4}, ["--seq-len", "4", "8"]),
    "beyond the model": ({"seq_len": 4096}, ["--seq-len", "128", "4096"]),
    "not a choice": ({"pack": "tight"}, ["--pack", "tight", "ffd"]),
    "no dtype": ({"store_dtype": "int3"}, ["--store-dtype", "int3", "bfloat16"]),
    "nothing in a unit": ({"unit_tokens": 0}, ["--unit-tokens", "0"]),
    "shards too small": ({"shard_bytes": 12}, ["--shard-bytes", "12", "4096"]),
    "no threads": ({"threads": -1}, ["--threads", "-1"]),
    "an unknown flag": ({"sequence": 5}, ["--sequence"]),
    "no such file of options": ({"config": "absent.toml"}, ["absent.toml"]),
    "a store elsewhere": ({"out": "s4://bucket/x"}, ["s4://bucket/x"]),
    "an empty output": ({"out": ""}, ["--out"]),
    "an empty model": ({"model": ""}, ["--model"]),
    "an absent model": ({"model": "absent"}, ["--model", "absent"]),
}


@pytest.mark.parametrize("verb", ["extract", "plan"])
@pytest.mark.parametrize("case", FLAGS)
def test_a_bad_flag_is_refused_by_name(
    verb: str, case: str, model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes, named = FLAGS[case]
    given = {"out": tmp_path / "out", **changes}
    arguments = Work(model, corpus, OPTIONS).flags(**given)
    check_refused(run(verb, *arguments), 2, *named)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "VERB"),
        (["extrct"], "extrct"),
        (["extract"], "--out"),
        (["extract", "--out", "out"], "--model"),
        (["extract", "--out", "out", "--model", "m"], "--corpus"),
        (["extract", "--out", "out", "--model", "m", "--corpus", "c"], "--taps"),
        (["status"], "OUT"),
        (["verify", "out", "--quickly"], "--quickly"),
    ],
)
def test_an_incomplete_command_is_refused(
    arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_refused(run(*arguments), 2, named)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"seq-len = ", ["job.toml"]),
        (b"\xff\xfe", ["job.toml", "utf-8"]),
        (b"seq-lem = 64", ["seq-lem", "seq_len"]),
        (b"[recipe]\nseq-len = 64", ["recipe"]),
        (b"seq-len = 64.5", ["--seq-len", "64.5"]),
        (b"taps = ['embed', 3]", ["--taps", "list of texts", "embed"]),
        (b"ignore-space = 'yes'", ["--ignore-space", "yes"]),
        (b"out = 3", ["--out", "3"]),
    ],
)
def test_a_bad_file_of_options_is_refused(
    text: bytes, named: list[str], model: Path, corpus: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = tmp_path / "job.toml"
    config.write_bytes(text)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    given = ["--model", model, "--corpus", corpus, "--config", config]
    given += [] if b"taps" in text else ["--taps", "embed"]
    given += [] if b"out" in text else ["--out", "out"]
    check_refused(run("extract", *given), 2, *named)
    assert list((tmp_path / "here").iterdir()) == []
