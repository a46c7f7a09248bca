"""The README: one screen to the first result, links instead of lists, words that are explained."""

import re

from documented.pages import ROOT, blocks, commands, shell_blocks

TEXT = (ROOT / "README.md").read_text()
SCREEN = 40  # lines


def test_one_screen_leads_to_the_first_result() -> None:
    before, python, result = blocks("README.md")[:3]
    assert (before.language, before.first.split()[:2]) == ("", ["make", "demo"])
    assert python.language == "python" and "spile.open" in python.text
    assert result.language == "text" and result.first.startswith("<spile.Dataset acts/demo: ")
    assert result.line + result.text.count("\n") < SCREEN


def test_the_tutorial_and_the_words_are_linked_at_the_top() -> None:
    top = TEXT.partition("\n## ")[0]
    assert "(docs/tutorial.md)" in top and "(docs/architecture.md#words)" in top
    words = (ROOT / "docs/architecture.md").read_text().split("\n## ")[1]
    for word in ("unit", "slice", "world", "pass"):
        assert f" {word}" in top and re.search(rf"^\| \*\*{word}\*\* \| \w", words, re.MULTILINE)


def test_families_are_counted_and_linked_instead_of_listed() -> None:
    table = (ROOT / "docs/models.md").read_text().split("\n## Families\n")[1].split("\n\n")
    (families,) = (part for part in table if part.startswith("| family"))
    (count,) = re.findall(r"\[(\d+)\+ families\]\(docs/models.md#families\)", TEXT)
    assert 0 <= len(families.splitlines()) - 2 - int(count) < 10
    cells = [cell for line in TEXT.splitlines() if line[:1] == "|" for cell in line.split("|")]
    assert max(map(len, cells)) < 500


def test_a_command_after_an_empty_line_is_a_command_of_its_own() -> None:
    found = [c.text for block in shell_blocks("README.md") for c in commands(block)]
    assert [text.split()[:2] for text in found[2:5]] == [
        ["pip", "install"], ["spile", "plan"], ["spile", "extract"],
    ]  # fmt: skip
