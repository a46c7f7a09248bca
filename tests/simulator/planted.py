"""What Spile did before its rules for combinations (`docs/protocol.md`), planted one by one.

`planted(FAULT)` breaks today's code in one way. Programs must find what comes of it: a simulator
that finds nothing may be blind.
"""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from spile.corpus.formats.contract import CorpusFile
from spile.dataset.format import Done
from spile.dataset.maintain import assemble, replica
from spile.dataset.read.order import Order
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.passes import Pass
from spile.dataset.records.table import Table
from spile.plan import resolve
from spile.run.extract import Extraction

Patch = tuple[Any, str, Any]


def _every_new_file(
    stored: Table, files: Sequence[CorpusFile], identities: Sequence[str]
) -> tuple[list[CorpusFile], tuple[str, ...]]:
    """Files of the dataset, and then every other path, whatever its content."""
    left = [*zip(files, identities, strict=True)]
    known = [next(pair for pair in left if pair[1] == file["identity"]) for file in stored.files]
    for pair in known:
        left.remove(pair)
    every = [*known, *left]
    return [file for file, _ in every], tuple(identity for _, identity in every)


def _of_the_recipe(ledger: Ledger, table: Table, done: Done) -> str | None:
    return None if done.fingerprint == table.fingerprint else "belongs to another recipe"


def _no_drops(own: Ledger) -> tuple[list[str], list[Ledger]]:
    """The ledgers of a source, without what it has dropped."""
    return [], _PASSES(own)[1]


_PASSES: Callable[[Ledger], tuple[list[str], list[Ledger]]] = replica._passes
_EARLY = re.compile(replica._BEFORE_UNITS.pattern.replace(r"|generations/\d{8}\.json", ""))
_BELIEVED: tuple[Patch, ...] = (
    (Ledger, "other_origin", _of_the_recipe),
    (Ledger, "refuse_strays", lambda *_: None),
)

# By the number of the finding (docs/protocol.md has the table).
FAULTS: Mapping[int, tuple[Patch, ...]] = {
    1: ((assemble, "_refuse_shared_files", lambda parts: None),),
    2: ((resolve, "in_stored_order", _every_new_file),),
    3: ((replica, "_BEFORE_UNITS", _EARLY), *_BELIEVED),
    5: ((replica, "_passes", _no_drops), (replica, "_refuse_same_taps", lambda *_: None)),
    7: (
        (Extraction, "has_more_units", lambda *_: False),
        (Pass, "lacks_generation", lambda *_: False),
    ),
    13: ((Order, "identity", property(lambda order: {})),),
}


@contextmanager
def planted(fault: int) -> Generator[None, None, None]:
    with ExitStack() as stack:
        for owner, name, stub in FAULTS[fault]:
            stack.enter_context(mock.patch.object(owner, name, stub))
        yield
