"""Names of topologies, and facts about chips."""

import pytest

from spile.core.errors import ConfigError
from spile.plan.chips import CHIPS, chip_of, parse_topology


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "libtpu"),
    [
        ("v4-8", 4, 1, "v4:2x2x1"),
        ("v4-32", 16, 4, "v4:2x2x4"),
        ("v5e-4", 4, 1, "v5e:2x2"),
        ("v5e-8", 8, 1, "v5e:2x4"),
        ("v5e-16", 16, 4, "v5e:4x4"),
        ("v5e-64", 64, 16, "v5e:8x8"),
        ("v5litepod-64", 64, 16, "v5e:8x8"),
        ("v5e-256", 256, 64, "v5e:16x16"),
        ("v6e-8", 8, 1, "v6e:2x4"),
        ("v6e-256", 256, 64, "v6e:16x16"),
        ("v5p-8", 4, 1, "v5p:2x2x1"),
        ("v5p-64", 32, 8, "v5p:2x4x4"),
        ("h200", 1, 1, None),
        ("H100-8", 8, 1, None),
    ],
)
def test_a_cloud_name_says_how_many_chips_and_hosts(
    name: str, chips: int, hosts: int, libtpu: str | None
) -> None:
    found = parse_topology(name)
    assert (found.chips, found.hosts, found.libtpu_name) == (chips, hosts, libtpu)
    assert found.chips % found.hosts == 0


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("v5e-7", "v5e-64"),
        ("v4-7", "v4-8"),
        ("v5e", "e.g. v5e-64"),
        ("h200-3", "1, 2, 4 or 8"),
        ("h200-16", "one host"),
        ("tpu", "chips: v4"),
        ("v5e-64; rm", "no such topology"),
    ],
)
def test_other_names_are_refused_with_those_there_are(name: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        parse_topology(name)


def test_a_torus_has_as_many_places_as_chips() -> None:
    for name in ("v4-64", "v4-512", "v5e-32", "v5e-128", "v6e-64", "v5p-16", "v5p-128"):
        found = parse_topology(name)
        assert found.shape
        places = 1
        for size in found.shape.split("x"):
            places *= int(size)
        assert places == found.chips


def test_every_figure_has_a_source_and_what_is_reached_is_explained() -> None:
    for chip in CHIPS.values():
        assert chip.sources and all(chip.sources)
        assert 0 < chip.reached < 1
        assert chip.why.startswith(("measured", "assumed"))
        assert chip.spot is None or chip.on_demand is None or chip.spot < chip.on_demand
    assert CHIPS["h200"].sustained == pytest.approx(653e12)


def test_a_device_is_known_by_what_jax_calls_it() -> None:
    names = {
        "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p",
        "TPU v6 lite": "v6e", "NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100",
        "Tesla T4": "t4",
    }  # fmt: skip
    for kind, name in names.items():
        assert chip_of(kind) is CHIPS[name]
    assert chip_of("cpu") is None


def test_a_chips_speed_is_that_of_the_16_bits_it_has() -> None:
    assert {name: chip.half for name, chip in CHIPS.items() if chip.platform == "gpu"} == {
        "h100": "bfloat16", "h200": "bfloat16", "t4": "float16",
    }  # fmt: skip
    assert not any(chip.lacks_bfloat16 for chip in CHIPS.values() if chip.platform == "tpu")
    found = parse_topology("t4-2")  # as Kaggle has them
    assert (found.chips, found.hosts, found.chip) == (2, 1, CHIPS["t4"])
