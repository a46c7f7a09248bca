"""The folder for files that Spile can make again: compiled programs, demo weights, corpora."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return the root of the cache: `SPILE_CACHE`, else a folder `spile` in the user's cache."""
    if root := os.environ.get("SPILE_CACHE"):
        return Path(root).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "spile"
    return Path.home() / ".cache" / "spile"


def demo_directory() -> Path:
    """Return the folder of the demo model, which `models/files/demo.py` creates."""
    return cache_directory() / "SmolLM2-135M-Instruct-b179c9523d0e"  # from its file's SHA-256
