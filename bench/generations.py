"""What a dataset costs that has grown often: `python bench/generations.py DIR`.

A real run reads the first file of a directory with a tiny model. Every further file is a generation
of one unit, whose files are hard links to those of the first and whose records are the ledger's
own, written without fsync. Each command runs in a fresh process; its processor seconds include
imports, as those of one generation show.

    grow    `spile extract --more`, after one more file has appeared
    others  `spile.open`, `status`, `verify --quick` (which reads only records), `copy`, `gc`
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from material import make_model
from units import link_unit

import spile
from spile.core.identity import sampled_digests
from spile.core.units import Span
from spile.dataset.codec.columns import encode_columns
from spile.dataset.records.generations import Generation, create_generation
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.segments import derive_segment, read_statistics
from spile.dataset.records.unit_table import UnitColumns
from spile.objects import LocalObjects


def write_document(corpus: Path, number: int) -> Path:
    """Write a file of one document; all have as many tokens, and no two are equal."""
    path = corpus / f"{number:06d}.jsonl"
    path.write_text(json.dumps({"text": f"{number:06d}"}) + "\n")
    return path


def make(folder: Path, model: Path, count: int) -> None:
    """Make a dataset that has grown `count` times."""
    corpus, out = folder / "corpus", folder / "out"
    corpus.mkdir(parents=True)
    write_document(corpus, 0)
    recipe = spile.Recipe(model=str(model), corpus=str(corpus), taps="resid_post:0", seq_len=16)
    spile.extract(recipe, str(out), progress=False)
    paths = [write_document(corpus, number) for number in range(1, count + 1)]
    ledger = Ledger(LocalObjects(out))
    table, first = ledger.table(), ledger.read_done(0)
    assert first and len(table.units) == 1
    unit = table.units[0]
    with patch("os.fsync", lambda descriptor: None):
        for number, identity in enumerate(sampled_digests(paths), 1):
            file = {"path": str(paths[number - 1]), "identity": identity}
            made = Generation(number, (file,), table.sources)
            added = replace(unit, id=number, first_doc=number, spans=(Span(number, 0, 1, 0, 1),))
            units = UnitColumns.of([added], number)
            create_generation(ledger.objects, number, made, table.fingerprint, units)
        table, linked = ledger.table(), [first]
        statistics = read_statistics(ledger.objects, first, table.taps)
        for number in range(1, count + 1):
            made_from = ledger.must_be_made_from(table, number)
            linked.append(link_unit(out, out, first, number, made_from))
            layout = table.at(number).layout
            records = [linked[unit] for unit in layout.units_of(layout.group(number), number + 1)]
            segment = encode_columns(derive_segment(records, [statistics] * len(records)))
            ledger.objects.create(layout.segment_key(layout.group(number)), segment)
        assert ledger.complete(table)


def commands(folder: Path) -> Iterator[tuple[str, Sequence[str]]]:
    out, copy = str(folder / "out"), str(folder / "copy")
    yield "open", ["-c", f"import spile; assert spile.open({out!r}).num_tokens"]
    yield "status", ["-m", "spile.cli", "status", out]
    yield "verify --quick", ["-m", "spile.cli", "verify", out, "--quick"]
    yield "gc", ["-m", "spile.cli", "gc", out]
    yield "copy", ["-m", "spile.cli", "copy", out, copy]
    yield "grow", ["-m", "spile.cli", "extract", "--out", out, "--more", "--quiet"]


def measured(command: Sequence[str]) -> tuple[float, int]:
    """Return the processor seconds of a command, and its peak memory in MB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = (
        "import resource, subprocess, sys; "
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, sys.executable, *command],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, int(said) // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--counts", default="1,10,1000,10000", help="generations")
    parser.add_argument("--only", help="commands, by name")
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    model = arguments.folder / "model"
    if not model.exists():
        make_model(model, "tiny")
    for count in map(int, arguments.counts.split(",")):
        folder = arguments.folder / f"grown-{count}"
        if not folder.exists():
            make(folder, model, count)
        for name, command in commands(folder):
            if arguments.only and name not in arguments.only.split(","):
                continue
            if name == "grow":
                corpus = folder / "corpus"
                write_document(corpus, len([*corpus.iterdir()]))
            cpu, peak = measured(command)
            print(f"{count} generations: {name} {cpu:.1f} CPU s, {peak} MB", flush=True)
            shutil.rmtree(folder / "copy", ignore_errors=True)


if __name__ == "__main__":
    main()
