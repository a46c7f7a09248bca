"""Print the size and shape of the source tree, so that two commits can be compared.

python scripts/measure_house.py             # this checkout
python scripts/measure_house.py ../other    # another one
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

LONG, WIDE = 80, 8  # lines of a function, parameters of one
ORDER = (  # as pyproject.toml has it, top to bottom
    ("cli",),
    ("serve", "launch", "fleet", "compile", "check", "interop", "features", "rollouts", "train",
     "lens"),
    ("run", "status"),
    ("plan",),
    ("corpus", "models", "dataset"),
    ("objects",),
    ("metrics",),
    ("core",),
)  # fmt: skip
LEVEL = {name: level for level, row in enumerate(ORDER) for name in row}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def parameters(function: Function) -> int:
    given = function.args
    named = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")])


def imported(name: str, tree: ast.Module, modules: set[str]) -> set[str]:
    """Modules of Spile that a module imports, wherever the statement stands."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return (found & modules) - {name, "spile"}


def backward(imports: dict[str, set[str]]) -> list[str]:
    """Imports between folders that run up the order, or from one sibling to another."""
    found: list[str] = []
    for source, targets in imports.items():
        for target in targets:
            a, b = source.split(".")[1:2], target.split(".")[1:2]
            if a and b and a != b and a[0] in LEVEL and b[0] in LEVEL:
                found += [f"{source} -> {target}"] if LEVEL[a[0]] >= LEVEL[b[0]] else []
    return found


def circular(imports: dict[str, set[str]]) -> list[str]:
    """Arrows between the children of one folder that lie on a circle of such arrows."""
    arrows = defaultdict[str, dict[str, set[str]]](lambda: defaultdict(set))
    for source, targets in imports.items():
        for target in targets:
            a, b = source.split("."), target.split(".")
            common = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
            if common:
                arrows[".".join(a[:common])][a[common]].add(b[common])
    found: list[str] = []
    for folder, graph in arrows.items():
        for a, targets in graph.items():
            found += [f"{folder}: {a} -> {b}" for b in targets if a in reached(graph, b)]
    return found


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen, left = set[str](), [start]
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += graph.get(node, ())
    return seen


def measure(root: Path) -> dict[str, object]:
    sources = root / "src"
    texts = {path: path.read_text() for path in sorted(sources.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    names = {
        path: ".".join(path.relative_to(sources).with_suffix("").parts).removesuffix(".__init__")
        for path in texts
    }
    known = set(names.values())
    imports = {names[path]: imported(names[path], tree, known) for path, tree in trees.items()}
    importers = defaultdict[str, set[str]](set)
    for name, targets in imports.items():
        for target in targets:
            importers[target].add(name)
    every = [(names[path], each) for path, tree in trees.items() for each in functions(tree)]
    lines = {names[path]: text.count("\n") for path, text in texts.items()}
    tests = [path.read_text() for path in sorted((root / "tests").rglob("*.py"))]
    test_names = [name for text in tests for name in re.findall(r"def (test_\w+)", text)]
    return {
        "modules (without empty __init__)": sum(1 for count in lines.values() if count),
        "lines": sum(lines.values()),
        "modules over 600 lines": sum(count > 600 for count in lines.values()),
        "modules under 100 lines with one importer": sum(
            0 < lines[name] < 100 and len(importers[name]) == 1 for name in known
        ),
        "imports against the order": len(backward(imports)),
        "arrows on a circle within a folder": len(circular(imports)),
        f"functions over {LONG} lines": sum(
            (each.end_lineno or 0) - each.lineno + 1 > LONG for _, each in every
        ),
        f"functions over {WIDE} parameters": sum(parameters(each) > WIDE for _, each in every),
        "files that opt out of strict types": sum(
            bool(re.search(r"^# pyright: (standard|basic)", text, re.M)) for text in texts.values()
        ),
        "files strict but for a library's unknown types": sum(
            bool(re.search(r"^# pyright: reportUnknown", text, re.M)) for text in texts.values()
        ),
        "uses of Any": sum(
            isinstance(node, ast.Name) and node.id == "Any"
            for tree in trees.values()
            for node in ast.walk(tree)
        ),
        "lines of tests": sum(text.count("\n") for text in tests),
        "test names of 70 characters or more": sum(len(name) >= 70 for name in test_names),
    }


if __name__ == "__main__":
    for what, count in measure(Path(sys.argv[1] if len(sys.argv) > 1 else ".")).items():
        print(f"{what:50} {count:>7,}")
