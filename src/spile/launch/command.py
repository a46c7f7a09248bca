"""Commands run for the user: shown exactly, or run, many at once."""

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
NOT_FOUND = 127  # the exit code of a shell for a missing program


@dataclass(frozen=True, kw_only=True)
class Command:
    """One program, its standard input and file, and its extra environment variables."""

    argv: tuple[str, ...]
    where: str = ""  # its host or purpose, in words
    stdin: str | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    file: str | None = None  # content of the file whose path replaces FILE; only we can read it
    suffix: str = ""

    def __str__(self) -> str:
        """The command as one would type it in a shell."""
        if self.file is not None:
            content = "\n".join(f"#   {line}" for line in self.file.splitlines())
            told = replace(self, file=None)
            return f"# {FILE}, for this command only, mode 0600:\n{content}\n{told}"
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
    """The result of a command."""

    where: str
    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """The last line of its output."""
        lines = [line.strip() for line in (self.err.strip() or self.out.strip()).splitlines()]
        return printable(lines[-1]) if lines else f"exit code {self.code}"


def shown(commands: Sequence[Command]) -> str:
    """The commands as text for a shell."""
    texts = [f"# {c.where}\n{c}" if c.where else str(c) for c in commands]
    return "\n\n".join(texts)


def run(command: Command, timeout: float | None = None) -> Result:
    """Run a command to its end. A missing program or a timeout is also returned as a result."""
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
            errors="surrogateescape",  # as in our own command line
            env={**os.environ, **command.env},
            timeout=timeout,
        )
    except FileNotFoundError:
        return Result(command.where, NOT_FOUND, "", f"{command.argv[0]} is not installed here")
    except subprocess.TimeoutExpired:
        return Result(command.where, 1, "", f"no answer within {timeout:g} s")
    return Result(command.where, done.returncode, done.stdout, done.stderr)


def run_all(commands: Sequence[Command], timeout: float | None = None) -> list[Result]:
    """Run commands at once; return the results in their order."""
    with ThreadPoolExecutor(min(_AT_ONCE, len(commands)) or 1) as pool:
        return list(pool.map(partial(run, timeout=timeout), commands))


def check_all(results: Sequence[Result], remedy: str) -> None:
    """Raises:
    LaunchError: if commands failed; names all of them.
    """
    failed = [result for result in results if result.code]
    if failed:
        named = "; ".join(f"{r.where}: {r.said}" if r.where else r.said for r in failed)
        count = f"{len(failed)} of {len(results)} failed: " if len(results) > 1 else ""
        raise LaunchError(f"{count}{named}; {remedy}")
