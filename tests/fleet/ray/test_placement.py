"""Where slices may run, by what the nodes of a cluster say they have; and clusters that are away.

Real clusters are in `tests/chaos/test_ray.py`.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

from chaos.harness import check_refused, run
from spile.core.config import RayOptions
from spile.fleet.ray.placement import Placements
from support import tiny


class Nodes:
    """The result of `ray.nodes()`."""

    def __init__(self, *totals: dict[str, float]) -> None:
        self.listed = [
            {"Alive": True, "NodeID": f"n{number}", "Resources": {"memory": 1e9, **total}}
            for number, total in enumerate(totals)
        ]

    def nodes(self) -> list[dict[str, Any]]:
        return self.listed


def taken(placements: Placements, count: int = 99, resting: tuple[str, ...] = ()) -> list[Any]:
    return [(place.name, dict(place.needs)) for place in placements.free(count, resting)]


def test_a_slice_takes_a_nodes_accelerators_or_its_cpus() -> None:
    nodes = Nodes({"CPU": 8}, {"CPU": 96, "GPU": 8}, {"CPU": 0.5, "TPU": 4}, {})
    placements = Placements(nodes, RayOptions())
    assert taken(placements) == [
        ("n0", {"CPU": 8}), ("n1", {"GPU": 8, "CPU": 1}), ("n2", {"TPU": 4}),
    ]  # fmt: skip
    assert taken(placements) == []


def test_several_share_a_node_where_they_take_less() -> None:
    nodes = Nodes({"GPU": 2, "CPU": 8}, {"CPU": 64})
    placements = Placements(nodes, RayOptions(ray_resources="GPU=1"))
    found = placements.free(99, ())
    assert [place.name for place in found] == ["n0", "n0"]
    placements.give_back(found[0])
    assert [name for name, _ in taken(placements)] == ["n0"]


def test_only_so_many_are_taken_and_none_where_one_has_just_failed() -> None:
    placements = Placements(Nodes({"CPU": 1}, {"CPU": 1}, {"CPU": 1}), RayOptions())
    assert [name for name, _ in taken(placements, 1, ("n0",))] == ["n1"]
    assert [name for name, _ in taken(placements, 5, ("n0",))] == ["n2"]
    assert taken(placements, 0) == []


def test_nodes_that_are_gone_have_no_room_and_those_that_join_have() -> None:
    nodes = Nodes({"CPU": 1})
    placements = Placements(nodes, RayOptions())
    nodes.listed[0]["Alive"] = False
    assert taken(placements) == []
    nodes.listed.append({"Alive": True, "NodeID": "new", "Resources": {"CPU": 2}})
    assert taken(placements) == [("new", {"CPU": 2})]


def test_what_is_wanted_and_what_there_is_can_be_told() -> None:
    placements = Placements(Nodes({"CPU": 4}, {}), RayOptions(ray_resources="GPU=1", ray_hosts=2))
    assert placements.described() == (
        "a slice needs GPU=1 on each of 2 nodes; the nodes have CPU=4, nothing"
    )


def test_an_absent_cluster_a_missing_ray_and_foreign_flags_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("extract", "--out", tmp_path / "out", "--engine", "ray")
    address = f"127.0.0.1:{tiny.free_port()}"
    check_refused(run(*flags, "--ray-address", address), 2, address, "Connection refused")
    check_refused(run(*flags, "--share", "0/2"), 2, "--share conflicts with --engine ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    check_refused(run(*flags), 2, "pip install 'spile[ray]'")
