"""Faults of a disk, at a chosen system call: compiled, preloaded by the zygote, armed by a child.

`library` compiles faults.c, which see. `zygote.py` preloads it into the process that all
others are forked from, where it does nothing until a child calls `arm`.
"""

import contextlib
import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")

# eio: one call fails, and later ones work. late: the call fails although its effect happened.
# full: the disk is full from that call on, after half of its bytes were written.
FAILS = ("eio", "late", "full")
KILLS = ("kill-before", "kill-half", "kill-after")
FAULTS = (*FAILS, "short", *KILLS, "interrupt")
OF_WRITES = ("short", "kill-half")  # they cut what one call writes
_IN_TURN = [fault for fault in FAULTS if fault not in (*OF_WRITES, "full")]


def applies(fault: str, call: str, nth: int) -> bool:
    """Whether to try a fault at a call: writes are many, so each gets only some of the faults."""
    if call != "write":
        return fault not in OF_WRITES
    return fault not in _IN_TURN or fault == _IN_TURN[nth % len(_IN_TURN)]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="spile-faults-", ignore_cleanup_errors=True)


@functools.cache
def library() -> str | None:
    """Path of the compiled library; None where there is no C compiler, or no glibc."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    made = str(Path(_folder().name, "faults.so"))
    result = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", made, str(_SOURCE)], capture_output=True
    )
    return made if result.returncode == 0 else None


def arm(under: str, action: str, nth: int, report: str) -> None:
    """From here on, in this process: `action` at the nth call that changes something below `under`.

    Args:
        action: one of FAULTS; or `count`, which reports every call, or `record`, which reports
            what a power cut could undo.
        report: a file that gets a line for the call that was hit.
    """
    preloaded = ctypes.CDLL(None)
    given = (under.encode(), action.encode(), ctypes.c_long(nth), report.encode())
    if preloaded.spile_faults_arm(*given) != 0:
        raise ValueError(f"no such fault: {action}")


def note(text: str) -> None:
    """Add a line to the record of calls."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).spile_faults_note(text.encode())
