"""A model and a corpus in a bucket give the rows of those on a disk, with the same checks."""

import gzip
import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import spile
from chaos.harness import check_refused, check_same, content, differences, launch, run
from spile.core.identity import sampled_digest
from spile.core.tensors import map_tensor, read_header, write_tensors
from spile.objects import open_objects
from support import servers, tiny
from support.marks import some
from support.remote import BUCKETS, upload

OPTIONS: dict[str, Any] = {
    "taps": "embed,logprob",
    "seq_len": 64,
    "unit_tokens": 400,
    "compute_dtype": "float32",
    "batch_tokens": 128,
}
TEXTS = [f"document {number}: " + "some words, " * (number % 7) for number in range(60)]


def flags(out: Path, model: object, corpus: object, **more: Any) -> list[str]:
    given = {"model": model, "corpus": corpus, **OPTIONS, **more, "out": out}
    return [str(part) for name, value in given.items()
            for part in (f"--{name.replace('_', '-')}", value)]  # fmt: skip


def extracted(out: Path, model: object, corpus: object, **more: Any) -> dict[str, bytes]:
    result = run("extract", *flags(out, model, corpus, **more))
    assert result.code == 0, result.err
    return content(out)


def write_texts(folder: Path) -> Path:
    """The same documents in every format, in several files each."""
    folder.mkdir(parents=True)
    texts = TEXTS[:30]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "plain.jsonl").write_bytes(lines)
    (folder / "zipped.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "packed.txt.zst").write_bytes(zstandard.compress("\n".join(texts).encode()))
    table = "id,text\n" + "".join(f'{n},"{text}\nmore"\n' for n, text in enumerate(texts))
    (folder / "table.csv").write_text(table)
    (folder / "deep").mkdir()
    for number in range(3):
        table = pa.table({"id": list(range(10)), "text": texts[10 * number : 10 * number + 10]})
        pq.write_table(table, folder / "deep" / f"part-{number}.parquet", row_group_size=4)
    (folder / "notes.md").write_text("left aside")
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "texts")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of several files and an index of them."""
    model = tiny.write_model(tmp_path_factory.mktemp("model") / "m", tie_word_embeddings=False)
    whole = model / "model.safetensors"
    tensors = {name: map_tensor(whole, info).copy() for name, info in read_header(whole).items()}
    index: dict[str, str] = {}
    for number in range(3):
        names = sorted(tensors)[number::3]
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        write_tensors(model / file, {name: tensors[name] for name in names})
        index |= dict.fromkeys(names, file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    whole.unlink()
    return model


@pytest.mark.parametrize(
    ("kind", "corpus"),
    some(
        [
            ("s3", ""),
            ("gs", "**/*.parquet"),
            ("s3", "zipped.jsonl.gz"),
            ("gs", "packed.txt.zst"),
            ("s3", "table.csv"),
        ],
        ("gs", "**/*.parquet"),
    ),
)
def test_what_is_extracted_from_a_bucket_is_what_is_extracted_from_a_disk(
    kind: str, corpus: str, sharded: Path, texts: Path, tmp_path: Path
) -> None:
    bucket = BUCKETS[kind]()
    there = upload(sharded, f"{bucket}/model"), f"{upload(texts, f'{bucket}/texts')}/{corpus}"
    local = extracted(tmp_path / "local", sharded, texts / corpus)
    assert not differences(extracted(tmp_path / "remote", *there), local)
    recipes = [spile.open(str(tmp_path / name)).fingerprint for name in ("local", "remote")]
    assert recipes[0] == recipes[1], "where things lie is no part of what they are"


@pytest.mark.full
def test_a_run_that_began_on_a_disk_goes_on_from_a_bucket_and_by_itself(
    model: Path, texts: Path, tmp_path: Path
) -> None:
    bucket, out, corpus = servers.new_s3_store(), tmp_path / "out", texts / "plain.jsonl"
    begun = flags(out, model, corpus)
    process = launch({"kill": "commit after", "nth": 2}, "extract", *begun)
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    there = upload(model, f"{bucket}/model"), upload(corpus, f"{bucket}/texts")
    whole = tmp_path / "whole"
    extracted(whole, *there)
    assert not differences(extracted(out, *there), content(whole))
    check_same(out, whole)
    again = run("extract", "--out", whole)  # not given: the URLs come from the store
    assert again.code == 0, again.err


@pytest.mark.full
def test_an_adapter_in_a_bucket_is_merged(model: Path, texts: Path, tmp_path: Path) -> None:
    adapter, name = tmp_path / "lora", "base_model.model.model.layers.0.self_attn.q_proj"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    weights = tiny.random_tensors(tiny.CONFIG)["model.embed_tokens.weight"]
    pair = {f"{name}.lora_A.weight": weights[:2], f"{name}.lora_B.weight": weights[:32, :2].copy()}
    write_tensors(adapter / "adapter_model.safetensors", pair)
    bucket, corpus = servers.new_s3_store(), texts / "plain.jsonl"
    there = upload(model, f"{bucket}/model"), corpus
    merged = extracted(tmp_path / "a", *there, lora=upload(adapter, f"{bucket}/lora"))
    assert not differences(merged, extracted(tmp_path / "b", model, corpus, lora=adapter))
    # (That it changes rows is tested in test_drift.py.)


def test_what_was_replaced_in_a_bucket_is_refused(model: Path, texts: Path, tmp_path: Path) -> None:
    bucket, out = servers.new_gcs_store(), tmp_path / "out"
    there = upload(model, f"{bucket}/model"), upload(texts / "plain.jsonl", f"{bucket}/texts")
    extracted(out, *there, max_docs=5)
    other = tmp_path / "plain.jsonl"
    other.write_bytes((texts / "plain.jsonl").read_bytes().replace(b"document 29", b"document 92"))
    upload(other, f"{bucket}/texts")
    old, new = sampled_digest(texts / "plain.jsonl"), sampled_digest(other)
    check_refused(run("extract", *flags(out, *there, max_docs=5)), 2, there[1], old, new)
    upload(texts / "plain.jsonl", f"{bucket}/texts")
    upload(tiny.write_model(tmp_path / "model", seed=1), f"{bucket}/model")
    again = run("extract", *flags(out, *there, max_docs=5))
    check_refused(again, 2, "model weights: stored", "now")


@pytest.mark.full
def test_a_byte_that_changed_in_a_bucket_is_found_when_it_is_read(
    model: Path, tmp_path: Path
) -> None:
    bucket, out, corpus = servers.new_s3_store(), tmp_path / "out", tmp_path / "large.jsonl"
    lines = (json.dumps({"text": text, "x": "." * 100_000}) + "\n" for text in TEXTS)
    corpus.write_text("".join(lines))
    url = upload(corpus, bucket)
    process = launch(
        {"kill": "commit after", "nth": 2}, "extract", *flags(out, model, url, unit_tokens=200)
    )
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    before, data = sampled_digest(corpus), corpus.read_bytes()
    corpus.write_bytes(data.replace(b"document 50", b"document 60"))
    assert sampled_digest(corpus) == before, "this byte is in a sampled block; choose another"
    upload(corpus, bucket)
    check_refused(run("extract", *flags(out, model, url, unit_tokens=200)), 3, url, "changed since")
    corpus.write_bytes(data)
    upload(corpus, bucket)
    assert run("extract", *flags(out, model, url, unit_tokens=200)).code == 0


@pytest.mark.full
def test_other_verbs_know_models_in_buckets(model: Path, texts: Path, tmp_path: Path) -> None:
    url = upload(model, servers.new_s3_store())
    corpus = upload(texts, servers.new_s3_store())
    listed = run("taps", "--model", url, "--json")
    assert (listed.code, listed.json) == (0, run("taps", "--model", model, "--json").json)
    planned = run("plan", *flags(tmp_path / "out", url, corpus), "--json")
    assert planned.code == 0, planned.err
    local = run("plan", "--calibrate", "off", *flags(tmp_path / "out", model, texts), "--json")
    assert "spile fetch" in planned.json["time"]["why"]
    measured = {"free_bytes": 0, "text_rate_per_core": 0, "time": 0}  # by which they may differ
    assert {**planned.json, **measured} == {**local.json, **measured}
    extracted(tmp_path / "out", url, f"{corpus}/deep", max_docs=3)
    checked = run("check", tmp_path / "out", "--samples", 1)
    assert checked.code == 0, checked.err


@pytest.mark.full
def test_what_cannot_be_found_is_one_line(model: Path, texts: Path, tmp_path: Path) -> None:
    bucket = servers.new_s3_store()
    weights, corpus = upload(model, f"{bucket}/model"), upload(texts, f"{bucket}/texts")

    def refused(code: int, *named: object, model: str = weights, corpus: str = corpus) -> None:
        result = run("extract", *flags(tmp_path / "out", model, corpus))
        check_refused(result, code, *named)

    for missing in ("none.jsonl", "none/", "*.tsv", "deep/*.jsonl"):
        refused(2, f"{corpus}/{missing}", "no such file", corpus=f"{corpus}/{missing}")
    refused(2, f"{corpus}/notes.md", "does not say what it holds", corpus=f"{corpus}/notes.md")
    refused(2, f"{bucket}/none", "no such directory", model=f"{bucket}/none")
    refused(2, corpus, "no tokenizer.json", model=corpus)
    refused(3, "s3://none-of-ours", corpus="s3://none-of-ours/x.jsonl")
    refused(3, "s3://none-of-ours", model="s3://none-of-ours/x")
    refused(2, "ftp://", corpus="ftp://host/x.jsonl")
    refused(2, "names no bucket", corpus="s3:///x.jsonl")
    open_objects(weights).delete("model.safetensors")
    refused(2, f"{weights}/model.safetensors", "no such file")
    open_objects(weights).create("pytorch_model.bin", b"")
    refused(2, f"{weights}/model.safetensors", "pickled .bin weights are never read")
    assert not (tmp_path / "out").exists()


class Refusing(BaseHTTPRequestHandler):
    """A service that does not know the credentials."""

    def do_GET(self) -> None:
        self.send_error(403)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_credentials_that_are_refused_are_one_line_and_not_shown(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in {"ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
                            "ACCESS_KEY_ID": "AKIAMINE", "SECRET_ACCESS_KEY": "sesame",
                            "REGION": "us-east-1"}.items():  # fmt: skip
            monkeypatch.setenv(f"AWS_{name}", value)
        for inputs in ((model, "s3://ours/x.jsonl"), ("s3://ours/model", "demo")):
            result = run("extract", *flags(tmp_path / "out", *inputs))
            check_refused(result, 3, "s3://ours", "403")
            assert "AKIAMINE" not in result.err
            assert "sesame" not in result.err
        server.shutdown()
