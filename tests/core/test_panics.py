"""Panics of Rust libraries become errors; other exceptions pass through."""

import pytest

from spile.core.errors import InputError
from spile.core.panics import without_panic


class PanicException(BaseException):
    """An exception as Rust libraries raise it: no module exports its name."""


def test_a_panic_is_refused_with_the_file() -> None:
    said = r"a/tokenizer.json: not a usable tokenizer \(overflow\)"
    with pytest.raises(InputError, match=said), without_panic("a/tokenizer.json"):
        raise PanicException("overflow")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_other_errors_pass(error: type[BaseException]) -> None:
    with pytest.raises(error), without_panic("a/tokenizer.json"):
        raise error
