"""A directory of rollouts: its record, its units, and how a unit comes to exist.

    rollouts.json              what the rollouts are: prompts, sampling, units; created once
    units/DIGEST.safetensors   the units of the prompts, as columns
    data/GROUP/UNIT.parquet    the answers of a unit

A unit's file is small and created exclusively, whole and durable, so that it is its own done
record: a killed run leaves whole units, and two runs can make a unit but once.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spile.core.errors import ConfigError, CorruptError, DataError
from spile.corpus.documents import plain
from spile.corpus.rollout_columns import DATA, RECORD
from spile.dataset import format as fmt
from spile.dataset.codec.columns import named_by_content
from spile.dataset.records.unit_table import UnitColumns, read_units
from spile.objects import Objects
from spile.rollouts.exchange import SampledAnswer, Sampling
from spile.rollouts.prompts import EnginePrompt
from spile.rollouts.tokens import AnsweredTokens

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false

_KIND = "rollouts"
_TYPES = {"bool": pa.bool_(), "int64": pa.int64(), "float64": pa.float64(), "string": pa.string()}
_SCHEMA = pa.schema(
    {
        "prompt": pa.int64(),
        "answer": pa.int32(),
        "token_ids": pa.list_(pa.int32()),
        "prompt_tokens": pa.int32(),
        "roles": pa.list_(pa.uint16()),
        "logprobs": pa.list_(pa.float32()),
        "prompt_ids_from": pa.string(),
        "answer_ids_from": pa.string(),
        "text": pa.string(),
        "thinking": pa.string(),
        "tool_calls": pa.string(),
        "finish_reason": pa.string(),
        "error": pa.string(),
        "prompt_text": pa.string(),
        "messages": pa.string(),
        "tools": pa.string(),
        "seed": pa.int64(),
        "sampling": pa.string(),
        "model": pa.string(),
    }
)


@dataclass(frozen=True)
class RolloutTable:
    """What a directory of rollouts is to hold.

    Attributes:
        prompts: the options that say what the prompts are, by name.
        sampling: how answers are sampled.
        files: of the corpus: path and identity.
        made_with: digests of the tokenizer and the chat template.
        kept: the type of each kept column.
    """

    prompts: Mapping[str, Any]
    sampling: Mapping[str, Any]
    files: Sequence[Mapping[str, Any]]
    made_with: Mapping[str, Any]
    kept: Mapping[str, str]
    units: UnitColumns

    def differences(self, other: "RolloutTable") -> dict[str, tuple[Any, Any]]:
        """Return what differs from another table, by name: the value here, and there."""
        found: dict[str, tuple[Any, Any]] = {}
        for mine, theirs in (
            (self.prompts, other.prompts),
            (self.sampling, other.sampling),
            (self.made_with, other.made_with),
        ):
            places = ("model", "corpus", "template")  # (a place may change; a content may not)
            for name in {*mine, *theirs}.difference(places if mine is self.prompts else ()):
                if mine.get(name) != theirs.get(name):
                    found[name] = mine.get(name), theirs.get(name)
        if [file["identity"] for file in self.files] != [file["identity"] for file in other.files]:
            found["corpus"] = ("other files", "changed files")
        return found


class RolloutStore:
    """The units of a directory of rollouts."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    def read(self) -> RolloutTable | None:
        """Return what the directory is to hold; None if nothing was begun there."""
        body = fmt.read_record(self.objects, RECORD, _KIND)
        if body is None:
            return None
        try:
            units = read_units(self.objects, body.pop("units"), fmt.UNIT_COLUMNS)
            return RolloutTable(**body, units=units)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(RECORD, f"is no record of rollouts ({error})") from error

    def create(self, table: RolloutTable) -> RolloutTable:
        """Store the table; if another process has stored one first, return that one."""
        if fmt.read_record(self.objects, fmt.UNITS, "units") is not None:
            raise ConfigError(f"{self.objects.url}: holds a dataset; choose another --out")
        file, data = named_by_content(fmt.UNIT_COLUMNS, table.units.columns)
        self.objects.create(file.key, data)
        body = {
            "prompts": dict(table.prompts), "sampling": dict(table.sampling),
            "files": [dict(file) for file in table.files], "made_with": dict(table.made_with),
            "kept": dict(table.kept),
            "units": {**file.to_json(), "count": len(table.units)},
        }  # fmt: skip
        self.objects.create(RECORD, fmt.encode_record(_KIND, body))
        stored = self.read()
        assert stored
        return stored

    def done(self) -> set[int]:
        """Return the units that exist, from a listing alone."""
        names = (key.rpartition("/")[2] for key in self.objects.list(DATA))
        return {int(name[:8]) for name in names if _is_unit(name)}

    def commit(self, unit: int, data: bytes) -> bool:
        """Create a unit's file; return False if another process has made the unit first."""
        return self.objects.create(_unit_key(unit), data)


def _is_unit(name: str) -> bool:
    return name.endswith(".parquet") and name[:8].isdecimal() and len(name) == 16


def _unit_key(unit: int) -> str:
    return f"{DATA}{unit // fmt.GROUP_UNITS:06d}/{unit:08d}.parquet"


@dataclass(frozen=True)
class AnswerRow:
    """One answer to a prompt, or why there is none."""

    prompt: EnginePrompt
    number: int
    answer: SampledAnswer | None = None
    tokens: AnsweredTokens | None = None
    error: str | None = None


def encode_unit(
    rows: Iterable[AnswerRow], sampling: Sampling, engine: str, kept: Mapping[str, str]
) -> bytes:
    """Return the Parquet file of a unit's answers."""
    settings = json.dumps(sampling.settings(engine), sort_keys=True)
    values = [_values(row, sampling, settings) | _kept(row.prompt, kept) for row in rows]
    schema = _SCHEMA
    for name, kind in kept.items():
        schema = schema.append(pa.field(name, _TYPES[kind]))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(values, schema), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _values(row: AnswerRow, sampling: Sampling, settings: str) -> dict[str, Any]:
    prompt, answer, tokens = row.prompt, row.answer, row.tokens
    told: dict[str, Any] = {
        "prompt": prompt.ordinal,
        "answer": row.number,
        "error": row.error,
        "prompt_text": prompt.text if prompt.skipped is None else None,
        "messages": _json(prompt.chat),
        "tools": _json(prompt.tools),
        "seed": sampling.seed_of(prompt.ordinal, row.number),
        "sampling": settings,
    }
    if tokens is None or answer is None:
        return told
    return told | {
        "token_ids": tokens.ids,
        "prompt_tokens": tokens.prompt,
        "roles": tokens.roles,
        "logprobs": pa.array(tokens.logprobs, mask=np.isnan(tokens.logprobs)).to_pylist(),
        "prompt_ids_from": tokens.prompt_from,
        "answer_ids_from": tokens.answer_from,
        "text": answer.text,
        "thinking": answer.thinking,
        "tool_calls": _json(answer.tool_calls),
        "finish_reason": answer.finish_reason,
        "model": answer.model,
    }


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)


def _kept(prompt: EnginePrompt, kept: Mapping[str, str]) -> dict[str, Any]:
    """Return the kept columns of a prompt, in their types."""
    found: dict[str, Any] = {}
    for name, kind in kept.items():
        value = plain(prompt.columns.get(name))
        if value is not None and kind == "string" and not isinstance(value, str):
            value = json.dumps(value)
        if value is not None and not _fits(value, kind):
            raise DataError(
                f"document {prompt.ordinal}: {name!r} holds {value!r:.80}, and the first ones hold "
                f"{kind}; leave it out with --keep"
            )
        found[name] = value
    return found


def _fits(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or kind == "bool":
        return isinstance(value, bool) and kind == "bool"
    return isinstance(value, {"int64": int, "float64": (int, float)}.get(kind, str))
