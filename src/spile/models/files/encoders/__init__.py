"""Published encoders: the table of the layouts in which tools store them. No jax.

`LAYOUTS` has a row for each layout: a new one is a file of this folder, and its row.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from spile.core.errors import InputError
from spile.models.files.encoders import (
    circuit_tracer,
    crosscoders,
    dictionary_learning,
    gemma_scope,
    llama_scope,
    openmoss,
    qwen_scope,
    saelens,
    sparsify,
)
from spile.models.files.encoders.sae import Sae
from spile.models.files.encoders.tensors import check_tensors, sampled_files
from spile.objects.paths import AnyPath, path_of

_UNGAINED = "ln2.hook_normalized"  # mlp_in, before the norm's gain multiplies it
_NUMBER = r"(0|[1-9]\d{0,5})"


@dataclass(frozen=True)
class EncoderLayout:
    """How a tool stores an encoder in a directory, or one for each layer.

    `read` takes the directory, and the layer if `file` has its number. It reads and checks the
    settings; tensors are checked later.
    """

    tool: str
    file: str  # a directory with this file has this layout; `{layer}` stands for a layer's number
    read: Callable[..., Sae]
    beside: str = ""  # another file that must be there, if other tools use the first name, too

    @property
    def layered(self) -> bool:
        return "{layer}" in self.file

    def layer_in(self, name: str) -> int | None:
        """Return the layer in the name of one of its files."""
        pattern = re.escape(self.file).replace(r"\{layer\}", _NUMBER)
        found = re.fullmatch(pattern, name) if self.layered else None
        return int(found[1]) if found else None


LAYOUTS = (  # the first whose file is there
    EncoderLayout("Kissane et al.", crosscoders.WEIGHTS, crosscoders.read_kissane),
    EncoderLayout("sparsify", sparsify.FILE, sparsify.read_sparsify),
    EncoderLayout("SAELens", saelens.CONFIG, saelens.read_saelens),
    EncoderLayout("Gemma Scope", gemma_scope.NPZ, gemma_scope.read_gemma_scope),
    EncoderLayout("Gemma Scope 2", gemma_scope.PARAMS, gemma_scope.read_gemma_scope_2),
    EncoderLayout("Gemma Scope 2", gemma_scope.CROSS_LAYER, gemma_scope.read_cross_layer),
    EncoderLayout(
        "dictionary_learning", dictionary_learning.FILE,
        dictionary_learning.read_dictionary_learning,
    ),
    EncoderLayout("Llama Scope 2", openmoss.FILE, openmoss.read_openmoss, openmoss.CONFIG),
    EncoderLayout("Llama Scope", llama_scope.CONFIG, llama_scope.read_llama_scope),
    EncoderLayout("Qwen-Scope", qwen_scope.FILE, qwen_scope.read_qwen_scope),
    EncoderLayout(
        "circuit-tracer", circuit_tracer.TRANSCODER, circuit_tracer.read_transcoder
    ),
    EncoderLayout(
        "circuit-tracer", circuit_tracer.CROSS_LAYER, circuit_tracer.read_cross_layer
    ),
    EncoderLayout(
        "dictionary_learning", crosscoders.PUBLISHED, crosscoders.read_published_crosscoder
    ),
)  # fmt: skip


@dataclass(frozen=True)
class FoundEncoders:
    """The layout of a directory, or of a file in one, and the layers that it has encoders of."""

    folder: AnyPath
    layout: EncoderLayout
    layers: tuple[int, ...] = ()  # sorted; empty if there is one encoder, of no stated layer


def find_layout(where: AnyPath) -> FoundEncoders | None:
    """Find the layout of a directory that holds encoders itself, or of one encoder's file.

    Returns None for a directory of other directories.
    """
    if where.is_file():
        folder = where.parent if isinstance(where, Path) else where.above(len(where.parts) - 1)
        for layout in LAYOUTS:
            layer = layout.layer_in(where.name)
            if layer is not None:
                return FoundEncoders(folder, layout, (layer,))
            if layout.file == where.name and _has_beside(folder, layout):
                return FoundEncoders(folder, layout)
        return None
    for layout in LAYOUTS:
        if layout.layered or not (where / layout.file).is_file():
            continue
        if _has_beside(where, layout):
            return FoundEncoders(where, layout)
    names = _names(where)
    for layout in LAYOUTS:
        layers = sorted(n for name in names if (n := layout.layer_in(name)) is not None)
        if layers:
            return FoundEncoders(where, layout, tuple(layers))
    return None


def open_sae(
    where: str,
    *,
    layer: int | None = None,
    flag: str = "--encode",
    decodes: bool = False,
    across: bool = False,
    sides: int = 1,
) -> Sae:
    """Open an encoder by its directory, file or URL; check its settings and its tensors' shapes.

    Args:
        layer: of the tap, if the directory has an encoder for each layer.
        flag: the one that names it, for errors.
        decodes: whether its decoder is needed, too.
        across: whether a layer of a cross-layer transcoder is then returned without its decoder,
            which `with_decoders` adds.
        sides: how many models' rows it must read.
    """
    path = path_of(where)
    found = find_layout(path)
    if found is None:
        files = ((each.file.replace("{layer}", "N"), each.tool) for each in LAYOUTS)
        known = ", ".join(f"{file} ({tool})" for file, tool in files)
        raise InputError(f"{flag} {where}: has none of the files {known}{_hint(path)}")
    if not found.layout.layered:
        sae = found.layout.read(found.folder)
    else:
        chosen = found.layers[0] if len(found.layers) == 1 else layer
        if chosen is None or chosen not in found.layers:
            layers = ", ".join(map(str, found.layers))
            asked = "is of no layer" if layer is None else f"is of layer {layer}"
            raise InputError(f"{flag} {where}: has encoders of layers {layers}; the tap {asked}")
        sae = found.layout.read(found.folder, chosen)
    if sae.sides != sides:
        told = f"{flag} {where}: is a crosscoder of {sae.sides} models"
        if sides == 1:
            raise InputError(
                f"{told}; make a dataset of each model by `spile extract --like`, then run `spile "
                "encode` on them"
            )
        raise InputError(
            f"{told}, not {sides}" if sae.sides > 1 else f"{flag} {where}: reads one model; give "
            "it to `spile extract --encode`"
        )  # fmt: skip
    if sae.hook and sae.hook.endswith(_UNGAINED):
        hook = f"{sae.hook.removesuffix(_UNGAINED)}mlp.hook_in"
        sae = replace(sae, hook=hook, ungained=True)
    if not decodes or (across and sae.crosses):
        return _checked(sae)
    return with_decoder(sae, f"{flag} {where}")


def with_decoder(sae: Sae, named: str) -> Sae:
    """Return an encoder with its decoder; `named`: what to call it in errors."""
    if sae.crosses:
        raise InputError(
            f"{named}: is a cross-layer transcoder, whose reconstruction needs the latents of all "
            "layers up to its own; only `spile extract` computes that, with --encode-error"
        )
    return _checked(replace(sae, decodes=True))


def with_decoders(sae: Sae, targets: tuple[int, ...]) -> Sae:
    """Return a layer of a cross-layer transcoder with its decoders to some layers, ascending."""
    assert sae.writes_from is not None
    picked = tuple(layer - sae.writes_from for layer in targets)
    places = {**sae.places, "W_dec": replace(sae.place("W_dec"), picked=picked)}
    made = replace(sae, across=targets, decodes=True, places=places)
    check_tensors(made)
    return made


def _checked(sae: Sae) -> Sae:
    check_tensors(sae)
    return replace(sae, sampled=sampled_files(sae))


def _has_beside(folder: AnyPath, layout: EncoderLayout) -> bool:
    return not layout.beside or (folder / layout.beside).is_file()


def _names(folder: AnyPath) -> list[str]:
    """Return the names of the files in a directory itself."""
    if isinstance(folder, Path):
        return [path.name for path in folder.iterdir()] if folder.is_dir() else []
    depth = len(folder.parts) + 1
    return [path.name for path in folder.below() if len(path.parts) == depth]


def _hint(folder: AnyPath) -> str:
    pickles = (".bin", ".pkl", ".pickle")
    if any(name.endswith(pickles) for name in _names(folder)):
        return "; pickles are never read, as reading them can run any program"
    return ""
