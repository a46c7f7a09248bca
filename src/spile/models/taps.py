"""Taps: a site and a layer; their names here and in other tools, and `--taps`.

Tap names are `site.layer` (`resid_post.20`) or the bare site where it has no layer (`embed`); some
heads of a layer are named after it (`z.5.h0.h3`).
Layers count from 0; `resid_post.i` is the residual stream after block *i*, before any final
norm. HF's `hidden_states[i + 1]` is the same thing, except its last entry, which is `final_norm`.
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spile.core.errors import ConfigError
from spile.core.options import flag_of
from spile.core.tap_order import sorted_taps
from spile.core.tensors import DTYPES_BY_NAME
from spile.models.config.arch import (
    ATTENTION,
    GATED_DELTA,
    NO_MIXER,
    SHORT_CONVOLUTION,
    SIDE_BY_SIDE,
    STATE_SPACE,
    Arch,
    Layer,
)
from spile.models.sites import (
    AFTER,
    ATTRIBUTION,
    BACKWARD,
    BEFORE,
    EDGE,
    FEATURES,
    GRADIENT,
    GROUPS,
    HEADS_WRITE,
    LENS_BLOCK,
    LENSES,
    SITES,
    SPLICED,
    WRITERS,
    Site,
    axis_sizes,
)

_LENS = {name: site.name for site in SITES.values() for name in site.lens}
# Names of TransformerLens, after any `blocks.N.`, whose values no site has; and why.
_LENS_DIFFERS = {
    "ln1.hook_normalized": "it is before the norm's weight; attn_in is after it",
    "ln2.hook_normalized": "it is before the norm's weight; mlp_in is after it",
    "ln_final.hook_normalized": "it is before the norm's weight; final_norm is after it",
    "ln1.hook_scale": "norms' scales are not kept; attn_in is what attention reads",
    "ln2.hook_scale": "norms' scales are not kept; mlp_in is what the MLP reads",
    "ln_final.hook_scale": "norms' scales are not kept; final_norm is what the head reads",
    **dict.fromkeys(
        ("hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input"),
        "it is before the norm, once for each head: resid_pre has its values once",
    ),
    "hook_mlp_in": "it is before the norm, which is resid_mid; mlp_in is what the MLP reads",
    "mlp.hook_pre": "it is before the activation; mlp_hidden is after it",
    "mlp.hook_pre_linear": "it is before the gate; mlp_hidden is after it",
    "attn.hook_attn_scores": "it is before the softmax; attn_pattern is after it",
    "attn.hook_result": "it is each head's output; z is before the projection, attn_out their sum",
    "hook_pos_embed": "positions alone are no tap; embed is before they are added",
    "hook_tokens": "token ids are in the index of every dataset",
}
_MIXING = {
    ATTENTION: "attention", GATED_DELTA: "the gated delta rule", STATE_SPACE: "a state space",
    SIDE_BY_SIDE: "attention beside a state space", SHORT_CONVOLUTION: "a short convolution",
}  # fmt: skip


@dataclass(frozen=True)
class Tap:
    """A site and, if it has one, a layer; for some heads, or (none named) for all."""

    site: str
    layer: int | None = None
    heads: tuple[int, ...] = ()
    # How many of the largest it keeps, at such a site; 0: as many as is usual there. Of edges: the
    # number of writers.
    top: int = 0

    @classmethod
    def from_name(cls, name: str) -> "Tap":
        """Parse a canonical name: `embed`, `resid_post.20`, `z.5.h0.h3`."""
        site, *rest = name.split(".")
        heads = tuple(int(head[1:]) for head in rest[1:])
        return cls(site, int(rest[0]) if rest else None, heads)

    @property
    def kind(self) -> Site:
        """Its site's row of the table."""
        return _site(self.site) or BACKWARD[self.site]

    @property
    def source(self) -> "Tap":
        """The tap whose gradient or attribution it holds; of any other tap, itself."""
        return replace(self, site=self.kind.of, top=0) if self.kind.of else self

    @property
    def name(self) -> str:
        heads = "".join(f".h{head}" for head in self.heads)
        return self.site if self.layer is None else f"{self.site}.{self.layer}{heads}"

    def shape(self, arch: Arch, seq_len: int) -> tuple[int, ...]:
        """Shape of one token's values: empty for a single number."""
        return self.shape_in(arch, seq_len, arch.layers[self.layer or 0])

    def shape_in(self, arch: Arch, seq_len: int, layer: Layer) -> tuple[int, ...]:
        """The same in a layer of that kind, whatever the tap's own."""
        sizes = axis_sizes(arch, seq_len, layer)
        if self.kind.largest_of:
            sizes["top"] = min(self.top or self.kind.top, sizes[self.kind.largest_of])
        if self.kind.crossed:
            sizes["writers"] = self.top
        whole = tuple(sizes[axis] for axis in self.kind.shape)
        return (len(self.heads), *whole[1:]) if self.heads else whole

    def why_not(self, arch: Arch) -> str | None:
        """Why the model does not have this tap; None if it has."""
        site, layer = self.kind, arch.layers[self.layer or 0]
        if site.mixers and layer.mixer == NO_MIXER:
            return "the block is an MLP alone"
        if site.mixers and layer.mixer not in site.mixers:
            return f"it mixes tokens by {_MIXING[layer.mixer]}"
        missing = (FEATURES[feature] for feature in site.requires)
        return next((reason for exists, reason in missing if not exists(arch, layer)), None)

    def width(self, arch: Arch, seq_len: int) -> int:
        """Values per token."""
        return math.prod(self.shape(arch, seq_len))

    def dtype(self, stored: str) -> str:
        return self.kind.dtype or stored

    def layers_needed(self, arch: Arch) -> int:
        """Number of blocks that must run for this tap; the last perhaps not to its end.

        (A gradient also needs those that its objective needs.)
        """
        if self.kind.stage == BEFORE:
            return 0
        if self.layer is None:
            return arch.num_layers
        return self.layer if self.source.site == "resid_pre" else self.layer + 1

    def aliases(self, arch: Arch) -> tuple[str, ...]:
        """Other tools' names of the same values; they have none for a subset of heads."""
        if self.heads:
            return ()
        lens = self.kind.lens
        if arch.latent:
            # TransformerLens rotates q and k before it hooks them, and hooks only rotated parts.
            lens = lens if self.kind.latent_lens is None else self.kind.latent_lens
        lens = tuple(name.format(self.layer) for name in lens)
        if self.layer is not None and not arch.layers[self.layer].attends:
            lens = tuple(name for name in lens if ".attn." not in name)
        if self.site == "logits" and (arch.logit_softcap is not None or arch.logit_scale != 1.0):
            lens = ()  # TransformerLens hooks them before the cap and the scale
        streams = {
            **{f"resid_pre.{i}": i for i in range(arch.num_layers)},
            **{f"resid_post.{i}": i + 1 for i in range(arch.num_layers)},
        }
        if self.site == "final_norm":
            return (*lens, f"hidden_states[{arch.num_layers}]")
        if self.name not in streams:
            return lens
        # HF's last entry is not this stream but its norm.
        blocks = streams[self.name]
        number = blocks - arch.first_hidden
        hf = (f"hidden_states[{number}]",) if 0 <= number < arch.num_layers else ()
        return (*lens, *hf, f"aux_hidden_states[{blocks}]")


def all_taps(arch: Arch) -> tuple[Tap, ...]:
    """Every tap of this model, in the order in which it computes them."""
    taps = [
        Tap(site.name, layer)
        for site in SITES.values()
        for layer in (range(arch.num_layers) if site.layered else (None,))
    ]
    return _in_order(tap for tap in taps if tap.why_not(arch) is None)


def describe_taps(
    arch: Arch, seq_len: int, store_dtype: str, *, each_layer: bool
) -> list[dict[str, Any]]:
    """Every tap of a model as plain data; without `each_layer`, one entry for each site.

    A site whose shape differs between layers then has an entry for each shape.
    """
    entries: list[dict[str, Any]] = []
    alike: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for tap in all_taps(arch):
        layers = alike.setdefault((tap.site, tap.shape(arch, seq_len)), [])
        layers.append(tap.layer or 0)
        if not each_layer and len(layers) > 1:
            continue
        dtype = tap.dtype(store_dtype)
        entries.append(
            {
                "name": tap.name,
                "shape": list(tap.shape(arch, seq_len)),
                "dtype": dtype,
                # (without float8's scale of four bytes per row)
                "bytes": tap.width(arch, seq_len) * DTYPES_BY_NAME[dtype].itemsize,
                "meaning": tap.kind.meaning,
                "aliases": list(tap.aliases(arch)),
            }
        )
    for entry in entries:
        site, *layered = entry["name"].split(".")
        if layered and not each_layer:
            entry["name"] = f"{site}:{_spelled(alike[site, tuple(entry['shape'])], arch)}"
    return entries


def _spelled(layers: list[int], arch: Arch) -> str:
    """Layers as `--taps` takes them: `0-27`; or a range for each place in the period."""
    if layers == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
    runs: list[list[int]] = []
    for layer in sorted(layers, key=lambda layer: (layer % arch.period, layer)):
        if runs and layer == runs[-1][-1] + arch.period:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    runs.sort()
    return "+".join(
        f"{run[0]}-{run[-1]}/{arch.period}" if len(run) > 1 else str(run[0]) for run in runs
    )


def parse_taps(text: str, arch: Arch) -> tuple[Tap, ...]:
    """`resid_post:20-27,mlp_out:12,embed` -> taps, in the order in which the model computes them.

    Layers: a number, a range `a-b` (both included), `all` (those that have the site), negatives
    from the end, a step (`0-27/4`); several joined by `+`. Heads, where a site has them, follow
    their layers: `z:5.h0`, `attn_pattern:0-3.h2+h5`. Canonical names (`resid_post.20`) and those of
    other tools (`blocks.20.hook_resid_post`, `hidden_states[21]`, `aux_hidden_states[21]`) are
    accepted too, and so are paths of HF modules (`model.layers.20`) whose output is that value.
    """
    taps: set[Tap] = set()
    items = [*filter(None, (part.strip() for part in text.split(",")))]
    for before, item in zip(["", *items], items, strict=False):
        if ":" in before and re.fullmatch(r"(all|-?\d+)[-\d/+]*", item):
            raise ConfigError(
                f"--taps {text!r}: layers of one site are joined by +, as in {before}+{item}"
            )
        if ".h" in before and re.fullmatch(r"h\d+", item):
            raise ConfigError(
                f"--taps {text!r}: heads of one layer are joined by +, as in {before}+{item}"
            )
        taps.update(_parse_item(item, arch))
    if not taps:
        raise ConfigError(f"--taps {text!r} names no tap")
    for tap in taps:
        if reason := tap.why_not(arch):
            having = [i for i in range(arch.num_layers) if Tap(tap.site, i).why_not(arch) is None]
            told = f"--taps: a {arch.family} model has no {tap.site}"
            if not having:
                raise ConfigError(f"{told}: {reason}")
            raise ConfigError(
                f"{told} in layer {tap.layer}: {reason}; write {tap.site}:all, or choose from "
                f"{_spelled(having, arch)}"
            )
    return _in_order(taps)


def with_tops(
    taps: Iterable[Tap], tops: Mapping[str, int | None], arch: Arch, seq_len: int
) -> tuple[Tap, ...]:
    """Return taps that know how many values they keep, of the sites that keep the largest.

    Args:
        tops: by the option that says so, which has the name of the sites' group; None: as usual.

    Raises:
        ConfigError: if no tap keeps that many, or the model has fewer.
    """
    found = tuple(
        replace(tap, top=tops.get(tap.kind.option) or tap.kind.top) if tap.kind.largest_of else tap
        for tap in taps
    )
    for group, top in tops.items():
        flag, sized = flag_of(group), [tap for tap in found if tap.top and tap.kind.option == group]
        if top is not None and top < 1:
            raise ConfigError(f"{flag} must be at least 1, got {top}")
        if top is not None and not sized:
            raise ConfigError(f"{flag} {top}: no tap keeps the largest; add {group} to --taps")
        for tap in sized:
            axis = tap.kind.largest_of
            most = axis_sizes(arch, seq_len, arch.layers[tap.layer or 0])[axis]
            if top is not None and top > most:
                counted = {"vocab": "tokens in the vocabulary", "keys": "tokens in a context"}
                raise ConfigError(f"{flag} {top}: there are only {most} {counted[axis]}")
    return found


def tops_of(taps: Iterable[Tap], arch: Arch, seq_len: int) -> dict[str, int]:
    """Return how many values taps keep, by the option that says so."""
    return {t.kind.option: t.shape(arch, seq_len)[-1] for t in taps if t.kind.largest_of}


def place_of(tap: Tap, arch: Arch) -> tuple[int, int, int, tuple[int, ...]]:
    """A key that compares how far a model must run for each of several taps."""
    if tap.kind.of:  # whatever happens before the objective may change it
        return arch.num_layers, arch.num_layers, len(SITES), tap.heads
    last = arch.num_layers if tap.kind.stage == AFTER else -1
    layer = last if tap.layer is None else tap.layer
    return tap.layers_needed(arch), layer, [*SITES, *LENSES].index(tap.site), tap.heads


def computed_as(tap: Tap) -> Tap:
    """The tap that computes a tap's value.

    A block's input is the output of the one before it, and a lens reads a block's output.
    """
    if tap.site in LENSES:
        return Tap("resid_post", tap.layer)
    return Tap("resid_post", tap.layer - 1) if tap.site == "resid_pre" and tap.layer else tap


def parse_writers(text: str, taps: Iterable[Tap], arch: Arch) -> tuple[Tap, ...]:
    """Return the taps that `--writers` names, but those that come after every tap of edges.

    Each head of `HEADS_WRITE` is a tap of its own.

    Raises:
        ConfigError: if one does not write to the residual stream, or none is left.
    """
    try:
        writers = parse_taps(text, arch)
    except ConfigError as error:
        raise ConfigError(error.message.replace("--taps", "--writers", 1)) from None
    readers = [tap.source for tap in taps if tap.kind.crossed]
    if not readers:
        raise ConfigError(f"--writers {text}: no tap holds edges; add e.g. resid_post_edge:4")
    for writer in writers:
        if writer.site not in (*WRITERS, HEADS_WRITE):
            raise ConfigError(
                f"--writers {text}: {writer.name} is not added to the residual stream; choose from "
                f"{', '.join((*WRITERS, HEADS_WRITE))}"
            )
        layer = arch.layers[writer.layer or 0]
        if writer.site == HEADS_WRITE and "attn_post_norm" in arch.norms_of(layer):
            raise ConfigError(
                f"--writers {text}: the model normalises what all heads of layer {writer.layer} "
                f"add together; give attn_out:{writer.layer}"
            )
    writers = _in_order({head for writer in writers for head in _each_head(writer, arch)})
    found = tuple(w for w in writers if any(writes_to(w, reader, arch) for reader in readers))
    if not found:
        raise ConfigError(
            f"--writers {text}: {writers[0].name} comes after every tap of edges; tap later layers"
        )
    return found


def _each_head(writer: Tap, arch: Arch) -> tuple[Tap, ...]:
    """Return a tap of each head of a writer whose heads write apart; any other as it is."""
    if writer.site != HEADS_WRITE:
        return (writer,)
    sizes = axis_sizes(arch, 1, arch.layers[writer.layer or 0])
    heads = writer.heads or range(sizes[writer.kind.shape[0]])
    return tuple(replace(writer, heads=(head,)) for head in heads)


def writes_to(writer: Tap, reader: Tap, arch: Arch) -> bool:
    """Return whether a stream is read after (or where) a value is added to it."""
    return place_of(computed_as(writer), arch) <= place_of(computed_as(reader), arch)


def ended_between(writer: Tap, reader: Tap) -> range:
    """The blocks that end after a value is added to the stream, and before the stream is read.

    Some models multiply the stream there (`Arch.block_scale`).
    """

    def ended(tap: Tap) -> int:
        own = computed_as(tap)
        return (own.layer or 0) + (own.site == "resid_post")

    return range(ended(writer), ended(reader))


def sites_on_paths(taps: Iterable[Tap]) -> dict[Tap, list[Tap]]:
    """Return the places whose values integrated gradients change, each with its taps.

    One place at a time is changed, with all of its heads.
    """
    found: dict[Tap, list[Tap]] = {}
    for tap in taps:
        if tap.kind.of:
            found.setdefault(replace(computed_as(tap.source), heads=()), []).append(tap)
    return found


def _in_order(taps: Iterable[Tap]) -> tuple[Tap, ...]:
    return tuple(map(Tap.from_name, sorted_taps(tap.name for tap in taps)))


def _site(name: str) -> Site | None:
    return SITES.get(name) or LENSES.get(name)


def _parse_item(item: str, arch: Arch) -> set[Tap]:
    item = _from_alias(item, arch)
    if match := re.fullmatch(r"(\w+)\.(-?\d+)((?:\.h\d+)*)", item):
        heads = "+".join(match[3].split(".")[1:])
        item = f"{match[1]}:{match[2]}" + (f".{heads}" if heads else "")
    site_name, colon, layers = item.partition(":")
    if site_name in GROUPS:
        return {
            tap
            for site in GROUPS[site_name]
            for tap in _parse_item(site + item.removeprefix(site_name), arch)
        }
    site = _site(site_name) or BACKWARD.get(site_name)
    if site is None:
        raise _unknown_site_error(item, site_name, arch)
    if not site.layered:
        if colon:
            raise ConfigError(f"--taps {item!r}: {site.name} has no layers; write just {site.name}")
        return {Tap(site.name)}
    if not layers:
        raise ConfigError(f"--taps {item!r}: say which layers, e.g. {site.name}:0-3 or :all")
    taps: set[Tap] = set()
    for part, heads in _grouped(layers, item):
        some = [Tap(site.name, layer) for layer in _layers(part, item, arch)]
        having = [tap for tap in some if tap.why_not(arch) is None]
        for tap in having if having and part.strip().startswith("all") else some:
            taps.add(replace(tap, heads=_heads(heads, site, item, arch, tap.layer or 0)))
    return taps


def _grouped(text: str, item: str) -> list[tuple[str, list[str]]]:
    """`3.h2+h5+7` -> layers, each with the heads that follow it: [(3, [2, 5]), (7, [])]."""
    groups: list[tuple[str, list[str]]] = []
    for part in (part.strip() for part in text.split("+")):
        if head := re.fullmatch(r"h(\d{1,9})", part):
            if not groups or not groups[-1][1]:
                raise ConfigError(f"--taps {item!r}: heads follow a layer, as in 5.h0+h3")
            groups[-1][1].append(head[1])
            continue
        layers, _, head = part.partition(".h")
        groups.append((layers, [head] if head or part.endswith(".h") else []))
    return groups


def _heads(texts: list[str], site: Site, item: str, arch: Arch, layer: int) -> tuple[int, ...]:
    """Heads in ascending order; empty stands for all heads."""
    if not texts:
        return ()
    if not site.heads:
        having = ", ".join(each.name for each in SITES.values() if each.heads)
        raise ConfigError(f"--taps {item!r}: {site.name} has no heads; these have: {having}")
    count = axis_sizes(arch, 1, arch.layers[layer])[site.shape[0]]
    for text in texts:
        if not re.fullmatch(r"\d{1,9}", text) or int(text) >= count:
            raise ConfigError(
                f"--taps {item!r}: head h{text} does not exist; {site.name} has {count} heads, "
                f"h0 to h{count - 1}"
            )
    chosen = tuple(sorted({int(text) for text in texts}))
    return chosen if len(chosen) < count else ()


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


def _from_alias(item: str, arch: Arch) -> str:
    """Translate another tool's name into ours; other items pass through unchanged."""
    if item in _LENS and item in Tap(_LENS[item]).aliases(arch):
        return _LENS[item]
    match = re.fullmatch(r"blocks\.(\d{1,9})\.([\w.]+)", item)
    if match and (site := _LENS.get(f"{LENS_BLOCK}{match[2]}")):
        layer = int(match[1])
        if layer >= arch.num_layers or item in Tap(site, layer).aliases(arch):
            return f"{site}:{layer}"
    if site := _from_module(item, arch):
        return site
    match = re.fullmatch(r"(aux_)?hidden_states\[(\d{1,9})\]", item)
    if not match:
        return item
    number = int(match[2])
    if number > arch.num_layers:
        raise ConfigError(f"--taps {item!r}: the last one is [{arch.num_layers}]")
    # HF returns its last entry after the final norm; vLLM counts the bare streams.
    if number == arch.num_layers and not match[1]:
        return "final_norm"
    blocks = number if match[1] else number + arch.first_hidden
    return f"resid_post:{blocks - 1}" if blocks else "resid_pre:0"


# The blocks of HF's models, by the paths of their modules.
_BLOCKS_OF_HF = r"(?:(?:model|backbone|gpt_neox)\.layers|transformer\.h)\.(\d{1,9})"


def _from_module(item: str, arch: Arch) -> str | None:
    """Translate the path of an HF module into our name; None if it is not such a path.

    Raises:
        ConfigError: if the module's output differs from the site's values.
    """
    match = re.fullmatch(_BLOCKS_OF_HF + r"([\w.]*)", item)
    path = match[2] if match else item
    having = (s.name for s in SITES.values() if s.layered == bool(match) and path in s.modules)
    site = next(having, None)
    if site is None:
        return None
    layer = int(match[1]) if match else 0
    normed = "mlp_post_norm" in arch.norms_of(arch.layers[min(layer, arch.num_layers - 1)])
    changed = (normed and "normalises") or (arch.residual_scale != 1.0 and "scales")
    added = changed and f"the model {changed} it before adding it to the stream"
    space = arch.state_space
    # (The root of the width is applied inside the module.)
    scaled = "the model scales it afterwards"
    differs = {
        "embed": arch.embed_scale not in (1.0, arch.width**0.5) and scaled,
        "logits": (arch.logit_softcap is not None and "the model caps it afterwards")
        or (arch.logit_scale != 1.0 and scaled),
        "attn_out": added or (arch.attn_out_scale != 1.0 and scaled),
        "ssm_out": added or (space is not None and space.out_scale != 1.0 and scaled),
        "mlp_out": added or (arch.mlp_scales[1] != 1.0 and scaled),
    }.get(site)
    ours = f"{site}:{match[1]}" if match else site
    if differs:
        raise ConfigError(
            f"--taps {item!r}: {ours} is not that module's output ({differs}); ask for {ours}"
        )
    return ours


def _unknown_site_error(item: str, site: str, arch: Arch) -> ConfigError:
    """The error for an unknown site, with the nearest name of ours or of TransformerLens."""
    layer = re.match(r"blocks\.(\d+)\.", item)
    if layer or "hook_" in item:
        known = [name.format(layer[1] if layer else "") for name in _LENS]
        if item in known:
            return ConfigError(
                f"--taps {item!r}: the {arch.family} model differs there; see `spile taps`"
            )
        if why := _LENS_DIFFERS.get(item[layer.end() :] if layer else item):
            return ConfigError(f"--taps {item!r}: no site has these values: {why}")
        near = difflib.get_close_matches(item, known, 1, 0.6)
        hint = f"; did you mean {near[0]}?" if near else ""
        return ConfigError(f"--taps: no TransformerLens name {item!r} is known here{hint}")
    if site == "delta_state" and (delta := arch.delta):
        whole = delta.value_heads * delta.key_dim * delta.value_dim
        return ConfigError(
            f"--taps {item!r}: whole states are too large to store ({whole:,} values for each "
            "token and layer); delta_state_norm has one number for each head"
        )
    for suffix in (GRADIENT, ATTRIBUTION, EDGE):
        if site.endswith(suffix) and site.removesuffix(suffix) in SITES:
            having = ", ".join(SPLICED)
            return ConfigError(f"--taps {item!r}: gradients are those of {having}; add {suffix}")
    known = (*SITES, *GROUPS, *BACKWARD)
    near = difflib.get_close_matches(site, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    told = ", ".join((*SITES, *GROUPS))
    return ConfigError(f"--taps: no site {site!r} (known: {told}){hint}")
