"""Write the site's reference pages from the code: `python scripts/make_reference.py DEST`.

cli.md       every verb and flag, from the parser itself
options.md   every option of recipe, runtime and engine, with its kind and bounds
python.md    every public name, from its signature and docstring
modules.md   every module, from the first paragraph of its docstring, folder by folder
"""

import argparse
import ast
import dataclasses
import importlib
import inspect
import pprint
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

import spile
from spile import cli
from spile.core.config import RayOptions, Recipe, Runtime, flag_of
from spile.core.options import Options

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "spile"

# Classes that the functions of `spile` return, documented besides the public names.
_ALSO = (
    "spile.dataset.read.dataset.Document",
    "spile.dataset.read.batches.Batches",
    "spile.dataset.read.window.Encoded",
    "spile.dataset.codec.statistics.TapStats",
    "spile.run.extract.Outcome",
    "spile.interop.export.Exported",
    "spile.dataset.read.latents.TopRows",
)
_MADE = ("spile.Dataset", "spile.dataset.read.batches.Batches")  # only `open`, `batches` make them
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
_ENTRY = re.compile(r"(\*{0,2}[\w.]+)(?: \([^)]*\))?: (.*)")


def cli_page() -> str:
    parser = cli.make_parser()
    lines = ["# Command line", "", *_verb(parser, "spile")]
    return "\n".join(lines) + "\n"


def _verb(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    """Yield a command's page, then those of its subcommands."""
    if name != "spile":
        yield from (f"{'#' * min(4, name.count(' ') + 1)} `{name}`", "")
    yield from _prose(parser.description)
    for group in parser._action_groups:
        shown = [a for a in group._group_actions if not _is_common(a)]
        if shown:
            yield from (f"| {group.title} | |", "|---|---|")
            yield from (f"| {_spelled(action)} | {_cell(action.help)} |" for action in shown)
            yield ""
    yield from _prose(parser.epilog)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, sub in action.choices.items():
                yield from _verb(sub, f"{name} {word}")


def _is_common(action: argparse.Action) -> bool:
    return isinstance(action, argparse._HelpAction | argparse._SubParsersAction)


def _spelled(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else None
    if action.choices:
        value = value or "|".join(map(str, action.choices))
    if not action.option_strings:
        return _code(value or action.dest)
    takes = "" if action.nargs == 0 else " " + (value or action.dest.upper())
    return ", ".join(_code(flag + takes) for flag in action.option_strings)


def options_page() -> str:
    lines = [
        "# Options",
        "",
        "Use these as flags of `spile extract` and `spile plan`, as keys of a TOML file "
        "(`--config`), or as fields of the Python classes; as keys and fields they have no leading "
        "dashes, and `_` instead of `-`.",
        "",
    ]
    for options in (Recipe, Runtime, RayOptions):
        lines += [f"## {options.__name__}", "", inspect.getdoc(options) or "", ""]
        lines += ["| option | kind | default | |", "|---|---|---|---|"]
        for field in dataclasses.fields(options):
            meta = field.metadata
            kind = " \\| ".join(meta["choices"]) or meta["kind"]
            least = meta["minimum"]
            kind += "" if least is None else f", at least {least}"
            default = "" if field.default in (None, "") else _code(str(field.default))
            flag = _code(flag_of(field.name))
            lines.append(f"| {flag} | {kind} | {default} | {_cell(meta['help'])} |")
        lines.append("")
    return "\n".join(lines) + "\n"


def python_page() -> str:
    about, _, example = (spile.__doc__ or "").partition("\n")
    lines = ["# Python", "", *_prose(about), *_prose(example, "python")]
    names = {name: getattr(spile, name) for name in spile.__all__ if not name.startswith("__")}
    errors = {name: value for name, value in names.items() if _is_error(value)}
    shown: dict[int, str] = {}
    for name, value in names.items():
        if name in errors:
            continue
        if id(value) in shown:
            lines += [f"## `spile.{name}`", "", f"The same as `spile.{shown[id(value)]}`.", ""]
        else:
            lines += _documented(f"spile.{name}", value)
            shown[id(value)] = name
    lines += ["## Errors", "", "Each is a `spile.SpileError`, with the command's exit code.", ""]
    for name, error in errors.items():
        lines += [f"### `spile.{name}`", "", f"Exit code {error.exit_code}.", ""]
        lines += _docstring(inspect.getdoc(error))
    lines += ["## What these give", ""]
    for path in _ALSO:
        module, _, name = path.rpartition(".")
        lines += _documented(path, getattr(importlib.import_module(module), name), 3)
    return "\n".join(lines) + "\n"


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def modules_page() -> str:
    """Return a page of every module by folder, in the order of docs/architecture.md."""
    where = (
        "Folders in the order in which data flows, as in [the architecture](../architecture.md)."
    )
    lines = ["# Modules", "", where, ""]
    for folder, about in folders((ROOT / "docs" / "architecture.md").read_text()).items():
        lines += [f"## `{folder}/`", "", about[:1].upper() + about[1:] + ".", ""]
        lines += ["| module | |", "|---|---|"]
        for path in sorted((SOURCES / folder).rglob("*.py")):
            told = ast.get_docstring(ast.parse(path.read_text()))
            if told:
                name = path.relative_to(SOURCES).as_posix().removesuffix("/__init__.py")
                first = told.partition("\n\n")[0]
                lines.append(f"| `{name}` | {_cell(first)} |")
        lines.append("")
    return "\n".join(lines) + "\n"


def folders(page: str) -> dict[str, str]:
    """Return the folders of `src/spile` in a page's table, with their descriptions."""
    return dict(re.findall(r"^\| `(\w+)/` \| (.*) \|$", page, re.MULTILINE))


def _documented(path: str, value: Any, level: int = 2) -> Iterator[str]:
    yield from (f"{'#' * level} `{path}`", "")
    if not callable(value):
        yield from ("```python", pprint.pformat(value, sort_dicts=False), "```", "")
        return
    if inspect.isclass(value) and issubclass(value, Options):
        yield from (f"{inspect.getdoc(value)} Its fields: [options](options.md).", "")
        return
    if path not in _MADE:
        yield from _signature(path.rpartition(".")[2], value)
    yield from _docstring(inspect.getdoc(value) if value.__doc__ else None)
    if inspect.isclass(value):
        for name, member in vars(value).items():
            if name.startswith("_"):
                continue
            if isinstance(member, property):
                returns = inspect.signature(member.fget).return_annotation if member.fget else ""
                about = " ".join((inspect.getdoc(member) or "").split())
                yield from (f"**`{name}`** · `{_annotation(returns)}` {about}", "")
            elif inspect.isfunction(member) or isinstance(member, classmethod):
                plain = member.__func__ if isinstance(member, classmethod) else member
                yield from _signature(name, plain)
                yield from _docstring(inspect.getdoc(plain))


def _signature(name: str, value: Any) -> Iterator[str]:
    signature = inspect.signature(value)
    given = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    given = [p for p in given if not p.name.startswith("_")]
    words = [_parameter(p) for p in given]
    star = next((n for n, p in enumerate(given) if p.kind is p.KEYWORD_ONLY), None)
    if star is not None and not any(p.kind is p.VAR_POSITIONAL for p in given):
        words.insert(star, "*")
    line = f"{name}({', '.join(words)})"
    returns = signature.empty if inspect.isclass(value) else signature.return_annotation
    after = "" if returns is signature.empty else f" -> {_annotation(returns)}"
    if len(line + after) > 96:
        line = f"{name}(\n" + "".join(f"    {word},\n" for word in words) + ")"
    yield from ("```python", line + after, "```", "")


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{stars}{parameter.name}: {_annotation(parameter.annotation)}{default}"


def _annotation(value: Any) -> str:
    if isinstance(value, str):
        return value
    found = (
        value.__name__ if inspect.isclass(value) and not hasattr(value, "__args__") else str(value)
    )
    if value == npt.DTypeLike | None:
        return "DTypeLike | None"  # spelled out it is a paragraph
    found = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Za-z])", "", found)
    return re.sub(r"\bOptional\[(Literal\[[^]]*\])\]", r"\1 | None", found)


def _docstring(text: str | None) -> Iterator[str]:
    """Yield prose, and lists for the sections of Google's style."""
    inside = False
    for line in (text or "").splitlines():
        section, entry = _SECTION.fullmatch(line.strip()), _ENTRY.fullmatch(line.strip())
        if section:
            inside = True
            yield from ("", f"*{section[1]}*", "")
        elif inside and entry and not line.startswith(" " * 8):
            yield f"* `{entry[1]}`: {_escaped(entry[2])}"
        else:
            yield ("    " if inside and line else "") + _escaped(line.strip())
    yield ""


def _prose(text: str | None, language: str = "") -> Iterator[str]:
    """Yield one line as a sentence, several lines as a code block."""
    lines = (text or "").strip("\n").splitlines()
    if len(lines) == 1:
        sentence = lines[0][:1].upper() + lines[0][1:].removesuffix(".")
        yield from (_escaped(sentence) + ".", "")
    elif lines:
        yield from (f"```{language}", *lines, "```", "")


def _cell(text: str | None) -> str:
    return _escaped(" ".join((text or "").replace("%%", "%").split())).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Escape markup outside of backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*<\[\]_])", r"\\\1", p) for p in parts)


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def main(arguments: Sequence[str]) -> None:
    (dest,) = arguments
    folder = Path(dest)
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "cli": cli_page,
        "options": options_page,
        "python": python_page,
        "modules": modules_page,
    }
    for name, page in pages.items():
        (folder / f"{name}.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
