"""Make the same datasets with two checkouts, and compare them bit for bit.

python scripts/compare_commits.py ../before . /tmp/compared                # on the CPU
python scripts/compare_commits.py ../before . /tmp/compared --platform cuda

Rows, index, documents, statistics, segments, unit table, generations and manifests must be the same
bytes, apart from what names an attempt or tells the time. A dataset that the first checkout begins
and the second finishes must be the same, too.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support import saes, tiny  # noqa: E402

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}</>\n{% endfor %}"
)
ATTEMPT = re.compile(r"(attempts/\d+/\d+/)[0-9a-f]{16}/")
# They tell the time or this process, or are made from an attempt's name.
VARYING = ("attempt", "checksum", "seconds", "finished_at", "host", "etag", "pid")
UNCOMPARED = re.compile(r"(^|/)(workers/|prediction\.json)")


@dataclass(frozen=True)
class Case:
    """A dataset: the flags of each command that makes it."""

    commands: tuple[str, ...]
    resumed: bool = True  # whether it has several units, so that it can be begun


TEXT = "--corpus {in}/docs.jsonl --taps resid_post:1,mlp_out:0,logprob,z:2"
CASES = {
    "text": Case((TEXT,)),
    "bfloat16": Case((f"{TEXT} --store-dtype bfloat16 --compress --keep id",)),
    "chat": Case(("--corpus {in}/chats.jsonl --messages chat --where assistant "
                  "--taps resid_post:0-2",)),
    "arc": Case(("--corpus arc:{in}/arc/training --taps resid_post:2",), resumed=False),
    "latents": Case(("--corpus {in}/docs.jsonl --taps resid_post:1,mlp_out:0 --encode {in}/sae "
                     "--latents 12",)),
    "int8": Case(("--corpus {in}/docs.jsonl --taps resid_post:1,q:0 --store-dtype int8",)),
    "float8": Case(("--corpus {in}/docs.jsonl --taps resid_post:1 --store-dtype float8_e4m3",)),
    "grown": Case(("--corpus {in}/docs.jsonl --taps resid_post:1",
                   "--add-corpus {in}/more.jsonl")),
    "passed": Case((TEXT, "--add-taps mlp_out:2,resid_pre:0")),
    "spliced": Case(("--corpus {in}/docs.jsonl --taps resid_post:1+2 "
                     "--splice steer:resid_post.0={in}/direction.npy*4",)),
    "csv": Case(("--corpus {in}/docs.csv --taps resid_post:1 --keep id",)),
    "parquet": Case(("--corpus {in}/docs.parquet --taps resid_post:1 --filter id>3",)),
}  # fmt: skip


def write_inputs(folder: Path) -> None:
    import pyarrow as pa  # noqa: PLC0415 - only where inputs are written
    import pyarrow.csv  # noqa: PLC0415
    import pyarrow.parquet  # noqa: PLC0415

    tiny.write_model(folder / "model")
    settings = json.loads((folder / "model/tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "model/tokenizer_config.json").write_text(json.dumps(settings))
    tiny.write_corpus(folder / "docs.jsonl", 60)
    tiny.write_corpus(folder / "more.jsonl", 20, seed=5)
    rows = [json.loads(line) for line in (folder / "docs.jsonl").read_text().splitlines()]
    chats = [{"chat": [{"role": "user", "content": each["text"]},
                       {"role": "assistant", "content": each["text"][::-1]}]}
             for each in rows]  # fmt: skip
    (folder / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats))
    table = pa.Table.from_pylist(rows)
    pyarrow.csv.write_csv(table, folder / "docs.csv")
    pyarrow.parquet.write_table(table, folder / "docs.parquet", row_group_size=7)
    shutil.copytree(ROOT / "tests/fixtures/arc", folder / "arc")
    saes.write_sae(folder / "sae", hook="blocks.1.hook_resid_post")
    direction = np.random.default_rng(0).standard_normal(32)
    np.save(folder / "direction.npy", direction.astype(np.float32))


def extract(checkout: Path, inputs: Path, out: Path, flags: str, platform: str) -> None:
    common = f"--model {inputs}/model --seq-len 64 --unit-tokens 900 --batch-tokens 512"
    if "--add-" in flags:
        common = ""
    elif platform == "cpu":
        common += " --compute-dtype float32"
    words = f"{common} {flags} --out {out}".replace("{in}", str(inputs)).split()
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "JAX_PLATFORMS": platform}
    command = [sys.executable, "-m", "spile.cli", "extract", *words]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    if found.returncode:
        raise SystemExit(f"{checkout}: {' '.join(words)}\n{found.stdout}\n{found.stderr}")


def tensors(data: bytes) -> dict[str, bytes]:
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    start = 8 + size
    return {
        name: repr((told["dtype"], told["shape"])).encode()
        + data[start + told["data_offsets"][0] : start + told["data_offsets"][1]]
        for name, told in header.items()
        if name != "__metadata__"
    }


def settled(value: Any) -> Any:
    """A record without what varies from run to run."""
    if isinstance(value, dict):
        return {
            name: settled(each)
            for name, each in value.items()
            if name not in VARYING
            and not (name == "digest" and "segments/" in str(value.get("key", "")))
        }
    if isinstance(value, list):
        return [settled(each) for each in value]
    return ATTEMPT.sub(r"\1ATTEMPT/", value) if isinstance(value, str) else value


def contents(out: Path) -> dict[str, str]:
    """A hash of each file, by its key; each tensor of a segment by itself."""
    found: dict[str, str] = {}
    for path in sorted(out.rglob("*")):
        key = str(path.relative_to(out))
        if path.is_dir() or UNCOMPARED.search(key):
            continue
        data, key = path.read_bytes(), ATTEMPT.sub(r"\1ATTEMPT/", key)
        if key.endswith(".json"):
            data = json.dumps(settled(json.loads(data)), sort_keys=True).encode()
        elif "segments/" in key:
            for name, values in tensors(data).items():
                if name.split("/")[-1] not in VARYING:
                    found[f"{key} {name}"] = hashlib.sha256(values).hexdigest()
            continue
        found[key] = hashlib.sha256(data).hexdigest()
    return found


def differing(one: Path, other: Path) -> list[str]:
    first, second = contents(one), contents(other)
    return sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--cases", default=",".join(CASES))
    given = parser.parse_args()
    old, new, folder = given.old.absolute(), given.new.absolute(), given.folder.absolute()
    if not (folder / "inputs").exists():
        write_inputs(folder / "inputs")
    faults = 0
    kinds = ("resident", "disk")
    for name in given.cases.split(","):
        case = CASES[name]
        for weights in kinds:
            flags = [f"{each} --weights {weights}" for each in case.commands]
            made = {who: folder / f"{name}-{weights}-{who}" for who in ("old", "new", "both")}
            for who, checkout in (("old", old), ("new", new)):
                if made[who].exists():  # by a run before this one
                    continue
                for each in flags:
                    extract(checkout, folder / "inputs", made[who], each, given.platform)
            told = [differing(made["old"], made["new"])]
            if case.resumed and weights == "disk":
                half = json.loads((made["old"] / "manifest.json").read_text())["bytes"] // 2
                begun = f"{flags[0]} --max-bytes {half}"
                extract(old, folder / "inputs", made["both"], begun, given.platform)
                unfinished = not (made["both"] / "manifest.json").exists()
                for each in flags:
                    extract(new, folder / "inputs", made["both"], each, given.platform)
                told.append(differing(made["old"], made["both"]))
                told[-1] += [] if unfinished else ["the first checkout finished it alone"]
            files = len(contents(made["old"]))
            faults += any(told)
            verdict = "; ".join(", ".join(keys[:6]) or "the same" for keys in told)
            print(f"{name:10} {weights:9} {files:4} files and tensors: {verdict}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
