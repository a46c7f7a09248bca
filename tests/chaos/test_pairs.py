"""Pairs of commands on the same places, both real processes, one or both killed at random moments.

A pair is drawn from its number: two commands, the places that they share, who is killed, and when.
A moment is a number of files that have come or gone, so that the speed of the machine does not
matter. Afterwards both commands are run again, and every place is compared with the corpus by the
plain reader, and with what the commands make one after the other by the model that the simulated
programs have (`tests/simulator/contents.py`). Pair 17 alone: `-k "pair[17]"`.
"""

import contextlib
import itertools
import math
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

import spile
from chaos.harness import Result, Witness, launch, run, said
from simulator import documents
from simulator.contents import Content, Op, Refused, after, between, found_in
from simulator.documents import GROWS, MODELS, Doc, Rules, TapRule
from simulator.places import check
from spile.dataset import format as fmt
from spile.dataset.records.ledger import Ledger
from spile.objects import LocalObjects
from support import stored
from support.plain_reader import PageReader

pytestmark = [pytest.mark.chaos, pytest.mark.full]

PAIRS = 200
KINDS = ("extract", "more", "add-taps", "drop", "copy", "part", "merge", "compact", "gc", "repair",
         "add-corpus", "shuffle")  # fmt: skip
TOGETHER = [*itertools.combinations_with_replacement(KINDS, 2)]
HERE, OTHER, THERE = "p0", "p1", "p2"  # two datasets; a place that is empty, or has a copy
PLACES = (HERE, OTHER, THERE)
GIVEN, COMES = ("a", "b", "e"), "f"  # files of the growing directory, of which HERE is made
OWN = frozenset({TapRule("resid_post.0")})
MORE, ELSE = frozenset({TapRule("resid_post.1")}), frozenset({TapRule("mlp_out.1")})
ONTO_THERE = ("copy", "part", "merge", "compact", "shuffle")
KILLED = -signal.SIGKILL
ROUNDED = 1e-5  # of a row's length: other documents beside it give other last digits

World = Mapping[str, Content | None]


# -- what is drawn -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A pair of commands.

    Attributes:
        given: what OTHER places hold, by the names of `Given`.
        moments: for each command, at how many changed files it is killed; None: it is not.
        begins: at how many changed files the second one begins.
    """

    given: Mapping[str, str]
    ops: tuple[Op, Op]
    moments: tuple[int | None, int | None]
    begins: int
    damage: str


def drawn(number: int) -> Drawn:
    draw = random.Random(number)
    kinds = [*TOGETHER[number % len(TOGETHER)]]
    draw.shuffle(kinds)
    taken = any(kind in ("copy", "extract", "add-corpus") for kind in kinds) and draw.random() < 0.5
    given = {HERE: draw.choice(("plain", "with taps", "grown")), OTHER: "other"}
    if taken and not {"part", "merge", "compact", "shuffle"}.intersection(kinds):
        given[THERE] = "plain"
    if "merge" in kinds:
        given[HERE] = draw.choice(("plain", "grown"))
    if "drop" in kinds:
        given[HERE] = "with taps"
    ops = tuple(_op(kind, given, draw) for kind in kinds)
    moments: list[int | None] = [_moment(draw), _moment(draw)]
    spared = draw.randrange(3)
    if spared < 2:
        moments[spared] = None
    begins = draw.choice((0, 0, _moment(draw)))
    damage = draw.choice(("shard", "record", "manifest", "segment"))
    return Drawn(given, (ops[0], ops[1]), (moments[0], moments[1]), begins, damage)


def _moment(draw: random.Random) -> int:
    return round(math.exp(draw.uniform(0, math.log(60))))


def _op(kind: str, given: Mapping[str, str], draw: random.Random) -> Op:
    at = HERE
    if THERE in given and kind in ("add-corpus", "add-taps", "gc") and draw.random() < 0.5:
        at = THERE
    if kind == "extract":
        return Op(kind, draw.choice((THERE, THERE, HERE)), source=GROWS, taps=OWN)
    if kind == "more":
        return Op(kind, HERE, files=(COMES,))
    if kind == "add-corpus":
        return Op(kind, at, source=draw.choice(("d", "ab", "bc")))
    if kind == "add-taps":
        return Op(kind, at, taps=draw.choice((MORE, MORE, ELSE)))
    if kind == "drop":
        return Op(kind, HERE, taps=MORE)
    if kind == "part":
        return Op(kind, THERE, (HERE,), units=draw.choice(((0, 2, None), (1, 3, None))))
    if kind in ONTO_THERE:
        of = (HERE, OTHER) if kind == "merge" else (HERE,)
        return Op(kind, THERE, of, seed=draw.randint(0, 2))
    return Op(kind, at)


# -- datasets that are there -----------------------------------------------------------------------


class Given:
    """Datasets that nothing disturbed, made once, and the rows of every document."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.grows = folder, folder / GROWS
        documents.grow(self.grows, GIVEN)

    def copy(self, name: str, to: Path) -> None:
        """Copy a dataset, by its name, to a place."""
        shutil.copytree(self._made(name), to)

    def _made(self, name: str) -> Path:
        path = self._folder / name
        if (path / fmt.MANIFEST).exists():
            return path
        if name in ("with taps", "grown"):
            self.copy("plain", path)
        self.grow(False)
        return self._run(path, {
            "plain": Op("extract", "", source=GROWS, taps=OWN),
            "other": Op("extract", "", source="c", taps=OWN),
            "with taps": Op("add-taps", "", taps=MORE),
            "grown": Op("add-corpus", "", source="d"),
        }[name])  # fmt: skip

    def _run(self, path: Path, op: Op) -> Path:
        result = run(*words(op, path, (), self.grows))
        assert result.code == 0, result.err
        return path

    def grow(self, comes: bool) -> None:
        """Let the growing directory have its further file, or not."""
        (self.grows / f"{COMES}.jsonl").unlink(missing_ok=True)
        documents.grow(self.grows, (COMES,) if comes else ())

    @cached_property
    def _true(self) -> Mapping[tuple[str, str, int], np.ndarray]:
        """The rows of each tap of each document, from runs of one file each."""
        found: dict[tuple[str, str, int], np.ndarray] = {}
        taps = OWN | MORE | ELSE
        for name in documents.FILES:
            out = self._folder / f"file-{name}"
            read = PageReader(self._run(out, Op("extract", "", source=name, taps=taps)))
            index = read.index()
            places = {doc.ordinal: doc.place for row in read.unit_rows for doc in row.documents}
            for tap, rows in read.all_rows().items():
                for ordinal, place in places.items():
                    mine = np.flatnonzero(index["doc"] == ordinal)
                    order = np.argsort(index["offset"][mine])
                    found[tap, name, place] = rows[mine[order]]
        return found

    def same(self, found: np.ndarray, docs: tuple[Doc, ...], rules: Rules, tap: TapRule) -> bool:
        """Whether rows are those of some documents, but for rounding."""
        rows = [self._true[tap.name, doc.file, doc.place] for doc in sorted(docs)]
        wanted = np.concatenate([found[:0], *rows])
        if wanted.shape != found.shape:
            return False
        apart = np.linalg.norm(found - wanted, axis=1)
        return bool((apart <= ROUNDED * np.linalg.norm(wanted, axis=1)).all())


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Given:
    return Given(tmp_path_factory.mktemp("given"))


def words(op: Op, place: Path, of: Sequence[Path], grows: Path) -> list[object]:
    """The command line."""
    corpus = op.source and documents.corpus(op.source, grows)
    taps = ",".join(sorted(tap.name for tap in op.taps))
    if op.kind == "extract":
        return [
            "extract", "--model", documents.home() / MODELS[0], "--corpus", corpus, "--taps",
            taps.replace(".", ":"), "--seq-len", documents.SEQ_LEN, "--unit-tokens", 25,
            "--compute-dtype", "float32", "--batch-tokens", 64, "--out", place,
        ]  # fmt: skip
    if op.kind == "more":
        return ["extract", "--out", place, "--more"]
    if op.kind == "add-corpus":
        return ["extract", "--out", place, "--add-corpus", corpus]
    if op.kind == "add-taps":
        return ["extract", "--out", place, "--add-taps", taps.replace(".", ":")]
    if op.kind == "drop":
        return ["drop", place, "--taps", taps]
    if op.kind == "part":
        return ["copy", *of, place, "--units", f"{op.units[0]}-{(op.units[1] or 0) - 1}"]
    if op.kind == "compact":
        return ["compact", *of, place, "--unit-bytes", "3kB"]
    if op.kind == "shuffle":
        return ["shuffle", *of, place, "--seed", op.seed, "--memory", "12kB"]
    if op.kind == "repair":
        return ["verify", place, "--repair"]
    return [op.kind, *of, place]


def damage(place: Path, what: str) -> None:
    """Damage something that a dataset consists of."""
    done = Ledger(LocalObjects(place)).read_done(0)
    assert done is not None
    if what == "shard":
        stored.flip(place / done.shards[0].key, done.shards[0].bytes - 1)
    elif what == "record":
        (place / fmt.CURRENT.done_key(1)).unlink()
    elif what == "manifest":
        stored.flip(place / fmt.MANIFEST, 40)
    else:
        stored.flip(place / fmt.CURRENT.segment_key(0), 40)


# -- a pair at work --------------------------------------------------------------------------------


class Pair:
    """Two commands in a folder of their own."""

    def __init__(self, number: int, known: Given, folder: Path) -> None:
        self.drawn, self.known, self.folder = drawn(number), known, folder
        self.ops, self.kinds = self.drawn.ops, {op.kind for op in self.drawn.ops}
        for place, name in self.drawn.given.items():
            known.copy(name, folder / place)
        known.grow("more" in self.kinds)
        self.grown = (*GIVEN, *([COMES] if "more" in self.kinds else []))
        self.before = self.world()
        if "repair" in self.kinds:
            damage(folder / HERE, self.drawn.damage)
        # (Two commands that begin different datasets in one place: records of the loser may be
        # left there. A repair replaces records, and a drop takes some away.)
        self.rivals = THERE not in self.drawn.given and all(op.place == THERE for op in self.ops)
        self.witnesses = [Witness(folder / place) for place in PLACES]
        self.ended: dict[int, list[int]] = {0: [], 1: []}
        self.told = [f"given {self.drawn.given}, killed at {self.drawn.moments}"]
        self.told += [f"begun at {self.drawn.begins}: {op}" for op in self.ops]

    def words(self, op: Op) -> list[object]:
        of = [self.folder / place for place in op.of]
        return words(op, self.folder / op.place, of, self.known.grows)

    def world(self) -> World:
        return {place: found_in(self.reader(place), self.known.grows) for place in PLACES}

    def reader(self, place: str) -> PageReader | None:
        there = (self.folder / place / "units.json").exists()
        return PageReader(self.folder / place) if there else None

    # -- both at once ----------------------------------------------------------------------------

    def run(self) -> int:
        """Run both, and kill those that are to be killed; return how many were."""
        files, kills = self._files(), 0
        waiting, running = {0: 0, 1: self.drawn.begins}, dict[int, subprocess.Popen[str]]()
        while waiting or running:
            changed = len(files ^ self._files())
            for number, begins in [*waiting.items()]:
                if changed >= begins or not (running or number == 0):
                    del waiting[number]
                    running[number] = launch({}, *self.words(self.ops[number]))
            for number, process in [*running.items()]:
                moment = self.drawn.moments[number]
                if moment is not None and changed >= moment:
                    process.kill()
                if process.poll() is not None:
                    del running[number]
                    _, err = process.communicate()
                    kills += process.returncode == KILLED
                    self._note(number, Result(process.returncode, "", err))
            time.sleep(0.001)
        return kills

    def _files(self) -> set[str]:
        """What is there; folders that vanish meanwhile do not matter."""
        places = (self.folder / place for place in PLACES)
        return {
            f"{at}/{name}" for place in places for at, _, names in os.walk(place) for name in names
        }

    def again(self, number: int) -> None:
        """Run a command again, undisturbed."""
        self._note(number, run(*self.words(self.ops[number])))

    def _note(self, number: int, result: Result) -> None:
        self.ended[number].append(result.code)
        self.told.append(f"{self.ops[number].kind}: {result.code} {result.err[-400:].strip()}")
        if result.code == KILLED:
            return
        assert result.code in (0, 2, 3), "it ends with an exit code that it may not have"
        assert "Traceback" not in result.err
        if result.code:
            assert any(line.startswith("spile: ") for line in said(result.err))

    # -- what must be so -------------------------------------------------------------------------

    def look(self) -> None:
        """Judge what is there while nothing runs, and commands are not at their end."""
        if self.rivals or "repair" in self.kinds:
            return
        for place, content in self.world().items():
            if content is None:
                continue
            self._check(place, content)
            faults = run("verify", self.folder / place, "--partial", "--json").json["faults"]
            assert faults == [], place
            before = self.before[place]
            docs = before.readable[0] if before else ()
            assert content.readable[0][: len(docs)] == docs, f"{place} hides documents"
        for witness in self.witnesses if "drop" not in self.kinds else ():
            witness.check()
            witness.look()

    def judge(self) -> None:
        """Judge what is there at the end."""
        self.look()
        done = [0 in self.ended[number] for number in (0, 1)]
        assert any(done), "neither command ever succeeded"
        if self.rivals and (self.folder / THERE / "units.json").exists():
            # (The same command may find what the other one left, or its own records.)
            run("verify", self.folder / THERE, "--repair")
        found = self.world()
        for place, content in found.items():
            if content is None:
                continue
            self._check(place, content)
            partial = [] if content.through == content.last else ["--partial"]
            report = run("verify", self.folder / place, "--json", *partial).json
            assert report["faults"] == [], place
            self._check_open(place, content)
        worlds = [*self._worlds(done)]
        spans = [(w, w) for w in worlds]
        if not all(done):  # one that was refused in the end may have done a part before
            spans = [*itertools.product(worlds, worlds)]
        if not any(all(between(lo[p], hi[p], found[p]) for p in PLACES) for lo, hi in spans):
            told = ["found", *_told(found), *(line for w in worlds for line in ["or", *_told(w)])]
            raise AssertionError("\n  ".join(told))

    def _check(self, place: str, content: Content) -> None:
        reader = self.reader(place)
        assert reader
        check(place, reader, content, self.known.same)

    def _check_open(self, place: str, content: Content) -> None:
        """`spile.open` reads what the plain reader reads."""
        reader = self.reader(place)
        if reader is None or not content.readable[0]:
            return
        dataset, wanted = spile.open(self.folder / place), reader.all_rows()
        assert {*dataset.taps} == {*wanted}
        for tap, rows in wanted.items():
            found = dataset.read(tap, 0, dataset.num_tokens, dtype="stored")
            assert found.tobytes() == rows.tobytes()

    def _worlds(self, done: Sequence[bool]) -> Iterator[World]:
        """What the commands make, one after the other, in any order, one of them again."""
        for order in ((0, 1), (1, 0), (0, 1, 0), (1, 0, 1), (0,), (1,), ()):
            world, did = {**self.before}, set[int]()
            for number in order:
                op = self.ops[number]
                with contextlib.suppress(Refused):
                    world[op.place] = after(op, world, self.grown)
                    did.add(number)
            if all(number in did for number in (0, 1) if done[number]):
                yield world


def _told(world: World) -> list[str]:
    return [f"{place}: {content.told() if content else '-'}" for place, content in world.items()]


@pytest.mark.parametrize("number", range(PAIRS), ids="pair[{}]".format)
def test_commands_that_meet_and_are_killed_lose_and_mix_nothing(
    number: int, known: Given, tmp_path: Path
) -> None:
    pair = Pair(number, known, tmp_path)
    try:
        for witness in pair.witnesses:
            witness.look()
        kills = pair.run()
        pair.look()
        order = random.Random(-number).sample((0, 1), 2)
        for each in (*order, *order):
            pair.again(each)
        pair.judge()
    except AssertionError as error:
        error.add_note("\n".join(pair.told))
        raise
    names = " beside ".join(op.kind for op in pair.ops)
    print(f"pair {number}: {names}: {kills} killed; exits {pair.ended}")  # noqa: T201
