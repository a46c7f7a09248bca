"""Download a model, an adapter and a corpus before a run: `spile fetch`. No jax.

Files on the Hub go to the cache that all Hub programs share, where later runs find them even
without a network. With `--to` they go into a plain directory, as do files in a bucket or on a web
server. Complete files are not fetched again. A corpus that only the `datasets` library can read is
converted to Parquet, as at the start of a run.
"""

import errno
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from spile.core.errors import ConfigError, InputError, StoreError
from spile.core.identity import sampled_digest
from spile.core.retry import PATIENCE
from spile.core.threads import OnProgress
from spile.corpus.files import find_files
from spile.corpus.formats.datasets_library import is_built
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.lora import adapter_files
from spile.objects.http import library, of_the_network
from spile.objects.hub.names import hub_name, pinned
from spile.objects.hub.repository import HubObjects, endpoint, note_files, offline
from spile.objects.paths import AnyPath, RemotePath, path_of
from spile.objects.protocol import retrying

_AT_ONCE = 4  # files
_PIECE = 64 << 20
_BESIDE = (".json", ".jinja", ".model", ".txt")  # a model's files beside its weights
_NAMED = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json")

_Item = tuple[RemotePath, Path | None]  # a file, and where to put it; None: the Hub's cache


@dataclass(frozen=True)
class Fetched:
    """What was fetched, and where it is now."""

    model: str | None  # the value for --model; the next three for --lora, --corpus and --cache
    lora: str | None
    corpus: str | None
    cache: str | None
    files: int
    files_there: int  # how many of them were there already
    bytes: int


def fetch(
    model: str | None,
    corpus: str | None,
    to: str | None = None,
    progress: OnProgress | None = None,
    *,
    lora: str | None = None,
    cache: str | None = None,
) -> Fetched:
    """Download the files that a run will read.

    Args:
        to: a directory that gets folders `model`, `lora` and `corpus`; None: the Hub's cache.
        cache: where to keep a corpus converted to Parquet; None: `to`, or the default of a run.
    """
    asked = {"model": model, "lora": lora, "corpus": corpus}
    if not any(asked.values()):
        raise ConfigError("nothing to fetch: give --model, --lora, --corpus or several of them")
    dest = Path(to) if to else None
    names = {name: _pinned(name, source) for name, source in asked.items()}
    built = bool(names["corpus"] and is_built(names["corpus"]))
    cache = cache or (str(dest / "corpus") if dest and built else None)
    wanted: list[_Item] = []
    for name, source in names.items():
        if source:
            files = _files(name, names, with_card=not dest, cache=cache)
            wanted += _placed(name, str(asked[name]), files, dest)
    missing = [item for item in wanted if not _is_there(*item)]
    if missing and offline() and not dest:
        raise ConfigError(
            f"{missing[0][0]}: HF_HUB_OFFLINE is set; unset it to fetch missing files"
        )
    if missing:
        _check_room([path for path, _ in missing], dest)
    _fetch_all(missing, progress or (lambda done, total: None))
    if not dest or built:
        _note(asked, names)
    for name in names:
        if dest and any(place and place.is_relative_to(dest / name) for _, place in wanted):
            names[name] = str(dest / name)
    return Fetched(
        **names,
        cache=cache if built else None,
        files=len(wanted) + built,
        files_there=len(wanted) - len(missing),
        bytes=sum(path.size() for path, _ in missing),
    )


def _pinned(name: str, source: str | None) -> str | None:
    if source in (None, "demo"):
        return source
    return pinned(source, "dataset" if name == "corpus" else "model")


def _files(
    name: str, sources: Mapping[str, str | None], *, with_card: bool, cache: str | None
) -> Sequence[AnyPath]:
    source, model = sources[name], sources["model"]
    assert source
    if name == "corpus":
        return _corpus_files(source, with_card=with_card, cache=cache)
    if name == "model":
        return _model_files(source)
    if model:
        adapter = open_checkpoint(model, source).adapter  # raises if it does not fit the model
        assert adapter
        return adapter.files
    return adapter_files(path_of(source))


def _placed(name: str, source: str, files: Sequence[AnyPath], dest: Path | None) -> list[_Item]:
    """Return the files that are not on a local disk, and where to put each."""
    remote = [path for path in files if isinstance(path, RemotePath)]
    if not dest:
        if not all(isinstance(path.objects, HubObjects) for path in remote):
            raise ConfigError(f"{source}: is not on the Hub; choose a directory with --to DIR")
        return [(path, None) for path in remote]
    flat = name != "corpus"
    return [(p, dest.joinpath(name, *((p.name,) if flat else p.parts))) for p in remote]


def _model_files(source: str) -> Sequence[AnyPath]:
    checkpoint = open_checkpoint(source)  # raises if a run would
    folder = checkpoint.directory
    if isinstance(folder, Path):
        return ()
    try:
        depth = len(folder.parts) + 1
        beside = [path for path in folder.below() if len(path.parts) == depth]
    except ConfigError:  # a web server has no listing
        beside = [path for path in map(folder.__truediv__, _NAMED) if path.is_file()]
    weights = [file for file in checkpoint.files if isinstance(file, RemotePath)]
    return [*(path for path in beside if path.name.endswith(_BESIDE)), *weights]


def _corpus_files(source: str, *, with_card: bool, cache: str | None) -> Sequence[AnyPath]:
    """Return the corpus's data files; for the cache also the card, which maps files to splits."""
    files: list[AnyPath] = [file.path for file in find_files(source, cache)]
    some = next((path for path in files if isinstance(path, RemotePath)), None)
    if some and with_card and isinstance(some.objects, HubObjects):
        card = RemotePath(some.objects, "README.md")
        files += [card] if card.is_file() else []
    return files


def _is_there(path: RemotePath, place: Path | None) -> bool:
    if place:
        return place.is_file() and place.stat().st_size == path.size() and _same(path, place)
    return path.objects.local_path(path.key) is not None


def _check_room(missing: Sequence[RemotePath], dest: Path | None) -> None:
    folder = dest or Path(library(".constants").HF_HUB_CACHE)
    needed = sum(path.size() for path in missing)
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise StoreError(
            f"{folder}: {needed / 1e9:.1f} GB would be fetched, but only {free / 1e9:.1f} GB are "
            "free; free some space, or set HF_HOME or --to to a larger disk"
        )


def _fetch_all(missing: Sequence[_Item], progress: OnProgress) -> None:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            for number, _ in enumerate(pool.map(_fetch, missing), 1):
                progress(number, len(missing))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _fetch(item: _Item) -> None:
    path, place = item
    try:
        if place:
            _copy(path, place)
        else:
            _cache(path)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise StoreError(
                f"disk full while fetching {path}; complete files stay: free some space and run "
                "the same command again"
            ) from error
        raise StoreError(f"fetching {path}: {error.strerror or error}") from error


def _copy(path: RemotePath, place: Path) -> None:
    """Download into a `.part` file beside the destination, resumed if it exists, then rename it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f".{place.name}.part")
    size = path.size()
    with part.open("ab") as file:
        if file.tell() > size:
            file.truncate(0)
        while (start := file.seek(0, 2)) < size:
            piece = bytearray(min(_PIECE, size - start))
            path.read_into(start, memoryview(piece))
            file.write(piece)
            file.flush()
    if not _same(path, part):
        part.unlink()
        raise InputError(f"{path}: the fetched bytes differ; run the same command again")
    part.replace(place)


def _cache(path: RemotePath) -> None:
    """Download into the Hub's cache with its own client, which resumes partial downloads."""
    objects = path.objects
    assert isinstance(objects, HubObjects)
    hub = library()
    library(".utils").disable_progress_bars()
    library(".utils.logging").set_verbosity_error()
    trying = retrying(f"fetching {path}", PATIENCE)
    where = {
        "repo_type": objects.repository.kind,
        "revision": objects.commit,
        "endpoint": endpoint(),
    }
    while True:
        try:
            found = Path(hub.hf_hub_download(objects.repository.name, path.key, **where))
            break
        except Exception as error:
            if getattr(error, "errno", None) == errno.ENOSPC or not of_the_network(error):
                raise
            line = str(error).strip().partition("\n")[0][:300]
            status = getattr(getattr(error, "response", None), "status_code", None)
            if status in (401, 403, 404):
                raise StoreError(f"fetching {path}: {line}") from error
            trying.again(line, error)
    objects.forget_local()
    if not _same(path, found):
        found.resolve().unlink()
        found.unlink(missing_ok=True)
        raise InputError(
            f"{path}: the fetched bytes differ from the Hub's; run the same command again"
        )


def _same(path: RemotePath, file: Path) -> bool:
    """Return whether a file equals the remote one: by the Hub's hash, or else by samples."""
    if not isinstance(path.objects, HubObjects):
        return sampled_digest(file) == sampled_digest(path)
    wanted = path.objects.entry(path.key).etag
    with file.open("rb") as stream:
        if len(wanted) == 64:
            return hashlib.file_digest(stream, "sha256").hexdigest() == wanted
        # A small file has its git blob hash.
        data = stream.read()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() == wanted


def _note(asked: Mapping[str, str | None], found: Mapping[str, str | None]) -> None:
    """Record which files the commits hold, for runs without a network."""
    for name, source in asked.items():
        kind = "dataset" if name == "corpus" else "model"
        named = hub_name(source, kind) if source and source != "demo" else None
        there = hub_name(found[name] or "", kind) if named else None
        if named and there and there.revision and not offline():
            note_files(named.repository, named.revision or "main", there.revision)
