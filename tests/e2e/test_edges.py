"""`SITE_edge` and `--writers`: edge attribution patching, summed over a corpus."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import spile
from chaos.harness import check_sound
from spile.check.compare import check
from spile.check.hf_gradients import gradients, logprob
from spile.check.reference import Reference
from spile.core.config import Recipe
from spile.core.errors import ConfigError, DriftError, SpileError
from support import tiny
from support.families import FAMILIES, randomised

WRITERS = ("embed", "attn_out.0", "mlp_out.0", "attn_out.1")
READERS = ("resid_mid.0", "resid_pre.1", "resid_mid.1", "resid_post.1")
LATER = {  # no edge leads there
    "mlp_out.0": ("resid_mid.0",),
    "attn_out.1": ("resid_mid.0", "resid_pre.1"),
}
SHORT = {"num_hidden_layers": 2, "num_kv_shared_layers": 0}  # of Gemma 4


@pytest.fixture(scope="module")
def recipe(model: Path, corpus: Path) -> Recipe:
    return Recipe(
        model=str(model), corpus=str(corpus), max_docs=6, seq_len=64, unit_tokens=200,
        taps="resid_mid_edge:0-1,resid_pre_edge:1,resid_post_edge:1",
        writers="embed,attn_out:all,mlp_out:0", compute_dtype="float32",
    )  # fmt: skip


def made(recipe: Recipe, out: Path, **options: Any) -> spile.Dataset:
    spile.extract(dataclasses.replace(recipe, **options), str(out))
    return spile.open(str(out))


@pytest.fixture(scope="module")
def dataset(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> spile.Dataset:
    return made(recipe, tmp_path_factory.mktemp("edges") / "out", reduce="mean")


def contexts(ds: spile.Dataset) -> list[np.ndarray]:
    """The token ids of every context of a dataset of rows."""
    index = ds.index(0, len(ds))
    starts = np.flatnonzero(index["pos"] == 0)
    return [*map(np.asarray, np.split(index["token_id"].astype(np.int32), starts[1:]))]


@pytest.mark.full
def test_an_edge_is_the_writers_values_times_the_gradient_in_the_stream(
    dataset: spile.Dataset, recipe: Recipe, model: Path, tmp_path: Path
) -> None:
    """Summed over all tokens; by HF's autograd. And the stream loses as much as it says."""
    check_sound(Path(dataset.url))
    found = dataset.edges()
    assert (found.writers, found.readers) == (WRITERS, READERS)
    assert found.labels == (None,)
    rows = made(recipe, tmp_path / "rows", taps="embed", writers=None)
    texts = contexts(rows)
    assert found.counts.tolist() == [len(rows)]
    reference = Reference(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    wanted = np.zeros((len(WRITERS), len(READERS)))
    for ids in texts:
        ids64 = torch.tensor(ids.astype(np.int64))
        grads = gradients(reference.model, reference.points, ids64, logprob)
        values = reference.taps(ids, {*WRITERS})
        for w, r in np.ndindex(*wanted.shape):
            wanted[w, r] += (values[WRITERS[w]] * grads[READERS[r]]).sum()
    for writer, readers in LATER.items():
        for reader in readers:
            wanted[WRITERS.index(writer), READERS.index(reader)] = 0.0
    assert np.abs(found.sums[0] - wanted).max() < 2e-5 * np.abs(wanted).max()


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3next-gqa"])
def test_heads_are_writers_whose_edges_add_up_to_those_of_attention(
    family: str, recipe: Recipe, model: Path, tmp_path: Path
) -> None:
    """By HF's autograd; less the bias of the output projection; beyond a baseline, too."""
    if family != "llama":
        folder = tmp_path / "model"
        made_of = randomised(FAMILIES[family])
        made_of.save_pretrained(folder)
        tiny.write_tokenizer(folder)
        recipe, model = dataclasses.replace(recipe, model=str(folder)), folder
    layer = 2 if "next" in family else 1
    options: dict[str, Any] = {"taps": f"resid_post_edge:{layer}", "store_dtype": "float32"}
    ds = made(recipe, tmp_path / "out", writers=f"z:all,attn_out:{layer}", **options)
    assert check(ds.url, samples=3).ok
    heads = [n for n, name in enumerate(str(ds.recipe.writers).split(",")) if f"z.{layer}." in name]
    found = ds.read(f"resid_post_edge.{layer}")
    assert len(heads) >= 2
    bias = 0.0
    if family == "gpt2":
        grads = made(recipe, tmp_path / "g", taps=f"resid_post_grad:{layer}", writers=None,
                     store_dtype="float32").read(f"resid_post_grad.{layer}")  # fmt: skip
        hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        bias = grads @ hf.transformer.h[layer].attn.c_proj.bias.detach().numpy()
    gap = found[:, heads].sum(axis=1) + bias - found[:, -1]
    assert np.abs(gap).max() < 2e-5 * np.abs(found).max()
    values = made(recipe, tmp_path / "values", taps="z:all", writers=None, reduce="mean")
    beyond = made(recipe, tmp_path / "beyond", writers=f"z:{layer}", baseline=values.url, **options)
    assert check(beyond.url, samples=2).ok


def test_edges_of_all_writers_add_up_to_the_attribution_of_the_stream(
    recipe: Recipe, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Gemma 4 multiplies the stream at the end of each block, whatever was written before."""
    folder = tmp_path / "model"
    randomised(partial(FAMILIES["gemma4-gqa"], **SHORT)).save_pretrained(folder)
    tiny.write_tokenizer(folder)
    readers = ("resid_mid:0", "resid_post:0", "resid_mid:1")
    attributions = ",".join(reader.replace(":", "_attr:") for reader in readers)
    ds = made(
        recipe, tmp_path / "out", model=str(folder), max_docs=2, store_dtype="float32",
        taps=f"resid_mid_edge:0-1,resid_post_edge:0-1,{attributions}",
        writers="embed,attn_out:all,mlp_out:all,layer_embed_out:all",
    )  # fmt: skip
    totals = {reader: ds.read(reader.replace(":", "_attr.")) for reader in readers}
    # The last norm takes away every change of the stream's length.
    totals["resid_post:1"] = np.zeros_like(totals["resid_mid:1"])
    for reader, total in totals.items():
        edges = ds.read(reader.replace(":", "_edge."))
        assert np.abs(edges.sum(axis=1) - total).max() < 2e-5 * np.abs(edges).max()
    if pytestconfig.getoption("--chaos-full"):  # XLA then sums as it does for users
        assert check(ds.url, samples=2).ok


@pytest.mark.full
def test_edges_say_what_splices_do(recipe: Recipe, tmp_path: Path) -> None:
    """A little of a writer's values, taken out of the stream, changes the objective as it says."""
    loaded = spile.load_model(str(recipe.model), compute_dtype="float32")
    one: dict[str, Any] = {"max_docs": 1, "long_docs": "truncate"}
    rows = made(recipe, tmp_path / "rows", taps="embed", writers=None, **one)
    writers = f"{recipe.writers},z:0.h1"
    edges = made(recipe, tmp_path / "edges", reduce="mean", writers=writers, **one).edges()
    (ids,) = contexts(rows)
    values, share = dict(loaded([ids], "attn_out:0,mlp_out:0")), 1e-3
    without = loaded([ids], "attn_out:0", splice={"z.0": lambda z: z.at[:, :, 1].set(0.0)})
    values["z.0.h1"] = values["attn_out.0"] - without["attn_out.0"]  # what that head adds

    def total(added: np.ndarray) -> float:
        splice = {"resid_post.1": spile.added(added)}
        found = loaded([ids], "logprob", splice=splice)["logprob"]
        return float(np.asarray(found, np.float64).sum())

    for writer in ("attn_out.0", "mlp_out.0", "z.0.h1"):
        own = share * np.asarray(values[writer])
        slope = (total(own) - total(-own)) / (2 * share)
        place = edges.writers.index(writer), edges.readers.index("resid_post.1")
        assert abs(slope - edges.sums[0][place]) < 1e-2 * abs(slope)


@pytest.mark.full
def test_edges_have_baselines_labels_and_rows_of_their_own(
    dataset: spile.Dataset, recipe: Recipe, tmp_path: Path
) -> None:
    """They can be stored token by token, added to a dataset, and resumed."""
    values = made(recipe, tmp_path / "values", taps="embed,attn_out:0-1,mlp_out:0", writers=None,
                  reduce="mean")  # fmt: skip
    plain = made(recipe, tmp_path / "plain", store_dtype="float32")
    beyond = made(recipe, tmp_path / "beyond", store_dtype="float32", baseline=values.url)
    grads = made(recipe, tmp_path / "grads", taps="resid_post_grad:1", writers=None,
                 store_dtype="float32")  # fmt: skip
    means = np.stack([values.reduced(tap).means[0] for tap in WRITERS])
    gap = plain.read("resid_post_edge.1") - beyond.read("resid_post_edge.1")
    wanted = grads.read("resid_post_grad.1") @ means.T
    assert np.abs(gap - wanted).max() < 1e-4 * np.abs(plain.read("resid_post_edge.1")).max()
    total = plain.read("resid_post_edge.1").sum(axis=0)
    np.testing.assert_allclose(total, dataset.edges().sums[0][:, -1], rtol=1e-3, atol=1e-3)
    with pytest.raises(SpileError, match="holds rows, not sums"):
        plain.edges()
    with pytest.raises(DriftError, match="writers: stored"):
        spile.extract(Recipe(writers="embed"), dataset.url)
    rows = made(recipe, tmp_path / "rows", taps="embed", writers=None)
    spile.extract(Recipe(add_taps="resid_mid_edge:1", writers="embed"), rows.url)
    assert spile.open(rows.url).shape("resid_mid_edge.1") == (1,)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"writers": None}, "edges from where. give --writers"),
        ({"taps": "embed"}, "--writers .*: no tap holds edges"),
        ({"writers": "mlp_in:0"}, "mlp_in.0 is not added to the residual stream"),
        ({"writers": "mlp_out:1", "taps": "resid_mid_edge:1"}, "comes after every tap of edges"),
        ({"writers": "q:1"}, "q.1 is not added to the residual stream; choose from .*, z"),
        ({"steps": 3}, "leave --steps out"),
        ({"taps": "mlp_out_edge:0"}, "mlp_out_edge"),
    ],
)
def test_what_is_no_edge_is_refused(
    options: dict[str, Any], told: str, recipe: Recipe, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        made(recipe, tmp_path / "out", **options)
