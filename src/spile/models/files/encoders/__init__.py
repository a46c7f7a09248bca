"""Published encoders: the table of the layouts in which tools store them. No jax.

`LAYOUTS` has a row for each layout: a new one is a file of this folder, and its row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from spile.core.errors import InputError
from spile.models.files.encoders import gemma_scope, saelens
from spile.models.files.encoders.sae import Sae
from spile.models.files.encoders.tensors import check_tensors, sampled_files
from spile.objects.paths import AnyPath, files_below, path_of


@dataclass(frozen=True)
class EncoderLayout:
    """How a tool stores an encoder in a directory."""

    tool: str
    file: str  # a directory with this file has this layout
    read: Callable[[AnyPath], Sae]  # reads and checks the settings; tensors are checked later


LAYOUTS = (  # the first whose file is there
    EncoderLayout("SAELens", saelens.CONFIG, saelens.read_saelens),
    EncoderLayout("Gemma Scope", gemma_scope.NPZ, gemma_scope.read_gemma_scope),
    EncoderLayout("Gemma Scope 2", gemma_scope.PARAMS, gemma_scope.read_gemma_scope_2),
)


def is_sae(folder: AnyPath) -> bool:
    """Whether a directory holds an encoder itself, and not directories of encoders."""
    return _layout_of(folder) is not None


def open_sae(where: str, *, flag: str = "--encode", decodes: bool = False) -> Sae:
    """Open an encoder by its directory or URL; check its settings and its tensors' shapes.

    Args:
        flag: the one that names it, for errors.
        decodes: whether its decoder is needed, too.
    """
    folder = path_of(where)
    layout = _layout_of(folder)
    if layout is None:
        known = ", ".join(f"{each.file} ({each.tool})" for each in LAYOUTS)
        raise InputError(f"{flag} {where}: has none of the files {known}{_hint(folder)}")
    sae = replace(layout.read(folder), decodes=decodes)
    check_tensors(sae)
    return replace(sae, sampled=sampled_files(sae))


def _hint(folder: AnyPath) -> str:
    pickles = (".pt", ".pth", ".bin", ".pkl")
    if any(path.name.endswith(pickles) for path in files_below(folder)):
        return "; pickles are never read, as reading them can run any program"
    return ""


def _layout_of(folder: AnyPath) -> EncoderLayout | None:
    return next((each for each in LAYOUTS if (folder / each.file).is_file()), None)
