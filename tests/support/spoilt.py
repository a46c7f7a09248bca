"""A model whose embedding of one letter is not finite, and a corpus with that letter."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from spile.core.tensors import write_tensors
from support import tiny

DOCUMENTS, AT = 40, 29  # the 30th document holds the letter
BEFORE = "a tune "  # what comes before it, after BOS
TOKEN = 1 + len(BEFORE)


def write_model(directory: Path) -> Path:
    tiny.write_model(directory)
    tensors = tiny.random_tensors(tiny.CONFIG)
    tensors["model.embed_tokens.weight"][letter(directory), 7] = np.inf
    (directory / "model.safetensors").unlink()
    write_tensors(directory / "model.safetensors", tensors)
    return directory


def letter(model: Path) -> int:
    return Tokenizer.from_file(str(model / "tokenizer.json")).encode("Z").ids[-1]


def write_corpus(path: Path) -> Path:
    tiny.write_corpus(path, DOCUMENTS)
    documents = [json.loads(line) for line in path.read_text().splitlines()]
    documents[AT] = {"text": f"{BEFORE}Zither", "id": "the\nthirtieth", "url": "https://a.b/c"}
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path
