"""The input of an export: chosen taps of a dataset, window by window, in the format's dtypes."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from spile.core.errors import ConfigError, DataError
from spile.core.tensors import DTYPES_BY_NAME
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.dtypes import STORED

WINDOW_BYTES = 32 << 20  # read and converted at a time; bounds an export's memory
FILE_BYTES = 256 << 20  # per file that its readers, or we, hold in memory


@dataclass(frozen=True)
class ExportSource:
    """Some taps of a dataset, with rows grouped into contexts and values cast to a dtype."""

    dataset: Dataset
    taps: tuple[str, ...]
    dtypes: dict[str, np.dtype[Any]]  # of each tap, as written
    context: int  # rows that stay together; 1 if the format has no contexts

    @property
    def contexts(self) -> int:
        return self.dataset.num_tokens // self.context

    @property
    def rows(self) -> int:
        """Rows of complete contexts."""
        return self.contexts * self.context

    def width(self, tap: str) -> int:
        return self.dataset.width(tap)

    def row_bytes(self, *taps: str) -> int:
        return sum(self.width(tap) * self.dtypes[tap].itemsize for tap in taps or self.taps)

    def hook(self, tap: str) -> str:
        """The TransformerLens name of a tap."""
        for name in self.dataset.aliases(tap):
            if re.search(r"(^|\.)hook_", name):
                return name
        raise ConfigError(
            f"{tap} has no TransformerLens name, which this format needs; "
            "choose other taps with --taps"
        )

    def windows(
        self, start: int, stop: int, row_bytes: int, size: int | None = None
    ) -> Iterator[tuple[int, int]]:
        """Ranges of whole contexts that cover start..stop, of about `size` bytes at most."""
        step = max(1, (size or WINDOW_BYTES) // (row_bytes * self.context)) * self.context
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def read(self, tap: str, start: int, stop: int) -> np.ndarray:
        """Rows of a tap in the dtype to write, contiguous."""
        return self.convert(tap, self.dataset.read(tap, start, stop, dtype=STORED))

    def convert(self, tap: str, values: np.ndarray) -> np.ndarray:
        """Convert rows of a `Dataset` to the dtype to write, contiguous."""
        wanted = self.dtypes[tap]
        if values.dtype == wanted:
            return np.ascontiguousarray(values)
        with np.errstate(over="ignore"):
            out = np.ascontiguousarray(values.astype(wanted))
        if wanted.itemsize < values.itemsize and (np.isinf(out) & np.isfinite(values)).any():
            raise DataError(f"{tap} has values that {wanted.name} cannot hold; use --dtype float32")
        return out

    def tokens(self, start: int, stop: int) -> np.ndarray:
        return self.dataset.index(start, stop)["token_id"]

    def about(self) -> dict[str, Any]:
        """The origin of the rows, to store beside them."""
        return {
            "spile": version("spile"),
            "dataset": self.dataset.url,
            "fingerprint": self.dataset.fingerprint,
            "recipe": self.dataset.recipe.to_json(),
            "taps": {
                tap: {"shape": list(self.dataset.shape(tap)), "dtype": self.dtypes[tap].name}
                for tap in self.taps
            },
        }


def choose_dtypes(
    dataset: Dataset,
    taps: Sequence[str],
    wanted: str | None,
    allowed: Sequence[str],
    *,
    integers: bool,
) -> dict[str, np.dtype[Any]]:
    """Each tap's dtype: `wanted`, else the stored one if the format has it, else float32."""
    if wanted is not None and wanted not in allowed:
        raise ConfigError(f"--dtype {wanted}: this format has {', '.join(allowed)}")

    def chosen(tap: str) -> np.dtype[Any]:
        stored = dataset.dtype(tap, STORED)
        if stored.kind == "i":  # (float32 holds them exactly)
            return stored if integers else DTYPES_BY_NAME["float32"]
        other = "float32" if "float32" in allowed else allowed[0]
        return DTYPES_BY_NAME[wanted or (stored.name if stored.name in allowed else other)]

    return {tap: chosen(tap) for tap in taps}
