"""`--splice`: rows of a changed model equal those of HF transformers with torch hooks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import spile
from spile.check.compare import check
from spile.core.config import Recipe, Runtime
from spile.core.errors import ConfigError, DriftError, InputError
from spile.models.files.encoders import open_sae
from spile.models.files.encoders.tensors import load_arrays
from support import saes, tiny
from support.marks import some
from support.stored import unit_files

TAPS = "resid_post:1+2,z:1,logits"
TOLERANCE = 2e-5  # of the largest value
HEAD = 8  # values of one
RNG = np.random.default_rng(0)
DIRECTION, OTHER = RNG.standard_normal((2, 32)).astype(np.float32)
MEAN = RNG.standard_normal(HEAD).astype(np.float32)

Hook = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a corpus, its unchanged dataset, and what changes need."""
    folder = tmp_path_factory.mktemp("splices")
    tiny.write_model(folder / "model")
    tiny.write_corpus(folder / "docs.jsonl", 12)
    np.save(folder / "direction.npy", DIRECTION)
    np.save(folder / "both.npy", np.stack([DIRECTION, OTHER]))
    np.save(folder / "mean.npy", MEAN)
    saes.write_sae(folder / "sae", "topk", rescale_acts_by_decoder_norm=True)
    extracted(folder, None, "clean")
    return folder


def extracted(folder: Path, splice: str | None, out: str, **more: Any) -> spile.Dataset:
    given: dict[str, Any] = {
        "taps": TAPS,
        "model": str(folder / "model"),
        "corpus": str(folder / "docs.jsonl"),
    }
    given |= {"seq_len": 64, "compute_dtype": "float32", **more}
    written = splice and splice.replace("{}", str(folder))
    spile.extract(Recipe(**given, splice=written), folder / out, Runtime(batch_tokens=256))
    return spile.open(folder / out)


def ablated(*directions: np.ndarray) -> Hook:
    basis = torch.linalg.qr(torch.tensor(np.stack(directions)).T)[0]
    return lambda x: x - (x @ basis) @ basis.T


def reconstructed(folder: Path) -> Hook:
    """Encode and decode as SAELens' TopK does."""
    arrays = load_arrays(open_sae(str(folder / "sae"), decodes=True))[0]
    sae = {name: torch.tensor(array) for name, array in arrays.items()}

    def change(x: torch.Tensor) -> torch.Tensor:
        norms = sae["W_dec"].norm(dim=-1)
        before = ((x - sae["b_dec"]) @ sae["W_enc"] + sae["b_enc"]) * norms
        top = torch.topk(before, 9, dim=-1)
        latents = torch.zeros_like(before).scatter(-1, top.indices, top.values.relu())
        return (latents / norms) @ sae["W_dec"] + sae["b_dec"]

    return change


def without_head(value: torch.Tensor) -> Hook:
    """Replace the values of head 3."""

    def change(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[..., 3 * HEAD : 4 * HEAD] = value
        return x

    return change


Modules = Callable[[Any], Any]
BLOCK: Modules = lambda model: model.model.layers[1]  # noqa: E731
Z: Modules = lambda model: model.model.layers[1].self_attn.o_proj  # noqa: E731
# The flag, HF's module whose output (or input, if it is `Z`) is changed, and the change.
BUILT_IN: dict[str, tuple[str, Modules, Callable[[Path], Hook]]] = {
    "zero a head": ("zero:z.1.h3", Z, lambda _: without_head(torch.zeros(HEAD))),
    "zero a tap": (
        "zero:mlp_out:1", lambda model: model.model.layers[1].mlp, lambda _: torch.zeros_like
    ),
    "ablate": ("ablate:resid_post.1={}/direction.npy", BLOCK, lambda _: ablated(DIRECTION)),
    "ablate two": (
        "ablate:resid_pre.2={}/both.npy", BLOCK, lambda _: ablated(DIRECTION, OTHER)
    ),
    "steer": (
        "steer:resid_post.1={}/direction.npy*-2.5", BLOCK,
        lambda _: lambda x: x - 2.5 * torch.tensor(DIRECTION),
    ),
    "mean": ("mean:z:1.h3={}/mean.npy", Z, lambda _: without_head(torch.tensor(MEAN))),
    "mean of a dataset": (
        "mean:resid_post.1={}/clean", BLOCK,
        lambda folder: lambda x: torch.tensor(
            spile.open(folder / "clean").statistics("resid_post.1").mean
        ).float().expand_as(x),
    ),
    "autoencoder": ("replace-with-sae:resid_post.1={}/sae", BLOCK, reconstructed),
    "one after another": (
        "steer:resid_post.1={}/direction.npy,ablate:resid_post.1={}/both.npy", BLOCK,
        lambda _: lambda x: ablated(DIRECTION, OTHER)(x + torch.tensor(DIRECTION)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", some(BUILT_IN, "zero a head", "autoencoder"))
def test_a_built_in_change_is_that_of_a_hook_in_hf(kind: str, folder: Path, tmp_path: Path) -> None:
    splice, module, made = BUILT_IN[kind]
    changed = extracted(folder, splice, str(tmp_path / "out"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    hook = made(folder)
    if module is Z:
        module(model).register_forward_pre_hook(lambda _, given: (hook(given[0]),))
    else:
        module(model).register_forward_hook(
            lambda _, given, out: (hook(out[0]), *out[1:]) if isinstance(out, tuple) else hook(out)
        )
    for number in range(3):
        document = changed.document(number)
        ids = torch.tensor(document.index["token_id"].astype(np.int64))[None, :64]
        with torch.no_grad():
            wanted = model(ids).logits[0].numpy()
        found = document.read("logits")[:64]
        assert np.abs(found - wanted).max() < TOLERANCE * np.abs(wanted).max()
    clean = spile.open(folder / "clean")
    assert np.abs(changed.read("logits", 0, 50) - clean.read("logits", 0, 50)).max() > 0.01


def transcoded(layer: int, rows: torch.Tensor) -> torch.Tensor:
    made = {
        name: torch.tensor(a) for name, a in saes.random_tensors("jumprelu", seed=layer).items()
    }
    inside = rows @ made["W_enc"] + made["b_enc"]
    latents = torch.where(inside > made["threshold"], inside.clamp(min=0), 0)
    skipped = rows @ torch.tensor(saes.skip_matrix(layer)).T
    return latents @ made["W_dec"] + made["b_dec"] + skipped


def test_transcoders_stand_for_the_mlps_of_hf(folder: Path, tmp_path: Path) -> None:
    saes.write_transcoders(tmp_path / "all", range(3))
    splice = f"steer:mlp_in.2={folder}/direction.npy,replace-with-sae:mlp_in:1-2={tmp_path}/all"
    changed = extracted(folder, splice, str(tmp_path / "out"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    for layer in (1, 2):
        more = torch.tensor(DIRECTION) * (layer == 2)
        model.model.layers[layer].mlp.register_forward_hook(
            lambda _, given, out, layer=layer, more=more: transcoded(layer, given[0] + more)
        )
    for number in range(3):
        document = changed.document(number)
        ids = torch.tensor(document.index["token_id"].astype(np.int64))[None, :64]
        with torch.no_grad():
            wanted = model(ids).logits[0].numpy()
        found = document.read("logits")[:64]
        assert np.abs(found - wanted).max() < TOLERANCE * np.abs(wanted).max()


@pytest.mark.full
def test_check_replaces_mlps_by_transcoders(folder: Path, tmp_path: Path) -> None:
    saes.write_transcoders(tmp_path / "all", range(3))
    splice = f"zero:mlp_in.1,replace-with-sae:mlp_in:1-2={tmp_path}/all"
    extracted(folder, splice, str(tmp_path / "out"))
    assert check(str(tmp_path / "out"), samples=2).ok


def test_a_changed_run_is_the_second_of_a_pair(folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(like=str(folder / "clean"), splice=f"zero:z.1.h3,ablate:resid_post.1="
                    f"{folder}/direction.npy")  # fmt: skip
    spile.extract(recipe, tmp_path / "changed", Runtime(batch_tokens=256))
    pair = spile.align(folder / "clean", tmp_path / "changed")
    rows = {side: pair.read(f"{side}/z.1", 0, 40) for side in pair.sides}
    assert not rows["changed"][:, 3].any() and rows["clean"][:, 3].any()
    np.testing.assert_array_equal(rows["changed"][:, :3], rows["clean"][:, :3])
    assert np.abs(pair.read("changed/resid_post.1", 0, 40) @ DIRECTION).max() < 1e-4
    assert check(str(tmp_path / "changed"), samples=2).ok


@pytest.mark.full
def test_taps_are_added_with_the_same_changes(folder: Path, tmp_path: Path) -> None:
    splice = f"ablate:resid_post.1={folder}/direction.npy"
    extracted(folder, splice, str(tmp_path / "out"))
    spile.extract(Recipe(add_taps="resid_post:0,mlp_out:2"), tmp_path / "out")
    grown = spile.open(tmp_path / "out")
    whole = extracted(
        folder, splice, str(tmp_path / "whole"), taps=f"{TAPS},resid_post:0,mlp_out:2"
    )
    for tap in ("resid_post.0", "mlp_out.2", "logits"):
        np.testing.assert_array_equal(grown.read(tap, 0, 60), whole.read(tap, 0, 60))


@pytest.mark.full
def test_streamed_blocks_are_changed_alike(folder: Path, tmp_path: Path) -> None:
    found: list[Any] = []
    transcoders = saes.write_transcoders(tmp_path / "all", range(3))
    for kept in ("resident", "disk"):
        recipe = Recipe(
            like=str(folder / "clean"),
            splice=f"steer:embed={folder}/direction.npy,ablate:resid_post:all="
            f"{folder}/both.npy,replace-with-sae:resid_mid.1={folder}/sae,"
            f"replace-with-sae:mlp_in:all={transcoders}",
        )
        spile.extract(recipe, tmp_path / kept, Runtime(batch_tokens=128, weights=kept))
        found.append(unit_files(tmp_path / kept))
    assert found[0] == found[1]


@pytest.mark.full
def test_check_refuses_what_no_module_of_hf_returns(folder: Path, tmp_path: Path) -> None:
    extracted(folder, "zero:resid_mid.1", str(tmp_path / "out"))
    with pytest.raises(InputError, match=r"cannot recompute a change at resid_mid\.1: no module"):
        check(str(tmp_path / "out"), samples=1)


def test_a_run_resumes_with_the_same_direction_alone(folder: Path, tmp_path: Path) -> None:
    direction, out = tmp_path / "direction.npy", str(tmp_path / "out")
    np.save(direction, DIRECTION)
    extracted(folder, f"ablate:resid_post.1={direction}", out)
    moved = direction.rename(tmp_path / "moved.npy")
    spile.extract(Recipe(splice=f"ablate:resid_post.1={moved}"), out)  # paths are not identity
    np.save(moved, OTHER)
    with pytest.raises(DriftError, match=r"splice 1: stored 'ablate resid_post\.1 \w+', now"):
        spile.extract(Recipe(splice=f"ablate:resid_post.1={moved}"), out)
    with pytest.raises(DriftError, match="splice 1: .* now None"):
        spile.extract(Recipe(splice="none"), out)


OWN = """
import jax.numpy as jnp
from jax.tree_util import Partial

def half():
    return {"resid_post.1": lambda values: 0.5 * values}

def minus(own, values):
    return values - own

def with_array():
    return {"mlp_out.0": Partial(minus, jnp.ones((1, 1, 32))), **half()}

def wrong():
    return {"resid_post.1": lambda values: values[..., 0]}

def broken():
    return {"resid_post.1": lambda values: values + "a"}
"""


def test_a_function_of_ones_own_runs_where_it_is_given(folder: Path, tmp_path: Path) -> None:
    own, out = tmp_path / "own.py", str(tmp_path / "out")
    own.write_text(OWN)
    rows = extracted(folder, f"{own}:half", out, taps="resid_post:1").read("resid_post.1", 0, 40)
    clean = spile.open(folder / "clean").read("resid_post.1", 0, 40)
    np.testing.assert_allclose(rows, 0.5 * clean, rtol=1e-6)
    extracted(folder, f"{own}:with_array", str(tmp_path / "two"), taps="resid_post:1")
    with pytest.raises(ConfigError, match="only because a store names it; give it with"):
        spile.extract(Recipe(), out)
    with pytest.raises(ConfigError, match="check runs only the built-in changes"):
        check(out, samples=1)
    own.write_text(OWN + "\n")
    with pytest.raises(DriftError, match="splice 1: stored 'function half resid_post.1"):
        spile.extract(Recipe(splice=f"{own}:half"), out)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("wrong", r"--splice: resid_post\.1: \(\d+, 64, 32\) became \(\d+, 64\)"),
        ("broken", "--splice: resid_post.1: TypeError"),
    ],
)
def test_what_a_function_of_ones_own_raises_is_one_line(
    function: str, told: str, folder: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    with pytest.raises((ConfigError, InputError), match=told) as raised:
        extracted(folder, f"{own}:{function}", str(tmp_path / "out"))
    assert "\n" not in str(raised.value)
