"""A folder in which documented commands run unchanged, on small files of the same names."""

import functools
import json
import re
import shutil
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spile
from chaos.harness import Result, run
from documented.pages import ROOT
from spile.objects import open_objects
from support import saes, servers, tiny
from support.engine_server import EngineServer
from support.launches import IMAGE

EXTRACT = ["--model", "M", "--corpus", "C", "--taps", "T"]
FEW = ["--max-docs", "6", "--seq-len", "256"]
TAPS = "resid_post:9+20,mlp_out:12"  # of the datasets that are there; one a layer
DEMO_TAPS = "resid_post:9,mlp_out:9"  # `make demo`'s
# What stands for something of the reader's own, where no file of that name can.
_PLACEHOLDERS = {
    "T": "resid_post:9", "N": "64", "X": "float32", "SECONDS": "1", "FORMAT": "saelens",
    "REPO": "me/acts", "BRANCH": "next", "IMAGE@sha256:…": IMAGE, "$ID": "0",
    "arc:DIR": "arc:arc/training",
}  # fmt: skip
_ENGINE = "http://127.0.0.1:8000"
_BUCKET = re.compile(r"(?:s3|gs)://(?:BUCKET|B)(?=/|$)")
# Datasets that pages read: `make demo` made the first, others are there unless a page makes them.
_DEMO = "acts/demo"
_READY = ("acts", "OUT", "acts/qwen", "acts/latents")
_SAE = "layer_20/width_16k/average_l0_71"
_ZONE = "us-west4-a"


def write_deep_model(folder: Path) -> Path:
    """A small model with all the layers that pages tap, and a chat template."""
    model = tiny.write_model(
        folder, num_hidden_layers=24, intermediate_size=32, max_position_embeddings=2048
    )
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    )
    return model


def write_datasets(model: Path, folder: Path) -> Path:
    corpus = tiny.write_corpus(model.parent / "texts.jsonl", 24)  # the folder is moved
    recipe = spile.Recipe(model=str(model), corpus=str(corpus), taps=TAPS, seq_len=256)
    spile.extract(recipe, str(folder / "acts"))
    spile.extract(replace(recipe, taps=DEMO_TAPS), str(folder / "demo"))
    saes.write_sae(folder / _SAE, latents=2048)
    encoded = replace(recipe, taps="resid_post:20", encode=str(folder / _SAE), latents=128)
    spile.extract(encoded, str(folder / "latents"))
    return folder


def records(page: str) -> dict[str, str]:
    """Return the records that a page shows, by the files that hold them."""
    titled = re.compile(r'^```json title="([^"]+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)
    return dict(titled.findall((ROOT / page).read_text(encoding="utf-8")))


def arc_tasks() -> dict[str, dict[str, object]]:
    grids = [{"input": [[n, 1], [2, 3]], "output": [[3, 2], [1, n]]} for n in range(4)]
    return {f"task{n}": {"train": grids[:3], "test": grids[3:]} for n in range(3)}


@dataclass(frozen=True)
class Scratch:
    """Where a page's commands run, in order."""

    folder: Path
    patch: pytest.MonkeyPatch
    made: Path

    @classmethod
    def make(cls, folder: Path, model: Path, made: Path, patch: pytest.MonkeyPatch) -> "Scratch":
        """Make every file that pages assume; `made`: the datasets of `write_datasets`."""
        for name in ("M", "DIR", "Qwen2.5-0.5B", "gemma-2-2b", "gemma-2-2b-it"):
            (folder / name).symlink_to(model)
        config = Path(__file__).parents[1] / "fixtures/configs/Qwen2.5-7B.json"
        (folder / "Qwen2.5-7B").mkdir()
        shutil.copy(config, folder / "Qwen2.5-7B/config.json")
        shutil.copytree(made / _SAE, folder / _SAE)
        saes.write_crosscoder(folder / "gemma-2-2b-crosscoder-l13")
        # What examples/train_sae.py writes, for the demo model.
        saes.write_sae(folder / "sae", "topk", width=576, latents=64)
        (folder / "hosts").write_text("host-0\nhost-1\nhost-2\nhost-3\n")
        texts = [tiny.words(np.random.default_rng(n), 12) for n in range(8)]
        chats = [[{"role": "user", "content": text}] for text in texts]
        columns = {"text": texts, "language": ["en"] * 8, "score": [4.0] * 8}
        for name, table in {
            "prompts/0.parquet": pa.table({"text": texts, "label": ["harmless", "refusal"] * 4}),
            "texts/0.parquet": pa.table({**columns, "conversations": chats}),
            "tokenized/0.parquet": pa.table({"input_ids": [[256, *range(30)]] * 8}),
        }.items():
            (folder / name).parent.mkdir()
            pq.write_table(table, folder / name)
        rows = pq.read_table(folder / "texts/0.parquet").to_pylist()
        (folder / "C").mkdir()
        (folder / "C/docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        answers = [{"prompt": text, "answer": f"yes, {text}"} for text in texts]
        (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
        for name, number in (("clean", 3), ("corrupted", 5)):
            pairs = [{"text": f"{text[:20]} has {number} of them"} for text in texts]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))
        generated = [
            {"ids": [n, n + 1, n + 2], "mask": [0, 1, 1], "logs": [-2.0, -1.0]} for n in range(8)
        ]
        (folder / "generated.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in generated)
        )
        for name, record in records("docs/corpora.md").items():
            (folder / name).write_text(record)
        ids = np.array([*range(20), tiny.EOS] * 8, np.uint16)
        for name in ("tokens.bin", "train.bin"):
            (folder / name).write_bytes(ids.tobytes())
        (folder / "mine.py").write_text(
            'def documents():\n    for n in range(6):\n        yield f"text number {n}"\n'
        )
        shutil.copy(ROOT / "examples/ce_bench.py", folder)
        stories = {"story1": texts[0], "story2": texts[1], "subject": "letters"}
        (folder / "pairs.jsonl").write_text(json.dumps(stories) + "\n")
        (folder / "arc/training").mkdir(parents=True)
        for name, task in arc_tasks().items():
            (folder / f"arc/training/{name}.json").write_text(json.dumps(task))
        return cls(folder, patch, made)

    def prepare(self, own: set[str]) -> None:
        """The datasets that are there before a page begins, which makes `own` itself."""
        for name in (_DEMO, *(name for name in _READY if name not in own)):
            source = {_DEMO: "demo", "acts/latents": "latents"}.get(name, "acts")
            shutil.copytree(self.made / source, self.folder / name, dirs_exist_ok=True)

    @functools.cached_property
    def bucket(self) -> str:
        """The bucket that pages name, with the objects that they read."""
        store = servers.new_gcs_store()
        objects = open_objects(store)
        lines = [json.dumps({"id": name, **task}) + "\n" for name, task in arc_tasks().items()]
        objects.create("tasks.jsonl", "".join(lines).encode())
        objects.create("texts/docs.jsonl", (self.folder / "C" / "docs.jsonl").read_bytes())
        return store

    @functools.cached_property
    def engine(self) -> str:
        """The address of an engine that answers."""
        server = EngineServer()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server.url

    def filled(self, words: list[str]) -> list[str]:
        """Return the words of a command, with small files in place of the reader's own."""
        found: list[str] = []
        for number, word in enumerate(words):
            word = word.removeprefix("[")
            if "[" not in word and word.endswith(
                "]"
            ):  # a synopsis's option: given, as it first says
                word = word.removesuffix("]").partition("|")[0]
            if word in ("…", "..."):
                found += [_ZONE] if words[number - 1] == "--zone" else self._extract(words)
            else:
                found.append(word)
        named = [_PLACEHOLDERS.get(word, word) for word in found]
        named = [self.engine if word == _ENGINE else word for word in named]
        return [_BUCKET.sub(lambda _: self.bucket, w) if "://" in w else w for w in named]

    def _extract(self, words: list[str]) -> list[str]:
        """Return the flags that a command needs and does not show."""
        new = f"acts/new-{len([*self.folder.glob('acts/new-*')])}"
        out = "gs://bucket/acts" if "launch" in words else new
        needed = zip(EXTRACT[::2], EXTRACT[1::2], strict=True)
        pairs = [pair for pair in (*needed, ("--out", out)) if pair[0] not in words]
        return [word for pair in pairs for word in pair]

    def spile(self, words: list[str]) -> Result:
        """Run it here; extractions read only a few documents, and plans measure for a moment."""
        few = FEW if words[0] in ("extract", "plan") else []
        if words[0] == "plan" and "--calibrate" not in words:
            few = [*few, "--calibrate", "0.1"]
        return run(*words, *few)
