"""Rows for other tools' trainers: one tap, shuffled, as an endless iterator of tensors.

    ds = spile.open("acts/demo")
    rows = spile.TorchRows(ds, "resid_post.9", 4096, device="cuda", where="pos >= 1")
    SAETrainer(cfg=cfg, sae=sae, data_provider=rows).fit()  # SAELens
    trainSAE(data=rows, trainer_configs=[...], steps=10_000)  # dictionary_learning

Both accept an iterator of tensors [batch, width], and take as many as they need.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from spile.dataset.read.dataset import Dataset
from spile.interop.torch_loader import TorchLoader


class TorchRows:
    """A resumable iterator over one tap's rows; it takes the options of `TorchLoader`."""

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
