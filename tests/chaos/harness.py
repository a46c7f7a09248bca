"""For kill tests and end-to-end tests: run commands, describe jobs, compare datasets."""

import contextlib
import dataclasses
import io
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import spile
from spile import cli
from spile.core.config import build
from spile.dataset import format as fmt
from spile.dataset.records.ledger import Ledger
from spile.objects import Objects, open_objects
from support import tiny, zygote

LAUNCHER = Path(__file__).with_name("launcher.py")
_PROGRESS = re.compile(r"(spile: )?( *\d+%  .*  q [\d·]+|[\w, ]+  \d+:\d\d(  ETA .*)?$)")
_started: list[subprocess.Popen[str]] = []


@dataclass(frozen=True)
class Result:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*arguments: object) -> Result:
    """Run the command in this process, without the start of an interpreter."""
    out, err = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.run([str(argument) for argument in arguments])
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return Result(code, out.getvalue(), err.getvalue())


def launch(spec: dict[str, Any], *arguments: object) -> subprocess.Popen[str]:
    """Start the command through launcher.py, as `spec` says; without a spec, as a user would."""
    if not spec:
        process = tiny.start(*map(str, arguments))
    else:
        process = zygote.Popen(
            [sys.executable, str(LAUNCHER), json.dumps(spec), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=tiny.environment(),
        )
    _started.append(process)
    return process


def end_all() -> None:
    """End all processes that a test has started."""
    while _started:
        process = _started.pop()
        process.kill()
        process.communicate()


@dataclass(frozen=True)
class Work:
    """An extraction that can be started any number of times, into any place."""

    model: Path
    corpus: Path
    options: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {
            "taps": "embed,resid_post:0+2,mlp_out:1",
            "seq_len": 64,
            "unit_tokens": 400,
            "compute_dtype": "float32",
            "batch_tokens": 128,
        }
    )

    def flags(self, out: Path | str, **changes: Any) -> list[str]:
        given = {"model": self.model, "corpus": self.corpus, **self.options, **changes, "out": out}
        flags: list[str] = []
        for name, value in given.items():
            if value is not None and value is not False:
                flag = "--" + name.replace("_", "-")
                flags += [flag] if value is True else [flag, str(value)]
        return flags

    def extract(self, out: Path | str, **changes: Any) -> None:
        """Extract in this process."""
        given = {"model": str(self.model), "corpus": str(self.corpus), **self.options, **changes}
        recipe, runtime = build(given)
        spile.extract(recipe, str(out), runtime)


def extracted(model: Path, corpus: object, out: Path, **options: Any) -> Any:
    """Extract a small corpus and audit the dataset; return the outcome."""
    given = {"seq_len": 128, "unit_tokens": 700, "taps": "embed", **options}
    recipe = spile.Recipe(model=str(model), corpus=str(corpus), **given)
    outcome = spile.extract(recipe, str(out))
    report = run("verify", out, "--json")
    assert report.json["faults"] == [], report.out
    return outcome


def content(out: Path | str) -> dict[str, bytes]:
    """The logical content of a dataset, by name: rows, index, statistics, documents."""
    dataset = spile.open(str(out))
    found = {"index": dataset.index(0, dataset.num_tokens).tobytes()}
    for tap in dataset.taps:
        found[tap] = dataset.read(tap, 0, dataset.num_tokens, dtype="stored").tobytes()
        statistics = dataset.statistics(tap).to_tensors(tap)
        found |= {name: np.asarray(value).tobytes() for name, value in statistics.items()}
    logical = ("unit", "rows", "tokens", "documents", "contexts", "skipped", "text_digest")
    ledger = Ledger(open_objects(str(out)))
    manifest = ledger.derived.read_manifest(ledger.layout)
    assert manifest
    for done in ledger.derived.catalog(ledger.table(), manifest):
        told = [getattr(done, name) for name in logical] + [done.documents_table.digest]
        found[f"unit {done.unit}"] = json.dumps(told).encode()
    return found


def differences(found: dict[str, bytes], wanted: dict[str, bytes]) -> list[str]:
    """Names of the parts that are not bit-identical."""
    return sorted(n for n in {*found, *wanted} if found.get(n) != wanted.get(n))


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def check_sound(out: Path | str) -> None:
    """After `gc` the audit finds nothing: no fault, nothing missing, nothing left over."""
    collected = run("gc", out, "--json")
    assert collected.code == 0, collected.err
    audit = run("verify", out, "--json")
    assert (audit.code, audit.json["faults"], audit.json["orphans"]) == (0, [], []), audit.out
    objects = open_objects(str(out))
    table = Ledger(objects).table()
    units = range(len(table.units))
    assert audit.json["units_done"] == len(units), audit.out
    done = sorted(objects.list("done/"))
    assert done == [table.layout.done_key(unit) for unit in units], done


def check_same(out: Path | str, reference: Path) -> None:
    """The same logical content, bit for bit, in a sound dataset."""
    check_sound(out)
    different = differences(content(out), content(reference))
    assert not different, different


def said(err: str) -> list[str]:
    """Lines that a command wrote, without progress, which a slow machine prints."""
    return [line for line in err.splitlines() if not _PROGRESS.match(line)]


def check_refused(result: Result, code: int, *named: object) -> None:
    """The error is one line that names the culprit, with the promised exit code."""
    assert result.code == code, result.err or result.out
    lines = said(result.err)
    assert len(lines) == 1, result.err
    assert lines[0].startswith("spile: "), result.err
    for name in named:
        assert str(name) in lines[0], f"{name!r} is not in {lines[0]!r}"


def places(objects: Objects) -> list[str]:
    """Prefixes of the folders with done records: the dataset's, and those of its passes."""
    return ["", *(f"{fmt.PASSES}{name}/" for name in sorted(objects.folders(fmt.PASSES)))]


class Witness:
    """Remember every commit that was seen, and check that each still stands."""

    def __init__(self, out: Path | str) -> None:
        self._objects = open_objects(str(out))
        self.seen: dict[str, bytes] = {}

    def look(self) -> None:
        for folder in places(self._objects):
            for key in self._objects.list(f"{folder}done/"):
                if key.endswith(".json") and key not in self.seen:
                    self.seen[key] = self._objects.get(key)

    def check(self) -> None:
        for key, record in self.seen.items():
            assert self._objects.get(key) == record
            body = json.loads(record)
            for file in (*body["shards"], body["index"], body["statistics"]):
                data = self._objects.get(fmt.split_pass_key(key)[0] + file["key"])
                assert len(data) == file["bytes"], file["key"]
                assert xxhash.xxh3_128_hexdigest(data) == file["digest"], file["key"]


def wait_for(condition: Any, process: subprocess.Popen[str], seconds: float = 300.0) -> None:
    """Poll until the condition holds or the process has ended."""
    limit = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.002)
