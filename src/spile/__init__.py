"""Spile taps a language model while it reads a corpus, and keeps the activations.

ds = spile.open("acts/demo")
rows = ds.read("resid_post.20", 0, 4096)
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from spile.core.config import Recipe, Runtime
    from spile.core.errors import (
        ConfigError,
        CorruptError,
        DataError,
        DriftError,
        InputError,
        Interrupted,
        LaunchError,
        SpileError,
        StoreError,
        WorldError,
    )
    from spile.core.index import FLAGS
    from spile.dataset.read.aligned import AlignedDatasets, align
    from spile.dataset.read.dataset import Dataset
    from spile.dataset.read.latents import top_rows
    from spile.dataset.read.opening import open_dataset as open
    from spile.interop.export import export
    from spile.interop.flight.client import connect
    from spile.interop.jax_loader import on_devices
    from spile.interop.torch_loader import TorchLoader, torch_dataset
    from spile.interop.trainers import TorchRows
    from spile.models.files.demo import demo_model
    from spile.models.forward.splice import added, only, replaced
    from spile.models.sites import SPLICED as SPLICE_SITES
    from spile.run.extract import extract
    from spile.run.model import Model, load_model
    from spile.run.stream import stream

__all__ = [
    "FLAGS",
    "SPLICE_SITES",
    "AlignedDatasets",
    "ConfigError",
    "CorruptError",
    "DataError",
    "Dataset",
    "DriftError",
    "InputError",
    "Interrupted",
    "LaunchError",
    "Model",
    "Recipe",
    "Runtime",
    "SpileError",
    "StoreError",
    "TorchLoader",
    "TorchRows",
    "WorldError",
    "__version__",
    "added",
    "align",
    "connect",
    "demo_model",
    "export",
    "extract",
    "load_model",
    "on_devices",
    "only",
    "open",
    "replaced",
    "stream",
    "top_rows",
    "torch_dataset",
]

# Resolved on first use: reading needs no jax, and `import spile` should cost nothing.
_HOMES = {
    "spile.core.config": ("Recipe", "Runtime"),
    "spile.core.errors": (
        "ConfigError",
        "CorruptError",
        "DataError",
        "DriftError",
        "InputError",
        "Interrupted",
        "LaunchError",
        "SpileError",
        "StoreError",
        "WorldError",
    ),
    "spile.core.index": ("FLAGS",),
    "spile.dataset.read.aligned": ("AlignedDatasets", "align"),
    "spile.dataset.read.dataset": ("Dataset",),
    "spile.dataset.read.opening": ("open=open_dataset",),
    "spile.dataset.read.latents": ("top_rows",),
    "spile.interop.export": ("export",),
    "spile.interop.flight.client": ("connect",),
    "spile.interop.jax_loader": ("on_devices",),
    "spile.interop.torch_loader": ("TorchLoader", "torch_dataset"),
    "spile.interop.trainers": ("TorchRows",),
    "spile.models.files.demo": ("demo_model",),
    "spile.models.forward.splice": ("added", "only", "replaced"),
    "spile.models.sites": ("SPLICE_SITES=SPLICED",),
    "spile.run.extract": ("extract",),
    "spile.run.model": ("Model", "load_model"),
    "spile.run.stream": ("stream",),
}
_NAMES = {
    public: (module, own or public)
    for module, names in _HOMES.items()
    for public, _, own in (name.partition("=") for name in names)
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'spile' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _NAMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
