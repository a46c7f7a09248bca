"""Spile taps a language model while it reads a corpus, and keeps the activations.

ds = spile.open("acts/demo")
rows = ds.read("resid_post.20", 0, 4096)
"""

from typing import TYPE_CHECKING, Any

from spile import _moved

__version__ = "0.1.0"

if TYPE_CHECKING:
    from spile.core.config import Recipe, Runtime
    from spile.core.index import FLAGS
    from spile.dataset.read.dataset import Dataset
    from spile.dataset.read.dataset import open_dataset as open
    from spile.interop.export import export
    from spile.interop.flight.client import connect
    from spile.run.extract import extract
    from spile.run.model import Model as model
    from spile.run.stream import stream

__all__ = ["FLAGS", "Dataset", "Recipe", "Runtime", "__version__", "connect", "export", "extract",
           "model", "open", "stream"]  # fmt: skip

_moved.install()

# Resolved on first use: reading needs no jax, and `import spile` should cost nothing.
_HOMES = {
    "Dataset": ("spile.dataset.read.dataset", "Dataset"),
    "FLAGS": ("spile.core.index", "FLAGS"),
    "Recipe": ("spile.core.config", "Recipe"),
    "Runtime": ("spile.core.config", "Runtime"),
    "connect": ("spile.interop.flight.client", "connect"),
    "export": ("spile.interop.export", "export"),
    "extract": ("spile.run.extract", "extract"),
    "model": ("spile.run.model", "Model"),
    "open": ("spile.dataset.read.dataset", "open_dataset"),
    "stream": ("spile.run.stream", "stream"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spile' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
