"""Configs and splits of datasets read by the `datasets` library. Their scripts are never run."""

import contextlib
import errno
from collections.abc import Generator
from typing import Any

from spile.core.errors import InputError, SpileError, StoreError, first_line
from spile.core.libraries import import_library
from spile.objects.hub.repository import Repository, offline, open_hub
from spile.objects.hub.splits import one_of


def datasets_library(where: str) -> Any:
    """Import the library and silence it."""
    datasets = import_library("datasets", f"{where}: it", "'spile[datasets]'")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    return datasets


def address(repository: Repository) -> str:
    """Return the library's URL of a repository: for a bare name it prefers a local folder."""
    return f"hf://datasets/{repository.name}"


def choose(repository: Repository, commit: str, config: str, split: str) -> tuple[str, str]:
    """Return the requested config and split, or the only ones."""
    refuse_script(repository, commit)
    if offline():
        if config and split:
            return config, split
        raise InputError(
            f"{repository.url}: HF_HUB_OFFLINE is set; give the full name that `spile fetch` "
            "printed, datasets:OWNER/NAME@COMMIT:CONFIG:SPLIT"
        )
    datasets, where = datasets_library(repository.url), address(repository)
    with reading(repository.url):
        names = datasets.get_dataset_config_names(where, revision=commit)
        default = datasets.get_dataset_default_config_name(where, revision=commit)
    config = one_of(repository.url, "config", config or default or "", names)
    with reading(repository.url):
        splits = datasets.get_dataset_split_names(where, config, revision=commit)
    return config, one_of(repository.url, "split", split, splits)


def refuse_script(repository: Repository, commit: str) -> None:
    """Refuse a dataset made by its owner's script: neither we nor the library run those."""
    script = f"{repository.name.partition('/')[2]}.py"
    if not offline() and script in {e.key for e in open_hub(repository, commit).entries()}:
        raise InputError(
            f"{repository.url}@{commit}: needs a script, {script}, which neither Spile nor the "
            "`datasets` library runs; use the Hub's own Parquet if it exists "
            "(@refs/convert/parquet), or load it with datasets 3, save it with `to_parquet`, and "
            "give that file"
        )


@contextlib.contextmanager
def reading(where: str) -> Generator[None, None, None]:
    """Turn any exception of the library into one line."""
    try:
        yield
    except SpileError:
        raise
    except Exception as error:
        if is_full(error):
            raise StoreError(
                f"disk full while making Parquet of {where}; free some space, or set --cache and "
                "HF_HOME to a larger disk, and run the same command again"
            ) from error
        line = first_line(error)
        raise InputError(f"{where}: the `datasets` library cannot read it ({line})") from error


def is_full(error: BaseException | None) -> bool:
    """Return whether a disk was full, however the error was wrapped."""
    while error is not None:
        if getattr(error, "errno", None) == errno.ENOSPC or "Not enough disk space" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
