"""The example trainer: exact after a kill, the same over several devices, read by SAELens."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spile
from spile.core.tensors import map_tensor, read_header
from spile.models.files.encoders import open_sae
from spile.models.files.encoders.arithmetic import activations
from spile.models.files.encoders.sae import Sae
from spile.models.files.encoders.tensors import load_arrays
from support import tiny, zygote

EXAMPLES = Path(__file__).parents[2] / "examples"
TAP = "resid_post.1"
OPTIONS = [
    "--tap", TAP, "--latents", "96", "--k", "6", "--steps", "60", "--batch", "64",
    "--rate", "1e-2", "--warmup", "10", "--dead-after", "2000", "--save-every", "7",
    "--log-every", "1", "--eval-tokens", "300",
]  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dataset")
    recipe = spile.Recipe(
        # (A random one of those that raise the loss when they are changed.)
        model=str(tiny.write_model(folder / "model", seed=5)),
        corpus=str(tiny.write_corpus(folder / "docs.jsonl", 60)),
        taps=TAP, seq_len=64, store_dtype="float8_e4m3",
    )  # fmt: skip
    spile.extract(recipe, str(folder / "out"))
    return str(folder / "out")


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The module, without the strict promotion of tests: users do not have that."""
    sys.path.insert(0, str(EXAMPLES))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield __import__("train_sae")
    sys.path.remove(str(EXAMPLES))


def start(dataset: str, out: Path, *more: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / "train_sae.py"), dataset, "--out", str(out)]
    return zygote.Popen(
        [*command, *OPTIONS, *more],
        env={**tiny.environment(), **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def trained(example: Any, dataset: str, out: Path, *more: str) -> tuple[Any, dict[str, Any]]:
    args = example.arguments([dataset, "--out", str(out), *OPTIONS, *more])
    out.mkdir(exist_ok=True)
    ds = spile.open(dataset)
    state = example.train(ds, out, args)
    example.save_for_saelens(out, example.folded(state), ds, args)
    return args, state


@pytest.fixture(scope="module")
def whole(
    example: Any, dataset: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, dict[str, Any]]:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole")
    return out, *trained(example, dataset, out)


def tensors(path: Path) -> dict[str, np.ndarray]:
    return {name: np.array(map_tensor(path, info)) for name, info in read_header(path).items()}


def logged(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_a_killed_training_ends_in_the_same_weights_and_explains_new_rows(
    example: Any, dataset: str, whole: tuple[Path, Any, dict[str, Any]], tmp_path: Path
) -> None:
    out, args, state = whole
    process = start(dataset, tmp_path)
    assert process.stdout
    # A small pipe that nobody reads on from holds the run up: it cannot come to its end.
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    for _ in range(20):
        process.stdout.readline()
    assert process.poll() is None
    process.kill()
    process.wait()
    process.stdout.close()
    stood = int(tensors(tmp_path / "checkpoint.safetensors")["step"])
    assert stood % 7 == 0 and 0 < stood < 60
    with pytest.raises(SystemExit, match=r"'k': 6.* this is .*'k': 5"):
        trained(example, dataset, tmp_path, "--k", "5")
    trained(example, dataset, tmp_path)
    for name in ("checkpoint.safetensors", "sae_weights.safetensors", "log.jsonl"):
        assert (tmp_path / name).read_bytes() == (out / name).read_bytes(), name

    log = logged(out)
    assert [line["step"] for line in log] == list(range(1, 61))
    assert log[-1]["explained variance"] > log[20]["explained variance"]
    ds = spile.open(dataset)
    model = spile.load_model(ds.recipe.model_source)
    sae = example.folded(state)
    found = example.evaluate(ds, sae, model, args)
    assert found["L0"] == pytest.approx(6, abs=0.1)
    assert found["explained variance"] > 0.5
    assert found["clean"] < found["spliced"] < found["ablated"]
    assert 0.3 < found["loss recovered"] < 1
    assert found["loss recovered"] == pytest.approx(
        (found["ablated"] - found["spliced"]) / (found["ablated"] - found["clean"])
    )
    np.testing.assert_allclose(np.linalg.norm(np.asarray(sae["W_dec"]), axis=1), 1, atol=1e-5)


def published(out: Path) -> tuple[Sae, dict[str, np.ndarray]]:
    """Read by Spile instead of SAELens: tests/models/files/test_sae_files.py compares them."""
    sae = open_sae(str(out))
    return sae, load_arrays(sae)[0]


@pytest.mark.full
def test_jumprelu_finds_the_number_of_latents_that_was_asked_for(
    example: Any, dataset: str, tmp_path: Path
) -> None:
    args, state = trained(example, dataset, tmp_path, "--kind", "jumprelu")
    log = logged(tmp_path)
    assert 4 < log[-1]["L0"] < 9
    assert log[-1]["explained variance"] > 0.4
    sae, arrays = published(tmp_path)
    assert (sae.architecture, sae.hook) == ("jumprelu", "blocks.1.hook_resid_post")
    rows = next(spile.open(dataset).batches([TAP], 200, where="pos >= 1"))[TAP]
    latents, _, _ = example.encode(example.folded(state), jnp.asarray(rows), args.k)
    assert (np.asarray(latents) > 0).any()
    found = activations(sae, arrays, rows, np, np.matmul)
    np.testing.assert_allclose(found, latents, atol=1e-4)


@pytest.mark.full
def test_several_devices_give_the_weights_of_one(
    dataset: str, whole: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    more = ["--eval-tokens", "0", "--log-every", "30"]
    flags = "--xla_force_host_platform_device_count=4"
    process = start(dataset, tmp_path, *more, XLA_FLAGS=flags)
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    one, four = (tensors(out / "sae_weights.safetensors") for out in (whole[0], tmp_path))
    for name, values in one.items():
        assert np.abs(four[name] - values).max() <= 0.02 * np.abs(values).max(), name


@pytest.mark.full
def test_silent_latents_are_taught_what_the_others_leave(
    example: Any, dataset: str, tmp_path: Path
) -> None:
    """Sixty latents are never among the most active; the first loss alone would leave them dead."""
    args = example.arguments([dataset, "--out", str(tmp_path), *OPTIONS])
    ds = spile.open(dataset)
    rows = jnp.asarray(next(ds.batches([TAP], 64, where="pos >= 1"))[TAP])
    state = example.begin(rows, args)
    sae = {name[4:]: array for name, array in state.items() if name.startswith("sae/")}
    sae["b_enc"] = sae["b_enc"].at[:60].set(-2.0).at[60:].set(5.0)
    silent = jnp.where(jnp.arange(96) < 60, 2001, 0)
    taught: dict[float, int] = {}
    for args.aux in (0.0, 1.0):
        slopes, (told, _) = jax.grad(example.losses, has_aux=True)(
            sae, rows * state["scale"], silent, args
        )
        assert told["dead"] == 60
        taught[args.aux] = int((jnp.abs(slopes["W_dec"][:60]).max(axis=1) > 0).sum())
        assert float(jnp.abs(slopes["W_dec"][60:]).max()) > 0
    assert taught[0.0] == 0 and taught[1.0] > 30


_SAELENS = """
import json, sys
import numpy as np, torch
from sae_lens import SAE

sae = SAE.load_from_disk(sys.argv[1])
x = torch.from_numpy(np.load(sys.argv[2]))
latents = sae.encode(x)
found = {"latents": latents, "decoded": sae.decode(latents)}
np.savez(sys.argv[3], **{name: values.detach().numpy() for name, values in found.items()})
print(json.dumps({"kind": sae.cfg.architecture(), "hook": sae.cfg.metadata.hook_name}))
"""


@pytest.mark.full
@pytest.mark.parametrize("kind", ["jumprelu", "topk"])
def test_saelens_loads_it_and_computes_the_same(
    kind: str, example: Any, dataset: str, tmp_path: Path
) -> None:
    python = os.environ.get("SPILE_SAELENS_PYTHON")
    if not python:
        pytest.skip("SPILE_SAELENS_PYTHON does not name an interpreter that has sae-lens")
    args, state = trained(example, dataset, tmp_path / "sae", "--kind", kind, "--steps", "20")
    rows = next(spile.open(dataset).batches([TAP], 200, where="pos >= 1"))[TAP]
    np.save(tmp_path / "rows.npy", rows)
    given = [str(tmp_path / name) for name in ("sae", "rows.npy", "found.npz")]
    result = subprocess.run([python, "-c", _SAELENS, *given], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    about = json.loads(result.stdout.splitlines()[-1])
    assert about == {"kind": kind, "hook": "blocks.1.hook_resid_post"}
    theirs = np.load(tmp_path / "found.npz")
    sae = example.folded(state)
    latents, _, _ = example.encode(sae, jnp.asarray(rows), args.k)
    assert (np.asarray(latents) > 0).any()
    np.testing.assert_allclose(theirs["latents"], latents, atol=1e-4)
    np.testing.assert_allclose(theirs["decoded"], example.decode(sae, latents), atol=1e-4)
