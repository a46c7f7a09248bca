"""What an encoder is: its settings, and where its tensors lie. No jax."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from spile.core.config import ALL_LATENTS, canonical_json
from spile.core.recipe import CROSSCODER
from spile.objects.paths import AnyPath

# The tensors of each kind of encoder; a letter is an axis: width, latents, or output.
_TENSORS: dict[str, dict[str, str]] = {
    "standard": {"W_enc": "wl", "b_enc": "l"},
    "topk": {"W_enc": "wl", "b_enc": "l"},
    "jumprelu": {"W_enc": "wl", "b_enc": "l", "threshold": "l"},
    "gated": {"W_enc": "wl", "b_gate": "l", "b_mag": "l", "r_mag": "l"},
}
ARCHITECTURES = tuple(_TENSORS)
NORMALIZATIONS = ("none", "layer_norm", "constant_norm_rescale")
AT_ONCE = 1 << 26  # latents held on a device, in float32: 256 MiB
MOST_LATENTS = 1 << 24
MLP_OUT = "hook_mlp_out"  # what transcoders write, where nothing says otherwise
_KEPT = 64  # latents per row, if the encoder has no k of its own

Arrays = Mapping[str, Any]  # numpy or jax arrays, by name


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a file, and in which form."""

    file: AnyPath
    name: str  # in the file
    turned: bool = False  # stored transposed, as torch.nn.Linear does
    repeated: bool = False  # one number stands for all
    logarithm: bool = False  # its logarithm is stored
    # As it is stored, if it has an axis of sides, which is the first one or the second.
    shape: tuple[int, ...] = ()
    side: int = 0
    picked: tuple[int, ...] = ()  # places on its second axis that are used; it has three


def stored_tensors(file: AnyPath, names: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Return where tensors lie, from our names and those in the file.

    After a name in the file, `T` says that the tensor is transposed, `1` that it is one number for
    all, `log` that its logarithm is stored.
    """
    found: dict[str, StoredTensor] = {}
    for ours, told in names.items():
        name, *form = told.split()
        found[ours] = StoredTensor(
            file, name, turned="T" in form, repeated="1" in form, logarithm="log" in form
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Sae:
    """A published encoder: its settings, and its files.

    Two are equal if they compute in the same way, so that one program serves both.
    """

    directory: AnyPath = field(compare=False)
    file: AnyPath = field(compare=False)  # its tensors, unless they have places
    architecture: str
    width: int  # values in a row that it reads
    latents: int
    k: int | None = None  # active latents per row, if that number is fixed
    normalize: str = "none"
    subtracts: bool = True  # whether it subtracts the decoder's bias from its input
    rescales: bool = False  # whether it scales latents by the norms of their decoder rows
    weighted: bool = False  # whether the k are chosen by latents times those norms
    hook: str | None = field(default=None, compare=False)  # that it reads, by TransformerLens' name
    # Of a transcoder: the hook whose values it reconstructs; perhaps without `blocks.N.`.
    writes: str | None = field(default=None, compare=False)
    target: int | None = None  # of a transcoder: values in such a row
    skips: bool = False  # whether a matrix of its input is added to its output
    # Of a layer of a cross-layer transcoder: the first layer that its stored decoder writes to; and
    # the layers whose errors need that decoder, ascending.
    writes_from: int | None = field(default=None, compare=False)
    across: tuple[int, ...] = ()
    sides: int = 1  # of a crosscoder: a row is one row of each side, one after another
    centres: bool = False  # whether it subtracts a mean from its input, before scaling it
    # Of a crosscoder with a threshold: what that is compared with is a latent times this much of
    # its decoder row's norm, and this much of the sum of that row's norms by side.
    norms: tuple[float, float] | None = None
    threshold: float | None = None  # of all latents, if it is no tensor
    scale: float = 1.0  # of its input, before anything else
    output_scale: float = 1.0  # by which its output is divided, after everything else
    ungained: bool = False  # whether it reads what a norm has made before its gain multiplies it
    # That gain, in float32: a tap's rows are divided by it.
    gain: bytes = field(default=b"", compare=False)
    raw: bool = False  # in Gemma Scope's own format
    # Tensors that lie elsewhere than `file`, or in another form, by name.
    places: Mapping[str, StoredTensor] = field(
        default_factory=dict[str, StoredTensor], compare=False
    )
    decodes: bool = False  # whether its decoder is used, too
    # Digest of sampled blocks of its tensors, as they were when it was opened.
    sampled: str = field(default="", compare=False)

    @property
    def crosses(self) -> bool:
        """Whether it is a layer of a cross-layer transcoder."""
        return self.writes_from is not None

    @property
    def outputs(self) -> int:
        """Values that its decoder makes of a row's latents: a row for each layer it writes to."""
        return (self.target or self.width) * max(1, len(self.across))

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The tensors to read, and the shape of each."""
        sizes = {"w": self.width, "l": self.latents, "o": self.target or self.width}
        sizes["a"] = self.outputs
        axes = dict(_TENSORS[self.architecture])
        if self.threshold is not None:
            del axes["threshold"]
        if self.subtracts or self.decodes:
            axes["b_dec"] = "o"
        if self.rescales or self.weighted or self.decodes or self.norms is not None:
            axes["W_dec"] = "la"
        if self.centres:
            axes["mean"] = "w"
        if self.skips and self.decodes:
            axes["W_skip"] = "wo"
        return {name: tuple(sizes[axis] for axis in each) for name, each in axes.items()}

    def place(self, name: str) -> StoredTensor:
        """Where a tensor lies."""
        return self.places.get(name) or StoredTensor(self.file, name)

    def by_file(self) -> list[tuple[AnyPath, dict[str, StoredTensor]]]:
        """The files that hold its tensors, each with those that it holds."""
        found: dict[str, tuple[AnyPath, dict[str, StoredTensor]]] = {}
        for name in self.tensors():
            place = self.place(name)  # (paths of one remote file are not equal)
            found.setdefault(str(place.file), (place.file, {}))[1][name] = place
        return list(found.values())

    def arithmetic(self) -> dict[str, Any]:
        """The settings, beside the tensors, that its latents depend on."""
        names = ("architecture", "width", "latents", "k", "normalize", "subtracts", "rescales")
        unless = {
            "threshold": None, "scale": 1.0, "output_scale": 1.0, "ungained": False, "sides": 1,
            "centres": False, "norms": None, "weighted": False,
        }  # fmt: skip
        more = {n: value for n, usual in unless.items() if (value := getattr(self, n)) != usual}
        return {name: getattr(self, name) for name in names} | more

    def identity(self) -> str:
        """What it is, without its name: its arithmetic and sampled blocks of its tensors."""
        digest = xxhash.xxh3_128_hexdigest(canonical_json(self.arithmetic()))
        kind = self.architecture if self.sides == 1 else f"{CROSSCODER}{self.architecture}"
        return f"{kind} {self.latents} {digest}-{self.sampled}"


@dataclass(frozen=True)
class SparseEncoder:
    """An encoder, and what is stored of it.

    Attributes:
        kept: the number of latents per row.
        error_of: the site whose rows less their reconstructions are stored, too, if any.
    """

    sae: Sae
    kept: int
    dense: bool = False  # whether all are stored, in the order of their ids
    error_of: str | None = None  # (of the tap's own layer)

    @classmethod
    def of(
        cls, sae: Sae, asked: int | None, *, pooled: bool = False, error_of: str | None = None
    ) -> "SparseEncoder":
        """Args:
        asked: the number to keep, or `ALL_LATENTS`; capped at the number that can be active.
        pooled: whether rows are of several tokens, which may have other latents active.
        """
        if asked == ALL_LATENTS:
            return cls(sae, sae.latents, dense=True)
        most = sae.latents if pooled else sae.k or sae.latents
        return cls(sae, min(asked or sae.k or _KEPT, most), error_of=error_of)

    @property
    def id_dtype(self) -> str:
        return "int16" if self.sae.latents <= 1 << 15 else "int32"


def is_size(value: object) -> bool:
    """Whether a setting can be a number of values or of latents."""
    return type(value) is int and 1 <= value <= MOST_LATENTS
