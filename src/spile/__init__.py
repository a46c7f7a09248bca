"""Spile taps a language model while it reads a corpus, and keeps the activations.

ds = spile.open("acts/demo")
rows = ds.read("resid_post.20", 0, 4096)
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from spile.config import Recipe, Runtime
    from spile.engine.feed import stream
    from spile.engine.local import extract
    from spile.engine.model import Model as model
    from spile.index import FLAGS
    from spile.interop.connect import connect
    from spile.interop.export import export
    from spile.store.reader import Dataset
    from spile.store.reader import open_dataset as open

__all__ = ["FLAGS", "Dataset", "Recipe", "Runtime", "__version__", "connect", "export", "extract",
           "model", "open", "stream"]  # fmt: skip

# Resolved on first use: reading needs no jax, and `import spile` should cost nothing.
_HOMES = {
    "Dataset": ("spile.store.reader", "Dataset"),
    "FLAGS": ("spile.index", "FLAGS"),
    "Recipe": ("spile.config", "Recipe"),
    "Runtime": ("spile.config", "Runtime"),
    "connect": ("spile.interop.connect", "connect"),
    "export": ("spile.interop.export", "export"),
    "extract": ("spile.engine.local", "extract"),
    "model": ("spile.engine.model", "Model"),
    "open": ("spile.store.reader", "open_dataset"),
    "stream": ("spile.engine.feed", "stream"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spile' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
