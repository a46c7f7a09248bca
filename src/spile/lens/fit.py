"""Fit a lens: sums over a corpus, made like any dataset, and the maps that follow from them.

The sums are a dataset in `OUT/sums`: `--reduce mean,cov:TAP` for a tuned lens, `--reduce
jacobian:TAP` for a Jacobian lens. So units are committed exactly once, whoever makes them, and a
stopped fit continues. The lens itself is a function of the sums: it is made again from them, with
the same bytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from spile.core.config import Recipe
from spile.core.errors import ConfigError
from spile.core.pool import JACOBIAN as REDUCED_JACOBIAN
from spile.core.pool import Pool
from spile.core.recipe import ResolvedRecipe
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.reduced import ReducedRows
from spile.lens.refine import Maps, Refined
from spile.lens.solve import RIDGE, explained, least_squares
from spile.models.config.arch import Arch
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.lenses import JACOBIAN, LENS_KINDS, TUNED, jacobian_files, tuned_files
from spile.models.taps import Tap, parse_taps
from spile.objects import open_objects

# The target's tap, maps by tap, spreads by tap, and what they were made from -> better maps.
Refining = Callable[[str, Maps, Mapping[str, np.ndarray], str], Refined]
SUMS = "sums"
# What the two projects read by default: all tokens but the first of a context, which is unlike the
# others; prompts of 128 tokens, without their first 16 and their last.
_DEFAULTS = {
    TUNED: {"where": "pos >= 1"},
    JACOBIAN: {"where": "pos >= 16 and not last", "seq_len": 128, "long_docs": "truncate"},
}


@dataclass(frozen=True)
class LayerFit:
    """What is known of one layer of a fitted lens."""

    layer: int  # -1: the stream before the first block
    explained: float | None  # of the last stream's variance, by a map of least squares
    kl: tuple[float, float] | None = None  # in nats, of the first and last steps of its refinement


@dataclass(frozen=True)
class LensFit:
    """A fitted lens."""

    out: str
    kind: str
    counted: int  # tokens, or prompts of a Jacobian lens
    layers: tuple[LayerFit, ...]
    files: tuple[str, ...]


def sums_at(out: str) -> str:
    """Return where the sums of a lens are stored."""
    return f"{out.rstrip('/')}/{SUMS}"


def sums_recipe(recipe: Recipe, kind: str, layers: str = "all") -> Recipe:
    """Return the recipe of a lens's sums.

    Args:
        recipe: of everything but the taps.
        kind: one of `LENS_KINDS`.
        layers: of `resid_post`, as `--taps` has them. The last is the target, and left out.
    """
    if kind not in LENS_KINDS:
        raise ConfigError(f"--kind must be {' or '.join(LENS_KINDS)}, got {kind!r}")
    for name in ("taps", "pool", "reduce", "by"):
        if getattr(recipe, name) is not None:
            raise ConfigError(f"spile lens fit chooses --{name}: leave it out")
    if recipe.model is None:
        raise ConfigError("--model is missing")
    arch = open_checkpoint(recipe.model, recipe.lora).arch
    taps = _sources(kind, layers, arch)
    last = Tap("resid_post", arch.num_layers - 1).name
    given = {k: v for k, v in _DEFAULTS[kind].items() if getattr(recipe, k) is None}
    reduce = f"mean,cov:{last}" if kind == TUNED else f"jacobian:{last}"
    return replace(recipe, taps=",".join(taps), reduce=reduce, **given)


def _sources(kind: str, layers: str, arch: Arch) -> list[str]:
    """Return the names of the taps whose map to the last stream is fitted."""
    try:
        taps = parse_taps(f"resid_post:{layers}", arch)
    except ConfigError as error:
        raise ConfigError(error.message.replace("--taps", "--layers", 1)) from None
    found = [tap.name for tap in taps if tap.layer != arch.num_layers - 1]
    if not found:
        raise ConfigError(f"--layers {layers}: the last layer is the target; choose earlier ones")
    # (The first translator of a tuned lens reads what enters the first block.)
    return ["resid_pre.0", *found] if kind == TUNED and layers == "all" else found


def lens_of(
    sums: Dataset, out: str, *, ridge: float = RIDGE, refining: Refining | None = None
) -> LensFit:
    """Make a lens of its sums; write its files to `out`.

    Args:
        refining: refines the maps of least squares, given them by tap, and returns better ones.
    """
    stored, fits, counted = sums.recipe, dict[int, LayerFit](), 0
    if reduces_to(stored) == JACOBIAN:
        found: dict[int, np.ndarray] = {}
        for name in sums.taps:
            reduced, layer = _reduced(sums, name), _layer_of(name)
            counted, found[layer] = int(reduced.counts[0]), reduced.means[0]
            fits[layer] = LayerFit(layer, None)
        files = jacobian_files(found, counted)
    else:
        maps: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        spreads: dict[str, np.ndarray] = {}
        last = Tap.from_name(Pool.parse(stored.pool or "").beside or "")
        for name in sums.taps:
            moments, layer = _reduced(sums, name), _layer_of(name)
            maps[name] = least_squares(moments, ridge)
            counted = int(moments.counts[0])
            fits[layer] = LayerFit(layer, explained(moments, maps[name][0]))
            assert moments.variances is not None
            spreads[name], spreads[last.name] = np.split(np.sqrt(moments.variances[0]), 2)
        if refining:
            identity = f"{sums.recipe.fingerprint()} ridge {ridge!r}"
            refined = refining(last.name, maps, spreads, identity)
            maps = {**refined.maps}
            for name, layer in ((name, _layer_of(name)) for name in maps):
                kl = refined.before[name], refined.after[name]
                fits[layer] = replace(fits[layer], kl=kl)
        by_layer = {_layer_of(name): each for name, each in maps.items()}
        files = tuned_files(by_layer, layers=(last.layer or 0) + 1, model=stored.model_source)
    objects = open_objects(out)
    for name, data in files.items():
        objects.replace(name, data)
    ordered = tuple(fits[layer] for layer in sorted(fits))
    return LensFit(out, reduces_to(stored), counted, ordered, tuple(files))


def reduces_to(recipe: ResolvedRecipe) -> str:
    """Return the kind of lens that a dataset of sums gives."""
    pool = Pool.parse(recipe.pool) if recipe.pool else None
    if pool is None or pool.beside is None:
        raise ConfigError("these are no sums of a lens; make them with spile lens fit")
    return JACOBIAN if pool.by == REDUCED_JACOBIAN else TUNED


def _reduced(sums: Dataset, name: str) -> ReducedRows:
    found = sums.reduced(name)
    if not len(found.counts) or not found.counts.sum():
        raise ConfigError(
            f"{sums.url}: --where {sums.recipe.where!r} keeps no token of any document; give "
            "longer documents, or another --where and another --out"
        )
    return found


def _layer_of(name: str) -> int:
    """Return the block after which a tap of the stream is; -1: before the first."""
    tap = Tap.from_name(name)
    return (tap.layer or 0) - (1 if tap.site == "resid_pre" else 0)
