"""`--splice`: find the changes that it names, and their arrays. No jax.

    zero:z.5.h3                       set all values of a head, or of any tap, to zero
    ablate:resid_post.12=DIR.npy      project out one direction, or several
    steer:resid_post.12=DIR.npy*4     add a vector
    mean:mlp_out.3=MEAN.npy           replace every token's values by these, or by a dataset's mean
    replace-with-sae:resid_post.9=SAE replace the values by a sparse autoencoder's reconstruction
    replace-with-sae:mlp_in.9=DIR     of a transcoder: what it reconstructs from these (`mlp_out.9`)
    FILE.py:FUNCTION                  returns {tap: a function of its values}, as `Model` takes it

Changes apply in the order in which they are named.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from spile.core.errors import ConfigError, InputError
from spile.core.identity import full_digest
from spile.core.npy import read_npy_header
from spile.corpus.programs.program import guarded, load_file
from spile.dataset.read.opening import open_dataset
from spile.models.config.arch import Arch
from spile.models.files.encoders import open_sae
from spile.models.sites import SPLICED
from spile.models.splices import FUNCTION, KINDS, Splice, digest, orthonormal
from spile.models.taps import Tap, computed_as, parse_taps, place_of
from spile.objects.paths import path_of
from spile.plan.encoders import reconstructed_tap, refuse_unfit, with_gain

NONE, SAE = "none", "replace-with-sae"
_MOST = 1 << 26  # most values in a file
_BUILT_IN = re.compile(rf"({'|'.join(KINDS)}):([^=]+?)(?:=(.+))?")
_PROGRAM = re.compile(r"(.+\.py):(\w+)")
_FACTOR = re.compile(r"(.+?)\*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")


def each_splice_source(splice: str, change: Callable[[str, str], str]) -> str:
    """Return `--splice` with every path changed, by its kind; program paths become absolute."""

    def changed(item: str) -> str:
        if program := _PROGRAM.fullmatch(item):
            return f"{os.path.abspath(program[1])}:{program[2]}"
        kind, tap, value = _parsed(item)
        if value is None:
            return item
        path, factor = _factored(kind, value)
        return f"{kind}:{tap}={change(kind, path)}" + ("" if factor is None else f"*{factor}")

    return ",".join(map(changed, _items(splice))) or NONE


def names_program(splice: str | None) -> str | None:
    """Return the first user function that `--splice` names."""
    return next((item for item in _items(splice or NONE) if _PROGRAM.fullmatch(item)), None)


def find_splices(
    splice: str | None,
    taps: Sequence[Tap],
    arch: Arch,
    gain: Callable[[Tap], np.ndarray] | None = None,
) -> tuple[Splice, ...]:
    """Find the changes that `--splice` names, in order. This calls the user's functions.

    Args:
        taps: the taps of a new dataset; empty if the dataset exists.
        gain: of the norm whose output a tap is; None if only shapes are needed.

    Raises:
        ConfigError: if a change does not fit its tap, or none of the taps can show it.
    """
    found = [each for item in _items(splice or NONE) for each in _found(item, arch, gain)]
    deepest = max(taps, key=lambda tap: place_of(tap, arch), default=None)
    for each in found:
        if deepest and place_of(each.tap, arch) > place_of(deepest, arch):
            raise ConfigError(
                f"--splice {each.kind}:{each.tap.name}: changes no tap: the last one, "
                f"{deepest.name}, is computed earlier; tap a later site"
            )
    return tuple(found)


def _items(splice: str) -> list[str]:
    items = [*filter(None, map(str.strip, splice.split(",")))]
    if not items:
        raise ConfigError(f"--splice {splice!r} names no change")
    return [] if items == [NONE] else items


def _parsed(item: str) -> tuple[str, str, str | None]:
    match = _BUILT_IN.fullmatch(item)
    if not match:
        known = ", ".join(
            f"{kind}:TAP" + (f"={what}" if what else "") for kind, what in KINDS.items()
        )
        raise ConfigError(f"--splice {item!r}: choose from {known}, and FILE.py:FUNCTION")
    kind, tap, value = match[1], match[2], match[3]
    wanted = KINDS[kind]
    if (wanted is None) != (value is None):
        told = f"{kind}:{tap}" + (f"={wanted}" if wanted else "")
        raise ConfigError(f"--splice {item!r}: write {told}")
    return kind, tap, value


def _factored(kind: str, value: str) -> tuple[str, str | None]:
    match = _FACTOR.fullmatch(value) if kind == "steer" else None
    return (match[1], match[2]) if match else (value, None)


def _found(item: str, arch: Arch, gain: Callable[[Tap], np.ndarray] | None) -> Iterator[Splice]:
    if program := _PROGRAM.fullmatch(item):
        yield from _functions(Path(os.path.abspath(program[1])), program[2], arch)
        return
    kind, named, value = _parsed(item)
    for tap in _taps(item, named, arch):
        if kind == SAE and value is not None:
            yield _reconstructed(item, tap, value, arch, gain)
        else:
            yield _built_in(item, kind, tap, value, arch)


def _taps(item: str, named: str, arch: Arch) -> tuple[Tap, ...]:
    try:
        taps = parse_taps(named, arch)
    except ConfigError as error:
        raise ConfigError(error.message.replace("--taps", f"--splice {item}:", 1)) from None
    for tap in taps:
        if not tap.kind.spliced:
            known = ", ".join(SPLICED)
            raise ConfigError(f"--splice {item}: only these can be changed: {known}")
    return taps


def _built_in(item: str, kind: str, tap: Tap, value: str | None, arch: Arch) -> Splice:
    """Return a built-in change. Its arrays cover all heads; other heads are left unchanged."""
    shape = tap.shape(arch, 1)
    whole = replace(computed_as(tap), heads=())
    width = int(np.prod(shape))
    places = np.arange(whole.width(arch, 1)).reshape(whole.shape(arch, 1))
    places = (places[list(tap.heads)] if tap.heads else places).reshape(-1)

    def widened(array: np.ndarray) -> np.ndarray:
        out = np.zeros((*array.shape[:-1], whole.width(arch, 1)), np.float32)
        out[..., places] = array
        return out

    def made(what: str, **arrays: np.ndarray) -> Splice:
        told = f"{kind} {tap.name} {what}".strip()
        return Splice(kind=kind, tap=whole, identity=told, arrays=arrays)

    chosen = widened(np.ones(width)) > 0
    if value is None:
        return made("", chosen=chosen, value=np.zeros(len(chosen), np.float32))
    if kind == "mean":
        mean = _mean(item, tap, value, width)
        return made(digest(mean), chosen=chosen, value=widened(mean))
    path, factor = _factored(kind, value)
    given = read_rows(f"--splice {item}", path, shape, several=kind == "ablate")
    if kind == "steer":
        times = float(factor or 1)
        told = f"*{repr(times).removesuffix('.0')} {digest(given[0])}"
        return made(told, direction=widened(given[0] * np.float32(times)))
    basis = orthonormal(given)
    if not len(basis):
        raise ConfigError(f"--splice {item}: the direction is zero")
    return made(digest(given), basis=widened(basis))


def _reconstructed(
    item: str, tap: Tap, where: str, arch: Arch, gain: Callable[[Tap], np.ndarray] | None
) -> Splice:
    """Return the change of the values that the encoder of a tap reconstructs."""
    sae = open_sae(where, layer=tap.layer, flag=f"--splice {SAE}", decodes=True)
    if tap.heads:
        raise ConfigError(f"--splice {item}: an autoencoder reads all heads together")
    sae = with_gain(sae, tap, gain)
    refuse_unfit(f"--splice {item}", sae, tap, arch)
    written = reconstructed_tap(sae, tap, arch)
    if written is None or not written.kind.spliced or written.why_not(arch):
        raise ConfigError(
            f"--splice {item}: is a transcoder, and what it reconstructs, {sae.writes}, cannot be "
            "changed in this model"
        )
    whole, reads = computed_as(written), None
    if sae.writes:
        reads, width = tap, written.width(arch, 1)
        if place_of(tap, arch) >= place_of(written, arch) or (sae.target or sae.width) != width:
            raise ConfigError(
                f"--splice {item}: is a transcoder from {sae.hook} to {sae.writes}, which does not "
                f"fit {tap.name}; name the tap that it reads"
            )
    told = f"{SAE} {tap.name} {sae.identity()}"
    return Splice(kind=SAE, tap=whole, identity=told, sae=sae, reads=reads)


def _mean(item: str, tap: Tap, where: str, width: int) -> np.ndarray:
    """Return the mean in a file, or the mean of a dataset's rows of the same tap."""
    if where.endswith(".npy"):
        return read_rows(f"--splice {item}", where, (width,), several=False)[0]
    dataset = open_dataset(where)
    all_heads = replace(tap, heads=()).name
    if tap.name in dataset.taps:
        return dataset.statistics(tap.name).mean.reshape(-1).astype(np.float32)
    if tap.heads and all_heads in dataset.taps:
        mean = dataset.statistics(all_heads).mean.reshape(dataset.shape(all_heads))
        return mean[list(tap.heads)].reshape(-1).astype(np.float32)
    raise ConfigError(
        f"--splice {item}: {where} has no {tap.name}; it has {', '.join(dataset.taps)}"
    )


def read_rows(flag: str, where: str, shape: tuple[int, ...], *, several: bool) -> np.ndarray:
    """Read one row of a tap from a file, or with `several` any number of them: [any, width].

    Args:
        flag: the option that names the file, for errors.
        shape: of a row.
    """
    return _rows(flag, _npy(flag, where), shape, several=several)


def _npy(flag: str, where: str) -> np.ndarray:
    """Read a small array of numbers; pickles are never read."""
    path = path_of(where)
    try:
        with path.open("rb") as stream:
            shape, dtype = read_npy_header(stream)
            if np.prod(shape, dtype=object) > _MOST:
                raise ValueError(f"has the shape {list(shape)}, more than {_MOST} values")
            count = int(np.prod(shape))
            data = stream.read(count * dtype.itemsize)
            if len(data) < count * dtype.itemsize:
                raise ValueError("ends too early")
    except OSError as error:
        raise InputError(f"{flag}: {where}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{flag}: {where}: {error}") from None
    array = np.frombuffer(data, dtype).reshape(shape).astype(np.float32)
    if not np.isfinite(array).all():
        raise InputError(f"{flag}: {where}: holds NaN or infinity")
    return array


def _rows(flag: str, array: np.ndarray, shape: tuple[int, ...], *, several: bool) -> np.ndarray:
    """Reshape an array to [1, width]; with `several`, to [any, width]."""
    width = int(np.prod(shape))
    fits = {shape, (width,)}
    if array.shape not in fits and not (several and array.shape[1:] in fits and len(array)):
        also = f", or several of them as [any, {width}]" if several else ""
        raise ConfigError(
            f"{flag}: the file holds an array of shape {list(array.shape)}; the tap needs "
            f"{list(shape)}{also}"
        )
    return array.reshape(-1, width)


def returned_by_tap(flag: str, path: Path, name: str, example: str) -> dict[object, Any]:
    """Call a user's function once, and return the dictionary that it returns.

    Raises:
        InputError: if the file has no such function, or it returns something else.
    """
    shown = f"{flag} {path}:{name}"
    function = getattr(load_file(path, flag), name, None)
    if not callable(function):
        raise InputError(f"{shown}: the file has no function {name!r}")
    returned: object = guarded(shown, function)
    if not isinstance(returned, dict) or not returned:
        kind = type(cast(object, returned)).__name__
        raise InputError(
            f"{shown}: returned a {kind}, not a dictionary of functions, as in "
            f'{{"resid_post.12": lambda values: {example}}}'
        )
    return cast(dict[object, Any], returned)


def _functions(path: Path, name: str, arch: Arch) -> Iterator[Splice]:
    """Yield the changes that a user's function returns by tap."""
    shown = f"--splice {path}:{name}"
    changes = returned_by_tap("--splice", path, name, "0.5 * values")
    source = full_digest(path)
    for named, change in changes.items():
        for tap in _taps(f"{path.name}:{name}", str(named), arch):
            if tap.heads:
                raise ConfigError(f"{shown}: {tap.name}: a function changes all heads together")
            told = f"function {name} {tap.name} {source}"
            tap = computed_as(tap)
            yield Splice(kind=FUNCTION, tap=tap, identity=told, function=change)
