"""Decoders of encoded taps; directions from files: names, shapes, and what is no direction."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spile.core.config import Recipe
from spile.core.errors import InputError
from spile.features.decoders import decoder_rows, open_decoder, read_directions
from spile.models.files.checkpoint import read_arch
from spile.models.taps import parse_taps
from spile.plan.encoders import find_encoders
from support import saes


def test_each_taps_decoder_is_found_in_a_directory_of_layers(model: Path, tmp_path: Path) -> None:
    arch, folder = read_arch(str(model)), saes.write_transcoders(tmp_path / "all", range(3))
    taps = parse_taps("mlp_in:0-2", arch)

    def recipe_of(where: str) -> Any:
        encoders = find_encoders(Recipe(encode=where), taps, arch)
        return SimpleNamespace(
            encode_source=where, taps=tuple(tap.name for tap in taps),
            encode={tap: each.sae.identity() for tap, each in encoders.items()},
        )  # fmt: skip

    for layer in range(3):
        sae = open_decoder(recipe_of(str(folder)), f"mlp_in.{layer}", arch, None)
        wanted = saes.random_tensors("jumprelu", seed=layer)["W_dec"]
        np.testing.assert_array_equal(decoder_rows(sae), wanted)
    # What was named is what is opened, whatever the tap's layer.
    named = f"mlp_in.0={folder / 'layer_2.safetensors'}"
    sae = open_decoder(recipe_of(named), "mlp_in.0", arch, None)
    np.testing.assert_array_equal(decoder_rows(sae), wanted)


def test_a_file_holds_one_direction_or_several(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.arange(1, 5, dtype=np.float64))
    np.save(tmp_path / "more.npy", np.ones((2, 4), np.float16))
    names, vectors = read_directions([str(tmp_path / "one.npy"), str(tmp_path / "more.npy")], 4)
    assert names == ("one", "more[0]", "more[1]")
    assert vectors.dtype == np.float32
    assert vectors.tolist() == [[1, 2, 3, 4], [1] * 4, [1] * 4]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (np.ones(3), r"holds \[3\], and rows of the tap have 4 values"),
        (np.ones(0), r"holds \[0\], and rows"),
        (np.zeros(4), "must be finite and not zero"),
        (np.array([1, np.nan, 0, 0]), "must be finite and not zero"),
        (np.array(["a"]), "cannot be read as .npy"),
    ],
)
def test_what_is_no_direction_is_refused(values: np.ndarray, why: str, tmp_path: Path) -> None:
    np.save(tmp_path / "bad.npy", values)
    with pytest.raises(InputError, match=why):
        read_directions([str(tmp_path / "bad.npy")], 4)


def test_a_missing_file_and_a_name_given_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none.npy: cannot be read as .npy"):
        read_directions([str(tmp_path / "none.npy")], 4)
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "x.npy", tmp_path / "a" / "x.npy"):
        np.save(path, np.ones(4))
    with pytest.raises(InputError, match="two directions are named x; rename a file"):
        read_directions([str(tmp_path / "x.npy"), str(tmp_path / "a" / "x.npy")], 4)
