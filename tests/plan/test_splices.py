"""What `--splice` names, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest

from spile.core.errors import ConfigError, InputError
from spile.models.files.checkpoint import open_checkpoint
from spile.models.splices import Splice
from spile.models.taps import Tap, parse_taps
from spile.plan.splices import each_splice_source, find_splices, names_program
from support import saes, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("splices")
    tiny.write_model(folder / "model")
    np.save(folder / "row.npy", np.arange(1, 33))
    np.save(folder / "short.npy", np.ones(31))
    np.save(folder / "zero.npy", np.zeros(32))
    np.save(folder / "nan.npy", np.full(32, np.nan))
    np.save(folder / "head.npy", np.ones(8, np.float16))
    (folder / "text.npy").write_text("no array")
    saes.write_sae(folder / "sae", width=16)
    (folder / "own.py").write_text("def nothing():\n    return 3\n\ndef late():\n    1 / 0\n")
    return folder


def found(folder: Path, splice: str, taps: str = "logits") -> tuple[Splice, ...]:
    arch = open_checkpoint(str(folder / "model")).arch
    return find_splices(splice.replace("{}", str(folder)), parse_taps(taps, arch), arch)


def test_a_transcoder_changes_what_it_reconstructs(folder: Path, tmp_path: Path) -> None:
    saes.write_transcoders(folder / "transcoders", range(2))
    (change,) = found(folder, "replace-with-sae:mlp_in.1={}/transcoders")
    assert (change.tap, change.reads) == (Tap("mlp_out", 1), Tap("mlp_in", 1))
    assert change.identity.startswith("replace-with-sae mlp_in.1 jumprelu 80 ")
    with pytest.raises(ConfigError, match="which does not fit mlp_out.1; name the tap that it"):
        found(folder, "replace-with-sae:mlp_out.1={}/transcoders")
    # Gemma Scope's own files say nothing; on mlp_in they are transcoders.
    made = saes.random_tensors("jumprelu")
    np.savez(tmp_path / "params.npz", **made)
    gains: list[Tap] = []
    splice = f"replace-with-sae:mlp_in.2={tmp_path}/params.npz"
    arch = open_checkpoint(str(folder / "model")).arch

    def gain(tap: Tap) -> np.ndarray:
        gains.append(tap)
        return np.full(32, 2.0, np.float32)

    (change,) = find_splices(splice, parse_taps("logits", arch), arch, gain)
    assert (change.tap, change.reads, gains) == (
        Tap("mlp_out", 2),
        Tap("mlp_in", 2),
        [change.reads],
    )
    np.testing.assert_array_equal(change.load()[0]["W_enc"], made["W_enc"] / 2.0)


def test_changes_keep_their_order_and_have_a_tap_each(folder: Path) -> None:
    changes = found(folder, "steer:resid_pre:1-2={}/row.npy*3, zero:z:1.h0+h2")
    assert [each.tap for each in changes] == [
        Tap("resid_post", 0), Tap("resid_post", 1), Tap("z", 1)
    ]  # fmt: skip
    np.testing.assert_array_equal(changes[0].arrays["direction"], 3.0 * np.arange(1, 33))
    assert changes[2].arrays["chosen"].reshape(4, 8).all(axis=1).tolist() == [1, 0, 1, 0]


def test_what_is_given_for_a_head_is_widened_to_all(folder: Path) -> None:
    assert found(folder, "steer:z.1={}/row.npy")  # all heads, one after another
    (change,) = found(folder, "ablate:z.1.h3={}/head.npy")
    assert change.arrays["basis"].shape == (1, 32)
    assert not change.arrays["basis"][:, :24].any()
    assert np.linalg.norm(change.arrays["basis"]) == pytest.approx(1)


def test_identity_is_that_of_the_values_and_not_of_the_file(folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "same.npy", np.arange(1, 33, dtype=np.float64))
    one, two, other = (
        found(folder, f"steer:resid_post.0={path}")[0].identity
        for path in ("{}/row.npy", f"{tmp_path}/same.npy", "{}/row.npy*2")
    )
    assert one == two != other
    assert other.startswith("steer resid_post.0 *2 ")


def test_every_digit_of_a_factor_is_part_of_the_identity(folder: Path) -> None:
    def identity(factor: str) -> str:
        return found(folder, f"steer:resid_post.0={{}}/row.npy*{factor}")[0].identity

    assert identity("4") == identity("4.0") == identity("+.4e1")
    assert identity("1.0000001") != identity("1.0000002") != identity("1")
    assert identity("1234567.5").startswith("steer resid_post.0 *1234567.5 ")


def test_paths_are_changed_and_nothing_else(folder: Path) -> None:
    changed = each_splice_source(
        "zero:z.1.h3,steer:embed=a.npy*-1e-2,replace-with-sae:resid_post:1=x/y,/b/c.py:f",
        lambda kind, path: f"<{kind} {path}>",
    )
    assert changed == (
        "zero:z.1.h3,steer:embed=<steer a.npy>*-1e-2,"
        "replace-with-sae:resid_post:1=<replace-with-sae x/y>,/b/c.py:f"
    )
    assert names_program(changed) == "/b/c.py:f"
    assert names_program(None) is None


@pytest.mark.parametrize(
    ("splice", "told"),
    [
        ("erase:z.1", "choose from zero:TAP, ablate:TAP=FILE.npy, .* and FILE.py:FUNCTION"),
        ("zero:z.1=x.npy", "write zero:z.1$"),
        ("steer:z.1", r"write steer:z.1=FILE.npy\*FACTOR$"),
        (",", "names no change"),
        ("zero:logits", "only these can be changed: embed, resid_pre"),
        ("zero:z.9", "--splice zero:z.9: .*layer"),
        (
            "ablate:resid_post.1={}/short.npy",
            r"shape \[31\]; the tap needs \[32\], or several",
        ),
        ("ablate:resid_post.1={}/zero.npy", "the direction is zero"),
        ("mean:resid_post.1={}/nan.npy", "holds NaN or infinity"),
        ("mean:resid_post.1={}/text.npy", "no .npy header"),
        ("mean:resid_post.1={}/none.npy", "No such file"),
        (
            "replace-with-sae:resid_post.1={}/sae",
            "reads rows of 16 values, but resid_post.1 has 32",
        ),
        (
            "replace-with-sae:resid_post.1={}",
            "--splice replace-with-sae .*: has none of the files .*cfg.json",
        ),
        ("replace-with-sae:z.1.h0={}/sae", "an autoencoder reads all heads together"),
        ("{}/own.py:nothing", "returned a int, not a dictionary of functions"),
        ("{}/own.py:late", "ZeroDivisionError: division by zero"),
        ("{}/own.py:other", "the file has no function 'other'"),
        ("{}/others.py:f", "No such file"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(folder: Path, splice: str, told: str) -> None:
    with pytest.raises((ConfigError, InputError), match=told) as raised:
        found(folder, splice)
    assert "\n" not in str(raised.value)


def test_a_change_that_no_tap_shows_is_refused(folder: Path) -> None:
    shown = {"zero:z.1": "z:1", "zero:resid_pre.1": "resid_post:0", "zero:embed": "embed"}
    assert all(found(folder, splice, taps) for splice, taps in shown.items())
    with pytest.raises(ConfigError, match="changes no tap: the last one, z.1, is computed"):
        found(folder, "zero:mlp_out.1", "z:1")
