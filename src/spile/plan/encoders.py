"""`--encode`: match sparse autoencoders with taps; list the arrays stored for each tap. No jax."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from spile.core.config import ALL_LATENTS, Recipe
from spile.core.errors import ConfigError
from spile.core.pool import COVARIANCE, JACOBIAN, MOMENTS, beside, is_reduced, reduces
from spile.core.recipe import error_name, latent_names
from spile.dataset.format import TapInfo, covariance_width, jacobian_width
from spile.models.config.arch import Arch
from spile.models.config.specs import block_specs
from spile.models.files.checkpoint import Checkpoint
from spile.models.files.encoders import find_layout, open_sae
from spile.models.files.encoders.sae import MLP_OUT, Sae, SparseEncoder
from spile.models.files.safetensors import read_tensor
from spile.models.sites import LENS_BLOCK, SITES
from spile.models.taps import Tap
from spile.objects.paths import path_of
from spile.plan.cross_layer import with_errors_across

_FLOATS = ("bfloat16", "float16", "float32")


def each_source(encode: str, change: Callable[[str], str]) -> str:
    """Return `--encode` with every directory in it changed."""
    return ",".join(
        f"{tap}={change(where)}" if tap else change(where) for tap, where in _items(encode)
    )


def find_encoders(
    recipe: Recipe,
    taps: Sequence[Tap],
    arch: Arch,
    gain: Callable[[Tap], np.ndarray] | None = None,
) -> dict[str, SparseEncoder]:
    """Find the encoder of each tap that has one, by the tap's name.

    Args:
        gain: of the norm whose output a tap is; None if only shapes are needed.

    Raises:
        ConfigError: if an encoder does not fit its tap.
    """
    if recipe.encode is None:
        if recipe.latents is not None or recipe.encode_error:
            flag = "--encode-error" if recipe.latents is None else "--latents"
            raise ConfigError(f"{flag} needs --encode")
        return {}
    pooled = reduces(recipe.pool) is not None
    if recipe.latents == ALL_LATENTS and not pooled:
        raise ConfigError(
            "--latents all needs --pool mean or max: in a row of one token few are active; give a "
            "number"
        )
    found: dict[str, SparseEncoder] = {}
    error = bool(recipe.encode_error)
    if error and recipe.pool:
        raise ConfigError("--encode-error: pooled rows have no error; leave out --pool or --reduce")
    opened = partial(open_sae, decodes=error, across=True)
    pairs = (each for item in _items(recipe.encode) for each in _pairs(*item, taps, arch, opened))
    for where, sae, made in pairs:
        tap = _read_at(made)
        if "keys" in tap.kind.shape or tap.dtype(_FLOATS[0]) != _FLOATS[0] or tap.kind.of:
            raise ConfigError(f"--encode {where}: an encoder cannot read {tap.site}")
        sae = with_gain(sae, tap, gain)
        refuse_unfit(f"--encode {where}", sae, tap, arch)
        if made.name in found:
            raise ConfigError(f"--encode names two encoders for {made.name}; give one per tap")
        if made.kind.summed:
            _refuse_attribution(f"--encode {where}: {made.name}", sae, recipe)
            whole = open_sae(where, layer=tap.layer, decodes=True)
            sae = replace(whole, ungained=sae.ungained, gain=sae.gain)
        error_of = _reconstructed_site(where, sae, tap, taps, arch) if error else None
        found[made.name] = SparseEncoder.of(sae, recipe.latents, pooled=pooled, error_of=error_of)
    made = with_errors_across(found, taps) if error else found
    return {tap.name: made[tap.name] for tap in taps if tap.name in made}


def with_gain(sae: Sae, tap: Tap, gain: Callable[[Tap], np.ndarray] | None) -> Sae:
    """Return the encoder of a tap, which divides its rows by the norm's gain if it must.

    (Gemma Scope's own files do not say what they read; those of `mlp_in` are transcoders.)

    Args:
        gain: as for `find_encoders`.
    """
    if not sae.ungained and not (tap.site == "mlp_in" and sae.file.name.endswith(".npz")):
        return sae
    own = gain(tap).tobytes() if gain else b""
    return replace(sae, ungained=True, gain=own, writes=sae.writes or MLP_OUT)


def _refuse_attribution(told: str, sae: Sae, recipe: Recipe) -> None:
    """Raise unless the attributions of an encoder's latents can be computed as a recipe says."""
    if sae.writes is not None:
        raise ConfigError(
            f"{told}: a transcoder's latents write to {sae.writes}, not to what it reads; give an "
            "autoencoder"
        )
    if recipe.encode_error:
        raise ConfigError(f"{told}: attributions have no error; add them with --add-taps")
    if recipe.pool:
        raise ConfigError(f"{told}: attributions of latents are not pooled; leave out --pool")
    if recipe.steps or recipe.baseline not in (None, "zero"):
        flag = "--steps" if recipe.steps else "--baseline"
        raise ConfigError(
            f"{told}: attributions of latents are the gradient times the latent; leave out {flag}"
        )


def reconstructed_tap(sae: Sae, tap: Tap, arch: Arch) -> Tap | None:
    """Return the tap whose rows the encoder of a tap reconstructs; None if no site has them.

    For an autoencoder that is the tap itself; a transcoder says which one it is.
    """
    if sae.writes is None:
        return tap
    named = {sae.writes, f"{LENS_BLOCK.format(tap.layer)}{sae.writes}"}
    every = (Tap(site, tap.layer) for site, row in SITES.items() if row.layered)
    return next((each for each in every if not named.isdisjoint(each.aliases(arch))), None)


def _reconstructed_site(
    where: str, sae: Sae, tap: Tap, taps: Sequence[Tap], arch: Arch
) -> str | None:
    """Return the site whose rows an encoder reconstructs: a transcoder's must be tapped, too.

    (Layers of a cross-layer transcoder may lack it: then their latents serve errors of others.)
    """
    wanted = reconstructed_tap(sae, tap, arch)
    if wanted and wanted in taps and wanted.width(arch, 1) == (sae.target or sae.width):
        return wanted.site
    if sae.crosses:
        return None
    raise ConfigError(
        f"--encode-error: {where} reconstructs {sae.writes}, which is not among --taps; add it"
    )


def gain_before(checkpoint: Checkpoint, tap: Tap) -> np.ndarray:
    """Return the gain by which a norm has multiplied the rows of `mlp_in`, in float32.

    Raises:
        ConfigError: if the tap is another, or the norm does more than multiply.
    """
    arch, layer = checkpoint.arch, tap.layer
    if tap.site != "mlp_in" or layer is None or not arch.norm.startswith("rms"):
        raise ConfigError(
            f"--encode: the encoder of {tap.name} reads what a norm has made before its gain "
            "multiplies it; that is known for mlp_in and RMS norms only"
        )
    specs = {spec.name: spec for spec in block_specs(arch, arch.layers[layer])}
    spec = specs.get("mlp_norm") or specs["attn_norm"]  # one norm for both, if they are parallel
    file, info = checkpoint.tensors[checkpoint.names(spec, layer)[0]]
    gain = np.asarray(read_tensor(file, info), np.float32).reshape(-1)
    gain = 1.0 + gain if arch.norm == "rms_plus_one" else gain
    if not np.all(gain):
        raise ConfigError(f"--encode: the norm before {tap.name} has a gain of zero")
    return gain


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
        if encoder.dense:
            infos[values] = TapInfo(shape, store_dtype)
            continue
        infos[values] = TapInfo(shape, store_dtype, latents=latents)
        infos[ids] = TapInfo(shape, encoder.id_dtype, latents=latents)
        if encoder.error_of:
            wanted = replace(tap, site=encoder.error_of)
            infos[error_name(tap.name)] = TapInfo(wanted.shape(arch, seq_len), store_dtype)
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


def _pairs(
    name: str, where: str, taps: Sequence[Tap], arch: Arch, opened: Callable[..., Sae]
) -> list[tuple[str, Sae, Tap]]:
    """Return the encoders of one item, each with its place and its tap.

    A directory with one encoder gives one. A directory with a folder for each tap, or with a file
    for each layer, gives those of the taps. `opened`: opens one, by its directory and layer.
    """
    if name:
        tap = _named_tap(name, where, taps, arch)
        return [(where, opened(where, layer=tap.layer), tap)]
    folder = path_of(where)
    found = find_layout(folder)
    if found is None:
        named = {tap: _read_at(tap).name for tap in taps}
        inside = [(f"{where.rstrip('/')}/{own}", tap) for tap, own in named.items()
                  if find_layout(folder / own)]  # fmt: skip
        if inside:
            return [(each, opened(each, layer=tap.layer), tap) for each, tap in inside]
    if found is None or len(found.layers) < 2:
        sae = opened(where)
        return [(where, sae, tap) for tap in _taps_of(where, sae, taps, arch)]
    pairs: list[tuple[str, Sae, Tap]] = []
    hook = None
    for layer in found.layers:
        if here := [tap for tap in taps if tap.layer == layer]:
            sae = opened(where, layer=layer)
            hook = sae.hook or hook
            pairs += [(where, sae, tap) for tap in here if _reads(sae, tap, arch, among=here)]
    if pairs:
        return pairs
    layers = f"{found.layers[0]} to {found.layers[-1]}{f' ({hook})' if hook else ''}"
    raise ConfigError(
        f"--encode {where}: has encoders of layers {layers}, and none of --taps is what one of "
        f"them reads; tap it, or write --encode TAP={where}"
    )


def _reads(sae: Sae, tap: Tap, arch: Arch, among: Sequence[Tap]) -> bool:
    """Whether an encoder was made for a tap; if nothing says so, for the only one."""
    if sae.hook:
        return sae.hook in _read_at(tap).aliases(arch)
    return len({*map(_read_at, among)}) == 1


def _read_at(tap: Tap) -> Tap:
    """Return the tap whose values an encoder reads: for attributions, those of their site."""
    return tap.source if tap.kind.summed else tap


def _named_tap(name: str, where: str, taps: Sequence[Tap], arch: Arch) -> Tap:
    for tap in taps:
        if name.replace(":", ".", 1) == tap.name or name in tap.aliases(arch):
            return tap
    among = ", ".join(tap.name for tap in taps)
    raise ConfigError(f"--encode {name}={where}: {name} is not among --taps ({among})")


def _taps_of(where: str, sae: Sae, taps: Sequence[Tap], arch: Arch) -> Sequence[Tap]:
    """Return the tap that the encoder was made for, and its attributions; else the only tap."""
    hooked = [tap for tap in taps if sae.hook and sae.hook in _read_at(tap).aliases(arch)]
    if hooked:
        return hooked
    if sae.hook:
        raise ConfigError(
            f"--encode {where}: was made for {sae.hook}, which is not among --taps; tap it, or "
            f"write --encode TAP={where}"
        )
    if len({*map(_read_at, taps)}) > 1:
        raise ConfigError(f"--encode {where}: names no tap; write --encode TAP={where}")
    return taps
