"""Panics of Rust libraries, as errors that can be handled."""

from collections.abc import Generator
from contextlib import contextmanager

from spile.core.errors import InputError


@contextmanager
def without_panic(path: object) -> Generator[None, None, None]:
    """Raise InputError if the Rust library panics over a tokenizer's file."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # no module exports it
            raise
        raise InputError(f"{path}: not a usable tokenizer ({error})") from error
