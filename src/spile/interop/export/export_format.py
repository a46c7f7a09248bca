"""Description of a foreign format: what it can hold, how to write it, and how to count its rows."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spile.core.errors import ConfigError
from spile.core.libraries import import_library
from spile.interop.export.export_source import ExportSource


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """One format.

    Attributes:
        write: writes below a directory; returns how many rows of each tap.
        count: counts the rows of each tap in the written files.
        check: refuses what the format cannot express, before anything is written.
        dtypes: allowed for floating values.
        contexts: whether rows come in sequences of one length.
        integers: whether integer taps stay integers.
        features: whether it holds features, which `write` and `count` count in place of rows.
        needs: modules, and what to install for them.
    """

    name: str
    about: str
    write: Callable[[ExportSource, Path], int]
    count: Callable[[ExportSource, Path], Mapping[str, int]]
    check: Callable[[ExportSource], None] = lambda source: None
    dtypes: tuple[str, ...] = ("float32", "float16")
    contexts: bool = False
    integers: bool = False
    features: bool = False
    needs: tuple[tuple[str, str], ...] = ()


def check_hooks(source: ExportSource) -> None:
    """Check that every tap has a TransformerLens name, for formats that use those."""
    hooks = [source.hook(tap) for tap in source.taps]
    if len(set(hooks)) < len(hooks):
        raise ConfigError("two of the taps have one TransformerLens name; choose with --taps")


def require(form: ExportFormat) -> None:
    """Refuse a format in one line if a library that it needs is missing."""
    for module, package in form.needs:
        import_library(module, f"--to {form.name}", package)


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    path.write_text(json.dumps(value, indent=indent) + "\n")
