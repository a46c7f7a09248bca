"""Meshes by name: their layouts, fallbacks and refusals."""

import logging

import pytest

from spile.core.errors import ConfigError
from spile.models.layout import Cuts, Layout, fitting_layout, parse_layout

SIZES = {"heads": 8, "kv_heads": 2, "mlp": 48, "vocab": 260, "width": 32}


@pytest.mark.parametrize(
    ("text", "devices", "processes", "fsdp", "wanted"),
    [
        ("1d", 64, 16, None, Layout(model=64)),
        ("2d", 64, 16, None, Layout(data=16, model=4)),
        ("2d", 4, 1, None, Layout(model=4)),
        ("2d", 8, 1, None, Layout(data=2, model=4)),
        ("3d", 64, 16, None, Layout(16, 2, 2)),
        ("3d", 64, 16, 4, Layout(16, 4, 1)),
        ("auto", 64, 16, 2, Layout(16, 2, 2)),
        ("data=16,fsdp=2,model=2", 64, 16, None, Layout(16, 2, 2)),
        ("model=4", 64, 16, None, Layout(data=16, model=4)),
        ("model=2,fsdp=2", 8, 1, None, Layout(2, 2, 2)),
        ("model=2", 8, 1, 4, Layout(1, 4, 2)),
        ("1d", 1, 1, None, Layout()),
        ("1", 8, 1, None, Layout()),
    ],
)
def test_a_mesh_is_laid_out_as_it_is_named(
    text: str, devices: int, processes: int, fsdp: int | None, wanted: Layout
) -> None:
    assert parse_layout(text, devices, processes, fsdp) == wanted


def test_what_cannot_be_laid_out_falls_back_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spile")
    assert parse_layout("3d", 48, 16, None) == Layout(data=16, model=3)
    assert "3d: 3 devices beside data=16 are not a multiple of fsdp=2; taking 2d" in caplog.text
    assert parse_layout("3d", 9, 1, None) == Layout(model=9)
    assert "2d: 9 devices are not a multiple of 2; taking 1d" in caplog.text


@pytest.mark.parametrize(
    ("text", "fsdp", "said"),
    [
        ("4d", None, "--mesh takes auto, 1, 1d, 2d, 3d or e.g. data=16,fsdp=2,model=2, got '4d'"),
        ("data=0", None, "--mesh takes"),
        ("data=2,data=4", None, "data is given twice"),
        ("fsdp=2", 2, "fsdp is given twice"),
        ("data=4,model=4", None, "is for 16 devices, there are 8"),
        ("model=3", None, "is for 3 devices, there are 8"),
        ("2d", 2, "--fsdp goes with --mesh 3d, not 2d"),
        ("1", 2, "--mesh 1 is one device of one process"),
    ],
)
def test_what_is_no_mesh_is_refused_by_name(text: str, fsdp: int | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        parse_layout(text, 8, 1, fsdp)


def test_auto_is_left_to_what_fits() -> None:
    assert parse_layout("auto", 8, 1, None) is None


def test_the_fastest_that_fits_cuts_as_little_as_it_must() -> None:
    tried: list[Layout] = []

    def fits(needed: int) -> Layout:
        tried.clear()
        chosen, found = fitting_layout(
            64, 4, lambda layout: tried.append(layout) is None and layout.model >= needed
        )
        assert found
        return chosen

    assert fits(1) == Layout(64) and len(tried) == 1
    assert fits(2) == Layout(data=32, model=2)
    assert fits(4) == Layout(data=16, model=4)
    assert fits(16) == Layout(data=4, model=16), "across hosts only where it must be"
    gathered, found = fitting_layout(64, 4, lambda layout: layout.model * layout.fsdp >= 8)
    assert found and gathered == Layout(8, 2, 4)
    assert fitting_layout(8, 8, lambda layout: False) == (Layout(1, 8, 1), False)


def test_each_axis_is_cut_along_its_own() -> None:
    cuts = Cuts.of(Layout(1, 2, 2), SIZES)
    assert cuts.along(("heads", "width")) == ("model", "fsdp")
    assert cuts.along(("heads", "width"), gathered=True) == ("model", None)
    assert cuts.along(("experts", "mlp", "width")) == (None, "model", "fsdp"), "no experts here"
    assert cuts.along(("width",)) == (None,), "a vector is small"
    assert cuts.along(("vocab", "width")) == ("model", None)
    assert cuts.share(("width", "mlp")) == 4


def test_an_axis_is_used_once() -> None:
    cuts = Cuts.of(Layout(model=2), {**SIZES, "experts": 4})
    assert cuts.along(("experts", "mlp", "width")) == ("model", None, None)


def test_what_cannot_be_cut_is_whole_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spile")
    cuts = Cuts.of(Layout(model=4), SIZES)
    assert "kv_heads" not in cuts.cut and cuts.cut["heads"] == "model"
    assert "mesh model=4: 2 kv heads cannot be cut 4 ways and are whole on every device" in (
        caplog.text
    )


def test_a_model_that_cannot_be_cut_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="--mesh fsdp=5: the model's width of 32 cannot"):
        Cuts.of(Layout(fsdp=5), SIZES)
    said = "neither the model's 8 heads nor its inner width of 48 can be cut 5 ways; choose model "
    with pytest.raises(ConfigError, match=said + "from 1, 2, 4, 8"):
        Cuts.of(Layout(model=5), SIZES)


def test_what_is_cut_and_what_is_whole_is_told() -> None:
    sizes = {"heads": 8, "kv_heads": 2, "mlp": 64, "vocab": 100, "width": 32}
    arrays = [
        ("vocab", "width"), ("heads", "width"), ("kv_heads", "width"), ("width", "heads"),
        ("mlp", "width"), ("latent", "width"), ("width",), ("channels", "one", "kernel"),
    ]  # fmt: skip
    assert Cuts.of(Layout(1, 2, 4), sizes).told(arrays) == (
        "query heads, MLPs, vocabulary 4 ways; every matrix 2 ways, gathered block by block; "
        "whole on every device: key heads, projections to latents"
    )
    assert Cuts.of(Layout(4), sizes).told(arrays) == "nothing: the model is whole on every device"
