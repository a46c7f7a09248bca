"""`--encode`: match sparse autoencoders with taps; list the arrays stored for each tap. No jax."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from spile.core.config import Recipe
from spile.core.errors import ConfigError
from spile.core.pool import COVARIANCE, JACOBIAN, MOMENTS, beside, is_reduced, reduces
from spile.core.recipe import latent_names
from spile.dataset.format import TapInfo, covariance_width, jacobian_width
from spile.models.config.arch import Arch
from spile.models.files.encoders import is_sae, open_sae
from spile.models.files.encoders.sae import Sae, SparseEncoder
from spile.models.taps import Tap
from spile.objects.paths import path_of

_FLOATS = ("bfloat16", "float16", "float32")


def each_source(encode: str, change: Callable[[str], str]) -> str:
    """Return `--encode` with every directory in it changed."""
    return ",".join(
        f"{tap}={change(where)}" if tap else change(where) for tap, where in _items(encode)
    )


def find_encoders(recipe: Recipe, taps: Sequence[Tap], arch: Arch) -> dict[str, SparseEncoder]:
    """Find the encoder of each tap that has one, by the tap's name.

    Raises:
        ConfigError: if an encoder does not fit its tap.
    """
    if recipe.encode is None:
        if recipe.latents is not None:
            raise ConfigError("--latents needs --encode")
        return {}
    pooled = reduces(recipe.pool) is not None
    found: dict[str, SparseEncoder] = {}
    for name, where in _found_in(recipe.encode, taps):
        sae = open_sae(where)
        tap = _tap_of(name, where, sae, taps, arch)
        if "keys" in tap.kind.shape or tap.dtype(_FLOATS[0]) != _FLOATS[0]:
            raise ConfigError(f"--encode {where}: an encoder cannot read {tap.site}")
        refuse_unfit(f"--encode {where}", sae, tap, arch)
        if tap.name in found:
            raise ConfigError(f"--encode names two encoders for {tap.name}; give one per tap")
        found[tap.name] = SparseEncoder.of(sae, recipe.latents, pooled=pooled)
    return {tap.name: found[tap.name] for tap in taps if tap.name in found}


def refuse_unfit(given: str, sae: Sae, tap: Tap, arch: Arch) -> None:
    """Refuse an encoder that cannot read a tap's rows; `given`: the flag and its value."""
    if sae.raw and tap.site == "embed" and arch.embed_scale != 1.0:
        raise ConfigError(
            f"{given}: Gemma Scope's own files expect unscaled embeddings, and this tap's are "
            "scaled; give SAELens' conversion"
        )
    if (width := tap.width(arch, 1)) != sae.width:
        raise ConfigError(f"{given}: reads rows of {sae.width} values, but {tap.name} has {width}")


def stored_taps(
    taps: Sequence[Tap],
    encoders: Mapping[str, SparseEncoder],
    arch: Arch,
    seq_len: int,
    store_dtype: str,
    pool: str | None = None,
) -> dict[str, TapInfo]:
    """Describe the stored arrays of every tap: its rows, its sums, or latents and their ids.

    Args:
        pool: that of the recipe.
    """
    by = reduces(pool)
    moments = (2,) if by == MOMENTS else ()
    other = Tap.from_name(name) if (name := beside(pool)) else None
    infos: dict[str, TapInfo] = {}
    for tap in taps:
        encoder = encoders.get(tap.name)
        if encoder is None:
            dtype = "float64" if is_reduced(pool) else tap.dtype(store_dtype)
            own = tap.shape(arch, seq_len)
            infos[tap.name] = TapInfo((*own, *moments), dtype, tap.aliases(arch))
            if by == COVARIANCE:
                if other:  # both as one row of values
                    own = (tap.width(arch, seq_len) + other.width(arch, seq_len),)
                shape = (covariance_width(math.prod(own)),)
                infos[tap.name] = replace(infos[tap.name], shape=shape, covariance_of=own)
            if by == JACOBIAN and other:
                sizes = other.width(arch, seq_len), tap.width(arch, seq_len)
                shape = (jacobian_width(sizes),)
                infos[tap.name] = replace(infos[tap.name], shape=shape, jacobian_of=sizes)
            continue
        values, ids = latent_names(tap.name)
        shape, latents = (encoder.kept,), encoder.sae.latents
        infos[values] = TapInfo(shape, store_dtype, latents=latents)
        infos[ids] = TapInfo(shape, encoder.id_dtype, latents=latents)
    return infos


def _items(encode: str) -> list[tuple[str, str]]:
    """Split `TAP=DIR,DIR` into (tap, directory) pairs; the tap is "" if none is named."""
    items: list[tuple[str, str]] = []
    for item in filter(None, map(str.strip, encode.split(","))):
        named = re.fullmatch(r"([\w.:\[\]-]+)=(.+)", item)
        items.append((named[1], named[2]) if named else ("", item))
    if not items:
        raise ConfigError(f"--encode {encode!r} names no directory")
    return items


def _found_in(encode: str, taps: Sequence[Tap]) -> list[tuple[str, str]]:
    """Return (tap, directory) pairs; a directory with a folder for each tap gives several."""
    found: list[tuple[str, str]] = []
    for name, where in _items(encode):
        folder = path_of(where)
        inside = [tap.name for tap in taps if is_sae(folder / tap.name)]
        if name or is_sae(folder) or not inside:
            found.append((name, where))
        else:
            found += [(tap, f"{where.rstrip('/')}/{tap}") for tap in inside]
    return found


def _tap_of(name: str, where: str, sae: Sae, taps: Sequence[Tap], arch: Arch) -> Tap:
    """Return the tap named, else the tap the encoder was made for, else the only tap."""
    if name:
        for tap in taps:
            if name.replace(":", ".", 1) == tap.name or name in tap.aliases(arch):
                return tap
        among = ", ".join(tap.name for tap in taps)
        raise ConfigError(f"--encode {name}={where}: {name} is not among --taps ({among})")
    hooked = [tap for tap in taps if sae.hook and sae.hook in tap.aliases(arch)]
    if hooked:
        return hooked[0]
    if sae.hook:
        raise ConfigError(
            f"--encode {where}: was made for {sae.hook}, which is not among --taps; tap it, or "
            f"write --encode TAP={where}"
        )
    if len(taps) > 1:
        raise ConfigError(f"--encode {where}: names no tap; write --encode TAP={where}")
    return taps[0]
