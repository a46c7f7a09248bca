"""Programs of commands, drawn from a seed, with kills and faults: `Program(4711).run()`.

Each command is drawn from what the places will contain if all before it have done what they do
(`contents.py`), so most of them are about something that is there. `running.py` runs them, and says
what must be so.

A program that finds something prints itself; `shrunk` leaves out what it does not need for that.
"""

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from simulator.contents import CHANGES, ONTO, Content, Op, Refused, after
from simulator.documents import (
    FILES,
    GROWS,
    GROWS_FROM,
    MODELS,
    SOURCES,
    SPLICE,
    WHERE,
    Rules,
    TapRule,
)
from simulator.places import Violation
from simulator.running import Run

PLACES = ("p0", "p1", "p2", "p3")
FEWEST, MOST = 12, 14  # commands
_OWN = ("resid_post.0", "mlp_out.0")  # taps of a dataset; others are added
_MORE = ("resid_post.1", "mlp_out.1")
_ALIKE = (("a", "b"), ("b", "a"), ("c", "d"), ("d", "c"))  # files with as many rows
# How often each is tried.
_KINDS = {
    "extract": 10, "more": 7, "add-corpus": 14, "add-taps": 13, "drop": 8, "copy": 16, "part": 8,
    "merge": 12, "compact": 5, "shuffle": 3, "like": 3, "gc": 5, "repair": 6, "read": 2,
    "verify": 2, "take": 7, "resume": 9,
}  # fmt: skip
_WHERE_BEGUN = {"extract": 4, "more": 1, "add-corpus": 4, "copy": 3, "part": 3, "merge": 1}
_BESIDE = (
    "extract", "more", "add-corpus", "add-taps", "drop", "copy", "part", "gc", "read", "verify",
)  # fmt: skip
_DAMAGES = (
    "shard flipped", "shard gone", "index flipped", "record cut", "record gone", "segment cut",
    "manifest cut", "pass cut",
)  # fmt: skip


class Program:
    """Datasets that are there, and commands in their order."""

    def __init__(
        self, seed: int, ops: Sequence[Op] | None = None, given: Sequence[Op] | None = None
    ) -> None:
        """Args:
        ops: other commands than those that the seed draws.
        given: other datasets.
        """
        drawing = _Drawing(seed)
        self.seed, self.unit_tokens = seed, drawing.unit_tokens
        drawn = drawing.given()
        self.given = drawn if given is None else tuple(given)
        self.ops = drawing.commands() if ops is None else tuple(ops)

    def run(self) -> Run:
        """Run it.

        Raises:
            Violation: with the program, and how far it came.
        """
        run = Run(PLACES, self.unit_tokens)
        with run.simulated():
            try:
                for op in self.given:
                    run.give(op)
                for number, op in enumerate(self.ops):
                    run.trace.append(f"{number:>3} {op}")
                    run.execute(op)
                run.finish()
            except BaseException as error:
                ran = "\n".join(run.trace)
                error.add_note(f"{self}\nwhat happened:\n{ran}")
                raise
        return run

    def __str__(self) -> str:
        lines = [f"given {op}" for op in self.given]
        lines += [f"{number:>3} {op}" for number, op in enumerate(self.ops)]
        return f"Program({self.seed}):\n" + "\n".join(lines)

    def violation(self) -> str | None:
        """What it finds."""
        try:
            self.run()
        except Violation as found:
            return str(found)
        return None

    def shrunk(self) -> "Program":
        """The program without what its violation does not need: commands, kills, faults."""
        kind = (self.violation() or "").partition(":")[0]
        smaller, at = self, len(self.ops) - 1
        while kind and at >= 0:
            for ops in _simpler(smaller.ops, at):
                tried = Program(self.seed, ops, self.given)
                if (tried.violation() or "").partition(":")[0] == kind:
                    smaller, at = tried, min(at, len(ops) - 1)
                    break
            else:
                at -= 1
        return smaller


def _simpler(ops: Sequence[Op], at: int) -> Iterator[tuple[Op, ...]]:
    """Programs without a command, its company, its faults or its kill."""
    op = ops[at]
    before, rest = tuple(ops[:at]), tuple(ops[at + 1 :])
    yield (*before, *rest)
    if op.beside:
        yield (*before, replace(op, beside=None), *rest)
        yield (*before, replace(op.beside, delay=0.0), *rest)
    if op.rough:
        yield (*before, replace(op, rough=0.0), *rest)
    if op.kill:
        yield (*before, replace(op, kill=None), *rest)


class _Drawing:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        chance = self.random.random
        self.unit_tokens = self.random.choice((25, 60))
        self.rules = Rules(
            splice=SPLICE if chance() < 0.1 else None, where=WHERE if chance() < 0.2 else None
        )
        self.most = 4 if chance() < 0.15 else None
        self.taps = frozenset(map(TapRule, _OWN[: 1 + (chance() < 0.3)]))
        self.world: dict[str, Content | None] = dict.fromkeys(PLACES)
        self.grown = GROWS_FROM
        self.planned: list[Callable[[], Op | None]] = []  # commands that belong together
        self.taken: set[str] = set()  # where readers have said where they are
        self.dirty: str | None = None  # where the last command was killed

    def given(self) -> tuple[Op, ...]:
        """Two datasets of one recipe."""
        first, *others = self.random.sample(sorted(SOURCES), 3)
        disjoint = [name for name in others if not {*SOURCES[name]} & {*SOURCES[first]}]
        sources = [first, *disjoint][:2]
        ops = tuple(
            Op("extract", place, source=source, taps=self.taps, rules=self.rules, most=self.most)
            for place, source in zip(PLACES, sources, strict=False)
        )
        for op in ops:
            self.world[op.place] = after(op, self.world, self.grown)
        return ops

    def commands(self) -> tuple[Op, ...]:
        count = self.random.randint(FEWEST, MOST)
        ops: list[Op] = []
        while len(ops) < count:
            op = self._command()
            if op is None:
                continue
            op = self._disturbed(op, len(ops), count)
            ops.append(op)
            for each in (op, op.beside):
                if each is not None:
                    self._happens(each)
        killed = [n for n, op in enumerate(ops) if op.kill]
        rest = [n for n, op in enumerate(ops) if n not in killed and op.kind in (*ONTO, *CHANGES)]
        for number in self.random.sample(rest, min(len(rest), max(0, 2 - len(killed)))):
            ops[number] = replace(ops[number], kill=self._requests())
        return tuple(ops)

    def _happens(self, op: Op) -> None:
        self.dirty = None
        if op.kill and not op.again and op.kind in (*ONTO, *CHANGES):
            self.dirty = op.place
            return
        with contextlib.suppress(Refused):
            self.world[op.place] = after(op, self.world, self.grown)

    def _command(self) -> Op | None:
        if not self.planned and self.random.random() < 0.1:
            self.planned = self._plan()
        if self.planned and self.random.random() < 0.7:
            return self.planned.pop(0)()
        begun = self.dirty and self.random.random() < 0.6  # what is there is in the way
        kinds = _WHERE_BEGUN if begun else _KINDS
        (kind,) = self.random.choices([*kinds], [*kinds.values()])
        return self._of_kind(kind)

    def _plan(self) -> list[Callable[[], Op | None]]:
        """Commands that only together are of interest; others may come between them."""
        choice = self.random.choice
        there = [place for place in PLACES if self.world[place]]
        empty = [place for place in PLACES if not self.world[place]]
        if not there:
            return []
        place = choice(there)
        other = choice(empty or [each for each in PLACES if each != place])
        copy = partial(self._made, "copy", other, of=(place,))
        names = choice(_ALIKE)
        grow = [
            partial(self._made, "add-corpus", each, source=name)
            for each, name in zip((place, other), names, strict=True)
        ]
        taps = frozenset({TapRule(choice(_MORE))})
        add = partial(self._made, "add-taps", place, taps=taps)
        one, another = self.random.sample((place, other), 2)
        return choice((
            # Two copies that grow otherwise; a reader of one goes on with the other.
            [copy, *grow, partial(self._made, "take", one), partial(self._made, "resume", another)],
            # Taps that were dropped, after they were copied; and others in their place.
            [add, copy, partial(self._made, "drop", place, taps=taps),
             partial(self._of_kind, "add-taps", place), copy],
            # A source that grows while, or after, it is copied; and the copy, too.
            [copy, grow[0], copy, grow[1], partial(self._made, "copy", place, of=(other,))],
        ))  # fmt: skip

    def _made(self, kind: str, place: str, **told: Any) -> Op:
        return Op(kind, place, seed=self.random.randint(0, 1 << 30), **told)

    def _of_kind(self, kind: str, place: str | None = None) -> Op | None:
        choice = self.random.choice
        there = [place for place in PLACES if self.world[place]]
        empty = [place for place in PLACES if not self.world[place]]
        seed = self.random.randint(0, 1 << 30)
        if self.dirty and place is None and kind in (*ONTO, "extract", "add-corpus", "more"):
            place = self.dirty
        if kind in ONTO:
            return self._onto(kind, place, there, empty, seed)
        if kind == "extract":
            again = [p for p in there if self.random.random() < 0.2]
            place = place or choice(again or empty or there)
            now = self.world[place]
            source = now.sources[0] if now else choice([*SOURCES, GROWS, GROWS])
            rules = self.rules
            if self.random.random() < 0.06:
                rules = rules._replace(weights=MODELS[1])
            return Op(
                kind, place, source=source, taps=self.taps, rules=rules, most=self.most, seed=seed
            )
        if not there:
            return None
        place = place or choice(there)
        if kind in ("more", "add-corpus"):
            most = None
            if self.random.random() < (0.7 if self.most else 0.1):
                now = self.world[place]
                most = (len(now.docs()) if now else 4) + choice((-1, 1, 2, 4))
            new = [name for name in FILES if name not in self.grown]
            files = tuple(self.random.sample(new, 1)) if new and self.random.random() < 0.6 else ()
            if kind == "more":
                grows = [p for p in there if GROWS in (self.world[p] or _NOTHING).sources]
                place = choice(grows) if grows else place
                self.grown = (*self.grown, *files)
                return Op(kind, place, files=files, most=most, seed=seed)
            return Op(kind, place, source=choice([*SOURCES, GROWS]), most=most, seed=seed)
        if kind == "add-taps":
            names = self.random.sample(_MORE, choice((1, 1, 2)))
            store = choice(("float32", "float32", "bfloat16", "float16"))
            compute = choice(("float32", "float32", "float32", "bfloat16"))
            taps = frozenset(TapRule(name, store, compute) for name in names)
            return Op(kind, place, taps=taps, seed=seed)
        if kind == "drop":
            having = [p for p in there if (self.world[p] or _NOTHING).added]
            place = choice(having) if having else place
            added = sorted((self.world[place] or _NOTHING).added, key=lambda e: sorted(e.taps))
            taps = choice(added).taps if added else frozenset({TapRule(choice(_MORE))})
            return Op(kind, place, taps=taps, seed=seed)
        if kind == "repair":
            return Op(kind, place, damage=choice(_DAMAGES), seed=seed)
        if kind in ("take", "resume"):
            taken = [p for p in there if any(self._related(p, q) for q in self.taken if q != p)]
            place = choice(taken) if taken and self.random.random() < 0.7 else place
            self.taken |= {place} if kind == "take" else set()
        return Op(kind, place, seed=seed)

    def _onto(
        self, kind: str, place: str | None, there: list[str], empty: list[str], seed: int
    ) -> Op | None:
        choice, chance = self.random.choice, self.random.random
        if not there:
            return None
        if kind == "merge":
            of = tuple(self.random.choices(there, k=choice((2, 2, 3))))
            if len({*of}) == 1:
                return None
            free = [p for p in empty if p not in of] or [p for p in PLACES if p not in of]
            if not free:
                return None
            return Op(kind, place if place and place not in of else choice(free), of, seed=seed)
        source = choice(there)
        others = [p for p in PLACES if p != source]
        free = [p for p in others if p in empty]
        known = [p for p in others if self._related(source, p)]
        if kind == "copy" and known and chance() < 0.6:
            to = choice(known)
        else:
            to = choice(free) if free and chance() < 0.85 else choice(others)
        op = Op(kind, place if place and place != source else to, (source,), seed=seed)
        if kind == "part":
            cuts = ((None, 1, None), (1, None, None), (None, None, 2), (-1, None, None))
            return replace(op, units=choice(cuts))
        if kind == "like":
            rules = self.rules._replace(weights=MODELS[1])
            return replace(op, rules=rules, taps=self.taps)
        return op

    def _related(self, source: str, place: str) -> bool:
        one, other = self.world[source], self.world[place]
        return bool(one and other and one.generations[0] == other.generations[0])

    # -- kills, faults and company ---------------------------------------------------------------

    def _disturbed(self, op: Op, number: int, count: int) -> Op:
        chance, kind = self.random.random, op.kind
        if kind in ("take", "resume"):
            return op
        if chance() < 0.3:
            op = replace(op, kill=self._requests(), again=chance() < 0.6)
        if chance() < 0.2 and kind != "repair":
            op = replace(op, rough=self.random.choice((0.5, 1.0, 2.0)))
        if kind != "repair" and chance() < 0.25:
            op = replace(op, beside=self._beside(op))
        return op

    def _requests(self) -> int:
        return round(math.exp(self.random.uniform(math.log(3), math.log(250))))

    def _beside(self, op: Op) -> Op | None:
        """A command that begins while another runs, on the same places."""
        place = self.random.choice([op.place, *op.of])
        kind = self.random.choice(_BESIDE)
        own = None if kind in ONTO else place
        if own is not None and not self.world[own] and kind not in ("extract", "gc"):
            return None
        beside = self._of_kind(kind, own)
        if beside is None:
            return None
        if kind in ("copy", "part") and op.place != beside.place:
            beside = replace(beside, of=(op.place,)) if self.world[op.place] else beside
        if kind == "add-taps" and op.kind == "add-taps" and self.random.random() < 0.5:
            beside = replace(beside, taps=op.taps)
        kill = self._requests() if self.random.random() < 0.2 else None
        return replace(beside, delay=self.random.uniform(0, 4), kill=kill, again=op.again)


_NOTHING = Content(Rules(), frozenset(), (), (), ((),), -1)
