"""Cuts a corpus into units and reads them; says what that took, and what was found.

python reading.py CORPUS MAX_DOC_BYTES
"""

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path

from spile.corpus.files import find_files
from spile.corpus.formats.contract import ReadOptions
from spile.corpus.reader import CorpusReader
from spile.corpus.units import CutOptions, make_units, tokens_per_byte


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def main(corpus: str, most: str) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is of what follows
    before = status("VmRSS")
    files = find_files(corpus)
    reader = CorpusReader(files, ReadOptions(max_doc_bytes=int(most)))
    density = tokens_per_byte(reader, lambda texts: sum(len(text.split()) for text in texts))
    units = make_units(reader, CutOptions(unit_tokens=1 << 20, density=density))
    read, skipped, digest = 0, Counter[str](), hashlib.sha256()
    for unit in units:
        found = reader.read(unit.spans, unit.first_doc)
        read, skipped = read + len(found.texts), skipped + found.skipped
        for ordinal, text in zip(found.ordinals, found.texts, strict=True):
            digest.update(f"{ordinal} {text}\n".encode())
    reader.close()
    took = status("VmHWM") - before
    said = {"took": took, "read": read, "skipped": skipped, "digest": digest.hexdigest()}
    print(json.dumps(said))  # noqa: T201


main(*sys.argv[1:])
