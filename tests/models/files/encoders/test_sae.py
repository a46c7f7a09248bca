"""An encoder: its identity, and how many latents are kept."""

from pathlib import Path
from typing import Any

from spile.models.files.encoders import open_sae
from spile.models.files.encoders.sae import SparseEncoder
from support import saes


def test_an_encoder_is_known_by_its_weights_and_its_arithmetic(tmp_path: Path) -> None:
    def known(name: str, **changes: Any) -> str:
        return open_sae(str(saes.write_sae(tmp_path / name, **changes))).identity()

    first = known("first")
    assert known("elsewhere", hook="blocks.0.hook_resid_post", device="cuda") == first
    others = [known("seed", seed=1), known("bias", apply_b_dec_to_input=False),
              known("norm", normalize_activations="layer_norm")]  # fmt: skip
    assert len({first, *others}) == 4


def test_as_many_are_kept_as_asked_for_or_as_can_be_active(tmp_path: Path) -> None:
    topk = open_sae(str(saes.write_sae(tmp_path / "topk", "topk")))
    other = open_sae(str(saes.write_sae(tmp_path / "other")))
    small = open_sae(str(saes.write_sae(tmp_path / "small", latents=20)))
    large = open_sae(str(saes.write_sae(tmp_path / "large", latents=40_000, width=2)))
    assert [SparseEncoder.of(topk, k).kept for k in (None, 4, 30)] == [9, 4, 9]
    assert [SparseEncoder.of(other, k).kept for k in (None, 4, 100)] == [64, 4, 80]
    assert SparseEncoder.of(small, None).kept == 20
    pooled = [SparseEncoder.of(topk, k, pooled=True).kept for k in (None, 30, 100)]
    assert pooled == [9, 30, topk.latents], "tokens of one span have different latents active"
    assert SparseEncoder.of(other, 4).id_dtype == "int16"
    assert SparseEncoder.of(large, 4).id_dtype == "int32"
