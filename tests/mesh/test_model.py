"""A callable model on a mesh: loaded there, or moved there and back."""

from pathlib import Path

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError

TEXTS = ["the sad rose is there", "a tin", "no one here is so sure that it is"]
TAPS = "embed,attn_pattern:0,resid_post:all,logits"


def test_a_model_that_is_moved_gives_the_same_everywhere(model: Path) -> None:
    one = spile.load_model(str(model))
    wanted = one(TEXTS, TAPS)
    for mesh in ("1d", "data=2,fsdp=2,model=2"):
        moved = one.to(mesh)
        assert f"mesh {'model=8' if mesh == '1d' else mesh}>" in repr(moved)
        found = moved(TEXTS, TAPS)
        assert {n: v.shape for n, v in found.items()} == {n: v.shape for n, v in wanted.items()}
        for tap, values in found.items():
            for row, ids in enumerate(one.encode(TEXTS)):
                own, known = (np.asarray(v[row, : len(ids)]) for v in (values, wanted[tap]))
                np.testing.assert_allclose(own, known, atol=2e-5, err_msg=tap)
        assert moved.loss(TEXTS) == pytest.approx(one.loss(TEXTS), rel=1e-5)
        back = moved.to("1")(TEXTS, TAPS)
        assert all(np.asarray(back[tap]).tobytes() == np.asarray(wanted[tap]).tobytes()
                   for tap in wanted)  # fmt: skip


def test_a_model_that_is_loaded_on_a_mesh_is_the_one_moved_there(model: Path) -> None:
    loaded = spile.load_model(str(model), mesh="data=4,model=2")
    moved = spile.load_model(str(model)).to("data=4,model=2")
    found, wanted = (np.asarray(each(TEXTS)["logits"]) for each in (loaded, moved))
    assert found.tobytes() == wanted.tobytes()


def test_a_model_in_float16_gives_the_same_on_a_mesh(model: Path) -> None:
    one = spile.load_model(str(model), compute_dtype="float16")
    taps = "resid_post:all,mlp_hidden:1,logits"
    wanted, found = (each(TEXTS, taps) for each in (one, one.to("data=2,fsdp=2,model=2")))
    for tap, values in found.items():
        assert values.dtype == np.float32
        own, known = (np.nan_to_num(np.asarray(each)) for each in (values, wanted[tap]))
        # A sum in another order may round a factor to the next value of float16.
        assert np.linalg.norm(own - known) < 2e-4 * np.linalg.norm(known), tap


def test_a_splice_on_a_mesh_needs_what_the_mesh_divides(model: Path) -> None:
    one = spile.load_model(str(model))
    moved = one.to("data=4,model=2")
    tokens = [ids[:4] for ids in one.encode([TEXTS[0]] * 4)]
    splice = {"resid_post.0": lambda rows: 2 * rows}
    found, wanted = (np.asarray(m(tokens, splice=splice)["logits"]) for m in (moved, one))
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    with pytest.raises(ConfigError, match="a multiple of 4 contexts"):
        moved(TEXTS, splice=splice)
    with pytest.raises(ConfigError, match="say which"):
        one.to("auto")
