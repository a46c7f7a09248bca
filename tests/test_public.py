"""The public surface: documented names are importable from `spile`, at no cost."""

import ast
import dataclasses
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import spile
from documented import pages

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", spile.__all__)
def test_every_public_name_resolves_and_is_listed(name: str) -> None:
    if name.startswith("Torch") or name == "torch_dataset":
        pytest.importorskip("torch")
    assert getattr(spile, name) is not None
    assert name in dir(spile)


def test_only_public_names_are_listed() -> None:
    assert dir(spile) == spile.__all__
    assert not {"Any", "TYPE_CHECKING", "_HOMES", "core"} & {*dir(spile)}


@pytest.mark.parametrize("options", [spile.Recipe, spile.Runtime])
def test_help_explains_each_option(options: type[spile.Recipe | spile.Runtime]) -> None:
    told = " ".join((options.__doc__ or "").split())
    for f in dataclasses.fields(options):
        assert f" {f.name}: {f.metadata['help'].split()[0].replace('--', '')}" in told
    assert "--" not in re.sub(r"`[^`]*`", "", told), "Python has names, not flags"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'spile' has no attribute 'nothing'"):
        _ = spile.nothing  # type: ignore[attr-defined]


def test_no_public_name_is_that_of_a_package() -> None:
    # Whichever of the two were imported last would be found.
    folders = {module.name for module in pkgutil.iter_modules(spile.__path__)}
    assert folders & set(spile.__all__) == set()


def test_importing_spile_imports_no_library() -> None:
    code = "import spile, sys; dir(spile); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in ran.stdout.split()}
    assert loaded & {"jax", "torch", "pyarrow", "numpy", "rich", "tokenizers"} == set()


def test_errors_and_reading_need_no_jax() -> None:
    code = "import spile, sys; spile.open, spile.SpileError, spile.top_rows, spile.export, "
    code += "spile.Recipe; print('jax' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


@pytest.mark.parametrize("page", pages.pages())
def test_documentation_imports_from_spile_alone(page: str) -> None:
    blocks = "\n".join(block.text for block in pages.python_blocks(page))
    imported = [node for node in ast.walk(ast.parse(blocks)) if isinstance(node, ast.ImportFrom)]
    assert [node.module for node in imported if (node.module or "").startswith("spile.")] == []
    names = [alias.name for node in imported if node.module == "spile" for alias in node.names]
    assert set(names) <= set(spile.__all__)
    used = set(re.findall(r"\bspile\.([A-Za-z]\w*)\b(?!\.py)(?=\()", blocks))
    assert used <= set(spile.__all__)
