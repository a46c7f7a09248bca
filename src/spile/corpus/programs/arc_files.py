"""The tasks of ARC-AGI, read from any of the layouts in which they are published, and checked."""

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

from spile.core.bounded_json import JsonError, parse_json
from spile.core.errors import InputError
from spile.core.options import shown
from spile.objects.paths import AnyPath, files_below, path_of, size_of

_log = logging.getLogger("spile")

Grid = tuple[tuple[int, ...], ...]

COLORS = 10
LARGEST = 30  # rows of a grid, and cells of a row
SOLUTIONS = "_solutions.json"
_CHALLENGES = "_challenges.json"
_IDS = ("id", "task_id")
_MAX_BYTES = 1 << 30
_READERS = 16  # a bucket answers late, but many at once


@dataclass(frozen=True)
class Pair:
    """An input and what becomes of it; None where that is not known."""

    input: Grid
    output: Grid | None


@dataclass(frozen=True)
class Task:
    id: str
    train: tuple[Pair, ...]
    test: tuple[Pair, ...]


def read_tasks(path: str) -> list[Task]:
    """Tasks by their ids, from any of the layouts in which they are published.

    A folder of TASKID.json; one such file; a file with many tasks by their ids, whose solutions
    may lie beside it (X_challenges.json and X_solutions.json); or a task with an id on each line
    of a .jsonl file.
    """
    where = path_of(path)
    if where.is_file():
        lines = where.name.lower().endswith((".jsonl", ".ndjson"))
        found = _from_lines(where) if lines else _from_object(where, path)
    elif where.is_dir():
        found = _from_folder(where)
    else:
        raise InputError(f"arc: {path}: no such file or folder")
    tasks: dict[str, Task] = {}
    for place, name, value in found:
        if name in tasks:
            raise InputError(f"arc: {place}: a second task {shown(name)}")
        tasks[name] = _task(f"arc: {place}: task {shown(name)}", name, value)
    if not tasks:
        raise InputError(f"arc: {path}: holds no task")
    return [tasks[name] for name in sorted(tasks)]


_Found = Iterator[tuple[str, str, Any]]  # where it was found, its id, what is to be a task


def _from_folder(folder: AnyPath) -> _Found:
    files = files_below(folder)
    known = [file for file in files if file.name.lower().endswith(".json")]
    if len(known) < len(files):
        _log.warning(
            "arc: %s: %d files that are not .json left aside", folder, len(files) - len(known)
        )
    with ThreadPoolExecutor(_READERS) as pool:
        for file, data in zip(known, pool.map(_bytes, known), strict=True):
            value = _json(str(file), data)
            if not _is_task(value):
                raise InputError(
                    f"arc: {file}: not a task (train and test); a file with many tasks is named "
                    "itself, not its folder"
                )
            yield str(file), file.name[: -len(".json")], value


def _from_object(file: AnyPath, path: str) -> _Found:
    value = _json(str(file), _bytes(file))
    if _is_task(value):
        yield str(file), file.name.removesuffix(".json"), value
        return
    if not isinstance(value, dict):
        raise InputError(f"arc: {file}: not a JSON object of tasks by their ids")
    named = cast(dict[str, Any], value)
    solutions = _solutions(path) if path.endswith(_CHALLENGES) else {}
    for name, task in named.items():
        if name in solutions and _is_task(task):
            task = {**task, "test": _solved(f"{file}: task {shown(name)}", task, solutions[name])}
        yield str(file), name, task


def _solutions(challenges: str) -> dict[str, Any]:
    file = path_of(challenges.removesuffix(_CHALLENGES) + SOLUTIONS)
    if not file.is_file():
        return {}
    value = _json(str(file), _bytes(file))
    if not isinstance(value, dict):
        raise InputError(f"arc: {file}: not a JSON object of solutions by their tasks' ids")
    return cast(dict[str, Any], value)


def _solved(where: str, task: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
    """The test pairs of a task, each with its solution."""
    if not isinstance(outputs, list) or len(cast(list[Any], outputs)) != len(task["test"]):
        raise InputError(f"arc: {where}: needs a list of {len(task['test'])} solutions")
    pairs = zip(task["test"], cast(list[Any], outputs), strict=True)
    return [{"input": _field(pair, "input"), "output": output} for pair, output in pairs]


def _from_lines(file: AnyPath) -> _Found:
    for number, line in enumerate(_bytes(file).split(b"\n"), 1):
        if not line.strip():
            continue
        place = f"{file} line {number}"
        value = _json(place, line)
        names = [name for key in _IDS if isinstance(name := _field(value, key), str) and name]
        if not names:
            raise InputError(f"arc: {place}: not a task with its id ({' or '.join(_IDS)}), a text")
        yield place, names[0], value


def _bytes(file: AnyPath) -> bytes:
    try:
        if size_of(file) > _MAX_BYTES:
            raise InputError(f"arc: {file}: larger than {_MAX_BYTES} bytes; cut it into several")
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"arc: {file}: {error.strerror or error}") from None


def _json(place: str, data: bytes) -> Any:
    try:
        # Of two tasks with one id, one would be lost.
        return parse_json(data, max_bytes=_MAX_BYTES, unique_keys=True)
    except JsonError as error:
        raise InputError(f"arc: {place}: {error}") from None


def _field(value: Any, key: str) -> Any:
    return cast(dict[str, Any], value).get(key) if isinstance(value, dict) else None


def _is_task(value: Any) -> bool:
    return isinstance(_field(value, "train"), list) and isinstance(_field(value, "test"), list)


def _task(where: str, name: str, value: Any) -> Task:
    if not _is_task(value) or not value["train"] or not value["test"]:
        raise InputError(f"{where}: needs lists train and test, each with a pair of grids or more")
    pairs: dict[str, tuple[Pair, ...]] = {}
    for part in ("train", "test"):
        found: list[Pair] = []
        for number, pair in enumerate(value[part], 1):
            place = f"{where}, {part} {number}"
            output = _field(pair, "output")
            known = part == "train" or output is not None
            found.append(
                Pair(
                    checked_grid(f"{place}, input", _field(pair, "input")),
                    checked_grid(f"{place}, output", output) if known else None,
                )
            )
        pairs[part] = tuple(found)
    return Task(name, **pairs)


def checked_grid(where: str, value: Any) -> Grid:
    """A grid of what was read as one."""
    rows = cast(list[Any], value) if isinstance(value, list) else []
    if not 1 <= len(rows) <= LARGEST:
        raise InputError(f"{where}: a grid is a list of 1 to {LARGEST} rows")
    width = len(cast(list[Any], rows[0])) if isinstance(rows[0], list) else 0
    for number, row in enumerate(rows, 1):
        if not isinstance(row, list) or not 1 <= len(cast(list[Any], row)) <= LARGEST:
            raise InputError(f"{where}, row {number}: a row is a list of 1 to {LARGEST} cells")
        cells = cast(list[Any], row)
        if len(cells) != width:
            raise InputError(
                f"{where}, row {number}: has {len(cells)} cells, the first row has {width}"
            )
        for cell in cells:
            if type(cell) is not int or not 0 <= cell < COLORS:
                raise InputError(f"{where}, row {number}: {shown(cell)} is not a colour, 0 to 9")
    return tuple(tuple(row) for row in rows)
