"""ARC-AGI as a corpus: grids as text, augmented tasks, and prompts made from them.

    arc:path/to/tasks(encoder="rows+shape", prompt="chat", predictions=8, augment="rotate,colors")

A document is one test input, asked once for each of `predictions`: first unchanged, then each time
under another augmentation, if any is requested. Everything random follows from the seed, the task's
id and the prediction's number, so that any part of the corpus is the same as within the whole. The
augmentation is kept with the document, and can be undone.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

import xxhash

from spile.core.bounded_json import JsonError, parse_json
from spile.core.config import canonical_json
from spile.core.errors import ConfigError, InputError
from spile.core.options import shown
from spile.objects.paths import AnyPath, files_below, path_of, size_of

_log = logging.getLogger("spile.corpus")

Grid = tuple[tuple[int, ...], ...]

COLORS = 10
LARGEST = 30  # rows of a grid, and cells of a row
SOLUTIONS = "_solutions.json"
_CHALLENGES = "_challenges.json"
_IDS = ("id", "task_id")
_MAX_BYTES = 1 << 30
_READERS = 16  # a bucket has high latency, but serves many requests at once


@dataclass(frozen=True)
class Pair:
    """An input and its output; None if the output is not known."""

    input: Grid
    output: Grid | None


@dataclass(frozen=True)
class Task:
    id: str
    train: tuple[Pair, ...]
    test: tuple[Pair, ...]


def read_tasks(path: str) -> list[Task]:
    """Read tasks, sorted by id, from any of the published layouts.

    The layouts are: a folder of TASKID.json; one such file; a file with many tasks by id, with or
    without solutions beside it (X_challenges.json and X_solutions.json); a .jsonl file with a task
    on each line. A line may hold the task's id (`id` or `task_id`); otherwise the task is named
    after its line, from 0.
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


_Found = Iterator[tuple[str, str, Any]]  # its place, its id, the unchecked task


def _from_folder(folder: AnyPath) -> _Found:
    files = files_below(folder)
    known = [file for file in files if file.name.lower().endswith(".json")]
    if len(known) < len(files):
        _log.warning(
            "arc: %s: %d files skipped that are not .json", folder, len(files) - len(known)
        )
    with ThreadPoolExecutor(_READERS) as pool:
        for file, data in zip(known, pool.map(_bytes, known), strict=True):
            value = _json(str(file), data)
            if not _is_task(value):
                raise InputError(
                    f"arc: {file}: not a task (train and test); to read a file of many tasks, "
                    "name the file, not its folder"
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
    """Return the test pairs of a task, each with its solution."""
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
        ids = [name for key in _IDS if (name := _field(value, key)) is not None]
        name = ids[0] if ids else f"task_{number - 1:08x}"
        if not isinstance(name, str) or not name:
            raise InputError(f"arc: {place}: its id ({' or '.join(_IDS)}) is not a text")
        yield place, name, value


def _bytes(file: AnyPath) -> bytes:
    try:
        if size_of(file) > _MAX_BYTES:
            raise InputError(f"arc: {file}: larger than {_MAX_BYTES} bytes; cut it into several")
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"arc: {file}: {error.strerror or error}") from None


def _json(place: str, data: bytes) -> Any:
    try:
        # Otherwise one of two tasks with the same id would be lost.
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
    """Check a value read as a grid."""
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


AUGMENTATIONS = ("rotate", "flip", "colors", "order")
_VERSION = 1  # version of the conversion from task to text: another text is another dataset


@dataclass(frozen=True)
class GridEncoder:
    """Writes grids as text: a line of digits for each row, and optional extras."""

    spaces: bool = False  # between cells, for tokenizers that join digits
    rows: bool = False  # each begins with its row number, from 1
    shape: bool = False  # a line before the rows, as in 3x4: rows, then columns

    @classmethod
    def parse(cls, name: str) -> "GridEncoder":
        """Parse `plain`, `spaces`, `rows`, `shape`, or several of them joined by `+`."""
        words = _words("encoder", name, "+", ("plain", *asdict(cls())))
        return cls(**{word: True for word in words if word != "plain"})

    def encode(self, grid: Grid) -> str:
        between = " " if self.spaces else ""
        lines = [between.join(map(str, row)) for row in grid]
        if self.rows:
            lines = [f"{number} {line}" for number, line in enumerate(lines, 1)]
        if self.shape:
            lines.insert(0, f"{len(grid)}x{len(grid[0])}")
        return "\n".join(lines)

    def decode(self, text: str) -> Grid:
        """Return the grid that `encode` turns into exactly this text."""
        lines = text.split("\n")[self.shape :]
        if self.rows:
            lines = [line.partition(" ")[2] for line in lines]
        cells = [[ord(cell) - ord("0") for cell in line if cell != " "] for line in lines]
        grid = checked_grid("the text", cells)
        if self.encode(grid) != text:
            raise InputError("the text is not one that this encoder makes of a grid")
        return grid


@dataclass(frozen=True)
class Augmentation:
    """A change to a task that leaves it the same puzzle.

    Attributes:
        turns: quarter turns, clockwise.
        flip: whether left and right are exchanged, after turning.
        colors: the new value of each colour.
        order: the order of the examples; empty: unchanged.
    """

    turns: int = 0
    flip: bool = False
    colors: tuple[int, ...] = tuple(range(COLORS))
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, items in (("colors", range(COLORS)), ("order", range(len(self.order)))):
            if sorted(getattr(self, name)) != list(items):
                raise ConfigError(f"augmentation: {name} is not a permutation of {list(items)}")
        if self.turns not in range(4):
            raise ConfigError(f"augmentation: turns must be 0, 1, 2 or 3, got {self.turns}")

    @classmethod
    def drawn(
        cls, kinds: Iterable[str], task: Task, seed: int, prediction: int, *, keep_zero: bool
    ) -> "Augmentation":
        """Draw an augmentation by hashes alone: the same for every version of Python."""

        def number(*what: str | int) -> int:
            drawn_from = canonical_json([seed, task.id, prediction, *what])
            return xxhash.xxh3_128_intdigest(drawn_from)

        def shuffled(what: str, items: Iterable[int]) -> tuple[int, ...]:
            return tuple(sorted(items, key=lambda item: number(what, item)))

        kept = (0,) if keep_zero else ()
        parts: dict[str, Any] = {
            "rotate": ("turns", number("rotate") % 4),
            "flip": ("flip", number("flip") % 2 == 1),
            "colors": ("colors", (*kept, *shuffled("colors", range(len(kept), COLORS)))),
            "order": ("order", shuffled("order", range(len(task.train)))),
        }
        return cls(**dict(parts[kind] for kind in kinds))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Augmentation":
        """Restore an augmentation from its form in a document."""
        return cls(value["turns"], value["flip"], tuple(value["colors"]), tuple(value["order"]))

    def inverse(self) -> "Augmentation":
        """Return the augmentation that undoes this one."""
        # In a mirror, a turn goes the other way: turning and flipping again undoes both.
        turns = self.turns if self.flip else -self.turns % 4
        return Augmentation(turns, self.flip, _inverse(self.colors), _inverse(self.order))

    def apply(self, task: Task) -> Task:
        order = self.order or range(len(task.train))
        train = tuple(self._pair(task.train[place]) for place in order)
        return Task(task.id, train, tuple(map(self._pair, task.test)))

    def apply_grid(self, grid: Grid) -> Grid:
        for _ in range(self.turns):
            grid = tuple(zip(*grid[::-1], strict=True))
        step = -1 if self.flip else 1
        return tuple(tuple(map(self.colors.__getitem__, row[::step])) for row in grid)

    def _pair(self, pair: Pair) -> Pair:
        output = None if pair.output is None else self.apply_grid(pair.output)
        return Pair(self.apply_grid(pair.input), output)


def _inverse(permutation: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(permutation)), key=permutation.__getitem__))


@dataclass(frozen=True)
class Prompt:
    """The wording of a task. Pieces are roles and texts with {number}, {input} and {output}."""

    before: tuple[tuple[str, str], ...]
    example: tuple[tuple[str, str], ...]
    question: tuple[tuple[str, str], ...]
    answer: tuple[tuple[str, str], ...] = (("assistant", "{output}"),)
    chat: bool = True  # messages for the model's template; otherwise a text in segments

    def pieces(self, task: Task, test: int, encoder: GridEncoder, answer: bool) -> list[list[str]]:
        """Return roles and texts; consecutive roles differ."""
        asked = task.test[test]
        parts = [
            (self.before, 0, asked),
            *((self.example, *each) for each in enumerate(task.train, 1)),
        ]
        parts += [(self.question, len(task.train) + 1, asked)]
        parts += [(self.answer, 0, asked)] if answer else []
        pieces: list[list[str]] = []
        for templates, number, pair in parts:
            output = "" if pair.output is None else encoder.encode(pair.output)
            values = {"number": number, "input": encoder.encode(pair.input), "output": output}
            for role, template in templates:
                if not pieces or pieces[-1][0] != role:
                    pieces.append([role, ""])
                pieces[-1][1] += template.format_map(values)
        return pieces


_RULE = (
    "The grids below hold digits from 0 to 9, each standing for a colour. One rule turns every "
    "input into its output. Find it, and answer with the output of the last input alone, written "
    "as the others are."
)
PROMPTS = {
    "plain": Prompt(
        before=(),
        example=(("user", "Input:\n{input}\nOutput:\n{output}\n\n"),),
        question=(("user", "Input:\n{input}\nOutput:\n"),),
        chat=False,
    ),
    "chat": Prompt(
        before=(("system", _RULE),),
        example=(("user", "Input {number}:\n{input}\nOutput {number}:\n{output}\n\n"),),
        question=(("user", "Input {number}:\n{input}\nOutput {number}:"),),
    ),
    # For templates without a system role, and answers in the form of the examples.
    "turns": Prompt(
        before=(),
        example=(("user", "{input}"), ("assistant", "{output}")),
        question=(("user", "{input}"),),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How tasks become documents."""

    encoder: str = "plain"
    prompt: str = "plain"
    predictions: int = 1
    augment: str = ""
    seed: int = 0
    keep_zero: bool = False  # keep colour 0, which usually is the background
    plain_first: bool = True  # no augmentation for the first prediction
    answers: bool = False  # end each document with the output, and not where it would begin

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if type(value) is not type(f.default):
                wanted = type(f.default).__name__
                raise ConfigError(f"arc: {f.name} must be of type {wanted}, got {value!r}")
        if self.predictions < 1:
            raise ConfigError(f"arc: predictions must be at least 1, got {self.predictions}")
        if self.predictions > 1 and not self.augment:
            kinds = ",".join(AUGMENTATIONS)
            raise ConfigError(
                f"arc: predictions={self.predictions} without augment makes equal documents; add "
                f'augment="{kinds}", or some of these'
            )
        if self.prompt not in PROMPTS:
            known = ", ".join(PROMPTS)
            raise ConfigError(f"arc: prompt must be one of {known}; got {self.prompt!r}")


class Questions:
    """The documents, by number: all predictions of the first test input, then of the next."""

    def __init__(self, tasks: list[Task], settings: Settings) -> None:
        self._tasks, self._settings = tasks, settings
        self._encoder = GridEncoder.parse(settings.encoder)
        self._augment = _words("augment", settings.augment, ",", AUGMENTATIONS)
        self._asked = [(task, test) for task in tasks for test in range(len(task.test))]
        for task, test in self._asked if settings.answers else ():
            if task.test[test].output is None:
                raise InputError(
                    f"arc: task {task.id!r}, test {test + 1}: its output is not known; leave "
                    f"answers out, or put the file of solutions (*{SOLUTIONS}) beside the tasks"
                )

    def __len__(self) -> int:
        return len(self._asked) * self._settings.predictions

    def __getitem__(self, number: int) -> dict[str, Any]:
        question, prediction = divmod(number, self._settings.predictions)
        if not 0 <= question < len(self._asked):
            raise IndexError(number)
        task, test = self._asked[question]
        augmentation = self._augmentation(task, prediction)
        prompt = PROMPTS[self._settings.prompt]
        pieces = prompt.pieces(
            augmentation.apply(task), test, self._encoder, answer=self._settings.answers
        )
        messages = [{"role": role, "content": text} for role, text in pieces]
        return {
            **({"messages": messages} if prompt.chat else {"segments": pieces}),
            "task_id": task.id,
            "test": test,
            "prediction": prediction,
            "augmentation": asdict(augmentation),
        }

    def identity(self) -> dict[str, Any]:
        """Return the settings and a hash of the tasks, whatever their place and layout."""
        tasks = canonical_json(
            [
                [
                    task.id,
                    *([[p.input, p.output] for p in part] for part in (task.train, task.test)),
                ]
                for task in self._tasks
            ]
        )
        return {
            **asdict(self._settings),
            "encoder": asdict(self._encoder),
            "augment": self._augment,
            "tasks": xxhash.xxh3_128_hexdigest(tasks),
            "version": _VERSION,
        }

    def _augmentation(self, task: Task, prediction: int) -> Augmentation:
        if prediction == 0 and self._settings.plain_first:
            return Augmentation()
        settings = self._settings
        return Augmentation.drawn(
            self._augment, task, settings.seed, prediction, keep_zero=settings.keep_zero
        )


def tasks(
    path: str,
    *,
    encoder: str = "plain",
    prompt: str = "plain",
    predictions: int = 1,
    augment: str = "",
    seed: int = 0,
    keep_zero: bool = False,
    plain_first: bool = True,
    answers: bool = False,
    max_tasks: int = 0,
) -> Questions:
    """The program: make documents from tasks at a path or URL (see `read_tasks`) under `Settings`.

    max_tasks: use only the first so many tasks, by id; 0: all.
    """
    if type(max_tasks) is not int or max_tasks < 0:
        raise ConfigError(f"arc: max_tasks must be a number of tasks, got {max_tasks!r}")
    settings = Settings(
        encoder=encoder,
        prompt=prompt,
        predictions=predictions,
        augment=augment,
        seed=seed,
        keep_zero=keep_zero,
        plain_first=plain_first,
        answers=answers,
    )
    return Questions(read_tasks(path)[: max_tasks or None], settings)


def _words(name: str, given: str, separator: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the given words, in the order in which they are known; refuse others."""
    words = [word.strip() for word in given.split(separator)] if given.strip() else []
    order = tuple(known)
    for word in words:
        if word not in order:
            raise ConfigError(f"arc: {name} knows {', '.join(order)}; got {word[:80]!r}")
    return tuple(word for word in order if word in words)
