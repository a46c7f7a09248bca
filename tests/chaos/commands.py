"""The commands that faults are put into: how each begins, and whether what it made is whole.

A new command needs an entry in `Commands`, and no more: `test_faults.py` then tries every fault at
every system call of it, and kills it at random ones.
"""

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from chaos.harness import (
    LAUNCHER,
    Result,
    Witness,
    Work,
    check_sound,
    content,
    differences,
    files,
    places,
    run,
    said,
)
from spile.dataset import format as fmt
from spile.dataset.records.ledger import Ledger
from spile.objects import LocalObjects
from support import faults, stored, tiny, zygote

_SECONDS = 120
_ENDS = (0, 2, 3, 130)  # of a command that was not killed
_TAPS = {"resid_post.0": 4}
_CUT = ("--unit-bytes", "3kB")
_EXPORTED = ("npy", "parquet", "zarr")


class Call(NamedTuple):
    """One system call."""

    name: str
    path: str


@dataclass(frozen=True)
class Command:
    """A command that can be begun in any empty folder.

    Attributes:
        arguments: of the command line, given the folder.
        finished: raises unless what the command makes there is whole.
        prepare: what has to be in the folder before.
        datasets: folders in it that records commit units to,
        passing: and those that they do so in for a while.
        sources: what it reads, which never changes.
        keeps_files: whether files of units that were not committed stay, for the next call.
    """

    name: str
    arguments: Callable[[Path], list[object]]
    finished: Callable[[Path], None]
    prepare: Callable[[Path], None] = lambda folder: None
    datasets: tuple[str, ...] = ()
    passing: tuple[str, ...] = ()
    sources: tuple[Path, ...] = ()
    keeps_files: bool = False

    def started(self, folder: Path, fault: Mapping[str, object]) -> Result:
        """Run it in a process of its own, with that fault."""
        given = json.dumps({"fault": fault})
        words = [sys.executable, str(LAUNCHER), given, *map(str, self.arguments(folder))]
        ended = zygote.run(words, env=tiny.environment(), timeout=_SECONDS)
        return Result(ended.returncode, ended.stdout, ended.stderr)

    def calls(self, folder: Path) -> list[Call]:
        """The calls that change something, in order."""
        begin(self, folder)
        report = folder.with_name(f"{folder.name}.calls")
        result = self.started(folder, spec(folder, "count", 0, report))
        assert result.code == 0, result.err
        return [Call(*line.split("\t")) for line in report.read_text().splitlines()]


def spec(folder: Path, action: str, nth: int, report: Path) -> dict[str, object]:
    return {"under": str(folder), "action": action, "nth": nth, "report": str(report)}


def begin(command: Command, folder: Path) -> None:
    folder.mkdir()
    command.prepare(folder)


class Commands:
    """All of them, by name, each with what an undisturbed run of it makes.

    Args:
        folder: for what they read, and for those undisturbed runs.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        self._folder = folder
        self._known = {command.name: command for command in _commands(model, folder)}
        self._ready: set[str] = set()

    def __getitem__(self, name: str) -> Command:
        command = self._known[name]
        if name not in self._ready:
            self._ready.add(name)
            begin(command, self._folder / name)
            result = run(*command.arguments(self._folder / name))
            assert result.code == 0, result.err
        return command


def _commands(model: Path, folder: Path) -> list[Command]:
    corpus = tiny.write_corpus(folder / "corpus.jsonl", 3, seed=3)
    options = {"taps": "resid_post:0", "seq_len": 64, "unit_tokens": 150,
               "compute_dtype": "float32", "batch_tokens": 128}  # fmt: skip
    work = Work(model, corpus, options)
    units = ((5, 21, 3), (40, 0, 2))
    source = stored.build(folder / "source", units, taps=_TAPS, shard_bytes=400).path
    more = stored.build(
        folder / "another", ((7,), (4, 9)), taps=_TAPS, shard_bytes=400, corpus=("34-cd",)
    ).path
    return [
        Command(
            "extract",
            lambda at: ["extract", *work.flags(at / "new/out")],
            _same_dataset(folder / "extract/new/out", "new/out"),
            datasets=("new/out",),
            sources=(corpus,),
        ),
        Command(
            "more",
            lambda at: ["extract", *work.flags(at / "out", more=True, max_docs=3)],
            _same_dataset(folder / "more/out", "out"),
            prepare=lambda at: _begun(folder / "begun", at / "out", work),
            datasets=("out",),
            sources=(corpus,),
        ),
        Command(
            "add-taps",
            lambda at: ["extract", *work.flags(at / "out", taps=None, add_taps="mlp_out:0")],
            _same_dataset(folder / "add-taps/out", "out"),
            prepare=lambda at: _whole(folder / "extracted", at / "out", work.extract),
            datasets=("out",),
            sources=(corpus,),
        ),
        Command(
            "drop",
            lambda at: ["drop", at / "out", "--taps", "z.0"],
            _same_dataset(source, "out"),
            prepare=lambda at: _with_taps(at / "out", units, drop=False),
        ),
        Command(
            "gc-dropped",
            lambda at: ["gc", at / "out"],
            _same_dataset(source, "out"),
            prepare=lambda at: _with_taps(at / "out", units, drop=True),
        ),
        Command(
            "compact",
            lambda at: ["compact", source, at / "new/dest", *_CUT],
            _same_dataset(folder / "compact/new/dest", "new/dest"),
            datasets=("new/dest",),
            sources=(source,),
        ),
        Command(
            "copy",
            lambda at: ["copy", source, at / "new/dest"],
            _same_dataset(folder / "copy/new/dest", "new/dest"),
            datasets=("new/dest",),
            sources=(source,),
            keeps_files=True,
        ),
        Command(
            "merge",
            lambda at: ["merge", source, more, at / "new/dest"],
            _same_dataset(folder / "merge/new/dest", "new/dest"),
            datasets=("new/dest",),
            sources=(source, more),
            keeps_files=True,
        ),
        Command(
            "shuffle",
            lambda at: ["shuffle", source, at / "new/dest", "--memory", "12kB"],
            _same_dataset(folder / "shuffle/new/dest", "new/dest"),
            datasets=("new/dest",),
            passing=("new/dest/scratch/1", "new/dest/scratch/2"),
            sources=(source,),
        ),
        Command(
            "gc",
            lambda at: ["gc", at / "out"],
            _same_files(folder / "gc", "out", folders=True),
            prepare=lambda at: _leave_orphans(at / "out", units),
            datasets=("out",),
        ),
        *(
            Command(
                f"export-{form}",
                lambda at, form=form: ["export", source, "--to", form, at / "new/dest"],
                _same_files(folder / f"export-{form}", "new"),
                sources=(source,),
            )
            for form in _EXPORTED
        ),
        # (No witness of commits: a repair replaces records, and its result is compared.)
        Command(
            "repair",
            lambda at: ["verify", at / "out", "--repair"],
            _same_dataset(folder / "repair/out", "out"),
            prepare=lambda at: _damage(folder / "extracted", at / "out", work.extract),
            sources=(corpus,),
        ),
        Command(
            "repair-copy",
            lambda at: ["verify", at / "out", "--repair", "--from", source],
            _same_dataset(folder / "repair-copy/out", "out"),
            prepare=lambda at: _damage(
                folder / "compacted", at / "out", lambda to: run("compact", source, to, *_CUT)
            ),
            sources=(source,),
        ),
    ]


def _begun(begun: Path, at: Path, work: Work) -> None:
    """A dataset of the first document, for `--more`."""
    if not begun.exists():
        work.extract(begun, max_docs=1)
    shutil.copytree(begun, at)


def _with_taps(at: Path, units: Sequence[Sequence[int]], *, drop: bool) -> None:
    """A dataset to which taps were added; `drop`: and dropped."""
    made = stored.copied(at, units, taps=_TAPS, shard_bytes=400)
    added, _ = stored.add_pass(made, {"z.0": 4})
    if drop:
        added.drop()


def _whole(whole: Path, at: Path, make: Callable[[Path], object]) -> None:
    """A finished dataset, which is made once."""
    if not whole.exists():
        make(whole)
    shutil.copytree(whole, at)


def _damage(whole: Path, at: Path, make: Callable[[Path], object]) -> None:
    """What `verify --repair` mends: a file with another byte, a record that is gone."""
    _whole(whole, at, make)
    done = Ledger(LocalObjects(at)).read_done(0)
    assert done is not None
    stored.flip(at / done.index.key, done.index.bytes - 1)
    (at / fmt.CURRENT.done_key(1)).unlink()


def _leave_orphans(at: Path, units: Sequence[Sequence[int]]) -> None:
    """What `gc` removes: attempts that lost, leftovers of records, a torn heartbeat."""
    dataset = stored.copied(at, units, taps=_TAPS, shard_bytes=400)
    dataset.attempt(1, shard_bytes=400)
    dataset.objects.create(f"{fmt.CURRENT.done_key(0)}.tmp-0123456789ab", b"{")
    dataset.objects.create(f"{fmt.WORKERS}torn.json", b"{")
    dataset.objects.create(f"{fmt.SCRATCH}1/owner.json", b"{}")


def _same_dataset(reference: Path, made: str) -> Callable[[Path], None]:
    wanted: dict[str, bytes] = {}

    def finished(folder: Path) -> None:
        wanted.update(wanted or content(reference))
        check_sound(folder / made)
        assert not files(folder / made / "scratch")
        assert not differences(content(folder / made), wanted)

    return finished


def _same_files(reference: Path, made: str, *, folders: bool = False) -> Callable[[Path], None]:
    """`folders`: whether empty folders may be left over, since no store lists those."""
    wanted: dict[str, bytes] = {}

    def finished(folder: Path) -> None:
        wanted.update(wanted or files(reference / made))
        assert not differences(files(folder / made), wanted)
        empty = [p for p in folder.rglob("*") if p.is_dir() and not any(p.iterdir())]
        assert folders or not empty, empty

    return finished


# -- one fault ---------------------------------------------------------------------------------


@dataclass
class Tally:
    """The outcomes of many faults."""

    calls: Counter[str] = field(default_factory=Counter)  # that were hit, by name
    ends: Counter[int] = field(default_factory=Counter)  # exit codes
    missed: int = 0  # the command had fewer calls that time
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        hit, ends = (
            ", ".join(f"{k} {v}" for k, v in sorted(c.items())) for c in (self.calls, self.ends)
        )
        return f"{self.calls.total()} hit ({hit}), {self.missed} missed; exits: {ends}"


def try_fault(command: Command, folder: Path, fault: str, nth: int, tally: Tally) -> None:
    """Run a command with a fault, and then without: afterwards all is as if nothing had happened.

    What went wrong is added to the tally, so that one run tells all.
    """
    begin(command, folder)
    try:
        with_fault(command, folder, fault, nth, tally)
        again(command, folder)
    except Exception as error:
        tally.wrong.append(
            f"{command.name}, {fault} at call {nth}: {type(error).__name__}: {error}"
        )
    else:
        shutil.rmtree(folder)


def with_fault(command: Command, folder: Path, fault: str, nth: int, tally: Tally) -> int:
    """Run it with a fault; check its message and that commits stand; return its exit code."""
    report = folder.with_name(f"{folder.name}.report")
    before = [_state(source) for source in command.sources]
    witnesses = [Witness(folder / name) for name in command.datasets]
    for witness in witnesses:
        witness.look()
    result = command.started(folder, spec(folder, fault, nth, report))
    hit = report.read_text().partition("\t")[0] if report.exists() else None
    report.unlink(missing_ok=True)
    if hit:
        tally.calls[hit] += 1
    else:
        tally.missed += 1
    tally.ends[result.code] += 1
    assert before == [_state(source) for source in command.sources], "a source was changed"
    if fault in faults.KILLS and hit and (fault not in faults.OF_WRITES or hit == "write"):
        assert result.code == -9, result
    else:
        assert result.code in _ENDS, result
        assert "Traceback" not in result.err, result.err
        if result.code:
            assert any(line.startswith("spile: ") for line in said(result.err)), result.err
    for witness in [*witnesses, *(Witness(folder / name) for name in command.passing)]:
        witness.check()  # what stood before
        witness.look()
        witness.check()
    removes = fault in faults.FAILS and not command.keeps_files
    if removes and hit != "unlink" and (fault, hit) != ("eio", "link"):
        _check_nothing_is_left(command, folder)
    if result.code == 0 and hit != "unlink":
        command.finished(folder)
    return result.code


def _check_nothing_is_left(command: Command, folder: Path) -> None:
    """A failure that is known to have committed nothing removes what it has written."""
    for name in (*command.datasets, *command.passing):
        for place in places(LocalObjects(folder / name)):
            objects = LocalObjects(folder / name / place)
            # (Listed, since a pass has no table of its own.)
            done = {*map(fmt.parse_done_key, objects.list(fmt.DONE))}
            attempts = filter(None, map(fmt.parse_attempt_key, objects.list(fmt.ATTEMPTS)))
            left = {unit for unit, *_ in attempts} - done
            assert not left, f"files of units {left} are left in {place or name}"


def again(command: Command, folder: Path) -> None:
    """Check that the same command, undisturbed, finishes."""
    witness = Witness(folder / command.datasets[0]) if command.datasets else None
    if witness:
        witness.look()
    result = run(*command.arguments(folder))
    # (An export that is whole, and taps that are dropped.)
    if not (result.code == 2 and re.search("exists already|no tap 'z.0' was added", result.err)):
        assert result.code == 0, result.err
    command.finished(folder)
    if witness:
        witness.check()


def _state(path: Path) -> list[tuple[str, int, int]]:
    found = [path, *path.rglob("*")]
    return sorted((str(p), (at := p.stat()).st_mtime_ns, at.st_size) for p in found)
