"""A model and a corpus on the Hub give the rows of those on a disk; so do fetched ones."""

import io
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

import spile
from chaos.harness import Work, check_refused, content, differences, files, launch, run
from chaos.test_hub import CARD, write_tables
from e2e.test_disk import small_disk
from e2e.test_drift import write_adapter
from support import hub_server, servers, tiny
from support.hub_network import Network
from support.hub_server import Hub
from support.remote import upload

__all__ = ["small_disk"]  # a fixture

OPTIONS: dict[str, Any] = {
    "taps": "embed,resid_post:0",
    "seq_len": 64,
    "unit_tokens": 400,
    "compute_dtype": "float32",
    "batch_tokens": 128,
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables") / "local"
    write_tables(folder, 3, 12)
    return folder


@pytest.fixture(scope="module")
def local(model: Path, tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of an extraction from a disk."""
    out = tmp_path_factory.mktemp("local") / "out"
    Work(model, tables, OPTIONS).extract(out)
    return out


@pytest.fixture
def hub(
    model: Path, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    server = Hub()
    server.network = Network(server.large)
    hub_server.use(server.url, tmp_path / "home", monkeypatch)
    server.publish("me/texts", {**files(tables), "README.md": CARD})
    server.publish("models/me/llama", files(model))
    yield server
    for each in (server, server.network):
        each.shutdown()
        each.server_close()


def flags(
    out: Path | str, model: Path | str = "me/llama", corpus: Path | str = "me/texts:sample"
) -> list[str]:
    options = {**OPTIONS, "model": model, "corpus": corpus}
    return Work(Path(), Path(), options).flags(out)


def recipe_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "units.json").read_text())["recipe"]


def test_what_is_extracted_from_the_hub_is_what_is_extracted_from_a_disk(
    hub: Hub, local: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = run("extract", *flags(out))
    assert result.code == 0, result.err
    assert not differences(content(out), content(local))
    assert spile.open(str(out)).fingerprint == spile.open(str(local)).fingerprint
    commits = [hub.repositories[name].sha("main") for name in ("models/me/llama", "me/texts")]
    assert recipe_of(out)["model_source"] == f"hf://me/llama@{commits[0]}"
    assert recipe_of(out)["corpus_source"] == f"hf://datasets/me/texts@{commits[1]}:sample:train"
    taps = run("taps", "--model", "me/llama", "--json")
    assert taps.code == 0 and taps.json


def test_a_dataset_stays_with_the_commits_it_began_with(
    hub: Hub, local: Path, tmp_path: Path
) -> None:
    """(In the chaos tests the branches move while it is made.)"""
    out = tmp_path / "out"
    assert run("extract", *flags(out)).code == 0
    other = tiny.write_model(tmp_path / "other", seed=1)
    hub.publish("models/me/llama", files(other))
    changed = hub.repositories["me/texts"].branches["main"]["sample/001.parquet"].data
    hub.publish("me/texts", {"sample/000.parquet": changed})
    again = run("extract", *flags(out))
    assert again.code == 0, again.err
    assert run("extract", "--out", out).code == 0, "the store knows the commits"
    for now in ({"corpus": "me/texts@main:sample"}, {"model": "me/llama@main"}):
        check_refused(run("extract", *flags(out, **now)), 2, "was made by another recipe")


def test_shards_that_the_hub_has_gained_are_added(hub: Hub, tmp_path: Path) -> None:
    """The branch has moved, and the old shards have not changed."""
    out = tmp_path / "out"
    assert run("extract", *flags(out)).code == 0
    before = spile.open(out)
    texts, shard = [f"a new text, the {n}th" for n in range(5)], io.BytesIO()
    pq.write_table(pa.table({"id": range(5), "text": texts}), shard)
    hub.publish("me/texts", {"sample/003.parquet": shard.getvalue()})
    assert run("extract", "--out", out).code == 0  # still at the old commit
    grown = run("extract", "--out", out, "--more")
    assert grown.code == 0, grown.err
    record = json.loads((out / "generations" / "00000001.json").read_text())
    commit = hub.repositories["me/texts"].sha("main")
    assert record["sources"] == [f"hf://datasets/me/texts@{commit}:sample:train"]
    ds = spile.open(out)
    assert ds.num_documents == before.num_documents + len(texts)
    assert run("extract", "--out", out).code == 0
    assert run("extract", "--out", out, "--more").code == 0
    assert not (out / "generations" / "00000002.json").exists()


def test_only_the_layers_that_are_needed_are_fetched(hub: Hub, tmp_path: Path) -> None:
    assert hub.network
    deep = tiny.write_model(tmp_path / "deep", num_hidden_layers=8, intermediate_size=4096)
    weights = (deep / "model.safetensors").stat().st_size
    hub.publish("models/me/deep", files(deep))
    result = run(
        "extract", *flags(tmp_path / "out", "me/deep", tiny.write_corpus(tmp_path / "c.txt"))
    )
    assert result.code == 0, result.err
    fetched = 0
    for status, headers in hub.network.seen:
        low, _, high = headers["Range"].removeprefix("bytes=").partition("-")
        fetched += int(high) - int(low) + 1 if status == 206 else 0
    # Its first layer, its header (whose reader reads ahead), its identity and the embedding.
    assert fetched < weights / 8 + (1 << 20) + (1 << 20) + 100_000 < weights / 2


def test_what_cannot_be_used_is_one_line(hub: Hub, model: Path, tmp_path: Path) -> None:
    def refused(*named: object, **given: str) -> None:
        check_refused(run("extract", *flags(tmp_path / "out", **given)), 2, *named)

    refused("hf://me/none: no such model", model="me/none")
    refused("hf://datasets/me/none: no such dataset", corpus="me/none")
    refused("has several configs; choose one; there are: all, sample", corpus="me/texts")
    refused("has no split 'test'", corpus="me/texts:sample:test")
    refused("hf://datasets/me/texts@", "no such file", corpus="hf://datasets/me/texts/none.parquet")
    rest = files(model)
    weights = rest.pop("model.safetensors")
    hub.publish("models/me/pickled", {**rest, "pytorch_model.bin": weights})
    refused("pickled .bin weights are never read", "save_pretrained", model="me/pickled")
    hub.publish("models/me/gated", {"model.safetensors": weights}).gated = True
    refused("ask for access at", model="me/gated")
    result = run("extract", *flags("hf://datasets/me/texts"))
    check_refused(result, 2, "hf://datasets/me/texts", "is read-only")
    assert not (tmp_path / "out").exists()


def test_a_dataset_of_ours_is_read_where_it_was_pushed_to(hub: Hub, local: Path) -> None:
    hub.publish("me/acts", files(local))
    here, there = spile.open(str(local)), spile.open("hf://datasets/me/acts")
    assert there.fingerprint == here.fingerprint
    assert (there.read("embed", 5, 500) == here.read("embed", 5, 500)).all()
    audit = run("verify", "hf://datasets/me/acts", "--json")
    assert audit.code == 0 and audit.json["rows"] == here.num_tokens, audit.err


def test_a_corpus_and_a_model_on_a_web_server(model: Path, tables: Path, tmp_path: Path) -> None:
    """A web server without ranges, as Python's own is."""
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    lines = tiny.write_corpus(tmp_path / "texts.jsonl")
    (tmp_path / "model").symlink_to(model)
    handler = partial(quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        remote = flags(tmp_path / "remote", f"{url}/model", f"{url}/texts.jsonl?signature=secret")
        result = run("extract", *remote)
        assert result.code == 0, result.err
        missing = run("extract", *flags(tmp_path / "no", f"{url}/none", "demo"))
        check_refused(missing, 2, f"{url}/none", "do not work on a web server")
        globbed = run("extract", *flags(tmp_path / "no", model, f"{url}/*.jsonl"))
        check_refused(globbed, 2, f"{url}/*.jsonl", "name one file")
        server.shutdown()
    Work(model, lines, OPTIONS).extract(tmp_path / "local")
    assert not differences(content(tmp_path / "remote"), content(tmp_path / "local"))
    assert "secret" not in (tmp_path / "remote" / "units.json").read_text()


# -- fetching --------------------------------------------------------------------------------


def fetched(*arguments: object) -> dict[str, Any]:
    result = run("fetch", *arguments, "--json")
    assert result.code == 0, result.err
    return result.json


def test_what_is_fetched_needs_no_network(
    hub: Hub, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = ("--model", "me/llama", "--corpus", "me/texts:sample")
    hub.publish("me/texts", {"more.parquet": b"of another config"})
    hub.fail("GET", "/resolve/", 503)
    made = fetched(*both)
    assert (made["files"], made["files_there"]) == (8, 0), made
    assert fetched(*both) == {**made, "files_there": 8, "bytes": 0}
    hub_server.use(hub.url, tmp_path / "home", monkeypatch, HF_HUB_OFFLINE="1")
    hub.seen.clear()
    process = launch({}, "extract", *flags(tmp_path / "out"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert hub.seen == []
    assert not differences(content(tmp_path / "out"), content(local))
    other = run("extract", *flags(tmp_path / "other", corpus="me/other"))
    check_refused(other, 2, "me/other: HF_HUB_OFFLINE is set, and it has not been fetched")
    more = run("fetch", "--corpus", "me/texts:all")
    check_refused(more, 2, "more.parquet: HF_HUB_OFFLINE is set; unset it to fetch")


def test_what_is_fetched_to_a_directory_is_a_model_and_a_corpus(
    hub: Hub, local: Path, tmp_path: Path
) -> None:
    to = tmp_path / "here"
    both = ("--model", "me/llama", "--corpus", "me/texts:sample", "--to", to)
    (to / "corpus" / "sample").mkdir(parents=True)
    begun = hub.repositories["me/texts"].branches["main"]["sample/001.parquet"].data
    (to / "corpus" / "sample" / ".001.parquet.part").write_bytes(begun[:700])
    made = fetched(*both)
    assert (made["model"], made["corpus"]) == (str(to / "model"), str(to / "corpus"))
    assert fetched(*both)["bytes"] == 0
    result = run("extract", *flags(tmp_path / "out", made["model"], made["corpus"]))
    assert result.code == 0, result.err
    assert not differences(content(tmp_path / "out"), content(local))
    (to / "corpus" / "sample" / "001.parquet").write_bytes(begun[:-1] + b"x")
    assert fetched(*both)["files_there"] == 6, "what is not whole is fetched again"
    text = run("fetch", *both)
    assert "7 files (7 were there already)" in text.out
    assert f"--model {to / 'model'} --corpus {to / 'corpus'}" in text.out


def test_what_lies_in_a_bucket_is_fetched_too(tables: Path, tmp_path: Path) -> None:
    url = upload(tables, servers.new_s3_store())
    check_refused(run("fetch", "--corpus", url), 2, url, "--to DIR")
    fetched("--corpus", url, "--to", tmp_path / "to")
    names = [path.name for path in sorted((tmp_path / "to").rglob("*.parquet"))]
    assert names == ["000.parquet", "001.parquet", "002.parquet"]
    check_refused(run("fetch"), 2, "nothing to fetch")
    assert fetched("--corpus", tables)["files"] == 0


@pytest.mark.filterwarnings("ignore:Not enough free disk space")  # the client says so, too
@pytest.mark.parametrize("checked", [True, False])
def test_a_disk_that_is_too_small_for_what_is_fetched_is_one_line(
    checked: bool, hub: Hub, monkeypatch: pytest.MonkeyPatch, small_disk: Path
) -> None:
    hub.publish("me/large", {"data.txt": bytes(5 << 20)})
    if not checked:
        monkeypatch.setattr("spile.plan.fetch._check_room", lambda *_: None)
    url = "hf://datasets/me/large/data.txt"
    said = "would be fetched" if checked else "disk full while fetching hf://datasets/me/large"
    check_refused(run("fetch", "--corpus", url, "--to", small_disk), 3, said)
    hub_server.use(hub.url, small_disk, monkeypatch)
    check_refused(run("fetch", "--corpus", url), 3, said)


# -- through the `datasets` library ----------------------------------------------------------


def as_csv(tables: Path) -> bytes:
    whole = pa.concat_tables(pq.read_table(path) for path in sorted(tables.rglob("*.parquet")))
    out = io.BytesIO()
    csv.write_csv(whole.select(["text"]), out)
    return out.getvalue()


@pytest.mark.full
def test_a_hub_dataset_of_other_files_gives_the_rows_of_parquet(
    hub: Hub, local: Path, tables: Path, tmp_path: Path
) -> None:
    hub.publish("me/csv", {"train.csv": as_csv(tables)})
    out = tmp_path / "out"
    result = run("extract", *flags(out, corpus="me/csv"), "--cache", tmp_path / "a")
    assert result.code == 0, result.err
    name = f"datasets:me/csv@{hub.repositories['me/csv'].sha('main')}:default:train"
    recipe = recipe_of(out)
    assert recipe["corpus_source"] == name and recipe["corpus"][0].startswith(f"{name} 36 rows ")
    there, here = spile.open(str(out)), spile.open(str(local))
    assert there.num_tokens == here.num_tokens
    ids = [each.document(35).index["token_id"].tolist() for each in (there, here)]
    assert ids[0] == ids[1]
    hub.publish("me/csv", {"train.csv": b"text\nother\n"})
    for corpus in ("me/csv", "datasets:me/csv", None):  # another machine, when the branch has moved
        given = flags(out, corpus=corpus) if corpus else ["--out", str(out)]
        again = run("extract", *given, "--cache", tmp_path / "b")
        assert again.code == 0, again.err
    note = next((tmp_path / "b").glob("me*/source.json"))
    note.write_text(note.read_text().replace('"content": "', '"content": "0'))
    differing = run("extract", "--out", out, "--cache", tmp_path / "b")
    check_refused(differing, 2, "was made by another recipe (corpus file", "36 rows 0")


def test_what_the_library_reads_is_made_ahead_of_a_run(
    hub: Hub, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.publish("me/csv", {"train.csv": as_csv(tables)})
    made = fetched("--model", "me/llama", "--corpus", "me/csv", "--cache", tmp_path / "cache")
    assert made["corpus"].startswith("datasets:me/csv@") and made["cache"] == str(
        tmp_path / "cache"
    )
    text = run("fetch", "--corpus", "me/csv", "--to", tmp_path / "to").out
    assert f"--corpus {made['corpus']} --cache {tmp_path / 'to' / 'corpus'}" in text
    hub_server.use(hub.url, tmp_path / "home", monkeypatch, HF_HUB_OFFLINE="1")
    hub.seen.clear()
    corpus = ("--cache", made["cache"])
    process = launch({}, "extract", *flags(tmp_path / "out", corpus=made["corpus"]), *corpus)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and hub.seen == [], err
    unnamed = run("extract", *flags(tmp_path / "no", corpus="datasets:me/csv"), *corpus)
    check_refused(unnamed, 2, "HF_HUB_OFFLINE is set; give the full name that `spile fetch`")


@pytest.mark.full  # tests/e2e/test_remote_inputs.py merges one from a bucket
def test_an_adapter_is_fetched_too(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    hub.publish("models/me/lora", files(adapter))
    made = fetched("--model", "me/llama", "--lora", "me/lora")
    assert made["lora"] == f"hf://me/lora@{hub.repositories['models/me/lora'].sha('main')}"
    plain = fetched("--lora", "me/lora", "--to", tmp_path / "to")
    assert files(Path(plain["lora"])) == files(adapter)
    corpus = tiny.write_corpus(tmp_path / "c.txt")
    hub_server.use(hub.url, tmp_path / "home", monkeypatch, HF_HUB_OFFLINE="1")
    hub.seen.clear()
    remote = launch({}, "extract", *flags(tmp_path / "a", corpus=corpus), "--lora", "me/lora")
    _, err = remote.communicate(timeout=60)
    assert remote.returncode == 0 and hub.seen == [], err
    Work(model, corpus, OPTIONS).extract(tmp_path / "b", lora=str(adapter))
    assert not differences(content(tmp_path / "a"), content(tmp_path / "b"))
    hub_server.use(hub.url, tmp_path / "home", monkeypatch)
    hub.publish("models/me/empty", {"README.md": b""})
    unfit = run("fetch", "--model", "me/llama", "--lora", "me/empty")
    check_refused(unfit, 2, "me/empty", "adapter_config.json")
