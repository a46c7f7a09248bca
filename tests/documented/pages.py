"""What the pages ask readers to type: commands in fenced blocks and in prose, and Python."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_SHELLS = ("", "sh", "shell", "bash", "console")
_INLINE = re.compile(r"(?<!`)`((?:spile|python|pytest|make) [^`]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def first(self) -> str:
        return self.text.partition("\n")[0]


@dataclass(frozen=True)
class Command:
    """One line to type: continued lines joined, without its comment."""

    page: str
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


def pages() -> list[str]:
    """Every page, by its path from the repository's root."""
    named = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found = [*named, *sorted((ROOT / "docs").glob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in found]


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text[: m.start()].count("\n") + 1, m[2], _dedented(m[3], len(m[1])))
        for m in _FENCE.finditer(text)
    ]


def shell_blocks(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language in _SHELLS]


def python_blocks(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def commands(block: Block) -> list[Command]:
    """The commands of a shell block: all lines, or only those with `$` if there are any."""
    joined = re.sub(r"\s*\\\n\s*", " ", block.text)
    joined = re.sub(r"\n[ \t]+", " ", joined)  # so synopses are continued; empty lines are not
    lines = joined.splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    parts = [part.strip() for line in lines for part in _parts(_without_comment(line))]
    return [Command(block.page, block.line, part) for part in parts if part]


def named(page: str) -> list[Command]:
    """Commands that prose names in backticks."""
    text = _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    return [Command(page, 0, " ".join(m[1].split())) for m in _INLINE.finditer(text)]


def _parts(line: str) -> list[str]:
    """Split `a; b` into two commands; leave a line that begins with a flag whole."""
    return [line] if line.startswith("--") else line.split("; ")


def _without_comment(line: str) -> str:
    """A comment is what follows ` #` outside of quotes."""
    for match in re.finditer(r"(?:^|\s)#", line):
        before = line[: match.start()]
        if before.count("'") % 2 == 0 and before.count('"') % 2 == 0:
            return before
    return line


def _dedented(text: str, spaces: int) -> str:
    return "".join(line[spaces:] for line in text.splitlines(keepends=True)) if spaces else text
