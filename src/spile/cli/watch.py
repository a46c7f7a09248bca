"""A status that is drawn again and again, until the dataset is whole."""

import contextlib
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from spile.cli.look_text import status_text

if TYPE_CHECKING:
    from spile.status.status import Status

_LEAVE = (b"q", b"Q", b"\x1b")


def watched(
    out: str, look: Callable[[], "Status"], *, interval: float, as_json: bool = False
) -> None:
    """Look every `interval` seconds; on a terminal `q` leaves, elsewhere each look is a block."""
    if as_json or not sys.stdout.isatty():
        _blocks(out, look, interval, as_json)
        return
    with _keys() as pressed, Live(console=Console(), auto_refresh=False, screen=False) as live:
        while True:
            status = look()
            text = status_text(out, status)
            ends = "" if status.state == "complete" else "\n(q leaves)"
            live.update(Text(text + ends, no_wrap=True, overflow="ellipsis"), refresh=True)
            if not ends or pressed(interval):
                return


def _blocks(out: str, look: Callable[[], "Status"], interval: float, as_json: bool) -> None:
    while True:
        status = look()
        shown = json.dumps(status.to_json()) if as_json else status_text(out, status) + "\n"
        sys.stdout.write(shown + "\n")
        sys.stdout.flush()
        if status.state == "complete":
            return
        time.sleep(interval)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yields what waits for a key that leaves, and says whether one came."""
    if not sys.stdin.isatty():
        yield _rest
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _leaves
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _rest(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _leaves(seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while (left := limit - time.monotonic()) > 0:
        ready, _, _ = select.select([sys.stdin], [], [], left)
        if ready and os.read(sys.stdin.fileno(), 1) in (b"", *_LEAVE):
            return True
    return False
