"""Rotary position embedding: its frequencies, with every scaling rule of the supported families.

Frequencies are a constant of the model, so they are computed once on the host, in float64 and
then rounded; the rotation itself is in `ops.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from spile.core.bounded_json import Json
from spile.core.errors import InputError

# scaling kind -> keys it must have, keys it may have (an unknown key is refused, never guessed)
KINDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset({"original_max_position_embeddings"})),
    "llama3": (
        frozenset(
            {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
        ),
        frozenset(),
    ),
    "yarn": (
        frozenset({"factor"}),
        frozenset(
            {
                "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
                "truncate", "mscale", "mscale_all_dim", "llama_4_scaling_beta",
                "max_position_embeddings",  # (as the config has it)
            }
        ),
    ),
    "proportional": (frozenset(), frozenset({"factor"})),
    "longrope": (
        frozenset({"short_factor", "long_factor"}),
        frozenset(
            {
                "factor", "attention_factor", "original_max_position_embeddings", "short_mscale",
                "long_mscale",
            }
        ),
    ),
}  # fmt: skip
_RENAMED = {"su": "longrope"}  # as the first Phi-3 configs spell it


def positive(value: Any, name: str, where: str) -> float:
    """Check that a config value is a number above zero, and small enough to compute with."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-15 < value < 1e15:
        raise InputError(f"{where}: {name} must be a positive number, got {value!r}")
    return float(value)


@dataclass(frozen=True)
class Rope:
    """Rotary settings of a model, or of some of its layers."""

    theta: float
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    # The share of each head's dimensions that rotate: the first ones or, if proportional, the first
    # of each half, with the frequencies that they would have if all rotated.
    fraction: float = 1.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str, *, default_theta: float) -> "Rope":
        """Read a HF config as transformers 4 (`rope_theta`, `rope_scaling`) or 5 writes it."""
        given: Json = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(given, Mapping):
            raise InputError(f"{where}: rope scaling must be an object, got {given!r}")
        written = dict(given)
        theta, fraction = (
            next(v for v in (written.pop(key, None), config.get(key), default) if v is not None)
            for key, default in (("rope_theta", default_theta), ("partial_rotary_factor", 1.0))
        )
        named = [written.pop(key, None) for key in ("rope_type", "type")]
        kinds = {_RENAMED.get(str(kind), str(kind)) for kind in named if kind is not None}
        if len(kinds) > 1:
            raise InputError(f"{where}: rope_type and type disagree: {sorted(kinds)}")
        kind = kinds.pop() if kinds else "default"
        if kind not in KINDS:
            raise InputError(
                f"{where}: rope scaling {kind!r} is not supported; known: {', '.join(KINDS)}"
            )
        required, optional = KINDS[kind]
        original = "original_max_position_embeddings"
        if original in required | optional and config.get(original) is not None:
            written[original] = config[original]  # if both are given, transformers uses this one
        scaling = {k: v for k, v in written.items() if v is not None}
        wrong = (required - set(scaling)) | (set(scaling) - required - optional)
        if wrong:
            raise InputError(
                f"{where}: rope scaling {kind!r} has missing or unknown keys: "
                + ", ".join(sorted(wrong))
            )
        checked = {k: _checked(v, f"rope scaling {k}", where) for k, v in scaling.items()}
        if checked.get("high_freq_factor", 2) < checked.get("low_freq_factor", 1):
            raise InputError(f"{where}: rope scaling high_freq_factor is below low_freq_factor")
        fraction = positive(fraction, "partial_rotary_factor", where)
        if positive(theta, "rope_theta", where) <= 1:
            raise InputError(f"{where}: rope_theta must be above 1, got {theta!r}")
        return cls(float(theta), kind, checked, fraction)

    def check(self, head_dim: int, max_positions: int, where: str) -> None:
        """Refuse settings that do not fit the model."""
        pairs = -(-int(head_dim * self.fraction) // 2)
        if self.kind == "proportional":
            pairs = 0 if head_dim % 2 else int(head_dim * self.fraction // 2)
        if not 0 < 2 * pairs <= head_dim:
            raise InputError(
                f"{where}: partial_rotary_factor {self.fraction} of {head_dim} dimensions per head "
                f"is no whole number of pairs"
            )
        for key in ("short_factor", "long_factor"):
            if len(self.scaling.get(key, range(pairs))) != pairs:
                raise InputError(f"{where}: rope scaling {key} must have {pairs} numbers")
        if self.kind == "longrope" and self._original(max_positions) < 2:
            raise InputError(f"{where}: original_max_position_embeddings must be above 1")

    def longest(self, max_positions: int) -> int:
        """The longest context for which `frequencies` holds."""
        # Beyond its original length a longrope model uses other factors for the whole context: a
        # packed row cannot give each of its documents its own frequencies. Others let queries
        # grow beyond that length.
        if self.kind != "longrope" and "llama_4_scaling_beta" not in self.scaling:
            return max_positions
        return min(max_positions, int(self._original(max_positions)))

    def frequencies(self, head_dim: int, max_positions: int) -> tuple[np.ndarray, float]:
        """Inverse frequencies of each rotated pair, in float32, and the factor on cos and sin."""
        proportional = self.kind == "proportional"
        dim = head_dim if proportional else int(head_dim * self.fraction)
        plain = self.theta ** -(np.arange(0, dim, 2) / dim)
        factor = self.scaling.get("factor", 1.0)
        original = self._original(max_positions)
        amplitude = 1.0
        if self.kind == "linear" or proportional:
            plain = plain / factor
        elif self.kind == "llama3":
            plain = _llama3(plain, factor, original, self.scaling)
        elif self.kind == "yarn":
            plain, amplitude = _yarn(plain, factor, original, self.theta, self.scaling)
        elif self.kind == "longrope":
            plain, amplitude = _longrope(plain, max_positions / original, original, self.scaling)
        if proportional:
            plain[int(head_dim * self.fraction // 2) :] = 0.0
        # "dynamic" changes frequencies only for sequences beyond the model's maximum, and those
        # are refused, for the reason given in `longest`.
        return plain.astype(np.float32), amplitude

    @property
    def score_scale(self) -> float:
        """The factor on scores where only a part of each head rotates, and YaRN stretches all."""
        if "mscale_all_dim" not in self.scaling:
            return 1.0
        return _amplitude(self.scaling["factor"], self.scaling["mscale_all_dim"]) ** 2

    def _original(self, max_positions: int) -> float:
        return self.scaling.get("original_max_position_embeddings", float(max_positions))


def _checked(value: Any, name: str, where: str) -> Any:
    if isinstance(value, bool) and name.endswith(" truncate"):
        return value
    if name.endswith((" short_factor", " long_factor")):
        if not isinstance(value, list):
            raise InputError(f"{where}: {name} must be a list of numbers, got {value!r}")
        return tuple(positive(v, name, where) for v in cast("list[Any]", value))
    return positive(value, name, where)


def _llama3(
    plain: np.ndarray, factor: float, original: float, scaling: Mapping[str, float]
) -> np.ndarray:
    """Stretch long wavelengths, keep short ones, and interpolate what lies between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * plain / (2 * math.pi)  # rotations within the original context
    blend = np.clip((turns - low) / ((high - low) or 1e-12), 0.0, 1.0)
    return (1 - blend) * plain / factor + blend * plain


def _yarn(
    plain: np.ndarray,
    factor: float,
    original: float,
    theta: float,
    scaling: Mapping[str, Any],
) -> tuple[np.ndarray, float]:
    """YaRN (arXiv:2309.00071): interpolate the slow dimensions, keep the fast ones."""
    half = len(plain)

    def dimension_at(turns: float) -> float:
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first = dimension_at(scaling.get("beta_fast", 32.0))
    last = dimension_at(scaling.get("beta_slow", 1.0))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    ramp = np.clip((np.arange(half) - first) / ((last - first) or 1e-3), 0.0, 1.0)

    default = _amplitude(factor)
    if "mscale" in scaling and "mscale_all_dim" in scaling:
        whole = _amplitude(factor, scaling["mscale_all_dim"])
        default = _amplitude(factor, scaling["mscale"]) / whole
    return plain * (1 - ramp) + plain / factor * ramp, scaling.get("attention_factor", default)


def _amplitude(factor: float, weight: float = 1.0) -> float:
    """How much YaRN stretches queries and keys, against the flatter scores of long contexts."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(
    plain: np.ndarray, stretch: float, original: float, scaling: Mapping[str, Any]
) -> tuple[np.ndarray, float]:
    """LongRoPE (arXiv:2402.13753), for contexts within the original length."""
    short = np.asarray(scaling["short_factor"])
    factor = scaling.get("factor", stretch)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    given = scaling.get("attention_factor", default)
    return plain / short, scaling.get("short_mscale", given)
