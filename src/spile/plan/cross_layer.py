"""`--encode-error` of cross-layer transcoders: which decoders each layer's error needs. No jax."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spile.core.errors import ConfigError
from spile.core.recipe import LATENTS_ALONE
from spile.models.files.encoders import with_decoders
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.taps import Tap


def with_errors_across(
    encoders: Mapping[str, SparseEncoder], taps: Sequence[Tap]
) -> dict[str, SparseEncoder]:
    """Return all encoders; those of cross-layer transcoders have the decoders that errors need.

    Latents of a layer write to the rows of all later layers, too. So a layer needs its decoder to
    every layer from its own on whose error is stored (`error_of`).

    Raises:
        ConfigError: if a layer that writes to such rows is not encoded by the same transcoder.
    """
    made = dict(encoders)
    by_site: dict[str, dict[int, str]] = {}
    for name, encoder in encoders.items():
        tap = Tap.from_name(name)
        if encoder.sae.crosses and tap.layer is not None:
            by_site.setdefault(tap.site, {})[tap.layer] = name
    for site, names in by_site.items():
        targets = sorted(layer for layer, name in names.items() if encoders[name].error_of)
        if not targets:
            sae = encoders[next(iter(names.values()))].sae
            raise ConfigError(
                f"--encode-error: {sae.directory} reconstructs {sae.writes}, which is not among "
                "--taps; add it"
            )
        _refuse_gaps(site, names, targets[-1], encoders, taps)
        for layer, name in names.items():
            own = tuple(target for target in targets if target >= layer)
            if own:
                sae = with_decoders(encoders[name].sae, own)
                made[name] = replace(encoders[name], sae=sae)
    return made


def _refuse_gaps(
    site: str,
    names: Mapping[int, str],
    last: int,
    encoders: Mapping[str, SparseEncoder],
    taps: Sequence[Tap],
) -> None:
    """Raise unless all layers up to the last one with an error are encoded by one transcoder."""
    layers = range(last + 1)
    target = f"{encoders[names[last]].error_of}.{last}"
    needs = f"--encode-error: the error of {target} needs the latents of layers 0 to {last}"
    if any(Tap(site, layer) not in taps for layer in layers):
        raise ConfigError(f"{needs}: add {site}:0-{last} to --taps")
    folders = {str(encoders[names[layer]].sae.directory) for layer in layers if layer in names}
    if len(folders) > 1 or any(layer not in names for layer in layers):
        raise ConfigError(f"{needs}, all of one transcoder: give --encode its directory")


def identities(encoders: Mapping[str, SparseEncoder], *, errors: bool) -> dict[str, str]:
    """Return what a recipe says of each encoder.

    Args:
        errors: whether errors are stored.
    """
    return {
        tap: f"{LATENTS_ALONE}{each.sae.identity()}"
        if errors and each.error_of is None
        else each.sae.identity()
        for tap, each in encoders.items()
    }
