"""The `spile` command: its parser, exit codes and log. Each group's file has its verbs' flags."""

import argparse
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from spile import __version__
from spile.cli import (
    dataset,
    doctor,
    encode,
    extract,
    features,
    ingest,
    launch,
    legacy,
    lens,
    look,
    model,
    plan,
    rollouts,
    rows,
)
from spile.cli.flags import Parser, Verbs
from spile.cli.style import JsonLines, formatter
from spile.core.errors import Interrupted, SpileError, naming_flags, printable

_VERBS = {  # as `spile --help` lists them
    "make a dataset": (
        extract.add_extract,
        ingest.add_ingest,
        encode.add_encode,
        plan.add_plan,
        rollouts.add_rollouts,
        lens.add_lens,
        model.add_taps,
        model.add_fetch,
        model.add_convert,
        legacy.add_legacy,
    ),
    "look at one": (
        features.add_features,
        look.add_status,
        look.add_ls,
        look.add_serve,
        doctor.add_doctor,
    ),
    "read one": (
        dataset.add_export,
        rows.add_shuffle,
        rows.add_serve_rows,
    ),
    "move one": (
        dataset.add_copy,
        dataset.add_merge,
        dataset.add_push,
    ),
    "maintain one": (
        dataset.add_verify,
        model.add_check,
        dataset.add_sign,
        dataset.add_compact,
        dataset.add_drop,
        dataset.add_gc,
        dataset.add_rm,
    ),
    "run elsewhere": (
        launch.add_launch,
        extract.add_supervise,
        model.add_compile,
    ),
}


@functools.cache
def make_parser(given: str | None = None) -> argparse.ArgumentParser:
    """Build the parser of `spile`, with every verb; once, because it takes 30 ms.

    Args:
        given: the verb to parse; others may then lack flags that take long to import. None: all.
    """
    parser = Parser(
        prog="spile",
        usage="spile VERB [flags]      (`spile VERB --help` explains a verb)",
        description="Taps a language model while it reads a corpus, and keeps the activations.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"spile {__version__}")
    verbs = Verbs(parser, given)
    for title, added in _VERBS.items():
        verbs.begin(title)
        for add in added:
            add(verbs)
    parser.epilog = verbs.listing()
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `spile`."""
    sys.unraisablehook = _show_unraisable
    code = run(sys.argv[1:] if argv is None else argv)
    if os.environ.get("SPILE_WORLD_CHILD"):
        # At exit, jax would wait even for processes that have failed.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run one command; return its exit code."""
    with naming_flags():
        return _run(argv)


def _run(argv: Sequence[str]) -> int:
    if argv and argv[0] == "watch":  # the verb's name before the first release
        print("spile: `spile watch OUT` is now `spile status OUT --follow`", file=sys.stderr)
        argv = ["status", "--follow", *argv[1:]]
    stop = threading.Event()

    def interrupted(number: int, frame: object) -> NoReturn:
        # Set a flag as well as raise: a library may swallow the exception.
        stop.set()
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    try:
        arguments = _parse(argv, argparse.Namespace(stop=stop, argv=list(argv), parse=_parse))
        logging.basicConfig(
            level=logging.WARNING if getattr(arguments, "quiet", False) else logging.INFO,
            handlers=[_handler(as_json=getattr(arguments, "log_json", False))],
        )
        logging.getLogger("jax").setLevel(logging.WARNING)
        return arguments.verb(arguments) or 0
    except SpileError as error:
        _say(error, argv)
        return error.exit_code
    except KeyboardInterrupt:
        _say(Interrupted(), argv)
        return Interrupted.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parse(argv: Sequence[str], given: argparse.Namespace | None = None) -> argparse.Namespace:
    return make_parser(argv[0] if argv else "").parse_args(argv, given or argparse.Namespace())


def _show_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Show errors that Python cannot raise, such as those of callbacks at a garbage collection.

    An interrupt in such a callback has set the flag, which ends the command without a traceback.
    """
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


def _say(error: SpileError, argv: Sequence[str]) -> None:
    """Report why the command ended, in the format of the log."""
    if "--log-json" in argv:
        record = logging.LogRecord("spile", logging.ERROR, "", 0, str(error), (), None)
        print(JsonLines().format(record), file=sys.stderr)
    else:
        print(f"spile: {printable(str(error))}", file=sys.stderr)


class _StderrHandler(logging.Handler):
    """Writes to what standard error is now: rich puts messages above a line that moves there."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # as logging's own handlers
            self.handleError(record)


def _handler(*, as_json: bool) -> logging.Handler:
    handler = _StderrHandler()
    handler.setFormatter(formatter(as_json=as_json))
    handler.addFilter(logging.Filter("spile"))
    return handler
