"""Where an array of ours lies in a published checkpoint: under which name, fused with what, in
which order. No jax, no file access: shapes and slices only.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from spile.models.config.specs import ParamSpec


@dataclass(frozen=True)
class Source:
    """A tensor of a checkpoint that holds one array of ours, or several side by side."""

    name: str  # {layer} and {expert} are filled in
    parts: tuple[str, ...] = ()  # our arrays it holds, in order; none: just the one
    by: str = "part"  # parts follow one another whole, or alternate by "head" or by "row"
    transposed: bool = False  # stored [in, out]

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.name

    def shape(self, spec: ParamSpec, specs: Mapping[str, ParamSpec]) -> tuple[int, ...]:
        """What the tensor's shape must be."""
        shape = list(spec.shape[1:] if self.per_expert else spec.shape)
        axis = _out_axis(spec) - self.per_expert
        if self.parts:
            shape[axis] = sum(specs[part].shape[_out_axis(specs[part])] for part in self.parts)
        if self.transposed and len(shape) - axis > 1:
            shape[-1], shape[-2] = shape[-2], shape[-1]
        return tuple(shape)

    def take(
        self, tensor: np.ndarray, spec: ParamSpec, specs: Mapping[str, ParamSpec], head_dim: int
    ) -> np.ndarray:
        """Our array, out of the tensor; a view where possible."""
        axis = _out_axis(spec) - self.per_expert
        if self.transposed and tensor.ndim - axis > 1:
            tensor = tensor.swapaxes(-1, -2)
        if not self.parts:
            return tensor
        number = self.parts.index(spec.name)
        if self.by == "part":
            sizes = [specs[part].shape[_out_axis(specs[part])] for part in self.parts]
            start = sum(sizes[:number])
            return tensor[(slice(None),) * axis + (slice(start, start + sizes[number]),)]
        group = head_dim if self.by == "head" else 1
        before, after = tensor.shape[:axis], tensor.shape[axis + 1 :]
        grouped = tensor.reshape(*before, -1, len(self.parts), group, *after)
        chosen = grouped[(slice(None),) * (axis + 1) + (number,)]
        return chosen.reshape(*before, -1, *after)


def _out_axis(spec: ParamSpec) -> int:
    """The axis along which arrays are fused: what comes out of the layer."""
    return 1 if spec.axes[0] == "experts" else 0
