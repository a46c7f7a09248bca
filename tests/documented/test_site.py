"""`make docs`: the site builds without a warning, and its reference is the code's."""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import spile
from documented import pages
from documented.pages import ROOT
from documented.test_commands import verbs_of
from spile import cli
from support import tiny


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the pages, with the reference as `make docs` writes it."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("reference"))
    _run(_recipe("docs")[0], folder)
    return folder


@pytest.fixture(scope="module")
def site(written: Path) -> Path:
    """The same folder with the site, as `make docs` builds it."""
    _run(_recipe("docs")[1], written)
    return written


def _recipe(target: str) -> list[str]:
    """Return the two commands of a target of the Makefile."""
    text = (ROOT / "Makefile").read_text().split(f"\n{target}:")[1].split("\n\n")[0] + "\n"
    lines = re.findall(r"^\t\$\(BIN\)/(.*)$", text, re.MULTILINE)
    assert len(lines) == 2
    return lines


def _run(line: str, folder: Path) -> None:
    program, *words = line.replace("scripts/", f"{ROOT}/scripts/").split()
    result = subprocess.run(
        [Path(sys.executable).with_name(program), *words],
        cwd=folder, env=tiny.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


def _named() -> list[str]:
    return re.findall(r": ([\w/-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


def test_every_page_is_in_the_navigation(written: Path) -> None:
    pages = (written / "docs").rglob("*.md")
    assert {*_named()} == {str(page.relative_to(written / "docs"))[:-3] for page in pages}


@pytest.mark.full
def test_every_page_is_built(site: Path) -> None:
    for page in _named():
        assert (site / "site" / f"{page}.html").stat().st_size > 1000
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["site_dir"] == "site"


def test_the_reference_has_every_verb_and_flag(written: Path) -> None:
    page = (written / "docs/reference/cli.md").read_text()

    def check(parser: argparse.ArgumentParser, name: str) -> None:
        section = page.split(f"`{name}`\n" if name != "spile" else "# Command line\n")[1]
        section = re.split(r"^#+ `", section, maxsplit=1, flags=re.MULTILINE)[0]
        for action in parser._actions:
            for flag in action.option_strings:
                assert f"`{flag}" in section or flag in ("-h", "--help"), (name, flag)
        for word, sub in verbs_of(parser).items():
            check(sub, f"{name} {word}")

    check(cli.make_parser(), "spile")  # pyright: ignore[reportPrivateUsage]


def test_the_reference_has_every_public_name(written: Path) -> None:
    page = (written / "docs/reference/python.md").read_text()
    for name in spile.__all__:
        assert name.startswith("__") or f"## `spile.{name}`" in page
    for method in (name for name in vars(spile.Dataset) if not name.startswith("_")):
        assert re.search(rf"^{method}\(|\*\*`{method}`\*\*", page, re.MULTILINE), method


def test_the_reference_has_every_module(written: Path) -> None:
    page = (written / "docs/reference/modules.md").read_text()
    for path in (ROOT / "src" / "spile").rglob("*.py"):
        name = path.relative_to(ROOT / "src" / "spile").as_posix()
        if "/" in name and path.name != "__init__.py":
            assert re.search(rf"^\| `{name}` \| \S", page, re.MULTILINE), name


def test_the_folders_are_listed_for_contributors_and_in_the_architecture() -> None:
    row = re.compile(r"^\| `(\w+)/` \| .* \|$", re.MULTILINE)
    guide, architecture = (
        [(found[1], found[0]) for found in row.finditer((ROOT / page).read_text())]
        for page in ("CONTRIBUTING.md", "docs/architecture.md")
    )
    assert guide == architecture, "in the same words and in the same order"
    assert {name for name, _ in guide} == {
        path.parent.name for path in (ROOT / "src" / "spile").glob("*/__init__.py")
    }


@pytest.mark.full
def test_a_broken_link_fails_the_build(site: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(site, tmp_path / "broken")
    with (broken / "docs" / "index.md").open("a") as page:
        page.write("\n[nowhere](nowhere.md)\n")
    program = Path(sys.executable).with_name("zensical")
    result = subprocess.run(
        [program, "build", "--strict"], cwd=broken, capture_output=True, check=False
    )
    assert result.returncode != 0


def test_links_lead_to_files_of_the_checkout_and_to_headings_there() -> None:
    """On GitHub, too: what `make docs` writes is not there, and no page links to it."""
    built = (ROOT / "docs" / "reference", ROOT / "site")
    named = [ROOT / page for page in (*pages.pages(), "CHANGELOG.md")]
    for page in named:
        text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith(("https://", "http://")):
                continue
            path, _, heading = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            where = f"{page.relative_to(ROOT)}: {target}"
            assert file.exists() and not any(file.is_relative_to(each) for each in built), where
            assert not heading or heading in _anchors(file), where


def _anchors(page: Path) -> set[str]:
    """As GitHub and the site make them of headings."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", line.lower()).strip() for line in lines)
    return {re.sub(r"\s", "-", word) for word in words}


def test_the_comparison_says_what_engines_and_trainers_do_better() -> None:
    text = (ROOT / "docs" / "comparison.md").read_text()
    table = text.split("| tool | does better | Spile does better |")[1].split("\n\n")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| ")]
    known = " ".join(tool for tool, _, _ in rows)
    for tool in ("vLLM's hidden-state extraction", "vllm-lens", "vLLM-Hook", "speculators",
                 "DeepSpec", "circuit-tracer", "Llamascopium's trainer"):  # fmt: skip
        assert tool in known
    assert all(theirs.strip() and ours.strip() for _, theirs, ours in rows)
