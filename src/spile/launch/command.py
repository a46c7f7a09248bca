"""Commands that are run for the user: shown exactly, or run, many at once."""

import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from spile.core.errors import LaunchError, printable

FILE = "{file}"  # in a command's words: the path of its file
_AT_ONCE = 32
NOT_FOUND = 127  # as a shell says it of a program


@dataclass(frozen=True, kw_only=True)
class Command:
    """One program, what it reads, and what its environment has besides ours."""

    argv: tuple[str, ...]
    where: str = ""  # for whom it is, in words
    stdin: str | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    file: str | None = None  # what the file holds whose path stands for FILE; only we can read it
    suffix: str = ""

    def __str__(self) -> str:
        """As a shell would be told."""
        if self.file is not None:
            told = replace(self, file=None)
            return f"# {FILE}, for this command only, mode 0600:\n{_indented(self.file)}\n{told}"
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        line = " ".join([*settings, shlex.join(self.argv)])
        if self.stdin is None:
            return line
        end = "END"
        while end in self.stdin.splitlines():
            end += "_"
        return f"{line} <<'{end}'\n{self.stdin.removesuffix(chr(10))}\n{end}"


@dataclass(frozen=True)
class Result:
    """What became of a command."""

    where: str
    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """Its last word, on one line."""
        lines = [line.strip() for line in (self.err.strip() or self.out.strip()).splitlines()]
        return printable(lines[-1]) if lines else f"exit code {self.code}"


def shown(commands: Sequence[Command]) -> str:
    """What would be run, as text that a shell would take."""
    texts = [f"# {c.where}\n{c}" if c.where else str(c) for c in commands]
    return "\n\n".join(texts)


def run(command: Command, timeout: float | None = None) -> Result:
    """Run one to its end. A program that is not there, or takes too long, is a result as well."""
    if command.file is not None:
        with tempfile.NamedTemporaryFile(prefix="spile-", suffix=command.suffix) as file:
            file.write(command.file.encode("utf-8", "surrogateescape"))
            file.flush()
            argv = tuple(word.replace(FILE, file.name) for word in command.argv)
            return run(replace(command, argv=argv, file=None), timeout)
    try:
        done = subprocess.run(
            command.argv,
            input=command.stdin,
            stdin=subprocess.DEVNULL if command.stdin is None else None,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # as the words of our own command line came
            env={**os.environ, **command.env},
            timeout=timeout,
        )
    except FileNotFoundError:
        return Result(command.where, NOT_FOUND, "", f"{command.argv[0]} is not installed here")
    except subprocess.TimeoutExpired:
        return Result(command.where, 1, "", f"no answer within {timeout:g} s")
    return Result(command.where, done.returncode, done.stdout, done.stderr)


def run_all(commands: Sequence[Command], timeout: float | None = None) -> list[Result]:
    """Run them at once; results in their order."""
    with ThreadPoolExecutor(min(_AT_ONCE, len(commands)) or 1) as pool:
        return list(pool.map(partial(run, timeout=timeout), commands))


def check_all(results: Sequence[Result], remedy: str) -> None:
    """Raises:
    LaunchError: naming all that failed.
    """
    failed = [result for result in results if result.code]
    if failed:
        named = "; ".join(f"{r.where}: {r.said}" if r.where else r.said for r in failed)
        count = f"{len(failed)} of {len(results)} failed: " if len(results) > 1 else ""
        raise LaunchError(f"{count}{named}; {remedy}")


def _indented(text: str) -> str:
    return "\n".join(f"#   {line}" for line in text.splitlines())
