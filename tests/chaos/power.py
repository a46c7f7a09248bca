"""Power cuts: what a disk may hold after one, by strict POSIX, at every moment of a recorded run.

tests/faults.c records every call that changes something. `Disk` replays them and tells apart what
is durable from what is not: the bytes of a file are when it was synced, and a name in a folder is
when that folder was, each by itself. Whatever is not durable may survive or not, in any
combination: a write may be lost, done in half or done; a name may stand for any file that it stood
for since its folder was synced. So a rename without a sync may leave both names, or neither.
"""

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

State = dict[str, bytes | None]  # files by their path, and folders
Choose = Callable[[int], int]  # one of so many


@dataclass(frozen=True)
class Event:
    """A recorded call that changed something, or a note."""

    kind: str
    words: tuple[str, ...]
    data: bytes = b""


def read_events(log: Path) -> list[Event]:
    data, at = log.read_bytes(), 0
    events: list[Event] = []
    while at < len(data):
        end = data.index(b"\n", at)
        kind, *words = data[at:end].decode().split("\t")
        size = int(words[2]) if kind == "W" else 0
        at = end + 1 + size
        events.append(Event(kind, tuple(words), data[end + 1 : at]))
    return events


@dataclass(eq=False)
class _Node:
    """A file or a folder."""

    folder: bool
    synced: bytes = b""  # of a file
    unsynced: list[tuple[int, bytes | None]] = field(default_factory=list)  # None: cut to a size
    names: "dict[str, _Node | None]" = field(default_factory=dict)  # of a folder, as it is now
    durable: "dict[str, _Node | None]" = field(default_factory=dict)
    since: "dict[str, list[_Node | None]]" = field(default_factory=dict)  # each name's, in order

    def put(self, name: str, node: "_Node | None") -> None:
        self.names[name] = node
        self.since.setdefault(name, [self.durable.get(name)]).append(node)

    def sync(self) -> None:
        self.synced, self.unsynced = self.content(lambda count: 1), []
        self.durable, self.since = dict(self.names), {}

    def content(self, choose: Choose) -> bytes:
        """Return the state after a cut. (Of a change 0: it is lost, 1: done, 2: half done.)"""
        data = bytearray(self.synced)
        for at, change in self.unsynced:
            taken = choose(3 if change and len(change) > 1 else 2)
            if taken and change is None:
                data = data[:at].ljust(at, b"\0")
            elif taken and change is not None:
                part = change if taken == 1 else change[: len(change) // 2]
                data = data.ljust(at, b"\0")
                data[at : at + len(part)] = part
        return bytes(data)


class Disk:
    """A folder that was wholly durable, and the changes made to it since."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._nodes: dict[str, _Node] = {}  # by the number the system gives a file
        self._top = self._read(root)

    def _read(self, path: Path) -> _Node:
        node = _Node(path.is_dir(), b"" if path.is_dir() else path.read_bytes())
        self._nodes[str(path.stat().st_ino)] = node
        if node.folder:
            node.names = {child.name: self._read(child) for child in path.iterdir()}
            node.durable = dict(node.names)
        return node

    def _place(self, path: str) -> tuple[_Node, str]:
        node = self._top
        *folders, name = path.removeprefix(self._root).strip("/").split("/")
        for part in folders:
            found = node.names[part]
            assert found is not None
            node = found
        return node, name

    def apply(self, event: Event) -> None:
        words = event.words
        if event.kind in "CD":
            folder, name = self._place(words[1])
            self._nodes[words[0]] = node = _Node(event.kind == "D")
            folder.put(name, node)
        elif event.kind == "W":
            self._nodes[words[0]].unsynced.append((int(words[1]), event.data))
        elif event.kind == "T":
            self._nodes[words[0]].unsynced.append((int(words[1]), None))
        elif event.kind == "S":
            self._nodes[words[0]].sync()
        elif event.kind in "LR":
            (old, source), (new, name) = self._place(words[0]), self._place(words[1])
            node = old.names[source]
            if event.kind == "R":
                old.put(source, None)
            new.put(name, node)
        elif event.kind == "U":
            folder, name = self._place(words[0])
            folder.put(name, None)

    def crashed(self, choose: Choose) -> State:
        """Return the state after a cut; `choose` picks which of the undurable changes survive."""
        state: State = {}
        self._crash(self._top, "", choose, state)
        return state

    def _crash(self, node: _Node, path: str, choose: Choose, state: State) -> None:
        for name in sorted({*node.durable, *node.since}):
            options = list(dict.fromkeys(node.since.get(name) or [node.durable[name]]))
            found = options[choose(len(options))] if len(options) > 1 else options[0]
            where = f"{path}/{name}" if path else name
            if found is not None and found.folder:
                state[where] = None
                self._crash(found, where, choose, state)
            elif found is not None:
                state[where] = found.content(choose)


def crashes(disk: Disk, rng: random.Random, most: int) -> Iterator[State]:
    """States after a cut: all of them if they are few, else the extremes and random ones."""
    made: list[tuple[int, int]] = []
    kept = disk.crashed(lambda options: made.append((0, options)) or options - 1)
    if math.prod(options for _, options in made) <= most:
        yield from _all_crashes(disk)
        return
    yield kept
    yield disk.crashed(lambda options: 0)
    for _ in range(most - 2):
        yield disk.crashed(partial(_draw, rng, rng.choice((0.1, 0.5, 0.9))))


def _all_crashes(disk: Disk) -> Iterator[State]:
    script: list[int] = []
    while True:
        made: list[tuple[int, int]] = []
        yield disk.crashed(partial(_follow, script, made))
        while made and made[-1][0] + 1 == made[-1][1]:
            made.pop()
        if not made:
            return
        script = [chosen for chosen, _ in made]
        script[-1] += 1


def _follow(script: Sequence[int], made: list[tuple[int, int]], options: int) -> int:
    """As a script says, and the first from its end on; `made` gets each choice, and of how many."""
    chosen = script[len(made)] if len(made) < len(script) else 0
    made.append((chosen, options))
    return chosen


def _draw(rng: random.Random, survives: float, options: int) -> int:
    return rng.randrange(1, options) if rng.random() < survives else 0


def prefixes(
    disk: Disk, events: Sequence[Event], *, seed: int, most: int, first: int = 1
) -> Iterator[tuple[list[str], State]]:
    """Every state after a cut at every moment, each once, and what had been noted by then.

    Args:
        most: states of a moment: all of them, or the extremes and random ones.
        first: the moment to begin with, in events.
    """
    rng, noted, seen = random.Random(seed), list[str](), set[bytes]()
    for moment, event in enumerate(events, 1):
        if event.kind == "N":
            noted.append(event.words[0])
        disk.apply(event)
        if moment < first:
            continue
        for state in crashes(disk, rng, most):
            digest = hashlib.sha256(repr((noted, sorted(state.items()))).encode()).digest()
            if digest not in seen:
                seen.add(digest)
                yield list(noted), state


def materialise(state: State, folder: Path) -> None:
    folder.mkdir()
    for name, data in state.items():
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)
