"""Commands at work on a few places, and what must be so of what they make.

The shipped commands run in simulated time on simulated buckets (`scheduler.py`, `store.py`), from
the corpus to the reader. Only the model is stood in for, by a hash (`documents.py`). After every
command, each place that has changed is compared with

* the corpus: every row of every unit is that of the file, the place and the recipe that the table
  names, and no document is there twice (`places.py`);
* the model of the commands (`contents.py`): a command that succeeded did all that it says, one that
  was refused changed nothing, and one that was killed has done a part, which the same command ends;
* `spile.open` and `spile verify`: both find the same, and documents that were readable stay so.
"""

import functools
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from simulator import contents, documents
from simulator.contents import CHANGES, ONTO, Content, Op, Refused, after, between
from simulator.documents import GROWS, GROWS_FROM, SEQ_LEN, HashStep
from simulator.places import HOST, Places, Violation, read, reads, told
from simulator.scheduler import Process, Scheduler
from simulator.states import States
from simulator.store import Faults, Store
from spile.core.config import Recipe, Runtime
from spile.core.errors import CorruptError, SpileError
from spile.core.system import using
from spile.dataset.maintain import repair
from spile.dataset.maintain.assemble import copy_part, merge
from spile.dataset.maintain.compact import compact
from spile.dataset.maintain.gc import collect_garbage
from spile.dataset.maintain.replica import replicate
from spile.dataset.maintain.shuffle import shuffle
from spile.dataset.maintain.verify import verify
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.passes import drop_taps
from spile.metrics import Counters
from spile.models.files.checkpoint import Checkpoint
from spile.objects import Objects, bucket
from spile.objects.bucket import BucketObjects
from spile.objects.rooted import RootedObjects
from spile.plan import passes, resolve
from spile.run import assembly
from spile.run import extract as extraction
from spile.run import repair as repairing
from spile.run.assembly import Assembly
from spile.run.pipeline.pickers import Place

_DAY = 86_400.0


@dataclass
class _Running:
    """A command at work."""

    op: Op
    outcome: str = ""  # ok, refused, failed, killed or crashed
    said: str = ""
    result: Any = None
    begun: bool = False  # whether it may have begun before it was refused
    requests: int = 0
    kill: int | None = None


class Run:
    """A program at work."""

    def __init__(self, places: Sequence[str], unit_tokens: int) -> None:
        self._unit_tokens = unit_tokens
        self.scheduler = Scheduler(0)
        self.world: dict[str, Content | None] = dict.fromkeys(places)
        self.trace: list[str] = []
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self._folder = Path(tempfile.mkdtemp(prefix="spile-program-"))
        self._grows = self._folder / GROWS
        self.places = Places(places, self._grows)
        self._grown = list(GROWS_FROM)
        self._undone: dict[str, set[str]] = {place: set() for place in places}
        self._made_from: dict[str, tuple[str, Content | None]] = {}
        self._makers: dict[str, set[str]] = {place: set() for place in places}
        self._recut: set[str] = set()  # places whose units do not follow from their corpus
        self._unlike: set[str] = set()  # places that were made like others that had grown
        self._states = States(self.places, self.outcomes)
        self._runs: Counter[str] = Counter()
        self._processes: dict[Process, _Running] = {}

    @contextmanager
    def simulated(self) -> Generator[None, None, None]:
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.CRITICAL)
            documents.grow(self._grows, self._grown)
            stack.enter_context(using(self.scheduler))
            for owner, name, stub in (
                (bucket, "open_bucket", self._open),
                (Assembly, "load", lambda parts: HashStep(parts)),
                (extraction, "stop_on_signal", lambda stop, at_second=None: nullcontext(stop)),
                (extraction, "peak_flops", lambda device, dtype: None),
                (repair, "secrets", SimpleNamespace(token_hex=self.scheduler.token)),
                *_cached(),
            ):
                stack.enter_context(mock.patch.object(owner, name, stub))
            stack.callback(self.scheduler.close)
            yield

    def _say(self, line: str) -> None:
        """Note what happened; two runs of a program have different folders."""
        self.trace.append(line.replace(str(self._folder), ""))

    # -- commands -----------------------------------------------------------------------------

    def give(self, op: Op) -> None:
        """Let a dataset be there."""
        self.places.buckets[op.place].restore(_given(op, self._unit_tokens))
        self.places.has_changed(op.place)
        self.world[op.place] = self.places.found(op.place)
        self.places.look_at(op.place, self.world[op.place])

    def execute(self, op: Op) -> None:
        """Run a command, and what runs beside it; look at what came of it."""
        for name in op.files:
            if name not in self._grown:
                self._grown.append(name)
        documents.grow(self._grows, op.files)
        if op.kind == "take":
            self._states.take(op, self.world[op.place])
        elif op.kind == "resume":
            self._states.resume(op, self.world[op.place])
        elif op.kind == "repair":
            self._repair(op)
        else:
            self._once(op)

    def _once(self, op: Op) -> None:
        before = dict(self.world)
        clean = {place for place, undone in self._undone.items() if not undone}
        together = [op, *([op.beside] if op.beside else [])]
        ran = self._together(op, together)
        self._judge(ran, before)
        for each in ran:
            must = len(ran) == 1 and self._must(each.op, before, clean)
            if each.outcome == "ok":
                self._undone[each.op.place].discard(str(_plain(each.op)))
            elif must and each.outcome != "killed" and not each.op.rough:
                raise Violation(f"refused: {_plain(each.op)}: {each.said}")
            elif each.op.again and (each.outcome == "killed" or each.op.rough or len(ran) > 1):
                self._again(each.op, before if len(ran) == 1 else None, must)

    def _again(self, op: Op, before: Mapping[str, Content | None] | None, must: bool) -> None:
        """Repeat a command that did not succeed."""
        world = dict(self.world)
        (ran,) = self._together(op, [_plain(op)])
        self._judge([ran], world)
        if ran.outcome == "ok":
            self._undone[op.place].discard(str(_plain(op)))
            if before is not None:
                self._same_as(op, before)
        elif must and before is not None:
            self._same_as(op, before, ran.said)  # (what is dropped cannot be dropped again)

    def _same_as(self, op: Op, before: Mapping[str, Content | None], said: str = "") -> None:
        """Expect that a command which was killed, and then repeated, has done what it does."""
        try:
            wanted = after(op, before, tuple(self._grown))
        except Refused as why:
            raise Violation(f"model: {_plain(op)} succeeded, though {why}") from None
        if not between(wanted, wanted, self.world[op.place]):
            raise (
                Violation(f"refused: repeated, {_plain(op)}: {said}")
                if said
                else self._other(op.place, [(wanted, wanted)])
            )

    def _together(self, first: Op, ops: Sequence[Op]) -> list[_Running]:
        """Run commands at once, until nothing is left to happen."""
        self._draw_anew(first)
        running = [_Running(op, kill=op.kill) for op in ops]
        for each in running:
            delay = each.op.delay if len(ops) > 1 else 0.0
            self.scheduler.at(delay, functools.partial(self._start, each))
        self.scheduler.run(self.scheduler.now + _DAY)
        for each in running:
            if not each.outcome:
                raise Violation(f"hang: {each.op} never ended")
            self._say(f"   {each.op.kind} {each.op.place}: {each.outcome} {each.said}")
            self.outcomes[each.op.kind, each.outcome] += 1
            if each.outcome == "crashed":
                raise Violation(f"crash: {each.op}: {each.said}") from each.result
        self._processes.clear()
        return running

    def _draw_anew(self, op: Op) -> None:
        """Let chance depend on the command and on how often it has run, not on those before it."""
        told = f"{op.seed} {op.kind} {op.place} {op.source}"
        self._runs[told] += 1
        self.scheduler.random.seed(f"{told} {self._runs[told]}")

    def _start(self, running: _Running) -> None:
        def life() -> None:
            try:
                running.result = self._command(running.op)
                running.outcome = "ok"
            except SpileError as error:
                running.outcome = "refused" if error.exit_code == 2 else "failed"
                running.said = f"({type(error).__name__}: {error})"
                running.result = error
            except Exception as error:
                running.outcome, running.result = "crashed", error
                running.said = f"({type(error).__name__}: {error})"
            if running.outcome == "ok":
                self.places.note_shown(running.op.place)

        process = Process(running.op.kind)
        self._processes[process] = running
        process.main = self.scheduler.spawn(process, life)

    def _open(self, url: str, spool: object = None, prefix: str = "") -> Objects:
        place, _, inside = url.removeprefix(HOST).partition("/")
        objects: Objects
        if self.places.looking:
            objects = self.places.held(place)
        else:
            assert self.scheduler.task
            process = self.scheduler.task.process
            running = self._processes[process]
            store = Store(
                self.scheduler, self.places.buckets[place], _faults(running.op.rough),
                functools.partial(self._asked, process),
            )  # fmt: skip
            objects = BucketObjects(HOST + place, store)
        return RootedObjects(objects, f"{inside.rstrip('/')}/") if inside else objects

    def _asked(self, process: Process, line: str) -> None:
        """Count a request; after so many, a process is killed."""
        running = self._processes.get(process)
        if running is None or running.outcome:
            return
        running.requests += 1
        if running.requests == running.kill:
            process.alive = False
            running.outcome, running.said = "killed", f"(after {line.split(' ', 2)[2]})"

    def _command(self, op: Op) -> Any:
        url, objects = HOST + op.place, self._open(HOST + op.place)
        of = [self._open(HOST + place) for place in op.of]
        names = sorted(tap.name for tap in op.taps)
        if op.kind in ("extract", "more", "add-corpus", "add-taps", "like"):
            stop: Any = self.scheduler.event()
            return extraction.extract(
                self._recipe(op), url, Runtime(), counters=Counters(), stop=stop,
                options=extraction.RunOptions(place=Place()),
            )  # fmt: skip
        if op.kind == "drop":
            return drop_taps(Ledger(objects), names)
        if op.kind == "copy":
            return replicate(of[0], objects)
        if op.kind == "part":
            units = [*range(len(Ledger(of[0]).table().units))][slice(*op.units)]
            whole = op.units == (None, None, None)
            return copy_part(of[0], objects, taps=names or None, units=None if whole else units)
        if op.kind == "merge":
            return merge(of, objects)
        if op.kind == "compact":
            return compact(of[0], objects, unit_bytes=70_000, taps=names or None)
        if op.kind == "shuffle":
            return shuffle(of[0], objects, seed=op.seed % 3, memory=20_000, taps=names or None)
        if op.kind == "gc":
            return collect_garbage(objects)
        if op.kind == "verify":
            return verify(objects, partial=True)
        if op.kind == "read":
            return read(op.place)
        raise AssertionError(op.kind)

    def _recipe(self, op: Op) -> Recipe:
        path = op.source and documents.corpus(op.source, self._grows)
        if op.kind == "more":
            return Recipe(more=True, max_docs=op.most)
        if op.kind == "add-corpus":
            return Recipe(add_corpus=path, max_docs=op.most)
        (spelled,) = {tap[1:] for tap in op.taps}
        names = ",".join(tap.name.replace(".", ":") for tap in sorted(op.taps))
        each: dict[str, Any] = {"store_dtype": spelled[0], "compute_dtype": spelled[1]}
        if op.kind == "add-taps":
            return Recipe(add_taps=names, **each)
        model = str(documents.home() / op.rules.weights)
        splice = (op.rules.splice or "none").replace(" ", ":")
        if op.kind == "like":
            like = HOST + op.of[0]
            return Recipe(like=like, model=model, taps=names, splice=splice, **each)
        return Recipe(
            model=model, corpus=path, taps=names, where=op.rules.where, max_docs=op.most,
            splice=splice, seq_len=SEQ_LEN, unit_tokens=self._unit_tokens, **each,
        )  # fmt: skip

    # -- what must be so ---------------------------------------------------------------------

    def _judge(self, ran: Sequence[_Running], before: Mapping[str, Content | None]) -> None:
        """Compare what is there now with what commands should have made of what was there."""
        changed = [place for place in self.places.buckets if self.places.has_changed(place)]
        for each in ran:
            # (By what another command does, or has left there.)
            each.begun = len(ran) > 1 or bool(self._undone[each.op.place])
            undone = each.outcome in ("failed", "killed", "refused")
            if undone and each.op.place in changed and each.op.kind in (*ONTO, *CHANGES):
                self._undone[each.op.place].add(str(_plain(each.op)))
            if each.outcome == "ok" and each.op.kind == "compact":
                self._made_from[each.op.place] = each.op.of[0], before[each.op.of[0]]
            cut = each.op.kind == "compact" or not self._recut.isdisjoint(each.op.of)
            if each.op.kind in ONTO and each.op.kind != "like" and cut:
                self._recut.add(each.op.place)
            of = [before[place] for place in each.op.of] if each.op.kind == "like" else []
            grown = any(source and source.last for source in of)
            if grown or (each.op.kind in ONTO and not self._unlike.isdisjoint(each.op.of)):
                self._unlike.add(each.op.place)
            if each.outcome == "ok" and each.op.kind == "copy":
                # (A copy has what others have left of commands that were killed there.)
                self._undone[each.op.place] |= self._undone[each.op.of[0]]
        mended = self._clear_up(ran, before, changed)
        judged = dict.fromkeys([*changed, *(each.op.place for each in ran)])
        found = {place: self.places.found(place) for place in judged}
        self.world |= found
        for place in changed:
            self.places.look_at(place, self.world[place])
        every = self._candidates(ran, before)
        if not every:
            done = [each for each in ran if each.outcome == "ok"]
            raise Violation(f"model: {self._why(done, before)}")
        for place in judged:
            spans = [(lo[place], hi[place]) for lo, hi in every]
            if place in mended:
                spans = [(lo, hi and _with_whole_passes(hi)) for lo, hi in spans]
            if not any(between(lo, hi, found[place]) for lo, hi in spans):
                raise self._other(place, spans)
        for each in ran:
            worlds = [before, *(world for span in every for world in span)]
            self._judge_result(each, [world[each.op.place] for world in worlds])

    def _clear_up(
        self, ran: Sequence[_Running], before: Mapping[str, Content | None], changed: Sequence[str]
    ) -> set[str]:
        """Clear up what commands have left that began different datasets in one empty place.

        The table of one of them counts, and records of the others may remain. Then nobody may call
        the place sound, and a repair moves those records aside, or says to delete what has no row.
        The places that a repair has mended are returned.
        """
        mended = set[str]()
        for op in (each.op for each in ran if each.op.kind in (*ONTO, "extract")):
            if before[op.place] is None:
                self._makers[op.place].add(str(_plain(op)))
        for place in changed:
            if len(self._makers[place]) < 2 or not self.places.is_wreck(place):
                continue
            running = self._mended(Op("repair", place))
            if running.outcome != "ok" and "no row is stored there yet" in running.said:
                self.places.buckets[place].restore({})  # as the error says, which nobody regrets
            elif running.outcome != "ok":
                raise Violation(f"refused: repair of a place that two began: {running.said}")
            elif self.places.found(place) is not None:
                mended.add(place)
            self.places.has_changed(place)
            self._makers[place].clear()
            self._undone[place].clear()
        return mended

    def _why(self, ran: Sequence[_Running], before: Mapping[str, Content | None]) -> str:
        """Why commands must not all have succeeded."""
        for each in ran:
            try:
                after(each.op, before, tuple(self._grown))
            except Refused as why:
                return f"{_plain(each.op)} succeeded, though {why}"
        return f"both succeeded: {' and '.join(str(_plain(each.op)) for each in ran)}"

    def _other(self, place: str, spans: Sequence[Any]) -> Violation:
        wanted = {told(hi) for _, hi in spans} | {told(lo) for lo, _ in spans}
        should = "\n  or ".join(sorted(wanted))
        now = told(self.world[place])
        return Violation(f"model: {place} contains\n     {now}\n  and should\n     {should}")

    def _candidates(
        self, ran: Sequence[_Running], before: Mapping[str, Content | None]
    ) -> list[tuple[dict[str, Content | None], dict[str, Content | None]]]:
        """What commands may have made, one after the other in any order: the least, the most."""
        orders = [ran, ran[::-1]] if len(ran) > 1 else [ran]
        if len({str(_plain(each.op)) for each in ran}) < len(ran):
            orders += [ran[:1], ran[1:]]  # of one command twice, each may have done all of it
        found = list[Any]()
        for order in orders:
            spans = [(dict(before), dict(before))]
            for each in order:
                spans = [span for lo, hi in spans for span in self._span(each, lo, hi)]
            found += spans
        for one, other in (ran, ran[::-1]) if len(ran) > 1 else ():
            if one.op.kind in ONTO and one.outcome == "ok" and other.op.place in one.op.of:
                found += self._meanwhile(one.op, other, before)
            if one.op.kind == "copy" and one.outcome == "refused":
                found += [(lo, self._begun(one.op, hi, before)) for lo, hi in found]
        return found

    def _begun(
        self, op: Op, world: dict[str, Content | None], before: Mapping[str, Content | None]
    ) -> dict[str, Content | None]:
        """A place with the records that a copy created before it saw another's pass."""
        source, now = before[op.of[0]], world[op.place]
        if source is None or now is None:
            return world
        kept = {each for each in now.added if each.name not in source.dropped}
        there = {each.taps for each in kept}
        begun = {replace(each, through=-1) for each in source.added if each.taps not in there}
        longer = max(now, source, key=lambda each: each.last)
        generations = {"generations": longer.generations, "limits": longer.limits}
        dropped = now.dropped | source.dropped
        made = replace(now, added=frozenset(kept | begun), dropped=dropped, **generations)
        return {**world, op.place: made}

    def _meanwhile(
        self, op: Op, other: _Running, before: Mapping[str, Content | None]
    ) -> Generator[tuple[dict[str, Content | None], dict[str, Content | None]], None, None]:
        """What a command may have made of a place that another was changing: of what it found."""
        for lo, hi in self._span(other, dict(before), dict(before)):
            place, source = other.op.place, before[other.op.place]
            least, most, now = self._after(op, before), self._after(op, hi), hi[place]
            if source is not None and now is not None and not most:
                # A copy may refuse taps that are complete, and have them while they are not.
                half = {a if a in source.added else replace(a, through=-1) for a in now.added}
                most = self._after(op, {**hi, place: replace(now, added=frozenset(half))})
            if op.kind == "copy" and least and most:
                yield {**lo, op.place: least[0]}, {**hi, op.place: most[0]}
            if source is not None and now is not None and other.op.kind == "copy":
                # Drops come first.
                kept = {each for each in source.added if each.name not in now.dropped}
                bare = replace(source, added=frozenset(kept), dropped=now.dropped)
                for made in self._after(op, {**before, place: bare}):
                    yield {**lo, op.place: made}, {**hi, op.place: made}

    def _after(self, op: Op, world: Mapping[str, Content | None]) -> list[Content | None]:
        try:
            return [after(op, world, tuple(self._grown))]
        except Refused:
            return []

    def _span(self, ran: _Running, lo: dict[str, Any], hi: dict[str, Any]) -> list[Any]:
        op, place = ran.op, ran.op.place
        if op.kind not in (*ONTO, *CHANGES) or (ran.outcome == "refused" and not ran.begun):
            return [(lo, hi)]
        least, most = self._after(op, lo), self._after(op, hi)
        if ran.outcome == "ok":
            both = [*least, *most]
            return [({**lo, place: both[0]}, {**hi, place: both[-1]})] if both else []
        return [(lo, {**hi, place: (most or [hi[place]])[0]})]

    def _must(self, op: Op, before: Mapping[str, Content | None], clean: set[str]) -> bool:
        """Whether a command has no reason to refuse what it is asked."""
        if not clean.issuperset((op.place, *op.of)):
            return False
        now, grown = before[op.place], tuple(self._grown)
        try:
            after(op, before, grown)
        except Refused:
            return False
        parts = [part for place in op.of if (part := before[place])]
        if op.kind == "like" and (
            op.of[0] in self._recut | self._unlike
            or parts[0].made
            or not self._found_again(parts[0])
        ):
            return False
        if op.kind in ONTO:
            return now is None or op.kind == "copy"
        if now is None:
            return op.kind == "extract"
        if op.kind == "add-taps":
            return self._found_again(now)
        if op.kind == "extract":
            return not (now.made or now.shuffled) and self._found_again(now)
        return True

    def _found_again(self, content: Content) -> bool:
        """Whether the sources of a dataset still have the same files."""
        files = {**documents.SOURCES, GROWS: self._grown}
        return {name for source in content.sources for name in files[source]} == {*content.files}

    def _judge_result(self, ran: _Running, states: Sequence[Content | None]) -> None:
        """Judge what a reader or an audit said of a place that had one of some states."""
        kind, place, outcome = ran.op.kind, ran.op.place, ran.outcome
        if states[0] is None or self._undone[place]:
            return
        if kind == "verify" and outcome == "ok" and not ran.result.ok and not ran.op.rough:
            raise Violation(f"verify: {place}: {ran.result.faults[:3]}")
        if kind == "read" and isinstance(ran.result, CorruptError):
            raise Violation(f"open: {place}: {ran.said}")
        if kind != "read" or outcome != "ok":
            return
        on_the_way = (c for each in states if each for c in contents.on_the_way(states[0], each))
        if not any(state and reads(ran.result, state) for state in (*states, *on_the_way)):
            raise Violation(f"open: {place} was read as none of its states")

    def finish(self) -> None:
        """Audit every place."""
        for place, content in self.world.items():
            if content is not None and not self._undone[place]:
                report = self.places.audit(place, partial=content.through < content.last)
                if not report.ok:
                    raise Violation(f"verify: {place}: {report.faults[:3]}")

    # -- damage ----------------------------------------------------------------------------------

    def _repair(self, op: Op) -> None:
        """Damage a dataset, and let it be mended."""
        content, held = self.world[op.place], self.places.buckets[op.place]
        if content is None or content.through < content.last or self._undone[op.place]:
            return
        before = dict(held.objects)
        key = self.places.damage(op.place, op.damage, op.seed)
        if key is None:
            return
        self._say(f"   {key} is damaged ({op.damage})")
        try:
            sound = self.places.audit(op.place, partial=False).ok
        except SpileError:
            sound = False
        if sound:
            raise Violation(
                f"verify: {op.place}: {key} is damaged ({op.damage}), and it says sound"
            )
        source, was = self._made_from.get(op.place, ("", None))
        if content.last or (source and self.world[source] != was):
            source = ""  # (units of a growth come from no source)
        running = self._mended(op, source)
        if running.outcome == "ok":
            self.places.has_changed(op.place)
            self.world[op.place] = self.places.found(op.place)
            mended = _with_whole_passes(content)
            # (Taps whose own record is damaged are dropped: their recipe is unknown.)
            least = replace(content, added=frozenset()) if op.damage == "pass cut" else content
            if not between(least, mended, self.world[op.place]):
                raise self._other(op.place, [(least, mended)])
            self.places.look_at(op.place, self.world[op.place])
            return
        held.restore(before)  # from a backup, as a user would
        self.places.has_changed(op.place)
        # (Rows of a shuffle come from everywhere; a limit on documents hides some of a corpus.)
        same = source or op.place not in self._recut
        if not content.shuffled and self._found_again(content) and same:
            raise Violation(f"refused: repair of {key}: {running.said}")

    def _mended(self, op: Op, source: str = "") -> _Running:
        """Let a dataset be mended, and once more if that was killed."""
        running = _Running(op, kill=op.kill)
        for again in (_plain(op), None):
            self._draw_anew(op)
            command = functools.partial(self._mend, op.place, source)
            with mock.patch.object(self, "_command", lambda _, command=command: command()):
                self.scheduler.at(0.0, functools.partial(self._start, running))
                self.scheduler.run(self.scheduler.now + _DAY)
            self._say(f"   repair {op.place}: {running.outcome} {running.said}")
            self.outcomes["repair", running.outcome] += 1
            if running.outcome == "crashed":
                raise Violation(f"crash: {op}: {running.said}") from running.result
            if running.outcome != "killed" or again is None:
                break
            running = _Running(again)
        return running

    def _mend(self, place: str, source: str) -> None:
        """As `spile verify --repair` does."""
        objects = self._open(HOST + place)
        from_source = self._open(HOST + source) if source else None
        stop: Any = self.scheduler.event()
        repairing.repair(
            objects, verify(objects), recipe=Recipe(), source=from_source, partial=False,
            counters=Counters(), on_start=lambda *_: None, stop=stop,
        )  # fmt: skip
        report = verify(objects)
        if not report.ok:
            raise CorruptError(place, f"still has faults: {report.faults[:2]}")


def _with_whole_passes(content: Content) -> Content:
    """What a repair may make of a dataset: it also makes units that a pass lacks."""
    whole = {replace(a, through=max(a.through, content.last)) for a in content.added}
    return replace(content, added=frozenset(whole))


def _plain(op: Op) -> Op:
    """The command alone."""
    return replace(op, kill=None, rough=0.0, beside=None, delay=0.0, again=True)


def _faults(rough: float) -> Faults:
    return Faults(
        refused=0.05 * rough, lost=0.02 * rough, late=0.01 * rough, twice=0.02 * rough,
        echoed=0.02 * rough, latency=0.03,
    )  # fmt: skip


@functools.cache
def _given(op: Op, unit_tokens: int) -> dict[str, tuple[bytes, str]]:
    """The objects of a dataset that nothing has disturbed."""
    run = Run([op.place], unit_tokens)
    with run.simulated():
        run.execute(op)
    return dict(run.places.buckets[op.place].objects)


@functools.cache
def _cached() -> tuple[tuple[Any, str, Any], ...]:
    """What is the same for every command, as the models never change: it is read once."""
    opened = functools.cache(resolve.open_checkpoint)
    identities: dict[Any, dict[str, str]] = {}
    identity = Checkpoint.identity

    def identity_of(checkpoint: Checkpoint) -> dict[str, str]:
        if checkpoint.directory not in identities:
            identities[checkpoint.directory] = identity(checkpoint)
        return dict(identities[checkpoint.directory])

    return (
        (resolve, "open_checkpoint", opened),
        (passes, "open_checkpoint", opened),
        (resolve, "TextTokenizer", functools.cache(resolve.TextTokenizer)),
        (Checkpoint, "identity", identity_of),
        (assembly, "use_threads", lambda asked: None),
    )
