"""Exactly once from a Hub that is slow and fails, by workers that are killed, while it changes."""

import json
import random
import signal
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chaos.harness import Work, check_same, content, launch, wait_for
from support import hub_server, servers, tiny
from support.hub_network import Network
from support.hub_server import Hub

pytestmark = pytest.mark.chaos

SHARE = 0.15  # of the requests fail
CARD = b"""---
configs:
- config_name: sample
  data_files:
  - split: train
    path: sample/*.parquet
- config_name: all
  data_files: "**/*.parquet"
---
"""
OPTIONS = {
    "taps": "embed,resid_post:1",
    "seq_len": 64,
    "compute_dtype": "float32",
    "batch_tokens": 128,
    "unit_tokens": 400,
}


def write_tables(folder: Path, files: int, documents: int) -> dict[str, bytes]:
    """Parquet files of a few row groups each, by their paths in a repository."""
    (folder / "sample").mkdir(parents=True)
    lines = tiny.write_corpus(folder.parent / "texts.jsonl", files * documents, seed=3)
    texts = [json.loads(line)["text"] for line in lines.read_text().splitlines()]
    for number in range(files):
        mine = texts[number * documents : (number + 1) * documents]
        pq.write_table(
            pa.table({"id": list(range(len(mine))), "text": mine}),
            folder / "sample" / f"{number:03d}.parquet",
            row_group_size=7,
        )
    paths = sorted((folder / "sample").iterdir())
    return {f"sample/{path.name}": path.read_bytes() for path in paths}


@pytest.mark.full
def test_workers_killed_on_a_failing_hub_lose_and_double_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = 12
    tables = write_tables(tmp_path / "local", 5, 200)
    Work(model, tmp_path / "local", OPTIONS).extract(tmp_path / "whole")
    units = len(list((tmp_path / "whole" / "done").glob("*/*")))
    assert units >= 100

    hub = Hub()
    hub.network, hub.latency = Network(hub.large), 0.005
    weights = {path.name: path.read_bytes() for path in model.iterdir()}
    hub.publish("me/texts", {**tables, "README.md": CARD})
    hub.publish("models/me/llama", weights)
    proxies = [servers.started("flaky_proxy.py", url.rpartition(":")[2], str(SHARE), str(seed))
               for seed, url in enumerate((hub.url, hub.network.url))]  # fmt: skip
    hub.network.url = proxies[1]
    hub_server.use(proxies[0], tmp_path / "home", monkeypatch)

    out, rng = tmp_path / "out", random.Random(1)
    flags = Work(Path("me/llama"), Path("me/texts:sample:train"), OPTIONS).flags(out, stale_after=2)

    def start() -> subprocess.Popen[str]:
        return launch({}, "extract", *flags)

    def done() -> int:
        return len(list((out / "done").glob("*/*.json"))) if (out / "done").is_dir() else 0

    workers = [start() for _ in range(4)]
    for kill in range(kills):
        victim = workers.pop(rng.randrange(len(workers)))
        wait_for(lambda wanted=kill * (units - 4) // kills + 1: done() >= wanted, victim)
        victim.kill()
        _, err = victim.communicate()
        assert victim.returncode in (0, -signal.SIGKILL), err
        if kill == 0:  # another model and other documents than those of the run
            hub.publish("models/me/llama", {"config.json": b"{}"})
            hub.publish("me/texts", {"sample/000.parquet": tables["sample/001.parquet"]})
        workers.append(start())
    ended = [worker.communicate(timeout=240) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4, ended
    check_same(out, tmp_path / "whole")
    assert content(out)["index"], "documents, each once"

    counts = [servers.counts(proxy) for proxy in proxies]
    for found in counts:
        assert sum(found.values()) > 1.05 * found["requests"], counts
    assert [seen for seen in hub.seen if seen[2] not in (200, 206, 302)] == []
    recipe = json.loads((out / "units.json").read_text())["recipe"]
    assert recipe["corpus_source"].startswith("hf://datasets/me/texts@")
    assert recipe["corpus_source"].endswith(":sample:train")
    assert recipe["model_source"].startswith("hf://me/llama@")
    for server in (hub, hub.network):
        server.shutdown()
        server.server_close()
