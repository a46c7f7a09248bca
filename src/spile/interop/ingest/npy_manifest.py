"""`.npy` shards with a manifest, as tpu-mech-interp captures them from sglang-jax.

    manifest.json    `layers`, `d_model`, `dtype`; the shards: `path`, `tokens`, `sha256`
    shard-00000.npy  [tokens, width], or [tokens, layers, width]: whole prompts, one after another

Layer k is the stream that enters block k. There are no token ids: they are those of the prompts, in
the file that was captured, as the model's tokenizer makes them. So only rows of prompts are read.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from spile.core.bounded_json import JsonError, parse_json_object
from spile.core.errors import InputError, SpileError
from spile.core.npy import read_npy_header
from spile.core.tensors import TensorInfo
from spile.corpus.tokenize import TextTokenizer
from spile.dataset.format import is_count
from spile.interop.ingest.ingest_format import (
    NO_ROWS,
    UNREADABLE,
    EngineRun,
    GivenDocument,
    GivenRows,
    IngestFormat,
    identity_of,
)
from spile.interop.ingest.writer import LENGTHS
from spile.models.files.safetensors import read_tensor
from spile.objects.opened import opened
from spile.objects.paths import AnyPath, read_json

_MANIFEST = "manifest.json"
_KEYS = ("layers", "d_model", "dtype", "shards", "tokens_kept", "prompts_sha256", "prompts_done")
_PIECE = 8 << 20


@dataclass(frozen=True)
class _ShardRecord:
    """A shard, and the prompts whose rows it holds.

    Attributes:
        first: the number of its first prompt.
        refused: why its rows cannot be told apart; None if they can.
    """

    path: AnyPath
    rows: int
    sha256: str | None
    first: int
    counts: Sequence[int]
    refused: str | None = None


def _recognise(source: AnyPath) -> bool:
    return source.is_dir() and (source / _MANIFEST).is_file()


def _open(source: AnyPath, run: EngineRun) -> GivenRows:
    manifest = read_json(source / _MANIFEST)
    where = str(source / _MANIFEST)
    if missing := [key for key in _KEYS if key not in manifest]:
        raise InputError(f"{where}: has no {', '.join(missing)}")
    layers, width, dtype = _form(manifest, where)
    _refuse_completions(manifest, where)
    if run.prompts is None:
        raise InputError(
            f"{source}: holds no token ids; give the prompts that were captured with --prompts FILE"
        )
    prompts = _read_prompts(run.prompts)
    _compare_prompts(prompts, manifest, run.prompts)
    prompts = prompts[: int(manifest["prompts_done"])]
    tokens = TextTokenizer(run.checkpoint.directory, "tokenizer").encode(prompts)
    shards = _assigned(source, manifest, [len(ids) for ids in tokens], where)
    taps = ",".join(f"resid_post:{layer - 1}" if layer else "resid_pre:0" for layer in layers)
    shape = (len(layers), width)

    def documents(first: int) -> Iterator[GivenDocument]:
        for shard in shards:
            yield from _documents(shard, tokens, shape, dtype, first)

    files = [source / _MANIFEST, *(shard.path for shard in shards if shard.path.is_file())]
    identity = identity_of([*files, run.prompts])
    return GivenRows(len(layers), dtype.name, taps, len(prompts), identity, documents)


def _form(manifest: Mapping[str, Any], where: str) -> tuple[list[int], int, np.dtype[Any]]:
    """Return the layers, the width and the dtype of the rows."""
    given, width, name = (manifest[key] for key in ("layers", "d_model", "dtype"))
    layers = cast(list[Any], given) if isinstance(given, list) else []
    known = all(map(is_count, layers)) and is_count(width) and width > 0
    if not known or not layers or sorted({*layers}) != layers:
        raise InputError(f"{where}: layers and d_model are not ascending numbers and a width")
    if name not in ("float32", "float16"):
        raise InputError(f"{where}: dtype must be float32 or float16")
    return layers, width, np.dtype(name)


def _refuse_completions(manifest: Mapping[str, Any], where: str) -> None:
    """Refuse rows of tokens that the model sampled: nothing says which those were."""
    kept, sampling = manifest["tokens_kept"], manifest.get("sampling_params")
    told = cast(dict[str, Any], sampling) if isinstance(sampling, dict) else {}
    asked = told.get("max_new_tokens")
    if kept == "prompt" or (kept == "all" and asked == 1):
        return
    raise InputError(
        f"{where}: has rows of sampled tokens, and does not say which tokens those are; capture "
        "with --tokens prompt, or with --max-new-tokens 1"
    )


def _read_prompts(path: AnyPath) -> list[str]:
    """Return the prompts of a file: its lines, or the `text` of each line of JSONL."""
    try:
        lines = path.read_bytes().decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts {path}: cannot be read ({error})") from None
    lines = [line.strip() for line in lines if line.strip()]
    if not path.name.endswith(".jsonl"):
        return lines
    found: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            text = parse_json_object(line.encode()).get("text")
        except JsonError as error:
            raise InputError(f"--prompts {path}: line {number} is not JSON ({error})") from None
        if not isinstance(text, str):
            raise InputError(f"--prompts {path}: line {number} has no text")
        found.append(text)
    return found


def _compare_prompts(prompts: Sequence[str], manifest: Mapping[str, Any], path: AnyPath) -> None:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.encode() + b"\0")
    done = manifest["prompts_done"]
    if digest.hexdigest() != manifest["prompts_sha256"]:
        raise InputError(f"--prompts {path}: are not the prompts that the manifest was made from")
    if type(done) is not int or not 0 <= done <= len(prompts):
        raise InputError(f"--prompts {path}: the manifest counts {done} of {len(prompts)} prompts")


def _assigned(
    source: AnyPath, manifest: Mapping[str, Any], counts: Sequence[int], where: str
) -> list[_ShardRecord]:
    """Return the shards, each with the prompts that fill it.

    A shard ends with a prompt. If no number of prompts fills one, its documents cannot be told
    apart, nor can those of all later shards.
    """
    ends, first, reason = [*itertools.accumulate(counts)], 0, None
    found: list[_ShardRecord] = []
    before = 0
    for record in manifest["shards"]:
        try:
            name, rows, sha256 = record["path"], record["tokens"], record.get("sha256")
        except (TypeError, KeyError, AttributeError):
            raise InputError(f"{where}: a shard has no path or no tokens") from None
        if not isinstance(name, str) or "/" in name or name in ("", "..") or not is_count(rows):
            raise InputError(f"{where}: {str(name)[:100]!r} is not the name of a shard")
        last = next((n for n in range(first, len(ends)) if ends[n] - before >= rows), len(ends) - 1)
        if reason is None and (last < first or ends[last] - before != rows):
            reason = LENGTHS
        own = counts[first : last + 1] if reason is None else counts[first:]
        if reason is None or own:
            found.append(_ShardRecord(source / name, rows, sha256, first, own, reason))
        first += len(own)
        before = ends[first - 1] if first else 0
    if first < len(counts):
        found.append(_ShardRecord(source / _MANIFEST, 0, None, first, counts[first:], NO_ROWS))
    return found


def _documents(
    shard: _ShardRecord,
    tokens: Sequence[np.ndarray],
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    first: int,
) -> Iterator[GivenDocument]:
    """Yield the documents of a shard, from document `first` of all on."""
    numbers = range(shard.first, shard.first + len(shard.counts))
    if first >= numbers.stop:
        return
    refused, why = shard.refused, f"{shard.path.name} has {shard.rows} rows"
    try:
        info = None if refused else _checked(shard, shape, dtype)
        file = opened(shard.path) if info else None
    except (SpileError, ValueError, OSError) as error:
        refused, why, info, file = UNREADABLE, str(error), None, None
    begin = 0
    for number, count in zip(numbers, shard.counts, strict=True):
        name = f"prompt {number}"
        if number < first:
            pass
        elif info is None or file is None:
            yield GivenDocument(name, refused=refused, why=why)
        else:
            each = dtype.itemsize * shape[0] * shape[1]
            start = info.start + begin * each
            part = TensorInfo(name, dtype, (count, *shape), start, start + count * each)
            rows = read_tensor(file, part)
            slots = [(rows[:, layer], None) for layer in range(shape[0])]
            yield GivenDocument(name, tokens[number], slots)
        begin += count


def _checked(shard: _ShardRecord, shape: tuple[int, int], dtype: np.dtype[Any]) -> TensorInfo:
    """Return the place of a shard's rows; raise ValueError unless they are what they should be."""
    with shard.path.open("rb") as file:
        found, stored = read_npy_header(file)
        start = file.tell()
        digest, size = hashlib.sha256(), 0
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    wanted = [(shard.rows, *shape), *([(shard.rows, shape[1])] if shape[0] == 1 else [])]
    if found not in wanted or stored != dtype:
        raise ValueError(f"{shard.path.name} holds {stored} of {list(found)}")
    if size != shard.rows * shape[0] * shape[1] * dtype.itemsize:
        raise ValueError(f"{shard.path.name} is cut short")
    if shard.sha256 is not None and digest.hexdigest() != shard.sha256:
        raise ValueError(f"{shard.path.name} does not have the SHA-256 of the manifest")
    return TensorInfo(shard.path.name, dtype, (shard.rows, *shape), start, start + size)


NPY_MANIFEST = IngestFormat(
    name="npy",
    about=".npy shards with manifest.json, of tpu-mech-interp",
    rows_by="sglang-jax",
    recognise=_recognise,
    open=_open,
)
