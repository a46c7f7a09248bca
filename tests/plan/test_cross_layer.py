"""Which decoders of a cross-layer transcoder the stored errors need."""

from pathlib import Path

import pytest

from spile.core.config import Recipe
from spile.core.errors import ConfigError
from spile.core.recipe import LATENTS_ALONE
from spile.models.config.arch import Arch
from spile.models.files.checkpoint import read_arch
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.layout import ONE_DEVICE
from spile.models.taps import parse_taps
from spile.plan.cross_layer import identities
from spile.plan.encoders import find_encoders, stored_taps
from spile.plan.roofline import Workload
from support import saes


@pytest.fixture(scope="module")
def arch(model: Path) -> Arch:
    return read_arch(str(model))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saes.write_cross_layer(tmp_path_factory.mktemp("crossing") / "all", range(3))


def find(arch: Arch, taps: str, encode: object, *, error: bool = True) -> dict[str, SparseEncoder]:
    recipe = Recipe(encode=str(encode), encode_error=error or None)
    return find_encoders(recipe, parse_taps(taps, arch), arch)


def test_decoders_are_read_for_the_layers_whose_rows_are_tapped(arch: Arch, folder: Path) -> None:
    taps = "resid_mid:0-2,mlp_out:0-1"
    found, alone = (find(arch, taps, folder, error=each) for each in (True, False))
    assert [each.sae.across for each in found.values()] == [(0, 1), (1,), ()]
    assert [each.error_of for each in found.values()] == ["mlp_out", "mlp_out", None]
    assert found["resid_mid.0"].sae.tensors()["W_dec"] == (80, 2 * 32)
    assert "W_dec" not in found["resid_mid.2"].sae.tensors()
    stored = stored_taps(parse_taps(taps, arch), found, arch, 8, "float32")
    assert [tap for tap in stored if "error" in tap] == ["resid_mid_error.0", "resid_mid_error.1"]
    # The latents are the same with errors and without, and so is what made them.
    own = identities(alone, errors=False)
    assert identities(found, errors=True) == {
        **own, "resid_mid.2": f"{LATENTS_ALONE}{own['resid_mid.2']}",
    }  # fmt: skip


def test_a_plan_counts_the_decoders(arch: Arch, folder: Path) -> None:
    taps = "resid_mid:0-2,mlp_out:0-2"
    works = [
        Workload(
            arch=arch, taps=parse_taps(taps, arch), cuts=ONE_DEVICE, seq_len=64, rows=2,
            compute_dtype="bfloat16", store_dtype="bfloat16", whole=True,
            encoders=find(arch, taps, folder, error=each),
        )
        for each in (True, False)
    ]  # fmt: skip
    errors, latents = (work.outer_weights() for work in works)
    assert errors - latents == (3 + 2 + 1) * 80 * 32 * 2  # bytes
    errors, latents = (work.taps_bytes for work in works)
    # Three stored errors; and in float32, what a layer writes to three, and the sums of that.
    assert errors - latents == 2 * 64 * 32 * (3 * 2 + 2 * 3 * 4)


def test_what_is_missing_is_named(arch: Arch, folder: Path, tmp_path: Path) -> None:
    other = saes.write_cross_layer(tmp_path / "other", range(3))
    mixed = f"resid_mid.0={other},resid_mid.1={folder},resid_mid.2={folder}"
    needs = "the error of mlp_out.2 needs the latents of layers 0 to 2"
    for taps, encode, message in (
        ("resid_mid:1-2,mlp_out:2", folder, f"{needs}: add resid_mid:0-2 to --taps"),
        ("resid_mid:0-2", folder, "reconstructs blocks.0.hook_mlp_out, which is not among --taps"),
        ("resid_mid:0-2,mlp_out:2", mixed, f"{needs}, all of one transcoder: give --encode its"),
        (
            "resid_mid:0-2,mlp_out:2", f"resid_mid.2={folder}",
            f"{needs}, all of one transcoder: give --encode its directory",
        ),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            find(arch, taps, encode)
