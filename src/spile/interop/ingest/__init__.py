"""Make a dataset of rows that another engine made: `spile ingest SOURCE --model M --out OUT`.

A format reads an engine's files, document by document, and `spile.Writer` does the rest. Documents
that cannot be stored are refused one by one, counted and named.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spile.core.errors import ConfigError, InputError, name_parameters
from spile.core.humanize import plural
from spile.core.options import listed
from spile.core.threads import OnProgress, cancellation
from spile.dataset.codec.quantization import decode
from spile.dataset.read.opening import open_dataset
from spile.interop.ingest import npy_manifest, sglang, vllm
from spile.interop.ingest.ingest_format import EngineRun, GivenDocument, GivenRows, IngestFormat
from spile.interop.ingest.writer import LENGTHS, NONFINITE, Writer
from spile.models.files.checkpoint import open_checkpoint
from spile.objects.paths import AnyPath, path_of

_log = logging.getLogger("spile.interop")
FORMATS: dict[str, IngestFormat] = {
    form.name: form for form in (vllm.VLLM, npy_manifest.NPY_MANIFEST, sglang.SGLANG)
}
SOURCE = "source"  # the column of the documents table that names a document's file
_NAMED = 20  # refused documents that are named
name_parameters({"format": tuple(FORMATS), "prompts": (), "rows_by": ()})


@dataclass(frozen=True)
class Ingested:
    """The result of an ingestion."""

    out: str
    format: str
    rows_by: str
    taps: tuple[str, ...]
    dtype: str
    documents: int  # with rows
    rows: int  # of each tap
    units: int
    refused: Mapping[str, int]  # documents by reason
    named: Sequence[str]  # the first of those that this call refused


def ingest(
    source: str | Path,
    out: str | Path,
    *,
    model: str,
    taps: str | Sequence[str] | None = None,
    format: str | None = None,
    prompts: str | Path | None = None,
    rows_by: str | None = None,
    progress: OnProgress | None = None,
    **options: Any,
) -> Ingested:
    """Store the rows in an engine's files, or continue to.

    Args:
        source: the file or the folder, or its URL.
        model: the model that the engine ran.
        taps: what the layers in each file are, from the first to the last; by default as the files
            say.
        format: one of `FORMATS`; by default the one that recognises the files.
        prompts: the file of prompts, for files that hold no token ids.
        rows_by: the engine; by default the one that writes this format.
        options: `lora`, `store_dtype`, `compute_dtype`, `seq_len` and `unit_tokens` of `Writer`.

    Raises:
        InputError: if the files are not of that format, or no document can be stored.
    """
    place = path_of(str(source))
    form = _format_of(place, format)
    run = EngineRun(
        open_checkpoint(model, options.get("lora")), path_of(str(prompts)) if prompts else None
    )
    found = form.open(place, run)
    taps = taps or found.taps
    if taps is None:
        raise ConfigError(
            f"{source}: say with --taps what its {plural(found.slots, 'layer')} of each token are, "
            f"from the first to the last: {form.layers(found.slots, run.checkpoint)}"
        )
    settings: dict[str, Any] = {"store_dtype": found.dtype}
    settings |= {name: value for name, value in options.items() if value is not None}
    if found.dtype == "float8_e4m3" and settings["store_dtype"] != found.dtype:
        raise ConfigError("--store-dtype: rows in float8_e4m3 are stored as they are; leave it out")
    with Writer(
        out,
        model=model,
        taps=taps,
        rows_by=rows_by or form.rows_by,
        corpus=str(source),
        identity=f"{form.name} {found.identity}",
        keep=(SOURCE,),
        **settings,
    ) as made:
        names = made.job.recipe.taps
        if len(names) != found.slots:
            raise ConfigError(
                f"--taps names {len(names)} ({', '.join(names)}), and {source} has "
                f"{plural(found.slots, 'layer')} of each token"
            )
        named = _copied(made, found, names, progress)
    reader = open_dataset(str(out))
    return Ingested(
        out=str(out),
        format=form.name,
        rows_by=made.job.recipe.rows_by or "",
        taps=names,
        dtype=made.job.recipe.store_dtype,
        documents=reader.num_documents,
        rows=reader.num_tokens,
        units=reader.num_units,
        refused=dict(sorted(made.refused.items())),
        named=named,
    )


def _format_of(place: AnyPath, asked: str | None) -> IngestFormat:
    if asked is not None:
        form = FORMATS.get(asked)
        if form is None:
            raise ConfigError(f"--format {asked}: no such format; there are {', '.join(FORMATS)}")
        return form
    if not (place.is_file() or place.is_dir()):
        raise InputError(f"{place}: no such file or folder")
    form = next((form for form in FORMATS.values() if form.recognise(place)), None)
    if form is None:
        known = "; ".join(f"{form.name}: {form.about}" for form in FORMATS.values())
        raise InputError(f"{place}: holds no rows in a format that spile ingests ({known})")
    return form


def _copied(
    made: Writer, found: GivenRows, taps: Sequence[str], progress: OnProgress | None
) -> list[str]:
    """Give every document that is left to the writer; return the first that are refused."""
    named: list[str] = []
    if made.finished:
        return named
    for document in found.documents(made.documents):
        cancellation().check()
        reason, why = document.refused, document.why
        columns = {SOURCE: document.name}
        if reason is None:
            rows = {
                tap: values if scales is None else (values, scales)
                for tap, (values, scales) in zip(taps, document.slots, strict=True)
            }
            reason = made.add(document.tokens, rows, columns=columns)
            why = _why(document, taps, reason)
        else:
            made.refuse(reason, columns=columns)
        if reason is not None and len(named) < _NAMED:
            named.append(f"{document.name}: {reason}" + (f" ({why})" if why else ""))
            _log.warning("refused %s", named[-1])
        if progress:
            progress(made.documents, found.count)
    return named


def _why(document: GivenDocument, taps: Sequence[str], reason: str | None) -> str:
    """Describe more closely why a document was refused."""
    if reason == LENGTHS:
        rows = listed(dict.fromkeys(str(len(values)) for values, _ in document.slots))
        return f"{rows} rows, {document.tokens.size} tokens"
    if reason != NONFINITE:
        return ""
    for tap, (values, scales) in zip(taps, document.slots, strict=True):
        wide = values.astype(np.float32) if scales is None else decode(values, scales)
        bad = np.flatnonzero(~np.isfinite(wide).all(axis=tuple(range(1, wide.ndim))))
        if len(bad):
            return f"{tap}, token {bad[0]}" + (f" and {len(bad) - 1} more" if bad.size > 1 else "")
    return f"larger than {taps[0]} can hold"
