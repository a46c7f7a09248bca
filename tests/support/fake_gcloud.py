"""A `gcloud` for tests: it keeps TPUs, runs commands on their hosts, and fails on demand.

`Cloud` sets it up and reads what it was asked; run as a program, this file is `gcloud` itself. A
TPU is a file that holds its state, and each of its hosts a home in which commands really run.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HOSTS = 2  # of every TPU


class Cloud:
    """The existing TPUs, the commands so far, and the failures to inject."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("tpus", "queue", "faults"):
            (folder / name).mkdir(parents=True)
        program = folder / "bin" / "gcloud"
        program.parent.mkdir()
        program.write_text(
            f"#!/bin/sh\nexport FAKE_CLOUD='{folder}'\nexec {sys.executable} -S {__file__} \"$@\"\n"
        )
        program.chmod(0o755)

    def tpu(self, name: str, zone: str, state: str = "READY") -> None:
        (self.folder / "tpus" / f"{name}@{zone}").write_text(state)

    def tpus(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in sorted((self.folder / "tpus").iterdir())}

    def fault(self, verb: str, *, err: str = "", code: int = 1, **more: Any) -> None:
        """Fail the next command with this verb once (`has`: only if it has this word).

        `host`: only on that host; `preempt`: lose the TPU first, and answer as usual; `state`: the
        state that a description reports.
        """
        number = len(list((self.folder / "faults").iterdir()))
        fault = {"verb": verb, "err": err, "code": code, **more}
        (self.folder / "faults" / f"{number:03d}").write_text(json.dumps(fault))

    def asked(self) -> list[list[str]]:
        """Every command line, in order."""
        file = self.folder / "asked"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def verbs(self) -> list[str]:
        return [" ".join(words[2:4]) for words in self.asked()]

    def home(self, name: str, host: int) -> Path:
        return self.folder / "homes" / name / str(host)

    def end(self) -> None:
        for path in self.folder.glob("homes/*/*/.spile/*/*/group"):
            _kill(path)


def _kill(group: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        os.killpg(int(group.read_text()), signal.SIGKILL)


def _fault(folder: Path, words: list[str], host: int | None) -> dict[str, Any] | None:
    for path in sorted((folder / "faults").iterdir()):
        if path.suffix:
            continue
        fault = json.loads(path.read_text())
        wanted = fault["verb"] == " ".join(words[2:4]) and fault.get("has", "") in "\n".join(words)
        if wanted and fault.get("host") == host:
            path.rename(path.with_suffix(".used"))
            return fault
    return None


def _preempt(folder: Path, tpu: Path) -> None:
    name = tpu.name.partition("@")[0]
    for group in folder.glob(f"homes/{name}/*/.spile/*/*/group"):
        _kill(group)
    shutil.rmtree(folder / "homes" / name, ignore_errors=True)
    tpu.write_text("PREEMPTED")


def main() -> int:
    folder, words = Path(os.environ["FAKE_CLOUD"]), sys.argv[1:]
    with (folder / "asked").open("a") as file:
        file.write(json.dumps(words) + "\n")
    kind, verb = words[2:4]
    given = [word[2:].partition("=") for word in words if word.startswith("--")]
    flags = {name: value for name, _, value in given}
    plain = [word for word in words[4:] if not word.startswith("--")]
    name = (plain[-1] if plain else "").partition(":")[0]
    tpu, queued = (folder / k / f"{name}@{flags['zone']}" for k in ("tpus", "queue"))
    fault = _fault(folder, words, None)
    if fault and fault.get("preempt"):
        _preempt(folder, tpu)
    elif fault and "state" in fault:
        sys.stdout.write(fault["state"] + "\n")
        return 0
    elif fault:
        sys.stderr.write(fault["err"] + "\n")
        return int(fault["code"])
    there = queued if kind == "queued-resources" else tpu
    if verb == "create":
        if there.exists():
            sys.stderr.write("ERROR: (gcloud) ALREADY_EXISTS: Resource exists" + "\n")
            return 1
        there.write_text("ACTIVE" if there == queued else "READY")
        tpu.write_text("READY")
        return 0
    if verb == "list":
        for path in (folder / "tpus").glob(f"*@{flags['zone']}"):
            sys.stdout.write(path.name + "\n")
        return 0
    if not there.exists():
        sys.stderr.write(f"ERROR: (gcloud.{kind}.{verb}) NOT_FOUND: no {name}" + "\n")
        return 1
    if verb == "describe":
        sys.stdout.write(there.read_text() + "\n")
        return 0
    if verb == "delete":
        there.unlink()
        tpu.unlink(missing_ok=True)
        return 0
    if tpu.read_text() != "READY":
        sys.stderr.write(f"ERROR: (gcloud) {name} is {tpu.read_text()}" + "\n")
        return 1
    return max(_on_host(folder, name, host, verb, words, flags, plain) for host in range(HOSTS))


def _on_host(
    folder: Path, name: str, host: int, verb: str, words: list[str], flags: dict[str, str],
    plain: list[str],
) -> int:  # fmt: skip
    home = folder / "homes" / name / str(host)
    home.mkdir(parents=True, exist_ok=True)
    fault = _fault(folder, words, host)
    if fault:
        sys.stderr.write(fault["err"] + "\n")
        return int(fault["code"])
    if verb == "scp":
        shutil.copy(plain[0], home / plain[1].partition(":")[2])
        return 0
    sys.stdout.flush()
    env = {**os.environ, "HOME": str(home)}
    return subprocess.run(["sh", "-c", flags["command"]], env=env, cwd=home).returncode


if __name__ == "__main__":
    sys.exit(main())
