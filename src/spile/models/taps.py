"""The places one can tap, and what each means. The only file that says so.

Tap names are `site.layer` (`resid_post.20`) or the bare site where it has no layer (`embed`).
Layers count from 0; `resid_post.i` is the residual stream after block *i*, before any final
norm. HF's `hidden_states[i + 1]` is the same thing, except its last entry, which is `final_norm`.
"""

import difflib
import re
from dataclasses import dataclass

from spile.errors import ConfigError
from spile.models.arch import Arch


@dataclass(frozen=True)
class Site:
    """One kind of place."""

    name: str
    layered: bool
    meaning: str
    lens: str  # TransformerLens name; `{}` stands for the layer


SITES = {
    site.name: site
    for site in (
        Site("embed", False, "token embeddings, as block 0 receives them", "hook_embed"),
        Site("resid_pre", True, "residual stream entering the block", "blocks.{}.hook_resid_pre"),
        Site(
            "attn_out",
            True,
            "what attention adds to the residual stream",
            "blocks.{}.hook_attn_out",
        ),
        Site(
            "resid_mid",
            True,
            "residual stream between attention and MLP",
            "blocks.{}.hook_resid_mid",
        ),
        Site("mlp_out", True, "what the MLP adds to the residual stream", "blocks.{}.hook_mlp_out"),
        Site("resid_post", True, "residual stream leaving the block", "blocks.{}.hook_resid_post"),
        Site("final_norm", False, "after the last norm: what the head reads", "ln_final.hook_out"),
        Site("logits", False, "next-token logits", "unembed.hook_out"),
    )
}
_ORDER = {name: i for i, name in enumerate(SITES)}
_LENS = {site.lens: site.name for site in SITES.values()} | {
    "ln_final.hook_normalized": "final_norm"
}


@dataclass(frozen=True)
class Tap:
    """A site and, where it has one, a layer."""

    site: str
    layer: int | None = None

    @property
    def name(self) -> str:
        return self.site if self.layer is None else f"{self.site}.{self.layer}"

    def width(self, arch: Arch) -> int:
        """Values per token."""
        return arch.vocab_size if self.site == "logits" else arch.width

    def layers_needed(self, arch: Arch) -> int:
        """How many blocks must run for this tap."""
        if self.site == "embed":
            return 0
        if self.layer is None:
            return arch.num_layers
        return self.layer if self.site == "resid_pre" else self.layer + 1


def parse_taps(text: str, arch: Arch) -> tuple[Tap, ...]:
    """`resid_post:20-27,mlp_out:12,embed` -> taps, in the order in which the model meets them.

    Layers: a number, a range `a-b` (both included), `all`, negatives from the end, a step
    (`0-27/4`); several joined by `+`. Canonical (`resid_post.20`) and TransformerLens names are
    accepted too.
    """
    taps: set[Tap] = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        taps.update(_parse_item(item, arch))
    if not taps:
        raise ConfigError(f"--taps {text!r} names no tap")

    def met(tap: Tap) -> tuple[int, int, int]:
        last = arch.num_layers if tap.site in ("final_norm", "logits") else -1
        return tap.layers_needed(arch), last if tap.layer is None else tap.layer, _ORDER[tap.site]

    return tuple(sorted(taps, key=met))


def _parse_item(item: str, arch: Arch) -> set[Tap]:
    item = _from_lens(item)
    if re.fullmatch(r"\w+\.-?\d+", item):
        item = item.replace(".", ":", 1)
    site_name, colon, layers = item.partition(":")
    site = SITES.get(site_name)
    if site is None:
        near = difflib.get_close_matches(site_name, SITES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--taps: no site {site_name!r} (known: {', '.join(SITES)}){hint}")
    if not site.layered:
        if colon:
            raise ConfigError(f"--taps {item!r}: {site.name} has no layers; write just {site.name}")
        return {Tap(site.name)}
    if not layers:
        raise ConfigError(f"--taps {item!r}: say which layers, e.g. {site.name}:0-3 or :all")
    return {
        Tap(site.name, layer) for part in layers.split("+") for layer in _layers(part, item, arch)
    }


def _layers(text: str, item: str, arch: Arch) -> range:
    match = re.fullmatch(r"(all|(-?\d{1,9})(?:-(-?\d{1,9}))?)(?:/(\d{1,9}))?", text.strip())
    if not match:
        raise ConfigError(
            f"--taps {item!r}: {text!r} is not a layer (5), a range (0-27), all, or a step (0-27/4)"
        )
    count = arch.num_layers
    first = 0 if match[1] == "all" else int(match[2])
    last = count - 1 if match[1] == "all" else int(match[3] if match[3] is not None else match[2])
    for layer in (first, last):
        if not -count <= layer < count:
            raise ConfigError(
                f"--taps {item!r}: layer {layer} does not exist; the model has {count} layers, "
                f"0 to {count - 1}"
            )
    first, last = first % count, last % count
    step = int(match[4] or 1)
    if step < 1 or last < first:
        raise ConfigError(f"--taps {item!r}: {text!r} is an empty range of layers")
    return range(first, last + 1, step)


def _from_lens(item: str) -> str:
    if item in _LENS:
        return _LENS[item]
    match = re.fullmatch(r"blocks\.(\d+)\.(\w+)", item)
    if match and (site := _LENS.get(f"blocks.{{}}.{match[2]}")):
        return f"{site}:{match[1]}"
    return item
