"""Runs the command in a process that dies at a chosen place: `launcher.py SPEC ARGUMENTS...`.

SPEC is JSON. The real functions are patched here, in the child, so that production code needs no
hooks:

    {"kill": PLACE, "nth": N}     SIGKILL itself the Nth time it comes to PLACE
    {"terminate": true}           SIGTERM itself while the tokenizer is being read
    {"gate": FOLDER, "crowd": N}  start work only when N processes have come to the gate
    {"slow": SECONDS}             take so much longer for every step
    {"blind": true}               see nobody else at work: do units that others are doing
    {"peak": FILE}                leave the peak of resident memory, in kB, in a file
    {"fault": ARGUMENTS}          a fault of the disk at a chosen system call: see support/faults.py
    {"until": FILE}               repeat the command until the file exists; print its exit codes
"""

import contextlib
import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spile import cli
from spile.corpus import tokenize as tokens
from spile.dataset.codec.shard import ShardWriter
from spile.dataset.records.heartbeat import Presence
from spile.dataset.records.ledger import Ledger
from spile.objects import LocalObjects

# Files that `create` makes, by the name it links them to.
RECORDS = {
    "units": r"units\.json",
    "model": r"model\.json",
    "manifest": r"manifest\.json",
    "columns": r"[0-9a-f]{32}\.safetensors",
    "segment": r"\d{6}\.safetensors",
    "done": r"\d{8}\.json",  # or a generation
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # never reached: the signal is for this very process


def nth_time(count: int) -> Callable[[], bool]:
    left = iter(range(count - 1, -1, -1))
    return lambda: next(left, -1) == 0


def kill_in_shard(part: str, now: Callable[[], bool]) -> None:
    """Half of a shard's header, or half of the rows that come in one piece, are written."""
    write = ShardWriter._write

    def torn(self: ShardWriter, data: bytes | memoryview) -> None:
        if (part == "header") == (self._size == 0) and now():
            self._stream.write(memoryview(data)[: len(data) // 2])
            die()
        write(self, data)

    ShardWriter._write = torn


def kill_around_commit(moment: str, now: Callable[[], bool]) -> None:
    commit = Ledger.commit

    def patched(self: Ledger, done: Any) -> bool:
        due = now()
        if due and moment == "before":
            die()
        won = commit(self, done)
        if due:
            die()
        return won

    Ledger.commit = patched


def kill_in_create(record: str, moment: str, now: Callable[[], bool]) -> None:
    """torn: half of the temporary file is there; written: all of it; linked: not yet synced."""
    pattern = RECORDS[record]
    open_new, link = LocalObjects._open_new, os.link

    class Torn(io.FileIO):
        def write(self, data: Any) -> int:
            super().write(bytes(data)[: len(data) // 2])
            die()
            return 0

    def torn(self: LocalObjects, path: Path) -> Any:
        if re.fullmatch(pattern + r"\.tmp-\w+", path.name) and now():
            path.parent.mkdir(parents=True, exist_ok=True)
            return Torn(path, "xb")
        return open_new(self, path)

    def patched_link(source: Path, target: Path) -> None:
        due = re.fullmatch(pattern, Path(target).name) and now()
        if due and moment == "written":
            die()
        link(source, target)
        if due:
            die()

    if moment == "torn":
        LocalObjects._open_new = torn
    else:
        os.link = patched_link


def kill_in_heartbeat(now: Callable[[], bool]) -> None:
    replace = os.replace

    def patched(source: Path, target: Path) -> None:
        if now():
            die()
        replace(source, target)

    os.replace = patched


def arm(place: str, nth: int) -> None:
    now = nth_time(nth)
    first, _, second = place.partition(" ")
    if first == "shard":
        kill_in_shard(second, now)
    elif first == "commit":
        kill_around_commit(second, now)
    elif first == "heartbeat":
        kill_in_heartbeat(now)
    else:
        kill_in_create(first, second, now)


def terminate_in_tokenizer() -> None:
    """Library code may catch `Exception`: a request to stop must pass through that."""
    real = tokens.Tokenizer

    class Shim:
        def __new__(cls, *given: Any) -> Any:
            return real(*given)

        @staticmethod
        def from_buffer(data: bytes) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return real.from_buffer(data)

    tokens.Tokenizer = Shim


def arm_fault(given: dict[str, Any]) -> None:
    """Record when the command reported a unit as committed."""
    from support import faults  # noqa: PLC0415 - the zygote has it, and this file alone does not find it

    commit = Ledger.commit

    def patched(self: Ledger, done: Any) -> bool:
        won = commit(self, done)
        if won:
            faults.note(f"committed {self.objects.url}/{self.layout.done_key(done.unit)}")
        return won

    Ledger.commit = patched
    faults.arm(**given)


def meet(folder: Path, crowd: int) -> None:
    from spile.run.pipeline.worker import Worker  # noqa: PLC0415 - imports jax; only workers meet

    run = Worker.run

    def patched(self: Worker) -> None:
        (folder / str(os.getpid())).touch()
        while len(list(folder.iterdir())) < crowd:
            time.sleep(0.002)
        run(self)

    Worker.run = patched


def slow_down(seconds: float) -> None:
    from spile.run.step.sweep import Sweep  # noqa: PLC0415 - imports jax

    call = Sweep.__call__

    def patched(self: Sweep, batch: Any) -> Any:
        time.sleep(seconds)
        return call(self, batch)

    Sweep.__call__ = patched


def repeat(arguments: list[str], until: Path) -> None:
    codes: list[int] = []
    while not until.exists():
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            codes.append(cli.run(arguments))
    sys.stdout.write(json.dumps(codes))


def main() -> None:
    spec, arguments = json.loads(sys.argv[1]), sys.argv[2:]
    if "kill" in spec:
        arm(spec["kill"], spec.get("nth", 1))
    if spec.get("terminate"):
        terminate_in_tokenizer()
    if "gate" in spec:
        meet(Path(spec["gate"]), spec["crowd"])
    if "slow" in spec:
        slow_down(spec["slow"])
    if spec.get("blind"):
        Presence._others = lambda self, prefix: iter(())
    if "until" in spec:
        return repeat(arguments, Path(spec["until"]))
    if "fault" in spec:
        arm_fault(spec["fault"])
    code = cli.run(arguments)
    if "peak" in spec:
        status = Path("/proc/self/status").read_text()
        Path(spec["peak"]).write_text(status.partition("VmHWM:")[2].split()[0])
    sys.exit(code)


if __name__ == "__main__":
    main()
