"""Which taps of a dataset are meant: by name, by another tool's name, or as `site:layers`."""

import re
from collections.abc import Iterator, Mapping, Sequence

from spile.core.errors import ConfigError

Aliases = Mapping[str, Sequence[str]]  # the taps of a dataset, each with its names in other tools


def choose_taps(url: str, taps: Aliases, wanted: str | Sequence[str] | None) -> tuple[str, ...]:
    """Choose some of a dataset's taps, in their own order; all if none are named.

    Args:
        url: the dataset's, for errors.
    """
    if wanted is None:
        return tuple(taps)
    items = wanted.split(",") if isinstance(wanted, str) else wanted
    chosen = {
        tap for item in filter(None, map(str.strip, items)) for tap in _matching(url, taps, item)
    }
    if not chosen:
        raise ConfigError(f"--taps {wanted!r} names no tap")
    return tuple(tap for tap in taps if tap in chosen)


def named_tap(url: str, taps: Aliases, name: str) -> str:
    """Return the canonical name of a tap, which may be given by another tool's name for it."""
    if name in taps:
        return name
    for tap, aliases in taps.items():
        if name in aliases:
            return tap
    raise ConfigError(f"no tap {name!r} in {url}; it has {', '.join(taps)}")


def site_and_layer(tap: str) -> tuple[str, int | None]:
    """`resid_post.20` -> its site and layer; `embed` has none. Heads stay with the site: `z.h0`."""
    site, *rest = tap.split(".")
    return ".".join([site, *rest[1:]]), int(rest[0]) if rest else None


def _matching(url: str, taps: Aliases, item: str) -> Iterator[str]:
    site, colon, layers = item.partition(":")
    if not colon:
        yield named_tap(url, taps, item)
        return
    here = [layer for name, layer in map(site_and_layer, taps) if name == site]
    for part in layers.split("+"):
        match = re.fullmatch(r"(?:all|(\d{1,9})(?:-(\d{1,9}))?)(?:/([1-9]\d{0,8}))?", part.strip())
        if not match:
            raise ConfigError(
                f"--taps {item!r}: {part!r} is not a layer (5), a range (0-27) or all"
            )
        if match[1] is None:
            numbers = sorted(layer for layer in here if layer is not None)[:: int(match[3] or 1)]
        else:
            numbers = range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))
        for number in numbers:
            yield named_tap(url, taps, f"{site}.{number}")
