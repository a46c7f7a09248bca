"""Description of an engine's files: how they are recognised, and the documents they hold."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from spile.core.config import canonical_json
from spile.core.identity import sampled_digests
from spile.models.files.checkpoint import Checkpoint
from spile.objects.paths import AnyPath

UNREADABLE = "file cannot be read"
NO_TOKENS = "no token ids"
NO_ROWS = "no hidden states"
OTHER_FORM = "another shape or dtype than the first document"


@dataclass(frozen=True)
class GivenDocument:
    """One document as an engine wrote it.

    Attributes:
        name: of its file or its line, for people.
        tokens: its token ids.
        slots: the rows of each layer, and a scale for each row if they are in eight bits.
        refused: why it cannot be read; then there are no rows.
        why: more about that, for people.
    """

    name: str
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    slots: Sequence[tuple[np.ndarray, np.ndarray | None]] = ()
    refused: str | None = None
    why: str = ""


@dataclass(frozen=True)
class GivenRows:
    """What an engine's files hold.

    Attributes:
        slots: the number of layers in each row of a token.
        dtype: of their values, as `--store-dtype` names it.
        taps: what the layers are, if the files say so; as for `--taps`.
        count: the number of documents.
        identity: what names the files for good.
        documents: yields the documents, from one of them on.
    """

    slots: int
    dtype: str
    taps: str | None
    count: int
    identity: str
    documents: Callable[[int], Iterator[GivenDocument]]


@dataclass(frozen=True)
class EngineRun:
    """What a format may need to open its files: the model that ran, and the prompts' file."""

    checkpoint: Checkpoint
    prompts: AnyPath | None = None


@dataclass(frozen=True, kw_only=True)
class IngestFormat:
    """One format.

    Attributes:
        rows_by: the engine that writes it.
        recognise: tells whether a place holds it.
        open: reads what the files hold.
        layers: says which taps to give if the files do not name them.
    """

    name: str
    about: str
    rows_by: str
    recognise: Callable[[AnyPath], bool]
    open: Callable[[AnyPath, EngineRun], GivenRows]
    layers: Callable[[int, Checkpoint], str] = lambda slots, checkpoint: ""


def identity_of(files: Sequence[AnyPath], *more: str) -> str:
    """Return a digest of files: of their names, and sampled blocks of their bytes."""
    names = [path.name for path in files]
    told = canonical_json([list(zip(names, sampled_digests(files), strict=True)), *more])
    return xxhash.xxh3_128_hexdigest(told)
