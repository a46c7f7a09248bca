"""LoRA adapters as PEFT saves them, merged into the base weights during reading. No jax.

The result equals that of `PeftModel.from_pretrained(base, directory).merge_and_unload()` on a CPU.
As with model configs, each key of `adapter_config.json` is read, ignored (it cannot change a merged
weight) or required to hold a harmless value; any other key is refused by name. Likewise, every
tensor of the adapter must be understood and must have a base weight.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from spile.core.bounded_json import Json
from spile.core.errors import InputError
from spile.core.identity import full_digest
from spile.core.tensors import TensorInfo
from spile.models.files.safetensors import open_tensors, read_tensor
from spile.objects.opened import Opened
from spile.objects.paths import AnyPath, path_of, read_json

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"

_READ = frozenset([
    "alpha_pattern", "bias", "fan_in_fan_out", "init_lora_weights", "lora_alpha", "peft_type", "r",
    "rank_pattern", "use_rslora",
])  # fmt: skip

# Where the adapter came from, how it was initialised and trained, and which modules have one. The
# last can be ignored because the stored tensors show it.
_IGNORED = frozenset([
    "auto_mapping", "base_model_name_or_path", "inference_mode", "merge_weights", "peft_version",
    "revision", "runtime_config", "task_type",
    "corda_config", "eva_config", "loftq_config", "lora_ga_config",
    "lora_dropout", "megatron_core", "qalora_group_size",
    "exclude_modules", "layers_pattern", "layers_to_transform", "target_modules",
])  # fmt: skip

# Values with which a key changes nothing; any other value needs code we do not have.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    **{f"{name}_config": (None,) for name in ("arrow", "kasa", "megatron", "monteclora", "velora")},
    **dict.fromkeys(
        ("ensure_weight_tying", "lora_bias", "use_bdlora", "use_dora", "use_qalora"), (False, None)
    ),
    **dict.fromkeys(
        ("alora_invocation_tokens", "layer_replication", "modules_to_save", "target_parameters"),
        (None, []),
    ),
    "enable_lora": (None,),
    "trainable_token_indices": (None, [], {}),
}

# The initialisations that leave the base weights alone. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA
# subtract the initial adapter from them, so the saved one does not fit the published weights.
_INITIALISATIONS = (True, False, None, "gaussian", "orthogonal", "eva")

_BIASES = ("none", "all", "lora_only")
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_PREFIXES = ("model.", "transformer.")
_FACTORS = ("lora_A.weight", "lora_B.weight")
_EMBEDDING_FACTORS = ("lora_embedding_A", "lora_embedding_B")
_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+?)\."
    r"(?P<part>lora_[AB]\.weight|lora_embedding_[AB]|base_layer\.weight|(base_layer\.)?bias)"
)
# Patterns allowed in the config: matching a more complex one could take too long.
_PATTERN = re.compile(r"(?:(?:[\w.^$|-]|\\[.dw]|\[[\w-]+\])[*+]?|\((?:\?:)?[\w.|-]+\))*")
_MOST_CHOICES, _MOST_PATTERNS = 3, 4096
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class _Pair:
    """Two factors whose scaled product is added to a weight."""

    a: TensorInfo
    b: TensorInfo
    scaling: float
    transposed: bool  # the weight is stored as (in, out): embeddings, and GPT-2's Conv1D
    embedding: bool

    def shape(self) -> tuple[int, int]:
        inner, outer = self.a.shape[1], self.b.shape[0]
        return (inner, outer) if self.transposed else (outer, inner)


@dataclass(frozen=True)
class _Change:
    """The change of one base tensor: `stored` replaces it, then `pair` is added."""

    stored: TensorInfo | None = None
    pair: _Pair | None = None


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter, each of its tensors matched to one of the base checkpoint."""

    directory: AnyPath
    files: tuple[AnyPath, ...]
    weights: Opened
    changes: Mapping[str, _Change] = field(repr=False)

    @property
    def targets(self) -> frozenset[str]:
        """Names of the base checkpoint's tensors that the adapter changes."""
        return frozenset(self.changes)

    def identity(self) -> str:
        """Digest of the adapter's config and weights; its path is not part of it."""
        return full_digest(*self.files[:-1], self.weights)

    def merge(self, name: str, weight: np.ndarray) -> np.ndarray:
        """Apply the adapter to the base tensor `name`, in the same dtype."""
        change = self.changes.get(name)
        if change is None:
            return weight
        self._check_shape(name, weight, change)
        # A value that is too large is reported below, in one line, instead of by numpy.
        with np.errstate(over="ignore", invalid="ignore"):
            merged = weight
            if change.stored is not None:
                merged = self._read(change.stored).astype(weight.dtype)
            if change.pair is not None:
                merged = self._add(change.pair, merged)
        if not np.isfinite(merged).all():
            raise InputError(
                f"{self.directory}: {name} with the adapter merged into it holds values that "
                f"are not finite {weight.dtype.name}"
            )
        return merged

    def _add(self, pair: _Pair, weight: np.ndarray) -> np.ndarray:
        # PEFT holds adapters in float32, whatever the file's dtype (autocast_adapter_dtype).
        a = self._read(pair.a).astype(np.float32)
        b = self._read(pair.b).astype(np.float32)
        delta = a.T @ b.T if pair.transposed else b @ a
        delta *= np.float32(pair.scaling)
        if pair.embedding:
            # PEFT rounds an embedding's delta before adding it, but not a linear layer's.
            delta = delta.astype(weight.dtype)
        return np.add(weight, delta, dtype=np.float32).astype(weight.dtype)

    def _read(self, info: TensorInfo) -> np.ndarray:
        return read_tensor(self.weights, info)

    def _check_shape(self, name: str, weight: np.ndarray, change: _Change) -> None:
        if change.stored is not None and change.stored.shape != weight.shape:
            raise InputError(
                f"{self.directory}: {change.stored.name} has shape {list(change.stored.shape)}, "
                f"but the base model's {name} has {list(weight.shape)} (a resized vocabulary?)"
            )
        if change.pair is not None and (shape := change.pair.shape()) != weight.shape:
            turned = shape[::-1] == weight.shape and not change.pair.embedding
            hint = "; fan_in_fan_out in adapter_config.json does not fit this model"
            raise InputError(
                f"{self.directory}: the adapter's change to {name} has shape {list(shape)}, "
                f"but the base weight has {list(weight.shape)}{hint if turned else ''}"
            )


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """The settings of `adapter_config.json` that concern merging."""

    r: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    rslora: bool
    fan_in_fan_out: bool
    bias: str

    def rank(self, module: str) -> int:
        return _by_pattern(self.ranks, module, self.r)

    def scaling(self, module: str) -> float:
        rank = self.rank(module)
        return _by_pattern(self.alphas, module, self.alpha) / (
            math.sqrt(rank) if self.rslora else rank
        )


def read_adapter(where: str | Path, tensors: Collection[str]) -> Adapter:
    """Read an adapter's config and header, and match its tensors to those of the base checkpoint.

    Args:
        where: a directory that holds adapter_config.json and adapter_model.safetensors, or its URL.
        tensors: names of the base checkpoint's tensors, as published.

    Raises:
        InputError: if the adapter cannot be merged exactly as PEFT would.
    """
    directory = path_of(str(where))
    config, weights = adapter_files(directory)
    settings = _read_settings(read_json(config), f"{config}")
    opened, header = open_tensors(weights, directory)
    if not header:
        raise InputError(f"{weights}: holds no tensors")
    faults: list[str] = []
    changes = _match(header, settings, frozenset(tensors), faults)
    if faults:
        shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise InputError(f"{weights}: does not fit the base model or its own config: {shown}")
    return Adapter(directory, (config, weights), opened, changes)


def adapter_files(directory: AnyPath) -> tuple[AnyPath, AnyPath]:
    """An adapter's config and weights."""
    if not directory.is_dir():
        raise InputError(
            f"{directory}: no such directory; an adapter is one with {_CONFIG} and {_WEIGHTS}"
        )
    return directory / _CONFIG, directory / _WEIGHTS


def _match(
    header: Mapping[str, TensorInfo],
    settings: _Settings,
    tensors: frozenset[str],
    faults: list[str],
) -> dict[str, _Change]:
    """One change for each base tensor that the adapter's tensors name; appends to `faults`."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in header.items():
        found = _NAME.fullmatch(name)
        if found is None:
            faults.append(f"{name} is not part of a supported LoRA")
        elif info.dtype.name not in _FLOATS:
            faults.append(f"{name} holds {info.dtype.name}, not floats")
        else:
            modules.setdefault(found["module"], {})[found["part"]] = info
    changes: dict[str, _Change] = {}

    def change(name: str, made: _Change) -> None:
        target = _find(name, tensors)
        if target is None:
            faults.append(f"{name} is not a tensor of the base model")
        elif target in changes:
            faults.append(f"{target} is changed twice")
        else:
            changes[target] = made

    for module, parts in modules.items():
        stored = parts.pop("base_layer.weight", None)
        for part in ("bias", "base_layer.bias"):
            if (bias := parts.pop(part, None)) is None:
                continue
            if settings.bias == "none":
                faults.append(f"{bias.name} is stored although bias is 'none'")
            else:
                change(f"{module}.bias", _Change(stored=bias))
        if parts and _find(f"{module}.weight", tensors) is None:
            faults.append(f"{module}.weight is not a tensor of the base model")
        elif parts:
            pair = _read_pair(module, parts, settings, faults)
            if pair is not None:
                change(f"{module}.weight", _Change(stored=stored, pair=pair))
        elif stored is not None:
            faults.append(f"{stored.name} has no LoRA beside it")
    return changes


def _read_pair(
    module: str, parts: Mapping[str, TensorInfo], settings: _Settings, faults: list[str]
) -> _Pair | None:
    embedding = not parts.keys().isdisjoint(_EMBEDDING_FACTORS)
    wanted = _EMBEDDING_FACTORS if embedding else _FACTORS
    if set(parts) != set(wanted):
        have = " and ".join(sorted(parts))
        faults.append(f"{module} has {have}, not {wanted[0]} and {wanted[1]}")
        return None
    a, b = (parts[part] for part in wanted)
    rank = settings.rank(module)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank:
        faults.append(
            f"{module} has factors of shapes {list(a.shape)} and {list(b.shape)} at rank {rank}"
        )
        return None
    transposed = embedding or settings.fan_in_fan_out
    return _Pair(a, b, settings.scaling(module), transposed, embedding)


def _find(name: str, tensors: frozenset[str]) -> str | None:
    """The published name; checkpoints of a bare decoder lack the prefix of the wrapper."""
    if name in tensors:
        return name
    others = {prefix + name for prefix in _PREFIXES}
    others |= {name.removeprefix(prefix) for prefix in _PREFIXES}
    found = others & tensors
    return found.pop() if len(found) == 1 else None


def _read_settings(config: Mapping[str, Any], where: str) -> _Settings:
    if (kind := config.get("peft_type")) != "LORA":
        raise InputError(f"{where}: peft_type {kind!r} is not supported, only 'LORA' is")
    for key, value in config.items():
        if key in _READ or key in _IGNORED:
            continue
        if key not in _HARMLESS:
            raise InputError(
                f"{where}: unknown key {key!r}; it may change the merged weights, so it must be "
                f"listed in models/files/lora.py as read or ignored first"
            )
        if value not in _HARMLESS[key]:
            raise InputError(f"{where}: {key} = {value!r} is not supported")
    init = config.get("init_lora_weights")
    if (init.lower() if isinstance(init, str) else init) not in _INITIALISATIONS:
        raise InputError(
            f"{where}: init_lora_weights {init!r} is not supported, because it may have changed "
            f"the base weights; save the adapter from PEFT with "
            f"path_initial_model_for_weight_conversion, or merge it there"
        )
    if (bias := config.get("bias", "none")) not in _BIASES:
        raise InputError(f"{where}: bias {bias!r} is not supported (known: {', '.join(_BIASES)})")

    def switch(key: str) -> bool:
        value = config.get(key, False)
        if type(value) is not bool:
            raise InputError(f"{where}: {key} must be true or false, got {value!r}")
        return value

    def patterns(key: str) -> dict[str, Any]:
        value: Json = config.get(key) or {}
        if not isinstance(value, dict):
            raise InputError(f"{where}: {key} must be an object, got {value!r}")
        if len(value) > _MOST_PATTERNS:
            raise InputError(f"{where}: {key} has more than {_MOST_PATTERNS} patterns")
        for pattern in value:
            choices = sum(map(pattern.count, "*+("))
            if choices > _MOST_CHOICES or not _PATTERN.fullmatch(pattern):
                raise InputError(
                    f"{where}: {key} has {pattern[:200]!r}, no regex that is supported; use names"
                )
            try:
                _suffix(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise InputError(
                    f"{where}: {key} has {pattern[:200]!r}, no regex ({error})"
                ) from None
        return value

    def rank(value: Any, key: str) -> int:
        if type(value) is not int or value <= 0:
            raise InputError(f"{where}: {key} must be a positive number, got {value!r}")
        return value

    def alpha(value: Any, key: str) -> float:
        if type(value) not in (int, float) or not abs(value) <= 1e30:
            raise InputError(f"{where}: {key} must be a finite number, got {value!r}")
        return float(value)

    return _Settings(
        r=rank(config.get("r"), "r"),
        alpha=alpha(config.get("lora_alpha"), "lora_alpha"),
        ranks={k: rank(v, f"rank_pattern {k!r}") for k, v in patterns("rank_pattern").items()},
        alphas={k: alpha(v, f"alpha_pattern {k!r}") for k, v in patterns("alpha_pattern").items()},
        rslora=switch("use_rslora"),
        fan_in_fan_out=switch("fan_in_fan_out"),
        bias=bias,
    )


@lru_cache(2 * _MOST_PATTERNS)
def _suffix(pattern: str) -> re.Pattern[str]:
    """Compile a pattern as PEFT reads it: a regex for a whole module name or for its last parts."""
    return re.compile(rf"(.*\.)?({pattern})$")


def _by_pattern(values: Mapping[str, _Number], module: str, default: _Number) -> _Number:
    for pattern, value in values.items():
        if _suffix(pattern).match(module):
            return value
    return values.get(module, default)
