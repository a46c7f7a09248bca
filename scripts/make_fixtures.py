"""Make a small dataset of every kind, as this version of the format stores it.

python scripts/make_fixtures.py tests/fixtures/datasets/v8

What is there stays as it is: a later version must read these very bytes, so only kinds that are
missing are made (remove a file to make it anew, while no release promises the format).
`tests/dataset/test_fixtures.py` reads them.
"""

import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from compare_commits import TEMPLATE

import spile
from spile.cli import run

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support import saes, tiny  # noqa: E402

WORK = Path("/tmp/spile-fixtures")  # recipes hold absolute paths
INPUTS = WORK / "inputs"
TEXT = "--corpus {in}/docs.jsonl --taps resid_post:1,logprob"
EXTRACTED = {
    "text": [f"{TEXT} --keep id"],
    "chat": ["--corpus {in}/chats.jsonl --messages chat --where assistant --taps resid_post:1"],
    "arc": ["--corpus arc:{in}/arc/training --taps resid_post:2"],
    "latents": ["--corpus {in}/docs.jsonl --taps resid_post:1 --encode {in}/sae --latents 12"],
    "errors": ["--corpus {in}/docs.jsonl --taps resid_post:1 --encode {in}/sae --latents 12 "
               "--encode-error"],
    "int8": ["--corpus {in}/docs.jsonl --taps resid_post:1 --store-dtype int8"],
    "float8": ["--corpus {in}/docs.jsonl --taps resid_post:1 --store-dtype float8_e4m3"],
    "compressed": [f"{TEXT} --store-dtype bfloat16 --compress"],
    "grown": [TEXT, "--add-corpus {in}/more.jsonl"],
    "added": [TEXT, "--add-taps mlp_out:2"],
    "spliced": ["--corpus {in}/docs.jsonl --taps resid_post:2 "
                "--splice steer:resid_post.0={in}/direction.npy*4"],
    "pooled": ["--corpus {in}/chats.jsonl --messages chat --pool mean:turn --taps resid_post:1"],
    "reduced": ["--corpus {in}/docs.jsonl --taps resid_post:1 --reduce mean,var --by id"],
    "tops": ["--corpus {in}/docs.jsonl --taps top_logits,attn_top:1.h0+h2,attn_summary:2 "
             "--top-logits 5 --attn-top 3"],
    "unfinished": [f"{TEXT} --keep id --max-bytes 80k"],
    "more": ["--corpus {in}/more.jsonl --taps resid_post:1,logprob"],
}  # fmt: skip
DERIVED = {  # each from one made before; {of}: where those lie, {out}: this one
    "dropped": ["copy {of}/added {out}", "drop {out} --taps mlp_out.2"],
    "part": ["copy {of}/text {out} --units 1-2"],
    "merged": ["merge {of}/plain {of}/more {out}"],
    "compacted": ["compact {of}/merged {out}"],
    "shuffled": ["shuffle {of}/plain {out} --seed 3"],
    "signed": ["copy {of}/plain {out}", "sign {out} --key {in}/id_ed25519"],
}
BETWEEN = {"plain": [TEXT]}  # made on the way, and not kept


def write_inputs() -> None:
    tiny.write_model(INPUTS / "model")
    settings = json.loads((INPUTS / "model/tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (INPUTS / "model/tokenizer_config.json").write_text(json.dumps(settings))
    tiny.write_corpus(INPUTS / "docs.jsonl", 6)
    tiny.write_corpus(INPUTS / "more.jsonl", 3, seed=5)
    rows = [json.loads(line) for line in (INPUTS / "docs.jsonl").read_text().splitlines()]
    roles = ("user", "assistant")
    chats = [{"chat": [{"role": role, "content": each["text"]} for role in roles]} for each in rows]
    (INPUTS / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats))
    shutil.copytree(ROOT / "tests/fixtures/arc", INPUTS / "arc")
    saes.write_sae(INPUTS / "sae", hook="blocks.1.hook_resid_post")
    direction = np.random.default_rng(0).standard_normal(32)
    np.save(INPUTS / "direction.npy", direction.astype(np.float32))
    key = INPUTS / "id_ed25519"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "spile", "-f", key], check=True
    )


def made(name: str) -> Iterator[str]:
    """Yield the commands that make a dataset."""
    out = WORK / name
    common = f"--model {INPUTS}/model --seq-len 64 --unit-tokens 150 --compute-dtype float32"
    for flags in {**EXTRACTED, **BETWEEN}.get(name, []):
        kept = "" if "--reduce" in flags else " --store-dtype bfloat16"
        yield f"extract {'' if '--add-' in flags else common + kept} {flags} --out {out}"
    yield from (each.replace("{out}", str(out)) for each in DERIVED.get(name, []))


def packed(folder: Path, kept: Callable[[str], bool] = lambda key: True) -> bytes:
    """Return a folder as a compressed archive that depends on its contents alone."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz", preset=9) as archive:
        for path in sorted(folder.rglob("*")):
            key = path.relative_to(folder).as_posix()
            if path.is_file() and kept(key):
                info = tarfile.TarInfo(key)
                info.size = path.stat().st_size
                archive.addfile(info, io.BytesIO(path.read_bytes()))
    return data.getvalue()


def digests(path: Path) -> dict[str, str]:
    """Return a hash of the index, and one of each tap's rows as they are stored."""
    ds = spile.open(path, partial=True)
    index = ds.index(0, ds.num_tokens)
    found = {"index": hashlib.sha256(index.tobytes()).hexdigest()}
    for tap in ds.taps:
        rows = np.ascontiguousarray(ds.read(tap, dtype="stored"))
        found[tap] = hashlib.sha256(rows.tobytes()).hexdigest()
    return found


def main(folder: Path) -> int:
    shutil.rmtree(WORK, ignore_errors=True)
    os.environ["JAX_PLATFORMS"] = "cpu"
    socket.gethostname = lambda: "example"  # records name the host that made them
    write_inputs()
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "contents.json"
    contents = json.loads(known.read_text()) if known.exists() else {}
    for name in (*EXTRACTED, *BETWEEN, *DERIVED):
        for command in made(name):
            words = command.replace("{in}", str(INPUTS)).replace("{of}", str(WORK)).split()
            if run(words):
                return 1
        archive = folder / f"{name}.tar.xz"
        if name in BETWEEN or archive.exists():
            continue
        archive.write_bytes(packed(WORK / name, lambda key: not key.startswith("workers/")))
        contents[name] = digests(WORK / name)
    if not (folder / "inputs.tar.xz").exists():
        (folder / "inputs.tar.xz").write_bytes(packed(INPUTS, lambda key: key != "id_ed25519"))
    known.write_text(json.dumps(contents, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
