"""Rotary position embedding: its frequencies, with every scaling rule of the supported families.

Frequencies are a constant of the model, so they are computed once on the host, in float64 and
then rounded; the rotation itself is in `ops.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spile.errors import InputError

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
            {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
        ),
    ),
}


def positive(value: Any, name: str, where: str) -> float:
    """A config value that must be a number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"{where}: {name} must be a positive number, got {value!r}")
    return float(value)


@dataclass(frozen=True)
class Rope:
    """Rotary settings of a model."""

    theta: float
    kind: str = "default"
    scaling: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str, *, default_theta: float) -> "Rope":
        """From a HF config as transformers 4 (`rope_theta`, `rope_scaling`) or 5 writes it."""
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(given, Mapping):
            raise InputError(f"{where}: rope scaling must be an object, got {given!r}")
        written = dict(given)
        theta = written.pop("rope_theta", None) or config.get("rope_theta") or default_theta
        named = [written.pop(key, None) for key in ("rope_type", "type")]
        kinds = {str(kind) for kind in named if kind is not None}
        if len(kinds) > 1:
            raise InputError(f"{where}: rope_type and type disagree: {sorted(kinds)}")
        kind = kinds.pop() if kinds else "default"
        if kind not in KINDS:
            raise InputError(
                f"{where}: rope scaling {kind!r} is not supported; known: {', '.join(KINDS)}"
            )
        scaling = {k: v for k, v in written.items() if v is not None}
        required, optional = KINDS[kind]
        wrong = (required - set(scaling)) | (set(scaling) - required - optional)
        if wrong:
            raise InputError(
                f"{where}: rope scaling {kind!r} has missing or unknown keys: "
                + ", ".join(sorted(wrong))
            )
        numbers = {k: positive(v, f"rope scaling {k}", where) for k, v in scaling.items()}
        return cls(positive(theta, "rope_theta", where), kind, numbers)

    def frequencies(self, head_dim: int, max_positions: int) -> tuple[np.ndarray, float]:
        """Inverse frequencies [head_dim / 2] in float32, and the factor on cos and sin."""
        plain = self.theta ** -(np.arange(0, head_dim, 2) / head_dim)
        factor = self.scaling.get("factor", 1.0)
        original = self.scaling.get("original_max_position_embeddings", float(max_positions))
        amplitude = 1.0
        if self.kind == "linear":
            plain = plain / factor
        elif self.kind == "llama3":
            plain = _llama3(plain, factor, original, self.scaling)
        elif self.kind == "yarn":
            plain, amplitude = _yarn(plain, factor, original, self.theta, self.scaling)
        # "dynamic" changes frequencies only for sequences beyond the model's maximum, and those
        # are refused (a packed row could not give each of its documents another frequency).
        return plain.astype(np.float32), amplitude


def _llama3(
    plain: np.ndarray, factor: float, original: float, scaling: Mapping[str, float]
) -> np.ndarray:
    """Long wavelengths are stretched, short ones kept, those between interpolated."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * plain / (2 * math.pi)  # rotations within the original context
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * plain / factor + blend * plain


def _yarn(
    plain: np.ndarray,
    factor: float,
    original: float,
    theta: float,
    scaling: Mapping[str, float],
) -> tuple[np.ndarray, float]:
    """YaRN (arXiv:2309.00071): interpolate the slow dimensions, keep the fast ones."""
    half = len(plain)

    def dimension_at(turns: float) -> float:
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first = max(math.floor(dimension_at(scaling.get("beta_fast", 32.0))), 0)
    last = min(math.ceil(dimension_at(scaling.get("beta_slow", 1.0))), 2 * half - 1)
    ramp = np.clip((np.arange(half) - first) / max(last - first, 1e-3), 0.0, 1.0)
    default = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return plain * (1 - ramp) + plain / factor * ramp, scaling.get("attention_factor", default)
