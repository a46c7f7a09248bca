"""Unchanged command lines of the former tools, against a Hub and a bucket on loopback."""

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spile
from chaos.harness import files, run
from spile.dataset import format as fmt
from spile.dataset.records.ledger import Ledger
from spile.objects import open_objects
from support import hub_server, servers, tiny
from support.hub_server import Hub
from support.worlds import wait_until

NESTED = "GridShapeEncoder(RowNumberEncoder(MinimalGridEncoder()))"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CARD = b"""---
configs:
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*.parquet
---
"""
PROGRAM = """
def both():
    return [{"text": "not this", "question": f"who is {n}?", "answer": f"n {n}"} for n in range(4)]
"""


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with as many layers as the former default names, and a chat template."""
    small = {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 2048}
    folder = tiny.write_model(
        tmp_path_factory.mktemp("deep") / "DIR",
        num_hidden_layers=24, num_attention_heads=2, num_key_value_heads=1, **small,
    )  # fmt: skip
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def hub(deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that serves what the former defaults name."""
    texts = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": [f"text {n} of a corpus" for n in range(140)]}), texts)
    server = Hub()
    hub_server.use(server.url, tmp_path / "home", monkeypatch)
    data = {"sample/10BT/000_00000.parquet": texts.read_bytes(), "README.md": CARD}
    server.publish("HuggingFaceFW/fineweb-edu", data)
    server.publish("models/KathirKs/qwen-2.5-0.5b", files(deep))
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def bucket() -> str:
    request = urllib.request.Request(f"{servers.gcs_endpoint()}/my-bucket", method="PUT")
    urllib.request.urlopen(request).close()
    return "gs://my-bucket"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_fineweb_to_a_bucket_and_what_the_monitor_says_before_and_after(
    hub: Hub, bucket: str, here: Path
) -> None:
    monitor = ["legacy", "monitor", "--gcs_bucket", "my-bucket", "--gcs_prefix", "fresh"]
    empty = run(*monitor)
    assert empty.code == 0, empty.err
    assert empty.out.count("NOT STARTED") == 32
    line = (
        "legacy fineweb --machine_id 0 --total_machines 1 --batch_size 8 --max_samples 100 "
        "--upload_to_gcs --gcs_bucket my-bucket --gcs_prefix fresh"
    )
    result = run(*line.split())
    assert result.code == 0, result.err
    assert "# --model_path is not given: KathirKs/qwen-2.5-0.5b, as before\n" in result.err
    dataset = spile.open(f"{bucket}/fresh")
    assert dataset.num_documents == 100
    assert list(dataset.taps) == [f"resid_post.{layer}" for layer in range(10, 24)]
    told = run(*monitor, "--total_machines", "1", "--list_shards", "--aggregate")
    assert told.code == 0, told.err
    assert "machine 000: COMPLETE\n" in told.out
    shards = json.loads(open_objects(bucket).get("shard_list.json"))
    assert {shard["tap"] for shard in shards} >= set(dataset.taps)
    assert all(shard["key"] in told.out for shard in shards)
    total = json.loads(open_objects(bucket).get("aggregated_metadata.json"))
    assert (total["total_samples"], total["total_shards"]) == (100, len(shards))
    assert total["machines"] == {"machine_000": "COMPLETE"}
    audit = run("verify", f"{bucket}/fresh", "--json")
    assert audit.code == 0 and not audit.json["orphans"]


@pytest.mark.full
def test_arc_tasks_without_ids_asked_eight_times(deep: Path, here: Path) -> None:
    pair = {"input": [[1, 2], [3, 4]], "output": [[4, 3], [2, 1]]}
    tasks = [{"train": [pair], "test": [pair]}, {"train": [pair, pair], "test": [pair, pair]}]
    Path("arc.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    line = "legacy multihost --dataset_path arc.jsonl --predictions_per_task 8 --output_dir out"
    result = run(*line.split(), "--model_path", deep, "--grid_encoder", NESTED)
    assert result.code == 0, result.err
    dataset = spile.open("out")
    assert dataset.num_documents == 24
    assert len({dataset.text(doc) for doc in range(8)}) > 4, "augmented"
    assert "2x2\n1 12\n2 34" in dataset.text(0)


@pytest.mark.full  # tests/cli/test_legacy.py has its translation, tests/e2e/test_launch.py launches
def test_a_launch_on_this_machine(
    hub: Hub, bucket: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    line = (
        "legacy launch --deployment local --total_machines 2 --gcs_bucket my-bucket "
        "-- --out gs://my-bucket/fresh2"
    )
    result = run(*line.split())
    assert result.code == 0, result.err
    assert result.out.count("started (pid ") == 2
    status = ("launch", "status", "local", "--slices", "2")
    wait_until(
        lambda: run(*status).out.count("ended with exit code 0") == 2,
        120,
        lambda: run("launch", "logs", *status[2:]).out,
    )
    assert Ledger(open_objects(f"{bucket}/fresh2")).derived.read_manifest(fmt.CURRENT)
    assert spile.open(f"{bucket}/fresh2").num_documents == 140


@pytest.mark.full
def test_pairs_of_a_program_and_of_columns_within_columns(deep: Path, here: Path) -> None:
    Path("mine.py").write_text(PROGRAM)
    line = "extract --taps resid_post:20 --corpus mine.py:both --prompt-column question"
    result = run(*line.split(), "--response-column", "answer", "--model", deep, "--out", "p")
    assert result.code == 0, result.err
    assert spile.open("p").text(1) == "<user>who is 1?<assistant>n 1"
    rows: list[Any] = [{"translation": {"en": f"yes {n}", "fr": f"oui {n}"}} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), "opus.parquet")
    line = "extract --taps resid_post:1 --corpus opus.parquet --prompt-column translation.en"
    more = "--response-column translation.fr --template none --out o"
    result = run(*line.split(), *more.split(), "--model", deep)
    assert result.code == 0, result.err
    assert spile.open("o").text(2) == "<s>yes 2oui 2"


@pytest.mark.full  # tests/run/world/test_devices.py has another, and every message
@pytest.mark.parametrize(
    ("platform", "said"), [("tpu", "needs a TPU and libtpu"), ("proxy", "needs Pathways")]
)
def test_a_platform_that_is_not_there_is_one_line(
    platform: str, said: str, deep: Path, corpus: Path, tmp_path: Path
) -> None:
    line = ("extract", "--taps", "embed", "--corpus", str(corpus), "--out", str(tmp_path / "o"))
    env = {**tiny.environment(), "JAX_PLATFORMS": platform}
    result = tiny.spile(*line, "--model", str(deep), check=False, env=env)
    assert result.returncode == 2
    assert said in result.stderr and "Traceback" not in result.stderr
