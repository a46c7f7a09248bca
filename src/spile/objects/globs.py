"""Patterns of paths, wherever the paths are."""

import glob
from collections.abc import Sequence
from fnmatch import fnmatchcase


def matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """As `glob` does: `*` stays within a name, and finds none that begins with a dot."""
    if not pattern or not names:
        return not names and all(part == "**" for part in pattern)
    name, part = names[0], pattern[0]
    hidden = name.startswith(".") and not part.startswith(".")
    if part == "**":
        return matches(names, pattern[1:]) or (not hidden and matches(names[1:], pattern))
    return not hidden and fnmatchcase(name, part) and matches(names[1:], pattern[1:])


def plain_depth(pattern: Sequence[str]) -> int:
    """How many folders a pattern names plainly before it begins to match."""
    depth = 0
    while depth + 1 < len(pattern) and not glob.has_magic(pattern[depth]):
        depth += 1
    return depth
