"""What is asked for: `Recipe` (what the dataset is) and `Runtime` (how it is made).

Each option is declared once, with its kind, bounds and help; flags, TOML keys, validation and
`--help` all derive from that declaration. In a `Recipe` a field left at None means "not given":
it is taken from the store when resuming, and settled by `engine/resolve.py` otherwise.
"""

import dataclasses
import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

from spile.errors import ConfigError

_SUFFIXES = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip

STORE_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3", "int8")
COMPUTE_DTYPES = ("bfloat16", "float32")
_LIMIT = 1 << 63  # every number is smaller than this


def _option(
    default: Any,
    help: str,
    *,
    kind: str = "text",
    choices: tuple[str, ...] = (),
    minimum: int | None = None,
    auto: bool = False,
) -> Any:
    """Declare one option. Kinds: text, count (an integer, `64k` allowed), size (bytes), switch.

    With `auto` that word may be given, and means the default.
    """
    meta = {"help": help, "kind": kind, "choices": choices, "minimum": minimum, "auto": auto}
    return field(default=default, metadata=meta)


def flag_of(name: str) -> str:
    """`seq_len` -> `--seq-len`."""
    return "--" + name.replace("_", "-")


def parse_count(text: str) -> int:
    """`4096`, `64k`, `1.5M`, `1GiB` -> an integer."""
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*([a-zA-Z]*)", text.strip())
    if not match or match[2].lower() not in _SUFFIXES:
        raise ValueError(text)
    suffix = match[2].lower()
    value = Fraction(match[1].replace("_", "")) * _SUFFIXES[suffix]
    if value.denominator != 1 and not suffix.endswith("ib"):  # 1.3GiB is no whole number either
        raise ValueError(text)
    return int(value)


class _Options:
    """Validation shared by Recipe and Runtime: from each field's declaration."""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if value is not None:
                object.__setattr__(self, f.name, _checked(f, value))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))  # type: ignore[arg-type]


def _checked(f: dataclasses.Field[Any], value: Any) -> Any:
    flag, meta = flag_of(f.name), f.metadata
    kind = meta["kind"]
    if value == "auto" and meta["auto"]:
        return None
    if kind in ("count", "size"):
        wanted = "a whole number such as 4096, 64k or 4M" if kind == "count" else "1GiB or 500MB"
        try:
            value = parse_count(value) if isinstance(value, str) else value
        except ValueError:
            raise ConfigError(f"{flag} must be {wanted}, got {_shown(value)}") from None
        if type(value) is not int or not -_LIMIT < value < _LIMIT:
            raise ConfigError(f"{flag} must be {wanted}, got {_shown(value)}")
        if meta["minimum"] is not None and value < meta["minimum"]:
            raise ConfigError(f"{flag} must be at least {meta['minimum']}, got {value}")
        return value
    if kind == "switch":
        if type(value) is not bool:
            raise ConfigError(f"{flag} must be true or false, got {_shown(value)}")
        return value
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{flag} must be a non-empty text, got {_shown(value)}")
    if meta["choices"] and value not in meta["choices"]:
        chosen = ", ".join(meta["choices"])
        raise ConfigError(f"{flag} must be one of {chosen}; got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """A value that may be of any size, in a part of a line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits for Python, or too deep
        return f"a {type(value).__name__} beyond all measure"
    return text if len(text) <= 200 else text[:199] + "…"


@dataclass(frozen=True, kw_only=True)
class Recipe(_Options):
    """What the dataset is. Two runs of one recipe make the same dataset."""

    model: str | None = _option(
        None, "'demo', or a directory or URL with config.json, tokenizer.json and *.safetensors"
    )
    lora: str | None = _option(None, "directory or URL of a PEFT LoRA adapter, merged at load")
    corpus: str | None = _option(
        None,
        "'demo', or a file, directory or glob of Parquet, JSONL or text (.gz and .zst too), or its "
        "URL in a bucket",
    )
    taps: str | None = _option(
        None, "where to tap: site:layers, comma separated, e.g. resid_post:20-27,mlp_out:12,embed"
    )
    where: str | None = _option(
        None,
        "keep only these rows, e.g. 'not bos and pos >= 1', or 'end' for the last token of each "
        "document; over bos eos special first last end pos offset doc token_id",
    )
    every: int | None = _option(
        None, "keep every N-th of a context's rows (that --where keeps)", kind="count", minimum=1
    )
    seq_len: int | None = _option(
        None,
        "tokens in a context [2048, or the model's maximum]",
        kind="count",
        minimum=8,
        auto=True,
    )
    pack: str | None = _option(
        None,
        "ffd packs several documents into a row, isolated; none: one context a row [ffd]",
        choices=("ffd", "none"),
    )
    long_docs: str | None = _option(
        None,
        "documents longer than --seq-len: split into contexts, or truncate [split]",
        choices=("split", "truncate"),
    )
    special_tokens: str | None = _option(
        None,
        "added as the tokenizer does by default, only a leading BOS, or none [tokenizer]",
        choices=("tokenizer", "bos", "none"),
    )
    text_column: str | None = _option(
        None, "column or key that holds the text [text, or the only column of strings]"
    )
    text_documents: str | None = _option(
        None, "in plain text files a document is a line or the whole file [line]",
        choices=("line", "file"),
    )  # fmt: skip
    max_docs: int | None = _option(
        None, "only the first N documents of the corpus", kind="count", minimum=1
    )
    max_tokens: int | None = _option(
        None, "only the first units estimated to hold N tokens", kind="count", minimum=1
    )
    unit_tokens: int | None = _option(
        None,
        "tokens in a unit, the atom of work and of loss, or auto [4M on accelerators, 64k on CPU]",
        kind="count",
        minimum=1,
        auto=True,
    )
    compute_dtype: str | None = _option(
        None, "[bfloat16 on accelerators, float32 on CPU]", choices=COMPUTE_DTYPES
    )
    store_dtype: str | None = _option(
        None,
        "float8_e4m3 is scaled by row, int8 by channel "
        "[bfloat16; float32 where --compute-dtype float32 is given]",
        choices=STORE_DTYPES,
    )


@dataclass(frozen=True, kw_only=True)
class Runtime(_Options):
    """How the dataset is made. Nothing here changes what is in it."""

    batch_tokens: int | None = _option(
        None,
        "tokens in a device step, or auto [1k on CPU; elsewhere 16k, 32k for small models, "
        "or what fits]",
        kind="count",
        minimum=1,
        auto=True,
    )
    shard_bytes: int = _option(
        1 << 30, "largest shard file, e.g. 1GiB [1GiB]", kind="size", minimum=4096
    )
    compress: bool = _option(
        False,
        "for cold storage: byte planes and zstd, lossless, about 0.7 of the size in bfloat16; "
        "slower to write and to read",
        kind="switch",
    )
    threads: int | None = _option(
        None, "threads that tokenize [all cores but one]", kind="count", minimum=1, auto=True
    )
    write_threads: int = _option(4, "taps written side by side [4]", kind="count", minimum=1)
    queue_depth: int = _option(
        2, "batches waiting between two stages; bounds memory [2]", kind="count", minimum=1
    )
    spool: str | None = _option(
        None,
        "local directory where what goes to a bucket waits for its upload, so that a slow network "
        "does not stop the device [memory]",
    )
    max_bytes: int | None = _option(
        None,
        "end, at a unit's end, before the whole dataset is larger than this, e.g. 2TB",
        kind="size",
        minimum=1,
    )
    stale_after: int = _option(
        30,
        "seconds without a sign of life after which another worker's unit may be redone [30]",
        kind="count",
        minimum=1,
    )
    mesh: str = _option(
        "auto",
        "devices by axis: auto, 1d (all on model), 2d (hosts x chips), 3d, or e.g. "
        "data=16,fsdp=2,model=2 [auto: the fastest that fits]",
    )
    fsdp: int | None = _option(
        None, "size of the fsdp axis, for --mesh 3d [2]", kind="count", minimum=1
    )
    world: str = _option(
        "slice",
        "slice: all processes that are joined do a unit together; host: each one alone, where the "
        "model fits [slice]",
        choices=("slice", "host"),
    )
    coordinator: str | None = _option(
        None, "HOST:PORT of process 0, where processes are joined [COORDINATOR_ADDRESS]"
    )
    num_processes: int | None = _option(
        None,
        "processes to be joined [NUM_HOSTS, or what the cluster says]",
        kind="count",
        minimum=1,
    )
    process_id: int | None = _option(
        None,
        "this process's number, from 0 [HOST_ID, CLOUD_TPU_TASK_ID, TPU_WORKER_ID]",
        kind="count",
        minimum=0,
    )
    bind_address: str | None = _option(
        None, "HOST:PORT that process 0 listens on [all addresses, the coordinator's port]"
    )
    start_timeout: int = _option(
        300, "seconds to wait for all processes to come [300]", kind="count", minimum=1
    )
    heartbeat_timeout: int = _option(
        100,
        "seconds after which a process that is not heard of ends the world [100]",
        kind="count",
        minimum=1,
    )
    ignore_space: bool = _option(
        False, "run even when the disk looks too small for the estimate", kind="switch"
    )
    allow_nonfinite: bool = _option(
        False, "keep rows with NaN or infinity instead of stopping", kind="switch"
    )


@dataclass(frozen=True, kw_only=True)
class ResolvedRecipe:
    """A recipe with nothing left open: what is stored, fingerprinted and compared on resume.

    `model_source`, `lora_source` and `corpus_source` say where things were found; paths are not
    identity, so they are kept but not fingerprinted.
    """

    model_source: str
    lora_source: str | None
    corpus_source: str
    model: Mapping[str, str]
    corpus: tuple[str, ...]
    taps: tuple[str, ...]
    where: str | None
    every: int | None
    seq_len: int
    pack: str
    long_docs: str
    special_tokens: str
    text_column: str | None
    text_documents: str
    max_docs: int | None
    max_tokens: int | None
    unit_tokens: int
    compute_dtype: str
    store_dtype: str

    @property
    def keeps_all(self) -> bool:
        """Whether every token the model reads is stored."""
        return self.where is None and self.every in (None, 1)

    def identity(self) -> dict[str, Any]:
        """The fields that define the dataset, as JSON values."""
        everything = self.to_json()
        return {k: v for k, v in everything.items() if not k.endswith("_source")}

    def fingerprint(self) -> str:
        return hashlib.sha256(canonical_json(self.identity())).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ResolvedRecipe":
        known = {f.name for f in fields(cls)}
        if set(value) != known:
            odd = sorted(set(value) ^ known)
            raise ConfigError(f"stored recipe has missing or unknown fields: {', '.join(odd)}")
        parts = dict(value)
        parts["taps"], parts["corpus"] = tuple(parts["taps"]), tuple(parts["corpus"])
        recipe = cls(**parts)
        for f in fields(cls):
            if not _fits(parts[f.name], f.type):
                raise ConfigError(f"stored recipe has no usable {f.name}: {_shown(parts[f.name])}")
        return recipe


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value from JSON is of a field's type; a number is above zero."""
    if kind == tuple[str, ...]:
        return all(type(part) is str for part in value)
    if kind == Mapping[str, str]:
        values = cast(dict[str, Any], value).values() if isinstance(value, dict) else [None]
        return all(type(part) is str for part in values)
    if type(value) is int and not 0 < value < _LIMIT:
        return False
    return isinstance(value, kind) and type(value) is not bool


def canonical_json(value: Any) -> bytes:
    """One byte string per JSON value: what digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def load_toml(path: Path) -> dict[str, Any]:
    """The options of a TOML file, keys spelled as the flags are (dashes or underscores)."""
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except RecursionError:
        raise ConfigError(f"--config {path}: is nested too deeply") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number of thousands of digits
        raise ConfigError(f"--config {path}: {error}") from None
    known = {*Recipe.names(), *Runtime.names(), "out"}
    options: dict[str, Any] = {}
    for key, value in raw.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"--config {path}: unknown key {_shown(key)}{hint}")
        options[name] = value
    return options


def build(options: Mapping[str, Any]) -> tuple[Recipe, Runtime]:
    """Split a flat mapping of options (None: not given) into the two."""
    given = {k: v for k, v in options.items() if v is not None}
    recipe = Recipe(**{k: v for k, v in given.items() if k in Recipe.names()})
    runtime = Runtime(**{k: v for k, v in given.items() if k in Runtime.names()})
    return recipe, runtime
