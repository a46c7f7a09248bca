"""Write a dataset in another tool's format: `spile export OUT --to FORMAT DEST`.

Every file of the dataset is checked before its rows are read. Rows are read window by window, and
counted again in the written files. Only then does the directory get its name: whatever is at DEST
is complete.
"""

import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spile.core.errors import ConfigError, StoreError, name_parameters
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.opening import open_dataset
from spile.dataset.records.chosen_taps import choose_taps
from spile.interop.export import (
    activault,
    circuit_tracer,
    deepspec,
    delphi,
    feature_table,
    legacy,
    neuronpedia,
    npy,
    openmoss,
    parquet,
    saelens,
    saev,
    specforge,
    speculators,
    zarr,
)
from spile.interop.export.export_format import ExportFormat, require
from spile.interop.export.export_source import ExportSource, choose_dtypes
from spile.objects.local import make_folder, sync

FORMATS: dict[str, ExportFormat] = {
    form.name: form
    for form in (
        saelens.SAELENS,
        parquet.PARQUET,
        npy.NPY,
        zarr.ZARR,
        activault.ACTIVAULT,
        openmoss.OPENMOSS,
        saev.SAEV,
        delphi.DELPHI,
        neuronpedia.NEURONPEDIA,
        circuit_tracer.CIRCUIT_TRACER,
        feature_table.FEATURE_TABLE,
        speculators.SPECULATORS,
        specforge.SPECFORGE,
        deepspec.DEEPSPEC,
        legacy.LEGACY,
    )
}
name_parameters({"to": tuple(FORMATS), "context_size": (), "dtype": ("float32", "float16")})


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    dest: str
    format: str
    taps: dict[str, str]  # with the dtype of each
    rows: int  # of each tap; 0 of a format of features
    left_over: int  # rows at the end that did not fill a sequence or a file
    context_size: int | None
    files: int
    bytes: int
    features: int = 0


def export(
    out: str | Dataset,
    dest: str | Path,
    *,
    to: str,
    taps: str | Sequence[str] | None = None,
    context_size: int | None = None,
    dtype: str | None = None,
) -> Exported:
    """Write a finished dataset in the format of another tool.

    Args:
        to: one of `FORMATS`.
        taps: all if not given.
        context_size: rows of a sequence, if the format has sequences; by default the recipe's.
        dtype: by default the stored dtype if the format has it, else float32.
    """
    form = FORMATS.get(to)
    if form is None:
        raise ConfigError(f"--to {to}: no such format; there are {', '.join(FORMATS)}")
    require(form)
    # Do not copy damage: the copy's own checksums would vouch for it.
    dataset = (open_dataset(out) if isinstance(out, str) else out).verified()
    target = _destination(str(dest), dataset)
    source = _source(dataset, form, taps, context_size, dtype)
    try:
        with _staged(target) as stage:
            rows = form.write(source, stage)
            counts = form.count(source, stage)
            wrong = {tap: counts.get(tap, 0) for tap in source.taps if counts.get(tap, 0) != rows}
            if form.features:
                wrong = dict(counts) if sum(counts.values()) != rows else dict[str, int]()
            if wrong:
                what = "features" if form.features else "rows"
                raise StoreError(f"{target}: {rows} {what} were written, but it holds {wrong}")
            sizes = [path.stat().st_size for path in stage.rglob("*") if path.is_file()]
    except OSError as error:
        raise StoreError(f"{target}: {error.strerror or error}") from error
    return Exported(
        dest=str(dest),
        format=form.name,
        taps={tap: source.dtypes[tap].name for tap in source.taps},
        rows=0 if form.features else rows,
        left_over=0 if form.features else dataset.num_tokens - rows,
        context_size=source.context if form.contexts else None,
        files=len(sizes),
        bytes=sum(sizes),
        features=rows if form.features else 0,
    )


def _source(
    dataset: Dataset,
    form: ExportFormat,
    taps: str | Sequence[str] | None,
    context_size: int | None,
    dtype: str | None,
) -> ExportSource:
    aliases = {tap: dataset.aliases(tap) for tap in dataset.taps}
    chosen = choose_taps(dataset.url, aliases, taps)
    if context_size is not None and not form.contexts:
        raise ConfigError(f"--context-size: {form.name} has no sequences of one length")
    if context_size is not None and context_size < 1:
        raise ConfigError(f"--context-size must be at least 1, got {context_size}")
    if form.contexts and dataset.recipe.pool:
        raise ConfigError(
            f"{dataset.url}: holds pooled rows, and {form.name} has sequences of tokens; export to "
            "npy, parquet or zarr"
        )
    context = (context_size or dataset.recipe.seq_len) if form.contexts else 1
    dtypes = choose_dtypes(dataset, chosen, dtype, form.dtypes, integers=form.integers)
    source = ExportSource(dataset, chosen, dtypes, context)
    form.check(source)
    if not source.rows:
        raise ConfigError(
            f"{dataset.url}: its {dataset.num_tokens} rows do not fill one sequence of {context}; "
            "give a smaller --context-size"
            if dataset.num_tokens
            else f"{dataset.url} holds no rows"
        )
    _refuse_too_large(source)
    return source


def _refuse_too_large(source: ExportSource) -> None:
    """Refuse by the statistics, at once, and not when half of the rows are written."""
    for tap, dtype in source.dtypes.items():
        largest = source.dataset.statistics(tap).max_abs
        if dtype == np.float16 and largest > float(np.finfo(np.float16).max):
            raise ConfigError(
                f"{tap} reaches {largest:.4g}, which float16 cannot hold; use --dtype float32"
            )


def _destination(dest: str, dataset: Dataset) -> Path:
    if "://" in dest:
        raise ConfigError(f"{dest}: export writes to a local directory; copy it from there")
    target = Path(dest).absolute()
    _remove_leftovers(target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{dest} exists already, and nothing is overwritten; choose another")
    if Path(dataset.url).absolute() in (target, *target.parents):
        raise ConfigError(f"{dest} lies inside the dataset; choose a directory outside of it")
    return target


# -- nothing gets its name before it is complete ------------------------------------------------

# A staging directory `.NAME.XXXXXXXX.partial` beside DEST holds a file that its export keeps
# locked, and `rows`, which becomes DEST. The lock ends with the process: if it can be taken, the
# directory was left behind by a killed export.
_LOCK = ".spile-export"
_ROWS = "rows"


@contextmanager
def _staged(target: Path) -> Generator[Path, None, None]:
    """A directory that becomes the target on success, and is removed otherwise."""
    make_folder(target.parent, set())
    folder, lock = _locked_folder(target)
    rows = folder / _ROWS
    made: os.stat_result | None = None
    try:
        rows.mkdir()
        yield rows
        for path in sorted(rows.rglob("*")):
            sync(path)
        sync(rows)
        made = rows.stat()
        # (replaces an empty directory, but nothing else)
        rows.rename(target)
        sync(folder)
        sync(target.parent)
    except BaseException:
        _take_back(target, rows, made)
        raise
    finally:
        _remove(folder)
        os.close(lock)


def _locked_folder(target: Path) -> tuple[Path, int]:
    """Make a staging directory and lock it; another export may remove it before it is locked."""
    while True:
        folder = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
        folder.mkdir()
        try:
            lock = os.open(folder / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except FileNotFoundError:
            continue
        except BaseException:
            _remove(folder)
            raise
        # If files cannot be locked here, no export removes leftovers either.
        if _locked(lock) is not False and os.fstat(lock).st_nlink:
            sync(folder)  # so that it has its lock even after a power cut
            return folder, lock
        os.close(lock)


def _locked(file: int) -> bool | None:
    """Lock a file; False if another process holds it, None if files cannot be locked there."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _take_back(target: Path, rows: Path, made: os.stat_result | None) -> None:
    """Rename DEST back, if it was renamed: a failed export must leave nothing at DEST."""
    with contextlib.suppress(OSError):
        if made is not None and not rows.exists() and os.path.samestat(target.stat(), made):
            target.rename(rows)


def _remove(folder: Path) -> None:
    """Remove a staging directory, its lock last: if this fails, a later export finds it again."""
    with contextlib.suppress(OSError):
        if (folder / _ROWS).exists():
            shutil.rmtree(folder / _ROWS)
            sync(folder)
        (folder / _LOCK).unlink(missing_ok=True)
        folder.rmdir()


def _remove_leftovers(target: Path) -> None:
    """Remove staging directories of killed exports to this target, and nothing else."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.partial")
    with contextlib.suppress(OSError):
        for folder in target.parent.iterdir():
            if pattern.fullmatch(folder.name) and not folder.is_symlink() and folder.is_dir():
                _remove_leftover(folder)


def _remove_leftover(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if not {*os.listdir(folder)} <= {_LOCK, _ROWS}:
            return  # not ours
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            folder.rmdir()  # killed before it made its lock, or after removing it; must be empty
            return
        try:
            if _locked(lock):
                _remove(folder)
        finally:
            os.close(lock)
