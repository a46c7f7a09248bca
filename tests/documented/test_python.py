"""The Python of README.md and docs/*.md runs, against a small dataset of the same names."""

import ast
import importlib
import multiprocessing
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import spile
from documented import exceptions, pages
from documented.pages import Block
from documented.scratch import Scratch
from marks import some

PAGES = [page for page in pages.pages() if pages.python_blocks(page)]


def known(scratch: Scratch) -> dict[str, Any]:
    """What a page takes for granted that its reader has."""
    shutil.copytree("acts/demo", "acts/qwen")
    taps = ["resid_post.9", "resid_post.20"]
    model, corpus = str(scratch.folder / "M"), str(scratch.folder / "C")
    return {
        "spile": spile,
        "jax": jax,
        "jnp": importlib.import_module("jax.numpy"),
        "NamedSharding": NamedSharding,
        "P": P,
        "mesh": Mesh(jax.devices(), ("data",)),
        "ds": spile.open("acts/demo"),
        "taps": taps,
        "recipe": spile.Recipe(model=model, corpus=corpus, taps="embed", seq_len=64),
        "out": "acts/from-python",
    }


@pytest.fixture
def spawning() -> Iterator[None]:
    """Workers of torch's loaders are started, not forked: jax runs in this process."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("spawning")
@pytest.mark.parametrize(
    "page", some([p for p in PAGES if p != "docs/tutorial.md"], "README.md", "docs/architecture.md")
)
# torch's, where there is no GPU
@pytest.mark.filterwarnings("ignore:'pin_memory':UserWarning")
def test_the_pages_python_runs(
    page: str, scratch: Scratch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = known(scratch)
    for block in pages.python_blocks(page):
        for statement in ast.parse(block.text).body:
            if not excepted(block, statement):
                run(block, statement, names)
    capsys.readouterr()


def run(block: Block, statement: ast.stmt, names: dict[str, Any]) -> None:
    where = f"{block.page}:{block.line + statement.lineno}"
    try:
        exec(compile(ast.Module([statement], []), where, "exec"), names)
    except Exception as error:
        raise AssertionError(f"{where}: {ast.unparse(statement)}") from error


def excepted(block: Block, statement: ast.stmt) -> bool:
    text = ast.unparse(statement)
    return any(
        page == block.page and text.startswith(start) for page, start in exceptions.STATEMENTS
    )


def test_every_excepted_statement_is_still_on_its_page() -> None:
    for page, start in exceptions.STATEMENTS:
        found = [s for block in pages.python_blocks(page) for s in ast.parse(block.text).body]
        assert any(ast.unparse(statement).startswith(start) for statement in found), (page, start)
