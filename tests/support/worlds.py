"""Worlds of real processes: start, watch, kill and pause them, and read their output."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np

import spile
from chaos.harness import check_sound, content
from support import quick, tiny, zygote

HEARTBEAT = 10  # seconds; the smallest that was tried
ABORTED = 134
_PLANTED = """
import os, runpy
os.environ["PYTHONPATH"] = {paths!r}
runpy.run_module("spile.cli", run_name="__main__", alter_sys=True)
"""


class Member:
    """One process as a user starts it; its child does the work."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        folder: Path | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """`prefix`: a command that executes this one, such as `ip netns exec`."""
        # Into files: nobody reads while a test waits, and a full pipe would stop the process.
        self._out, self._err = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115
        self.began = time.monotonic()
        self.ended: float | None = None
        program, environment = ["-m", "spile.cli"], dict(environment)
        if not prefix and "SPILE_PLANT" not in environment:
            # Only the child may run planted code: the process that forks it must not.
            paths = environment.pop("PYTHONPATH", None)
            program = ["-c", _PLANTED.format(paths=paths)] if paths else program
        self.process = zygote.Popen(
            [*prefix, sys.executable, *program, *arguments],
            stdout=self._out,
            stderr=self._err,
            env={**tiny.environment(), **environment},
            cwd=folder,
        )

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is not None and self.ended is None:
            self.ended = time.monotonic()
        return code

    def worker(self) -> int | None:
        """The id of the child that computes."""
        try:
            pid = self.process.pid
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the child that computes."""
        worker = self.worker()
        assert worker, "it has not started, or has ended"
        os.kill(worker, number)

    @property
    def out(self) -> str:
        return self._read(self._out)

    @property
    def err(self) -> str:
        return self._read(self._err)

    @property
    def last_line(self) -> str:
        return (self.err.splitlines() or [""])[-1]

    @staticmethod
    def _read(file: IO[str]) -> str:
        # Open it by name: reading through the same file would move the process's position.
        return Path(f"/proc/self/fd/{file.fileno()}").read_text()

    def end(self) -> None:
        worker = self.worker()
        self.process.kill()
        self.process.wait()
        if worker:  # the kernel ends it with its parent
            wait_until(lambda: not runs(worker), 10)
        self._out.close()
        self._err.close()


class Group:
    """Processes of one world; all of them end with the test, however it ends."""

    def __init__(
        self,
        flags: Sequence[str],
        processes: int,
        devices: int,
        *,
        coordinator: str | None = None,
        ids: Sequence[int] | None = None,
        heartbeat: int = HEARTBEAT,
        start_timeout: int = 60,
        own_flags: Mapping[int, Sequence[str]] | None = None,
        environments: Mapping[int, Mapping[str, str]] | None = None,
        folders: Mapping[int, Path] | None = None,
        prefixes: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        """Args:
        ids: of the processes to start [all].
        own_flags: by position among those started, as is what follows.
        """
        self.coordinator = coordinator or f"127.0.0.1:{tiny.free_port()}"
        self.members: list[Member] = []
        for position, number in enumerate(range(processes) if ids is None else ids):
            arguments = ["extract", *flags]
            if processes > 1:
                arguments += ["--coordinator", self.coordinator]
                arguments += ["--num-processes", str(processes), "--process-id", str(number)]
                arguments += ["--heartbeat-timeout", str(heartbeat)]
                arguments += ["--start-timeout", str(start_timeout)]
            arguments += (own_flags or {}).get(position, ())
            environment = {**on_devices(devices), **(environments or {}).get(position, {})}
            folder, prefix = (folders or {}).get(position), (prefixes or {}).get(position, ())
            self.members.append(Member(arguments, environment, folder=folder, prefix=prefix))

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *raised: object) -> None:
        for member in self.members:
            member.end()

    def __getitem__(self, position: int) -> Member:
        return self.members[position]

    @property
    def running(self) -> bool:
        return any(member.poll() is None for member in self.members)

    def until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Wait for a condition that the processes should make true."""
        wait_until(lambda: condition() or not self.running, seconds, self.said)
        assert condition(), f"they ended before that\n{self.said()}"

    def wait(self, seconds: float = 90) -> list[int]:
        """Exit codes, when all have ended."""
        return self.wait_for(self.members, seconds)

    def wait_for(self, members: Sequence[Member], seconds: float) -> list[int]:
        # Poll all of them each time, to know when each one ended.
        wait_until(lambda: None not in [member.poll() for member in members], seconds, self.said)
        return [member.process.returncode for member in members]

    def finish(self, seconds: float = 90) -> None:
        codes = self.wait(seconds)
        assert set(codes) == {0}, f"{codes}\n{self.said()}"

    def said(self) -> str:
        return "\n".join(
            f"-- {position}, exit {member.poll()}\n{member.out}{member.err[-3000:]}"
            for position, member in enumerate(self.members)
        )


def on_devices(count: int) -> dict[str, str]:
    """Return environment variables for so many virtual devices and quick compilation."""
    return {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count} {quick.FLAGS}"}


def slow_steps(seconds: float) -> str:
    """Return code that makes every step take so long that a kill falls between two units."""
    return f"""
import time
from spile.run.step import sweep
call = sweep.Sweep.__call__  # on a CPU every step is a sweep
sweep.Sweep.__call__ = lambda *given: (time.sleep({seconds}), call(*given))[1]
"""


def planted(folder: Path, code: str) -> dict[str, str]:
    """Environment variables by which processes that compute run `code` first."""
    folder.mkdir(parents=True, exist_ok=True)
    guard = "import os\nif 'SPILE_WORLD_CHILD' in os.environ or 'SPILE_PLANT' in os.environ:\n"
    body = "".join(f"    {line}\n" for line in code.strip().splitlines())
    (folder / "sitecustomize.py").write_text(guard + body)
    others = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(path for path in (str(folder), others) if path)}


def wait_until(
    condition: Callable[[], bool], seconds: float, said: Callable[[], str] = lambda: ""
) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"waited {seconds} s\n{said()}"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def check_equal(out: Path, expected: Path) -> None:
    """Check for equal units and index, rows within float32's tolerance, and a sound dataset."""
    check_sound(out)
    found, wanted = content(out), content(expected)
    assert found.keys() == wanted.keys()
    for name in wanted:
        if name == "index" or name.startswith("unit "):
            assert found[name] == wanted[name], name
    dataset, reference = spile.open(str(out)), spile.open(str(expected))
    count = reference.num_tokens
    for tap in reference.taps:
        rows, statistics = reference.read(tap, 0, count), reference.statistics(tap)
        close = 1e-5 * np.abs(rows).max()
        np.testing.assert_allclose(dataset.read(tap, 0, count), rows, rtol=0, atol=close)
        assert dataset.statistics(tap).count == statistics.count
        np.testing.assert_allclose(
            dataset.statistics(tap).mean, statistics.mean, rtol=0, atol=close
        )
