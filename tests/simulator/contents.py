"""What a dataset contains, as a user would say it; what each command makes of that; and what is
found in a store, by the plain reader.

`after` is the model of all commands: what a place contains once a command has ended with success.
It says nothing of how that comes about, nor of how documents are cut into units.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import compress, product
from pathlib import Path
from typing import Any

from simulator.documents import (
    GROWS,
    MODELS,
    SOURCES,
    SPLICE,
    Doc,
    Rules,
    TapRule,
    documents,
    file_of,
    source_of,
    weights_of,
)
from support.plain_reader import Invalid, PagePass, PageReader

Units = tuple[tuple[Doc, ...], ...]


@dataclass(frozen=True)
class Added:
    """Taps that were added to a dataset, and are not dropped.

    Attributes:
        through: the newest generation that they are complete for; -1: none.
        name: that of the pass, if it was found.
        lacks: earlier generations without a manifest. The newest gets its own first, so a killed
            command leaves some; it creates them when it runs again.
    """

    taps: frozenset[TapRule]
    through: int
    name: str = field(default="", compare=False)
    lacks: frozenset[int] = field(default=frozenset(), compare=False)


@dataclass(frozen=True)
class Content:
    """A dataset.

    Attributes:
        files: in their order.
        generations: the documents of each, unit by unit; the first is the table's own.
        through: the newest generation that is complete; -1: not even the first.
        limits: on documents, with the table and with each later generation.
        shuffled: whether rows have a random order.
        made: whether it was made from units of others.
        dropped: the names of the passes that were.
        records: those of the units that are done, of passes, too; by key, if they were found.
    """

    rules: Rules
    taps: frozenset[TapRule]
    sources: tuple[str, ...]
    files: tuple[str, ...]
    generations: tuple[Units, ...]
    through: int
    added: frozenset[Added] = frozenset()
    limits: tuple[int | None, ...] = (None,)
    shuffled: bool = False
    made: bool = field(default=False, compare=False)
    dropped: frozenset[str] = field(default=frozenset(), compare=False)
    records: Mapping[str, bytes] = field(default_factory=dict[str, bytes], compare=False)

    @property
    def last(self) -> int:
        return len(self.generations) - 1

    @property
    def most(self) -> int | None:
        """The newest limit on documents."""
        return self.limits[-1]

    def docs(self, generation: int | None = None) -> tuple[Doc, ...]:
        """The documents up to a generation, all by default."""
        stop = len(self.generations) if generation is None else generation + 1
        return tuple(doc for units in self.generations[:stop] for unit in units for doc in unit)

    @property
    def units(self) -> Units:
        return tuple(unit for units in self.generations for unit in units)

    @property
    def next_ordinal(self) -> int:
        return max((doc.ordinal for doc in self.docs()), default=-1) + 1

    @property
    def opened(self) -> int:
        """The generation that readers get; -1: nothing."""
        passes = [each.through for each in self.added if each.through >= 0]
        return min([self.through, *passes])

    @property
    def readable(self) -> tuple[tuple[Doc, ...], frozenset[TapRule]]:
        """The documents and the taps that readers get."""
        if self.opened < 0:
            return (), frozenset()
        there = [e for e in self.added if e.through >= self.opened and self.opened not in e.lacks]
        whole = [each.taps for each in there]
        return self.docs(self.opened), self.taps.union(*whole)

    @property
    def uncut(self) -> "Content":
        """The same without the borders of units."""
        whole = ((tuple(d for unit in units for d in unit),) for units in self.generations)
        return replace(self, generations=tuple(whole))

    def told(self) -> str:
        """In one line."""
        cut = [",".join(f"{d.ordinal}={d.file}{d.place}" for d in u) for u in self.uncut.units]
        taps = [f"{t.name}:{t.store}/{t.compute}" for t in sorted(self.taps)]
        more = [
            f"+[{' '.join(f'{t.name}:{t.store}/{t.compute}' for t in sorted(e.taps))}] "
            f"through {e.through}"
            for e in sorted(self.added, key=lambda e: sorted(e.taps))
        ]
        rules = [str(each) for each in self.rules if each] + ["shuffled"] * self.shuffled
        limit = [f"at most {self.most}"] if self.most else []
        return (
            f"{' '.join(taps + more)} of {' | '.join(cut)}, through {self.through} "
            f"({' '.join([*rules, *limit])}; from {' '.join(self.sources)})"
        )


World = Mapping[str, Content | None]


class Refused(Exception):
    """A command that must not succeed."""


# -- what commands make of it ----------------------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """A command, as a program holds it.

    Attributes:
        place: what it makes or changes; of a reader, what it reads.
        of: the places that it reads.
        files: appear in the growing directory before it begins.
        units: which units it copies: a slice.
        kill: it is killed after so many requests.
        rough: how often requests fail; 0: never.
        again: whether it is repeated, without faults, if it did not succeed.
        beside: runs at the same time.
        delay: seconds after the beginning of the one it runs beside.
    """

    kind: str
    place: str
    of: tuple[str, ...] = ()
    source: str | None = None
    files: tuple[str, ...] = ()
    taps: frozenset[TapRule] = frozenset()
    rules: Rules = Rules()
    most: int | None = None
    units: tuple[int | None, int | None, int | None] = (None, None, None)
    seed: int = 0
    damage: str = ""
    kill: int | None = None
    rough: float = 0.0
    again: bool = True
    beside: "Op | None" = None
    delay: float = 0.0

    def __str__(self) -> str:
        told = [self.kind, *self.of, *([] if self.kind in ONTO else [self.place])]
        told += [f"({' '.join(self.files)} appear in {GROWS})"] if self.files else []
        told += [f"corpus={self.source}"] if self.source else []
        told += [f"taps={t.name}:{t.store}/{t.compute}" for t in sorted(self.taps)]
        told += [f"{n}={v}" for n, v in self.rules._asdict().items() if v and v != MODELS[0]]
        told += [f"max-docs={self.most}"] if self.most is not None else []
        told += ["units=" + ":".join("" if at is None else str(at) for at in self.units)]
        if self.units == (None, None, None):
            told.pop()
        told += [f"-> {self.place}"] if self.kind in ONTO else []
        told += [f"damage={self.damage}"] if self.damage else []
        told += [f"seed={self.seed}"] if self.kind in ("shuffle", "take", "repair") else []
        told += [f"| killed after {self.kill} requests"] if self.kill is not None else []
        told += [f"| faults x{self.rough}"] if self.rough else []
        told += ["| not repeated"] if not self.again else []
        if self.beside:
            told += [f"\n      beside it, after {self.delay:.2f} s: {self.beside}"]
        return " ".join(told)


ONTO = ("copy", "part", "merge", "compact", "shuffle", "like")  # make a dataset from others
CHANGES = ("extract", "more", "add-corpus", "add-taps", "drop")  # change what a place contains


def after(op: Op, world: World, grown: tuple[str, ...]) -> Content | None:
    """What its place contains once a command has succeeded.

    Args:
        grown: the files of the directory that gains some.

    Raises:
        Refused: if it must not succeed.
    """
    now = world[op.place]
    files = {**SOURCES, GROWS: tuple(sorted(grown))}
    if op.kind == "extract":
        return _extracted(op, now, files)
    if op.kind in ("more", "add-corpus"):
        return _grown(op, _there(now), files)
    if op.kind == "add-taps":
        return _with_taps(op, _there(now))
    if op.kind == "drop":
        return _dropped(op, _there(now))
    if op.kind not in ONTO:
        return now
    parts = [_there(world[place]) for place in op.of]
    if op.kind == "copy":
        return _copied(parts[0], now)
    made = {
        "part": _part, "merge": _merged, "compact": _whole, "shuffle": _whole, "like": _like,
    }[op.kind](op, parts)  # fmt: skip
    if now is None:
        return made
    # (Taps may have been added to what an earlier one has made.)
    if replace(made, through=now.through, added=now.added).uncut != now.uncut:
        raise Refused(f"{op.place} holds another dataset")
    return replace(made, added=now.added, dropped=now.dropped)


def _there(content: Content | None) -> Content:
    if content is None:
        raise Refused("there is no dataset")
    return content


def _extracted(op: Op, now: Content | None, files: Mapping[str, tuple[str, ...]]) -> Content:
    assert op.source
    names = files[op.source]
    if now is None:
        docs = documents(names, most=op.most)
        return Content(op.rules, op.taps, (op.source,), names, ((docs,),), 0, limits=(op.most,))
    every = (*names, *(name for source in now.sources[1:] for name in files[source]))
    if {*every} != {*now.files}:
        raise Refused(f"its files are {' '.join(now.files)}")
    # (Options that are not given come from the store.)
    where, most = op.rules.where or now.rules.where, op.most or now.most
    asked = op.rules._replace(where=where), op.taps, most
    if asked != (now.rules, now.taps, now.most):
        raise Refused("its recipe is another")
    return replace(now, through=now.last)


def _grown(op: Op, now: Content, files: Mapping[str, tuple[str, ...]]) -> Content:
    if now.shuffled:
        raise Refused("it is shuffled")
    if op.most is not None and op.most < len(now.docs()):
        raise Refused("it has more documents")
    if now.made and (now.most is not None or op.most is not None):
        raise Refused("it was made of others, whose limit does not tell where it ends")
    sources = now.sources
    if op.source and op.source not in sources:
        sources = (*sources, op.source)
    found = dict.fromkeys(name for source in sources for name in files[source])
    new = tuple(name for name in found if name not in now.files)
    most = now.most if op.most is None else op.most
    if now.most is None:
        docs = documents(new, now.next_ordinal)
        if most is not None:
            docs = docs[: most - len(now.docs())]
    else:
        docs = documents((*now.files, *new), most=most)[len(now.docs()) :]
    if not docs:
        return replace(now, through=now.last)
    return replace(
        now,
        sources=sources,
        files=(*now.files, *new),
        generations=(*now.generations, (docs,)),
        through=now.last + 1,
        limits=(*now.limits, most),
    )


def _with_taps(op: Op, now: Content) -> Content:
    if now.shuffled or now.through < now.last:
        raise Refused("it is shuffled, or not finished")
    same = next((each for each in now.added if each.taps == op.taps), None)
    others = now.taps.union(*(each.taps for each in now.added - {same}))
    both = {tap.name for tap in op.taps} & {tap.name for tap in others}
    if both:
        raise Refused(f"it has {min(both)}")
    return replace(now, added=now.added - {same} | {Added(op.taps, now.last)})


def _dropped(op: Op, now: Content) -> Content:
    names = {tap.name for tap in op.taps}
    gone = {each for each in now.added if names & {tap.name for tap in each.taps}}
    if {tap.name for each in gone for tap in each.taps} != names:
        raise Refused("no such taps were added, or others with them")
    dropped = now.dropped | {each.name for each in gone if each.name}
    return replace(now, added=now.added - gone, dropped=dropped)


def _copied(source: Content, now: Content | None) -> Content:
    if now is None:
        return source
    shorter, longer = sorted((source, now), key=lambda each: each.last)
    beginning = replace(
        longer, generations=longer.generations[: len(shorter.generations)], added=shorter.added,
        through=shorter.through, files=shorter.files, sources=shorter.sources,
        limits=longer.limits[: len(shorter.generations)],
    )  # fmt: skip
    if beginning != shorter or longer.files[: len(shorter.files)] != shorter.files:
        raise Refused("the copy is of another dataset, or has grown otherwise")
    made_otherwise = [
        key for key, data in source.records.items() if now.records.get(key, data) != data
    ]
    if made_otherwise:
        raise Refused(f"{made_otherwise[0]} is of a unit that the copy has made itself")
    # Taps that were added to the copy alone stay; those that either has dropped are gone.
    dropped = source.dropped | now.dropped
    there = {each.taps: each for each in now.added if each.name not in dropped}
    for each in source.added:
        if each.name not in dropped and any(_of_other_pass(each, o) for o in there.values()):
            raise Refused("the copy has such taps from another pass")
    for each in source.added:
        had = there.get(each.taps)
        if each.name not in dropped and (had is None or each.through > had.through):
            there[each.taps] = each
    ahead = max(source, now, key=lambda each: (each.last, each.through))
    through = max(source.through, now.through)  # (growth of the copy may have begun without it)
    made = replace(ahead, through=through, added=frozenset(there.values()), dropped=dropped)
    kept = frozenset(each for each in now.added if each.name not in dropped)
    if made.opened < replace(now, added=kept).opened:
        raise Refused("taps of the source lack documents that the copy has")
    new = [each for each in source.added if each.name not in dropped and each.through >= 0]
    if now.last > source.last and any(
        not any(each.taps == other.taps and other.through >= 0 for other in kept) for each in new
    ):
        raise Refused("taps of the source lack documents that are being added to the copy")
    return made


def _of_other_pass(one: Added, other: Added) -> bool:
    """Whether two passes have the same tap. (Those without a name are told apart by their taps.)"""
    same = one.name == other.name if one.name and other.name else one.taps == other.taps
    return not same and bool({tap.name for tap in one.taps} & {tap.name for tap in other.taps})


def flat(content: Content) -> Content:
    """The dataset as one table, with all its taps; raise `Refused` if it is not finished."""
    if content.through < content.last:
        raise Refused("the source is not finished")
    if any(0 <= each.through < content.last for each in content.added):
        raise Refused("taps of the source lack documents")
    whole = [each.taps for each in content.added if each.through >= 0]
    taps = content.taps.union(*whole)
    return replace(
        content, taps=taps, generations=(content.units,), through=0, added=frozenset(), made=True,
        limits=(content.most,),
    )  # fmt: skip


def _one_recipe(content: Content) -> Content:
    if len({tap[1:] for tap in content.taps}) > 1:
        raise Refused("its taps are of several recipes")
    return content


def _chosen(op: Op, content: Content) -> Content:
    """With the taps that a command names, all by default."""
    named = {tap.name for tap in op.taps}
    if not named:
        return content
    if named - {tap.name for tap in content.taps}:
        raise Refused("it has no such taps")
    return replace(content, taps=frozenset(tap for tap in content.taps if tap.name in named))


def _part(op: Op, parts: list[Content]) -> Content:
    whole = _one_recipe(_chosen(op, flat(parts[0])))
    units = whole.units[slice(*op.units)]
    if not units or (whole.shuffled and units != whole.units):
        raise Refused("it has no such units")
    return replace(whole, generations=(units,))


def _whole(op: Op, parts: list[Content]) -> Content:
    whole = _one_recipe(_chosen(op, flat(parts[0])))
    return replace(whole, shuffled=True) if op.kind == "shuffle" else whole


def _merged(op: Op, parts: list[Content]) -> Content:
    flattened = [_one_recipe(flat(part)) for part in parts]
    first = flattened[0]
    units, files = list[tuple[Doc, ...]](), list[str]()
    begin = 0
    for part in flattened:
        same = (part.rules, part.taps) == (first.rules, first.taps)
        if not same or part.shuffled:
            raise Refused("they are of different recipes, or shuffled")
        units += [tuple(d._replace(ordinal=d.ordinal + begin) for d in u) for u in part.units]
        files += part.files
        begin += part.next_ordinal
    if len({*files}) < len(files):
        raise Refused("a file is in two of them")
    # A limit that left nothing out does not count. (A part of a dataset does not tell.)
    ended = [
        part.most is not None and (part.made or len(part.docs()) >= part.most) for part in parts
    ]
    if any(ended[:-1]):
        raise Refused("one that is not the last ends at its limit")
    sources = tuple(source for part in flattened for source in part.sources)
    return replace(
        first, sources=sources, files=tuple(files), generations=(tuple(units),),
        limits=(sum(map(len, units)) if ended[-1] else None,),
    )  # fmt: skip


def _like(op: Op, parts: list[Content]) -> Content:
    like = parts[0]
    if like.shuffled or like.rules.where != op.rules.where:
        raise Refused("its rows would differ")
    return replace(
        like, rules=op.rules, taps=op.taps, generations=(like.units,), through=0, added=frozenset(),
        limits=(like.most,),
    )  # fmt: skip


def between(lo: Content | None, hi: Content | None, found: Content | None) -> bool:
    """Whether a dataset is one state, another, or on the way from one to the other."""
    lo, hi, found = (each and each.uncut for each in (lo, hi, found))
    if found in (lo, hi):
        return True
    if hi is None or found is None:
        return False
    old = {each.taps: each.through for each in lo.added} if lo else {}
    # (A copy drops what its source has dropped; the same taps may follow from another pass.)
    gone = {each.taps for each in lo.added if each.name in hi.dropped} if lo else set[Any]()
    was = {taps: through for taps, through in old.items() if taps not in gone}
    will = {each.taps: each.through for each in hi.added}
    now = {each.taps: each.through for each in found.added}
    if len(now) < len(found.added):
        return False
    first = len(lo.generations) if lo else 1
    return (
        (found.rules, found.taps, found.shuffled) == (hi.rules, hi.taps, hi.shuffled)
        and first <= len(found.generations) <= len(hi.generations)
        and found.generations == hi.generations[: len(found.generations)]
        and (lo.through if lo else -1) <= found.through <= hi.through
        and all(was.get(t, -1) <= n <= max(old.get(t, -1), will.get(t, -1)) for t, n in now.items())
        and all(taps in old or taps in will for taps in now)
        and all(taps in now for taps in was if taps in will)
    )


def on_the_way(lo: Content, hi: Content) -> Iterator[Content]:
    """What readers may find while a command makes one state of another.

    Taps that are dropped go, and new ones come, one pass at a time, as generations do.
    """
    stay = lo.added & hi.added
    moving = sorted((lo.added | hi.added) - stay, key=lambda each: (each.through, *each.taps))
    for through in range(lo.through, hi.through + 1):
        for chosen in product((False, True), repeat=len(moving)):
            yield replace(hi, through=through, added=stay | {*compress(moving, chosen)})


# -- what is found ---------------------------------------------------------------------------------


def found_in(reader: PageReader | None, grows: Path) -> Content | None:
    """What a dataset contains, as the plain reader finds it."""
    if reader is None:
        return None
    table, recipe = reader.table, reader.table["recipe"]
    sources = table.get("sources", [recipe["corpus_source"]])
    for more in reader.generations:
        first, *added = more["sources"]
        sources = [first, *sources[1:], *(each for each in added if each not in sources)]
    bounds = [0, *reader.counts]
    units = tuple(
        tuple(Doc(doc.ordinal, file_of()[doc.file], doc.place) for doc in row.documents)
        for row in reader.unit_rows
    )
    whole = [number for number in range(len(reader.counts)) if reader.has_manifest(number)]
    if not whole and len(reader.done(range(reader.counts[0]))) == reader.counts[0]:
        whole = [0]
    done = tuple(f"{each.prefix}done/" for each in (reader, *reader.live))
    passes = [_added_of(each, len(reader.counts)) for each in reader.live]
    return Content(
        rules=_rules_of(recipe),
        taps=_taps_of(reader),
        sources=tuple(source_of(path, grows) for path in sources),
        files=tuple(file_of()[identity] for identity in reader.files),
        generations=tuple(units[a:b] for a, b in zip(bounds, bounds[1:], strict=False)),
        through=max(whole, default=-1),
        added=frozenset(passes),
        limits=(recipe["max_docs"], *(more["max_docs"] for more in reader.generations)),
        shuffled="shuffled" in table,
        made="made_of" in table,
        dropped=frozenset(key.split("/")[1] for key in reader.objects if _DROPPED in key),
        records={key: data for key, data in reader.objects.items() if key.startswith(done)},
    )


_DROPPED = "/dropped.json"


def _added_of(part: PagePass, generations: int) -> Added:
    there = {number for number in range(generations) if part.has_manifest(number)}
    through = max(there, default=-1)
    lacks = frozenset(range(through + 1)) - there
    return Added(_taps_of(part), through, part.name, lacks)


def _rules_of(recipe: Mapping[str, Any]) -> Rules:
    splice = recipe.get("splice", [])
    if splice not in ([], [SPLICE]):
        raise Invalid(f"the recipe has the splices {splice}")
    weights = weights_of()[recipe["model"]["weights"]]
    return Rules(weights, SPLICE if splice else None, recipe["where"])


def _taps_of(reader: PageReader) -> frozenset[TapRule]:
    compute = reader.table["recipe"]["compute_dtype"]
    return frozenset(
        TapRule(name, tap["dtype"], compute) for name, tap in reader.table["taps"].items()
    )
