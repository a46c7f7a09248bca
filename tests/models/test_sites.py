"""The table of sites agrees with itself, with the model's matrices and with the docs."""

import re
from pathlib import Path

import pytest

from spile.models.sites import (
    AFTER,
    AFTER_BLOCKS,
    ALL_MIXERS,
    BEFORE,
    FEATURES,
    SITES,
    Site,
)

DOCS = Path(__file__).parents[2] / "docs"


def test_every_row_is_complete_and_names_are_unique() -> None:
    assert all(site.meaning and name == site.name for name, site in SITES.items())
    for names in ("lens", "modules"):
        found = [name for site in SITES.values() for name in getattr(site, names)]
        assert len(found) == len(set(found)), "one name, one site"
    assert all(("{}" in name) is site.layered for site in SITES.values() for name in site.lens)
    assert {feature for site in SITES.values() for feature in site.requires} == {*FEATURES}


@pytest.mark.parametrize("site", SITES.values(), ids=lambda site: site.name)
def test_a_site_reaches_no_further_than_its_stage(site: Site) -> None:
    if site.stage == BEFORE:
        assert site.reach == ()
    elif site.stage == AFTER:
        assert site.reach is None and not site.spliced
    if site.head:
        assert site.stage == AFTER
    of_mlp = re.compile(r"w[ds]?_(gate|up|down|router)")
    known = {*ALL_MIXERS}
    assert {name for name in site.reach or () if not of_mlp.fullmatch(name)} <= known


def test_sites_after_the_blocks_come_last() -> None:
    assert [*SITES][-len(AFTER_BLOCKS) :] == [*AFTER_BLOCKS]


def test_the_docs_list_every_site_once() -> None:
    section = (DOCS / "models.md").read_text().split("\n## Taps\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(SITES)
