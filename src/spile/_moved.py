"""Old paths and names that the documentation of 0.1 showed: they work for one release, with a line.

Remove this file, its line in `__init__.py` and every use of `renamed` with the release after.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence

MOVED = {
    "spile.interop.jax": "spile.interop.jax_loader",
    "spile.interop.torch": "spile.interop.torch_loader",
    "spile.models.splice": "spile.models.forward.splice",
    "spile.store.latents": "spile.dataset.read.latents",
}
_PARENTS = {"spile.store": "spile.dataset"}  # they only lead to the others: without a line


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last, so that it costs nothing where a module is found."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MOVED | _PARENTS:
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        if spec.name in _PARENTS:
            return _Alias(spec.name, importlib.import_module(_PARENTS[spec.name]))
        new = MOVED[spec.name]
        warnings.warn(
            f"{spec.name} is now {new}, and its public names are those of `spile` itself; "
            "the old path goes with the next release",
            FutureWarning,
            stacklevel=2,
        )
        return _Alias(spec.name, importlib.import_module(new))

    def exec_module(self, module: types.ModuleType) -> None:
        """The module was executed under its new name."""


class _Alias(types.ModuleType):
    """Another name of a module: what one sets or takes here is the module's own."""

    def __init__(self, name: str, module: types.ModuleType) -> None:
        super().__init__(name, module.__doc__)
        self.__dict__["_module"] = module
        self.__dict__["__path__"] = []  # a package's old name has its modules' old names below it

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["_module"], name)

    def __dir__(self) -> list[str]:
        return dir(self.__dict__["_module"])


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """Make a module's `__getattr__`: an old name gives the new one's value, with a line."""

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(
            f"{module}.{name} is now spile.{names[name]}; the old name goes with the next release",
            FutureWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(module), names[name])

    return find


def install() -> None:
    """Let the old paths be imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
