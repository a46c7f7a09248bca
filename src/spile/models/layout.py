"""How devices are laid out, and what is cut along which axis: names and numbers, no jax.

Three axes: `data` (rows of a batch), `fsdp` (rows too, and the weights' width, gathered block by
block), `model` (heads, the MLP's inner width, the vocabulary, experts). There is no pipeline axis:
a forward pass alone gains nothing from one, and would lose time to its bubbles.
"""

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spile.core.errors import ConfigError

_log = logging.getLogger("spile.models")

AXES = ("data", "fsdp", "model")
ROWS = ("data", "fsdp")  # the axes that cut a batch's rows
DEFAULT_FSDP = 2

# Logical axis -> mesh axis. Attention needs whole heads and the MLP its inner width: if one of them
# cannot be cut, every device of the model axis computes all of it.
_ALONG_MODEL = (
    "heads", "kv_heads", "delta_heads", "ssm_heads", "ssm_groups", "channels", "experts", "mlp",
    "vocab",
)  # fmt: skip
_RULES = {**dict.fromkeys(_ALONG_MODEL, "model"), "width": "fsdp"}
# Logical axes as messages name them.
_TOLD = {
    "heads": "query heads",
    "kv_heads": "key heads",
    "delta_heads": "heads of the delta rule",
    "ssm_heads": "heads of state spaces",
    "ssm_groups": "keys and queries of state spaces",
    "channels": "channels of convolutions",
    "mlp": "MLPs",
    "vocab": "vocabulary",
    "latent": "projections to latents",
    "layer_embed": "embeddings of blocks",
    "routes": "routers",
}
# Of these, at least one is cut if the model is.
_MODEL = {"heads", "delta_heads", "ssm_heads", "channels", "mlp", "experts"}


@dataclass(frozen=True)
class Layout:
    """The number of devices along each axis."""

    data: int = 1
    fsdp: int = 1
    model: int = 1

    @property
    def size(self) -> int:
        return self.data * self.fsdp * self.model

    @property
    def groups(self) -> int:
        """Number of sets of devices that read different rows."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        named = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return ",".join(named) or "1"


@dataclass(frozen=True)
class Cuts:
    """Which logical axes are cut, along which mesh axis; the others are whole on every device."""

    layout: Layout
    cut: Mapping[str, str] = field(hash=False)

    @classmethod
    def of(cls, layout: Layout, sizes: Mapping[str, int], *, quiet: bool = False) -> "Cuts":
        """Decide the cuts for a model whose logical axes have these `sizes`.

        Raises:
            ConfigError: if the model cannot be cut for this layout.
        """
        cut: dict[str, str] = {}
        for axis, size in sizes.items():
            along = _RULES[axis]
            ways = getattr(layout, along)
            if ways == 1:
                continue
            if size % ways == 0:
                cut[axis] = along
            elif axis == "width":
                raise ConfigError(
                    f"--mesh {layout}: the model's width of {size} cannot be cut {ways} ways; "
                    f"choose fsdp from {_divisors(size, 2 * ways)}"
                )
            elif not quiet:
                _log.info("mesh %s: %d %s cannot be cut %d ways and are whole on every device",
                          layout, size, axis.replace("_", " "), ways)  # fmt: skip
        if layout.model > 1 and not cut.keys() & _MODEL:
            heads = next(sizes[axis] for axis in ("heads", "ssm_heads") if axis in sizes)
            inner = f" nor its inner width of {sizes['mlp']}" if "mlp" in sizes else ""
            raise ConfigError(
                f"--mesh {layout}: {'neither ' * bool(inner)}the model's {heads} heads{inner} "
                f"can{'not' * (not inner)} be cut {layout.model} ways; choose model from "
                f"{_divisors(heads, 2 * layout.model)}"
            )
        return cls(layout, cut)

    def along(self, axes: Sequence[str], *, gathered: bool = False) -> tuple[str | None, ...]:
        """The mesh axis of each of an array's axes; each is used once, by the first axis that can.

        Args:
            gathered: for the array as it is used, not as it is kept.
        """
        found: list[str | None] = []
        for axis in axes:
            along = self.cut.get(axis)
            # A vector is small, and an embedding with both axes cut would have to be gathered.
            whole = along == "fsdp" and (gathered or len(axes) < 2 or "vocab" in axes)
            found.append(None if whole or along in found else along)
        return tuple(found)

    def told(self, arrays: Iterable[Sequence[str]]) -> str:
        """What is cut, and what is whole, of a model whose arrays have these axes."""
        parts: list[str] = []
        model = [axis for axis, along in self.cut.items() if along == "model"]
        if model:
            parts.append(f"{_listed(model)} {self.layout.model} ways")
        if "width" in self.cut:
            parts.append(f"every matrix {self.layout.fsdp} ways, gathered block by block")
        if model:
            matrices = [axes for axes in arrays if len(axes) > 1 and "one" not in axes]
            cut = [axes for axes in matrices if "model" in self.along(axes)]
            # By the axis that tells what they are: a matrix's other one is the stream.
            kinds = dict.fromkeys(
                next((axis for axis in axes if axis in _TOLD), "")
                for axes in matrices
                if axes not in cut
            )
            if whole := [axis for axis in kinds if axis]:
                parts.append(f"whole on every device: {_listed(whole)}")
        return "; ".join(parts) or "nothing: the model is whole on every device"

    def share(self, axes: Sequence[str]) -> int:
        """The number of parts that an array with these axes is cut into."""
        ways = 1
        for along in self.along(axes):
            ways *= getattr(self.layout, along) if along else 1
        return ways


ONE_DEVICE = Cuts(Layout(), {})


def parse_layout(text: str, devices: int, processes: int, fsdp: int | None) -> Layout | None:
    """The layout that a `--mesh` names; None for `auto`.

    If devices do not divide as named, 3d falls back to 2d and 2d to 1d, and the reason is logged.
    """
    if text == "auto":
        return None if fsdp is None else _three(devices, processes, fsdp)
    if text == "1":
        if processes > 1 or fsdp is not None:
            raise ConfigError("--mesh 1 is one device of one process: without --fsdp, not joined")
        return Layout()
    if text in ("1d", "2d"):
        if fsdp is not None:
            raise ConfigError(f"--fsdp goes with --mesh 3d, not {text}")
        return Layout(model=devices) if text == "1d" else _two(devices, processes)
    if text == "3d":
        return _three(devices, processes, fsdp or DEFAULT_FSDP)
    return _explicit(text, devices, fsdp)


def devices_of(text: str) -> int | None:
    """The number of devices of a `--mesh` that gives its sizes, if it includes `data`."""
    if not re.fullmatch(r"\w+=\d+(,\w+=\d+)*", text) or "data=" not in text:
        return None
    return math.prod(int(size) for size in re.findall(r"=(\d+)", text))


def _two(devices: int, processes: int) -> Layout:
    """Hosts by chips per host; a single host with eight or more chips is cut in two."""
    data = processes if processes > 1 else 1 + (devices >= 8)
    if devices % data:
        _log.info("mesh 2d: %d devices are not a multiple of %d; taking 1d", devices, data)
        return Layout(model=devices)
    return Layout(data=data, model=devices // data)


def _three(devices: int, processes: int, fsdp: int) -> Layout:
    two = _two(devices, processes)
    if two.model % fsdp:
        _log.info(
            "mesh 3d: %d devices beside data=%d are not a multiple of fsdp=%d; taking 2d",
            two.model, two.data, fsdp,
        )  # fmt: skip
        return two
    return Layout(data=two.data, fsdp=fsdp, model=two.model // fsdp)


def _explicit(text: str, devices: int, fsdp: int | None) -> Layout:
    sizes: dict[str, int] = {} if fsdp is None else {"fsdp": fsdp}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise ConfigError(
                f"--mesh takes auto, 1, 1d, 2d, 3d or e.g. data=16,fsdp=2,model=2, got {text!r}"
            )
        if axis in sizes:
            raise ConfigError(f"--mesh {text}: {axis} is given twice")
        sizes[axis] = int(size)
    given = Layout(**sizes)
    if "data" not in sizes and devices % given.size == 0:
        given = Layout(devices // given.size, given.fsdp, given.model)
    if given.size != devices:
        raise ConfigError(
            f"--mesh {text} is for {given.size} devices, there are {devices}; choose sizes whose "
            "product is that"
        )
    return given


def fitting_layout(
    devices: int, per_process: int, fits: Callable[[Layout], bool]
) -> tuple[Layout, bool]:
    """The fastest layout that fits, and whether any does.

    Copies of the model that read different rows send each other nothing. Cutting the model costs
    a sum over its devices in every block, cheapest within a host; gathering weights costs as many
    bytes as the weights have, for every step.
    """
    ways = [n for n in range(1, devices + 1) if devices % n == 0]
    inside = [n for n in ways if per_process % n == 0]
    across = [n for n in ways if n not in inside]
    tried = [Layout(devices // n, 1, n) for n in inside]
    tried += [Layout(devices // n // f, f, n) for n in reversed(inside) for f in ways
              if f > 1 and devices // n % f == 0]  # fmt: skip
    tried += [Layout(devices // n, 1, n) for n in across]
    chosen = next((layout for layout in tried if fits(layout)), None)
    return (chosen, True) if chosen else (tried[-1], False)


def _listed(axes: Sequence[str]) -> str:
    return ", ".join(_TOLD.get(axis, axis) for axis in axes)


def _divisors(size: int, up_to: int) -> str:
    return ", ".join(str(n) for n in range(1, min(size, up_to) + 1) if size % n == 0)
