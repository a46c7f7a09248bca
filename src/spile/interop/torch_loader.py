"""Batches as torch tensors, from this process or from DataLoader's workers.

    loader = spile.TorchLoader(ds, ["resid_post.20"], 4096, num_workers=4, seed=0)
    for batch in loader: ...

The loader yields the same batches in the same order as `ds.batches`, for any number of workers:
worker i of n makes every n-th batch, and DataLoader takes batches from its workers in turn.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from spile.core.errors import ConfigError
from spile.core.libraries import import_library
from spile.core.tensors import DTYPES_BY_NAME
from spile.dataset.read.aligned import AlignedDatasets
from spile.dataset.read.batches import Batches
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.window import Encoded


def _torch() -> Any:
    return import_library("torch", "a batch of tensors", "torch")


class TorchLoader:
    """A resumable loader of batches as tensors; it takes the options of `Dataset.batches`.

    Without `dtype`, tensors have the stored dtype: torch accumulates in float32.
    """

    def __init__(
        self,
        dataset: Dataset | AlignedDatasets,
        taps: str | Sequence[str],
        batch_size: int,
        *,
        num_workers: int = 0,
        loader: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Args:
        num_workers: processes that read and shuffle; 0: this process.
        loader: other options of DataLoader, such as pin_memory or multiprocessing_context.
        """
        if options.get("encoded"):
            raise ConfigError("encoded=True is for JAX's devices only; give a dtype instead")
        self._dataset = dataset
        self._options: dict[str, Any] = {"taps": taps, "batch_size": batch_size, **options}
        self._workers, self._loader = num_workers, dict(loader or {})
        self._at = dataset.batches(**self._options)  # never iterated: it only keeps the position

    def __len__(self) -> int:
        return len(self._at)

    def __repr__(self) -> str:
        return f"<spile.TorchLoader, num_workers={self._workers}: {self._at!r}>"

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iteration, in the form of `Dataset.batches`."""
        return self._at.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._at.load_state_dict(state)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate from the current state."""
        source = _made(self._dataset, self._options, self.state_dict())
        data: Any = importlib.import_module("torch.utils.data")
        options = {"num_workers": self._workers, **self._loader}
        for batch in data.DataLoader(source, batch_size=None, **options):
            self._at.skip()
            yield batch


class TorchRows:
    """A resumable, endless iterator over one tap's rows; it takes the options of `TorchLoader`.

    rows = spile.TorchRows(ds, "resid_post.9", 4096, device="cuda", where="pos >= 1")
    SAETrainer(cfg=cfg, sae=sae, data_provider=rows).fit()  # SAELens
    trainSAE(data=rows, trainer_configs=[...], steps=10_000)  # dictionary_learning

    Both accept an iterator of tensors [batch, width], and take as many as they need.
    """

    def __init__(
        self,
        dataset: Dataset,
        tap: str,
        batch_size: int,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        epochs: int | None = None,
        **options: Any,
    ) -> None:
        """Args:
        dtype: the tensors' dtype, as torch spells it.
        epochs: how many epochs to yield; None: no end.
        """
        self._tap, self._device = tap, device
        self._dtype = getattr(importlib.import_module("torch"), dtype)
        self._loader = TorchLoader(
            dataset, tap, batch_size, epochs=epochs, index=False, drop_last=True, **options
        )
        self._given: Iterator[dict[str, Any]] | None = None
        # (dictionary_learning stores this with its results.)
        self.config = {"dataset": dataset.url, "fingerprint": dataset.fingerprint, "tap": tap}
        self.config |= {"batch_size": batch_size, **options}

    def __iter__(self) -> "TorchRows":
        return self

    def __repr__(self) -> str:
        return f"<spile.TorchRows in {self._dtype} on {self._device}: {self._loader!r}>"

    def __next__(self) -> Any:
        self._given = self._given or iter(self._loader)
        rows = next(self._given)[self._tap]
        flat = rows.reshape(len(rows), -1)  # concatenates heads
        return flat.to(self._device, self._dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iteration, in the form of `Dataset.batches`."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self._given = None


def torch_dataset(
    dataset: Dataset | AlignedDatasets,
    taps: str | Sequence[str],
    batch_size: int,
    *,
    state: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return a torch `IterableDataset`, for use with your own DataLoader.

    It yields whole batches: give the DataLoader batch_size=None.

    Args:
        state: where to continue, as `state_dict` of `Dataset.batches` or of a TorchLoader gives it.
        options: those of `Dataset.batches`.
    """
    chosen: dict[str, Any] = {"taps": taps, "batch_size": batch_size, **options}
    dataset.batches(**chosen)  # refuses what is wrong here, not in a worker
    return _made(dataset, chosen, state)


def _made(
    dataset: Dataset | AlignedDatasets, options: Mapping[str, Any], state: Mapping[str, Any] | None
) -> Any:
    data: Any = importlib.import_module("torch.utils.data") if _torch() else None
    made = type("Rows", (_Rows, data.IterableDataset), {"__reduce__": _reduced})
    return made(dataset, options, state)


def _reduced(rows: "_Rows") -> Any:
    """Pickle by `_made`: the class is created only once torch is imported."""
    return _made, (rows.dataset, rows.options, rows.state)


class _Rows:
    def __init__(
        self,
        dataset: Dataset | AlignedDatasets,
        options: Mapping[str, Any],
        state: Mapping[str, Any] | None,
    ) -> None:
        self.dataset, self.options, self.state = dataset, dict(options), state

    def __repr__(self) -> str:
        return f"<spile.torch_dataset of {self._batches()!r}>"

    def _batches(self) -> Any:
        batches = self.dataset.batches(**self.options)
        if self.state is not None:
            batches.load_state_dict(self.state)
        return batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker: Any = importlib.import_module("torch.utils.data").get_worker_info()
        batches = self._batches()
        if worker is not None:
            batches = batches.in_turn(worker.id, worker.num_workers)
        return tensors(batches)


def tensors(batches: Batches) -> Iterator[dict[str, Any]]:
    """Yield each batch as tensors, without a copy; the index as one tensor per column."""
    for batch in batches.unconverted():
        made: dict[str, Any] = {}
        for name, values in batch.items():
            if name == "index":
                made |= {f"index/{column}": tensor(values[column]) for column in _columns(values)}
            else:
                assert not isinstance(values, Encoded)
                made[name] = tensor(values)
        yield made


def tensor(values: np.ndarray) -> Any:
    """Convert an array to a tensor, including dtypes that numpy itself lacks."""
    torch = _torch()
    if values.dtype == DTYPES_BY_NAME["bfloat16"]:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    if values.dtype == np.uint16:  # the index's flags: torch hardly supports uint16
        values = values.astype(np.int32)
    return torch.from_numpy(np.ascontiguousarray(values))


def _columns(values: np.ndarray) -> tuple[str, ...]:
    return cast(tuple[str, ...], values.dtype.names or ())
