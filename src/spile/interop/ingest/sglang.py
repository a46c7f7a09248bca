"""Answers of SGLang and sglang-jax, as JSONL: one answer of `/generate` or of the engine a line.

    input_ids                  the prompt's token ids, as they were sent; or
    meta_info.input_token_logprobs   [log-probability, id, text] of each token of the prompt
    output_ids                 the sampled ids; or meta_info.output_token_logprobs
    meta_info.hidden_states    a list: of the prompt [tokens, width], then [width] for each sampled
                               token but the last; or, with a layer axis, [tokens, layers, width]
                               and [layers, width]

Without a layer axis, SGLang returns the input of the head, after the final norm.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import ml_dtypes
import numpy as np

from spile.core.bounded_json import JsonError, parse_json
from spile.core.errors import InputError
from spile.interop.ingest.ingest_format import (
    NO_ROWS,
    NO_TOKENS,
    OTHER_FORM,
    UNREADABLE,
    EngineRun,
    GivenDocument,
    GivenRows,
    IngestFormat,
    identity_of,
)
from spile.models.files.checkpoint import Checkpoint
from spile.objects.paths import AnyPath, files_below

_LONGEST = 1 << 30  # bytes of a line
_NARROW = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


def _files(source: AnyPath) -> list[AnyPath]:
    if source.is_file():
        return [source] if source.name.endswith(".jsonl") else []
    return [path for path in files_below(source) if path.name.endswith(".jsonl")]


def _lines(files: Sequence[AnyPath]) -> Iterator[tuple[str, bytes]]:
    """Yield the place and the bytes of each line that is not empty."""
    for path in files:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), 1):
                if line.strip():
                    yield f"{path.name}:{number}", line


def _recognise(source: AnyPath) -> bool:
    files = _files(source) if source.is_dir() or source.is_file() else []
    _, line = next(_lines(files[:1]), ("", b""))
    return b"hidden_states" in line and b"meta_info" in line


def _open(source: AnyPath, run: EngineRun) -> GivenRows:
    files = _files(source)
    if not files:
        raise InputError(f"{source}: holds no .jsonl file")
    count, form, dtype, layered = 0, None, "float32", False
    for place, line in _lines(files):
        count += 1
        if form is not None:
            continue
        first = _document(place, line, None)
        if first.refused is None:
            form = (len(first.slots), *first.slots[0][0].shape[1:])
            dtype = _dtype_of([values for values, _ in first.slots])
            layered = _has_layers(line)
    if form is None:
        raise InputError(f"{source}: none of its {count} answers has hidden states and token ids")

    def documents(first: int) -> Iterator[GivenDocument]:
        for number, (place, line) in enumerate(_lines(files)):
            if number >= first:
                yield _document(place, line, form)

    taps = None if layered else "final_norm"
    return GivenRows(form[0], dtype, taps, count, identity_of(files), documents)


def _dtype_of(values: Sequence[np.ndarray]) -> str:
    """Return the narrowest dtype that holds these values exactly: the engine's own, most likely."""
    for name, dtype in _NARROW.items():
        with np.errstate(over="ignore"):
            if all(np.array_equal(each.astype(dtype), each, equal_nan=True) for each in values):
                return name
    return "float32"


def _has_layers(line: bytes) -> bool:
    answer = parse_json(line, max_bytes=_LONGEST, max_depth=None)
    return np.ndim(answer["meta_info"]["hidden_states"][0]) == 3


def _document(place: str, line: bytes, form: tuple[int, ...] | None) -> GivenDocument:
    """Return the document of one answer; `form`: layers and width that its rows must have."""
    try:
        answer = parse_json(line, max_bytes=_LONGEST, max_depth=None)
        meta = answer["meta_info"]
        chunks = meta["hidden_states"]
    except (JsonError, KeyError, TypeError, IndexError) as error:
        lacks = not isinstance(error, JsonError)
        return GivenDocument(place, refused=NO_ROWS if lacks else UNREADABLE, why=str(error))
    try:
        rows = _rows(chunks)
    except (ValueError, TypeError) as error:
        return GivenDocument(place, refused=NO_ROWS, why=str(error)[:100])
    if form is not None and rows.shape[1:] != form:
        return GivenDocument(place, refused=OTHER_FORM, why=f"{list(rows.shape)}")
    tokens = _tokens(answer, meta)
    if tokens is None:
        return GivenDocument(place, refused=NO_TOKENS, why="no input_ids or input_token_logprobs")
    slots = [(rows[:, layer], None) for layer in range(rows.shape[1])]
    return GivenDocument(place, tokens, slots)


def _rows(chunks: Any) -> np.ndarray:
    """Return [tokens, layers, width] of the chunks of an answer.

    Raises:
        ValueError: if they are not arrays of one width.
    """
    arrays = [np.asarray(chunk, np.float32) for chunk in chunks]
    if not arrays or arrays[0].ndim not in (2, 3):
        raise ValueError("hidden_states is not a list that begins with the rows of the prompt")
    token = arrays[0].ndim - 1  # axes of a token's rows
    whole = [each[None] if each.ndim == token else each for each in arrays]
    joined = np.concatenate(whole)
    return joined[:, None] if token == 1 else joined


def _tokens(answer: Mapping[str, Any], meta: Mapping[str, Any]) -> np.ndarray | None:
    """Return the ids of all tokens that have rows: not of the last that was sampled."""
    prompt = _ids(answer.get("input_ids"), meta.get("input_token_logprobs"))
    sampled = _ids(answer.get("output_ids"), meta.get("output_token_logprobs")) or []
    known = meta.get("prompt_tokens")
    if prompt is None or (type(known) is int and known != len(prompt)):
        return None
    return np.array([*prompt, *sampled[:-1]], np.int64)


def _ids(given: Any, logprobs: Any) -> list[int] | None:
    """Return token ids from a list of them, or from log-probabilities with ids."""
    if given is None and isinstance(logprobs, list):
        given = [_second(each) for each in cast(list[Any], logprobs)]
    if not isinstance(given, list):
        return None
    ids = cast(list[Any], given)
    if not all(type(token) is int for token in ids):
        return None
    return [token if -1 < token < 1 << 31 else -1 for token in ids]


def _second(entry: Any) -> Any:
    values = cast(list[Any], entry) if isinstance(entry, list) else []
    return values[1] if len(values) > 1 else None


def _layers(slots: int, checkpoint: Checkpoint) -> str:
    return "sglang-jax returned: its layer k enters block k, which is resid_post:k-1"


SGLANG = IngestFormat(
    name="sglang",
    about="answers of SGLang and sglang-jax with hidden states, as JSONL",
    rows_by="SGLang",
    recognise=_recognise,
    open=_open,
    layers=_layers,
)
