"""A tap's rows as the page knows them: flat, of numbers; each of its values is a channel."""

import numpy as np

from spile.dataset.read.dataset import Dataset


def channels(dataset: Dataset, tap: str) -> int:
    """How many values a row has."""
    return dataset.width(tap)


def read_rows(dataset: Dataset, tap: str, start: int, stop: int) -> np.ndarray:
    """Rows start..stop, float32 [rows, channels]."""
    found = dataset.read(tap, start, stop)
    return found.reshape(len(found), channels(dataset, tap)).astype(np.float32)
