"""What is stored of a token beside its rows: the likeliest next tokens, and where heads look."""

import re
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.core.index import LAST
from spile.core.tap_order import LARGEST, OF_A_LENS
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.document import Document
from spile.serve.digest import read_rows
from spile.serve.documents import PageTexts

_IDS, _LOGPROBS = LARGEST["top_logits"]
_, _LENS_IDS, _LENS_LOGPROBS = OF_A_LENS
_OF_A_LAYER = 3  # tokens that are shown
_RANK = "next_rank"
_KEYS, _WEIGHTS = "attn_top_keys", "attn_top_weights"
_HEAD = re.compile(r"\.h(\d+)")


def has_next(dataset: Dataset) -> bool:
    """Return whether likely next tokens are stored (`--taps top_logits`, or those of a lens)."""
    return _has_own(dataset) or bool(_lens_layers(dataset))


def _has_own(dataset: Dataset) -> bool:
    return {_IDS, _LOGPROBS} <= {*dataset.taps}


def _lens_layers(dataset: Dataset) -> list[int]:
    """Return the layers at which a lens's predictions are stored (`--taps lens_top`)."""
    found = [tap.removeprefix(f"{_LENS_IDS}.") for tap in dataset.taps if tap.startswith(_LENS_IDS)]
    return [int(layer) for layer in found if f"{_LENS_LOGPROBS}.{layer}" in dataset.taps]


def attended(dataset: Dataset) -> list[dict[str, Any]]:
    """Return the taps that hold the weights of keys (`--taps attn_top`), and their heads."""
    found = [
        tap
        for tap in dataset.taps
        if tap.startswith(f"{_WEIGHTS}.") and tap.replace(_WEIGHTS, _KEYS) in dataset.taps
    ]
    return [{"tap": tap, "heads": _heads(dataset, tap)} for tap in found]


def _heads(dataset: Dataset, tap: str) -> list[int]:
    named = [int(head) for head in _HEAD.findall(tap)]
    return named or [*range(dataset.shape(tap)[0])]


def next_tokens(
    dataset: Dataset, texts: PageTexts, document: Document, offset: int
) -> dict[str, Any]:
    """Return the likeliest next tokens after one, the next token itself, and its rank.

    `lens` has the likeliest that a lens says at each of its layers.
    """
    if not has_next(dataset):
        raise ConfigError("this dataset holds no next tokens; extract with --taps top_logits")
    place, row = _place(document, offset)

    def likely(ids: str, logprobs: str, most: int | None = None) -> list[dict[str, Any]]:
        found = read_rows(dataset, ids, row, row + 1, np.int64)[0, :most].tolist()
        shares = np.exp(read_rows(dataset, logprobs, row, row + 1, np.float64)[0, :most]).tolist()
        pieces = [texts.pieces([token])[0] for token in found]
        return [
            {"id": token, "piece": piece, "share": share}
            for token, piece, share in zip(found, pieces, shares, strict=True)
        ]

    own = likely(_IDS, _LOGPROBS) if _has_own(dataset) else []
    following = rank = None
    if not document.index["flags"][place] & LAST:  # the model has not seen the token after that
        after = document.index[place + 1 : place + 2]
        following = int(after["token_id"][0]) if (after["offset"] == offset + 1).any() else None
        if _RANK in dataset.taps:
            rank = int(read_rows(dataset, _RANK, row, row + 1, np.int64)[0, 0])
    return {
        "doc": document.doc,
        "offset": offset,
        "likely": own,
        "rest": max(0.0, 1 - sum(each["share"] for each in own)),
        "lens": [
            {
                "layer": layer,
                "likely": likely(f"{_LENS_IDS}.{layer}", f"{_LENS_LOGPROBS}.{layer}", _OF_A_LAYER),
            }
            for layer in _lens_layers(dataset)
        ],
        "next": following,
        "rank": rank,
    }


def keys(
    dataset: Dataset, texts: PageTexts, document: Document, offset: int, tap: str, head: int
) -> dict[str, Any]:
    """Return the tokens that a head weighs most from a given token, largest weight first."""
    if tap not in {each["tap"] for each in attended(dataset)}:
        raise ConfigError(f"{tap!r} holds no weights of keys; extract with --taps attn_top")
    heads = _heads(dataset, tap)
    if head not in heads:
        raise ConfigError(f"{tap} has the heads {', '.join(map(str, heads))}, not {head}")
    place, row = _place(document, offset)
    shape = dataset.shape(tap)
    weights = read_rows(dataset, tap, row, row + 1, np.float64).reshape(shape)
    positions = read_rows(dataset, tap.replace(_WEIGHTS, _KEYS), row, row + 1, np.int64)
    own, at = document.index[place], heads.index(head)
    first = int(own["offset"]) - int(own["pos"])  # where the context begins in the document
    found: list[dict[str, Any]] = []
    for position, weight in zip(positions.reshape(shape)[at], weights[at], strict=True):
        if position < 0:
            continue
        key = first + int(position)
        where = int(np.searchsorted(document.index["offset"], key))
        stored = where < len(document) and document.index["offset"][where] == key
        token = [int(document.index["token_id"][where])] if stored else []
        found.append(
            {"offset": key, "piece": texts.pieces(token)[0] if token else None, "weight": weight}
        )
    return {"tap": tap, "head": head, "doc": document.doc, "offset": offset, "keys": found}


def _place(document: Document, offset: int) -> tuple[int, int]:
    """Return the place of a token's row in its document, and the row's number."""
    place = int(np.searchsorted(document.index["offset"], offset))
    if place == len(document) or document.index["offset"][place] != offset:
        raise ConfigError(f"document {document.doc} has no row for the token at offset {offset}")
    return place, int(document.rows[place])
