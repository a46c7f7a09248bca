"""delphi's cache, read as its own loader does (its package resolves only with CUDA's)."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from spile.core.errors import ConfigError
from spile.interop.export import FORMATS, Exported, delphi, export
from support import delphi_reader, stored

Run = Callable[..., tuple[Path, Exported]]
VALUES, IDS = "mlp_out_latents.1", "mlp_out_latent_ids.1"


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> stored.Stored:
    path = tmp_path_factory.mktemp("out") / "out"
    return stored.build(path, taps=stored.LATENTS, **stored.ENCODED)


def load(folder: Path) -> tuple[dict[tuple[int, int, int], float], np.ndarray]:
    """Return all entries of a module and its tokens, by the published layout alone."""
    entries: dict[tuple[int, int, int], float] = {}
    tokens: list[np.ndarray] = []
    reached = 0
    for path in sorted(folder.glob("*.safetensors"), key=lambda p: int(p.stem.split("_")[0])):
        first, last = map(int, path.stem.split("_"))
        assert first == reached
        reached = last + 1
        split = load_file(path)
        assert {*split} == {"locations", "activations", "tokens"}
        places = split["locations"].astype(np.int64)
        assert (places[:, 2] <= last - first).all()
        assert places.tolist() == sorted(places.tolist()), "by sequence, token and latent"
        for (sequence, token, latent), value in zip(
            places.tolist(), split["activations"].tolist(), strict=True
        ):
            entries[sequence, token, latent + first] = value
        tokens.append(split["tokens"])
    assert all(np.array_equal(each, tokens[0]) for each in tokens)
    assert reached == 40
    return entries, tokens[0]


@pytest.mark.parametrize(("chosen", "dtype"), [(f"{VALUES},{IDS}", None), (VALUES, "float16")])
def test_every_active_latent_is_where_the_layout_says(
    latents: stored.Stored, exported: Run, chosen: str, dtype: str | None
) -> None:
    dest, made = exported(latents, "delphi", taps=chosen, dtype=dtype)
    assert (made.rows, made.left_over, made.context_size) == (104, 7, 8)
    assert sorted(path.name for path in dest.iterdir()) == ["latents", "spile.json"]
    assert [path.name for path in (dest / "latents").iterdir()] == ["mlp_out.1"]
    folder = dest / "latents" / "mlp_out.1"
    assert len(list(folder.glob("*.safetensors"))) == 5
    entries, tokens = load(folder)
    assert np.array_equal(tokens.reshape(-1), latents.index["token_id"][:104])
    assert tokens.dtype == np.int64
    wanted = {
        (row // 8, row % 8, int(number)): float(value)
        for row in range(104)
        for number, value in zip(latents.rows[IDS][row], latents.rows[VALUES][row], strict=True)
        if value
    }
    assert entries == wanted
    split = load_file(next(folder.glob("0_*.safetensors")))
    assert split["locations"].dtype == np.uint16
    assert split["activations"].dtype == np.dtype(dtype or "float32")


def test_the_config_says_what_delphi_asks(latents: stored.Stored, exported: Run) -> None:
    dest, _ = exported(latents, "delphi", taps=VALUES, context_size=16)
    config = json.loads((dest / "latents" / "mlp_out.1" / "config.json").read_bytes())
    assert (config["ctx_len"], config["n_tokens"], config["n_splits"]) == (16, 96, 5)
    assert config["model_name"] == "/models/tiny"


def test_many_entries_make_more_files(
    latents: stored.Stored, exported: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delphi, "FILE_BYTES", 400)
    dest, _ = exported(latents, "delphi", taps=VALUES)
    folder = dest / "latents" / "mlp_out.1"
    assert 5 < len(list(folder.glob("*.safetensors"))) <= 40
    assert len(load(folder)[0]) == np.count_nonzero(latents.rows[VALUES][:104])


def test_what_holds_no_latents_is_refused(
    latents: stored.Stored, floats: stored.Stored, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no latents: it was made without --encode"):
        export(str(floats.path), tmp_path / "dest", to="delphi")
    for chosen in (None, "resid_post.0", IDS):
        with pytest.raises(ConfigError, match=f"nothing else; choose them: --taps {VALUES}"):
            export(str(latents.path), tmp_path / "dest", to="delphi", taps=chosen)


@pytest.mark.parametrize("to", [to for to in FORMATS if to in ("npy", "zarr", "parquet")])
def test_plain_formats_hold_ids_and_values(latents: stored.Stored, exported: Run, to: str) -> None:
    dest, made = exported(latents, to)
    assert made.taps == {VALUES: "float32", IDS: "int16", "resid_post.0": "float32"}
    if to == "npy":
        assert np.array_equal(np.load(dest / f"{IDS}.npy"), latents.rows[IDS])


def test_formats_of_hooks_refuse_latents(latents: stored.Stored, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no TransformerLens name"):
        export(str(latents.path), tmp_path / "dest", to="saelens")


@pytest.mark.skipif("SPILE_DELPHI" not in os.environ, reason="SPILE_DELPHI: eai-delphi, unpacked")
def test_delphis_own_loader_reads_every_entry(latents: stored.Stored, exported: Run) -> None:
    """`pip download --no-deps eai-delphi`; its engines are stubbed, its `LatentDataset` is not."""
    dest, _ = exported(latents, "delphi", taps=VALUES)
    script = Path(delphi_reader.__file__)
    ran = subprocess.run(
        [sys.executable, script, dest / "latents"], capture_output=True, text=True, check=True
    )
    told = json.loads(ran.stdout.splitlines()[-1])
    assert (told["modules"], told["tokens"]) == (["mlp_out.1"], [13, 8])
    ids, values = latents.rows[IDS][:104], latents.rows[VALUES][:104]
    for latent in range(40):
        rows, places = np.nonzero((ids == latent) & (values > 0))
        entries = zip((rows // 8).tolist(), (rows % 8).tolist(), values[rows, places].tolist(),
                      strict=True)  # fmt: skip
        assert told["latents"].get(str(latent), []) == [[*each] for each in entries]
