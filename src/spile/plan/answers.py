"""The tokens that count to an objective, and those that columns of documents name. No jax."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from spile.core.errors import InputError
from spile.core.index import ROLES
from spile.corpus.documents import Documents
from spile.corpus.pack import Aims
from spile.corpus.tokenize import TextTokenizer
from spile.models.objectives import answer_columns, counted_role


def aims_of(
    identity: str | None, tokenizer: TextTokenizer, documents: Documents, chosen: Sequence[int]
) -> Aims | None:
    """Return what counts to a recipe's objective; None if every token does.

    Args:
        identity: of the objective.
        chosen: the numbers of the documents that are packed, of those that can be read.

    Raises:
        InputError: if a column does not name one token.
    """
    if (role := counted_role(identity)) is not None:
        return Aims(role=ROLES[role])
    columns = answer_columns(identity)
    if not columns:
        return None
    answers: list[tuple[int, int]] = []
    for number in chosen:
        document = documents.usable[number]
        first, second = (
            _token(tokenizer, document.ordinal, column, (document.columns or {}).get(column))
            for column in columns
        )
        answers.append((first, second))
    return Aims(answers=answers)


def _token(tokenizer: TextTokenizer, ordinal: int, column: str, value: Any) -> int:
    """Return the token that a document's column names: its id, or its text."""
    if isinstance(value, int) and not isinstance(value, bool):
        if 0 <= value <= tokenizer.max_id:
            return value
        raise InputError(f"document {ordinal}: {column} is {value}, which is no token's id")
    ids = tokenizer.encode_plain(value) if isinstance(value, str) else np.zeros(0, np.int32)
    if len(ids) != 1:
        raise InputError(
            f"document {ordinal}: {column} is {value!r}, which is {len(ids)} tokens; an objective "
            "compares single tokens: write the text of one, with its space, or its id"
        )
    return int(ids[0])
