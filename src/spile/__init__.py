"""Spile taps a language model while it reads a corpus, and keeps the activations.

ds = spile.open("acts/demo")
rows = ds.read("resid_post.20", 0, 4096)
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # `as` marks a name as exported
    from spile.core.config import Recipe as Recipe
    from spile.core.config import Runtime as Runtime
    from spile.core.errors import ConfigError as ConfigError
    from spile.core.errors import CorruptError as CorruptError
    from spile.core.errors import DataError as DataError
    from spile.core.errors import DriftError as DriftError
    from spile.core.errors import InputError as InputError
    from spile.core.errors import Interrupted as Interrupted
    from spile.core.errors import LaunchError as LaunchError
    from spile.core.errors import SpileError as SpileError
    from spile.core.errors import StoreError as StoreError
    from spile.core.errors import WorldError as WorldError
    from spile.core.index import FLAGS as FLAGS
    from spile.dataset.read.aligned import AlignedDatasets as AlignedDatasets
    from spile.dataset.read.aligned import align as align
    from spile.dataset.read.dataset import Dataset as Dataset
    from spile.dataset.read.direction import Direction as Direction
    from spile.dataset.read.direction import direction as direction
    from spile.dataset.read.latents import top_rows as top_rows
    from spile.dataset.read.opening import open_dataset
    from spile.interop.export import export as export
    from spile.interop.flight.client import connect as connect
    from spile.interop.ingest.writer import Writer as Writer
    from spile.interop.jax_loader import on_devices as on_devices
    from spile.interop.torch_loader import TorchLoader as TorchLoader
    from spile.interop.torch_loader import TorchRows as TorchRows
    from spile.interop.torch_loader import torch_dataset as torch_dataset
    from spile.models.files.demo import demo_model as demo_model
    from spile.models.forward.splice import added as added
    from spile.models.forward.splice import only as only
    from spile.models.forward.splice import replaced as replaced
    from spile.models.sites import SPLICED
    from spile.run.extract import extract as extract
    from spile.run.model import Model as Model
    from spile.run.model import load_model as load_model
    from spile.run.stream import stream as stream

    open = open_dataset
    SPLICE_SITES = SPLICED

# Resolved on first use: reading needs no jax, and `import spile` should cost nothing.
_HOMES = {
    "spile.core.config": "Recipe Runtime",
    "spile.core.errors": "ConfigError CorruptError DataError DriftError InputError Interrupted "
    "LaunchError SpileError StoreError WorldError",
    "spile.core.index": "FLAGS",
    "spile.dataset.read.aligned": "AlignedDatasets align",
    "spile.dataset.read.dataset": "Dataset",
    "spile.dataset.read.direction": "Direction direction",
    "spile.dataset.read.latents": "top_rows",
    "spile.dataset.read.opening": "open=open_dataset",
    "spile.interop.export": "export",
    "spile.interop.flight.client": "connect",
    "spile.interop.ingest.writer": "Writer",
    "spile.interop.jax_loader": "on_devices",
    "spile.interop.torch_loader": "TorchLoader TorchRows torch_dataset",
    "spile.models.files.demo": "demo_model",
    "spile.models.forward.splice": "added only replaced",
    "spile.models.sites": "SPLICE_SITES=SPLICED",
    "spile.run.extract": "extract",
    "spile.run.model": "Model load_model",
    "spile.run.stream": "stream",
}
_NAMES = {
    public: (module, own or public)
    for module, names in _HOMES.items()
    for public, _, own in (name.partition("=") for name in names.split())
}
__all__ = sorted([*_NAMES, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'spile' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _NAMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
