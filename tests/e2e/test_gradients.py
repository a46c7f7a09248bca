"""`--taps SITE_grad`: the gradient of an objective at every token, stored like any tap."""

import dataclasses
import json
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

TOLERANCE = 2e-5  # of the tap's largest value
TAPS = (
    "resid_post_grad:all,resid_post_attr:1,z_attr:0,resid_pre_grad:0,z_grad:1.h1+h2,embed_grad,"
    "mlp_out_grad:0,logprob"
)
SEQ = 32


@pytest.fixture(scope="module")
def recipe(model: Path, corpus: Path) -> Recipe:
    """Most documents are longer than a context."""
    return Recipe(
        model=str(model), corpus=str(corpus), taps=TAPS, seq_len=SEQ, unit_tokens=700, max_docs=12,
        compute_dtype="float32", store_dtype="float32",
    )  # fmt: skip


def made(recipe: Recipe, out: Path, **options: Any) -> spile.Dataset:
    spile.extract(dataclasses.replace(recipe, **options), str(out))
    return spile.open(str(out))


def of_hf(model: Path, context: np.ndarray) -> dict[str, np.ndarray]:
    reference = Reference(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    ids = torch.tensor(context.astype(np.int64))
    found = gradients(reference.model, reference.points, ids, logprob)
    values = reference.taps(context, {"resid_post", "z"})
    return {
        "resid_post_attr.1": (found["resid_post.1"] * values["resid_post.1"]).sum(axis=-1),
        "z_attr.0": (found["z.0"] * values["z.0"]).sum(axis=-1),
        "resid_post_grad.0": found["resid_post.0"],
        "resid_post_grad.1": found["resid_post.1"],
        "resid_pre_grad.0": found["resid_pre.0"],
        "z_grad.1.h1.h2": found["z.1"][:, 1:3],
        "embed_grad": found["embed"],
        "mlp_out_grad.0": found["mlp_out.0"],
    }


@pytest.fixture(scope="module")
def dataset(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> spile.Dataset:
    return made(recipe, tmp_path_factory.mktemp("gradients") / "out")


def test_each_context_has_the_gradients_of_hf(
    dataset: spile.Dataset, recipe: Recipe, model: Path
) -> None:
    """A context's gradients depend on its own tokens alone, wherever it is packed."""
    check_sound(Path(dataset.url))
    compared = 0
    for doc in (0, 5):
        document = dataset.document(doc)
        offsets = document.index["offset"]
        for start in range(0, int(offsets.max()) + 1, SEQ)[:2]:
            own = (offsets >= start) & (offsets < start + SEQ)
            truth = of_hf(model, document.index["token_id"][own])
            for tap, wanted in truth.items():
                found = document.read(tap)[own]
                assert found.shape == wanted.shape
                assert np.abs(found - wanted).max() < TOLERANCE * np.abs(wanted).max(), tap
                compared += 1
    assert compared >= 3 * len(truth)
    checked = check(dataset.url, samples=2)
    assert checked.ok and {*truth} < {*checked.taps}


@pytest.mark.full
def test_a_filter_and_pooling_apply_to_gradients_as_to_values(
    dataset: spile.Dataset, recipe: Recipe, tmp_path: Path
) -> None:
    """The objective still counts every token."""
    some = made(recipe, tmp_path / "some", taps="resid_post_grad:0", where="pos >= 3", every=2)
    taps = "resid_post_grad:0,resid_post_attr:1"
    mean = made(recipe, tmp_path / "mean", taps=taps, pool="mean")
    whole = dataset.read("resid_post_grad.0")
    index, kept = dataset.index(0, len(dataset)), some.index(0, len(some))
    rows = {key: row for row, key in enumerate(zip(index["doc"], index["offset"], strict=True))}
    places = [rows[key] for key in zip(kept["doc"], kept["offset"], strict=True)]
    assert 0 < len(places) < len(rows)
    np.testing.assert_allclose(some.read("resid_post_grad.0"), whole[places], atol=1e-6)
    for row, doc in enumerate(mean.index(0, len(mean))["doc"][:5]):
        for tap in ("resid_post_grad.0", "resid_post_attr.1"):
            wanted = dataset.read(tap)[index["doc"] == doc].mean(axis=0)
            np.testing.assert_allclose(mean.read(tap)[row], wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.full
def test_streamed_blocks_come_back_in_reverse_with_the_same_bits(
    dataset: spile.Dataset, recipe: Recipe, tmp_path: Path
) -> None:
    """Of several batches in a sweep, the same but for rounding."""
    spile.extract(recipe, tmp_path / "out", spile.Runtime(weights="disk"))
    spile.extract(recipe, tmp_path / "small", spile.Runtime(weights="disk", batch_tokens=64))
    ds, small = spile.open(tmp_path / "out"), spile.open(tmp_path / "small")
    for tap in ds.taps:
        whole = dataset.read(tap, dtype="stored")
        assert np.array_equal(ds.read(tap, dtype="stored"), whole), tap
        gap = np.abs(small.read(tap, dtype="stored") - whole).max()
        assert gap < TOLERANCE * np.abs(whole).max(), tap


@pytest.mark.full
def test_gradients_are_added_to_a_dataset_and_resumed(
    dataset: spile.Dataset, recipe: Recipe, tmp_path: Path
) -> None:
    ds = made(recipe, tmp_path / "out", taps="resid_post:0")
    spile.extract(Recipe(add_taps="resid_post_grad:0"), ds.url)
    ds = spile.open(ds.url)
    assert [*ds.taps] == ["resid_post.0", "resid_post_grad.0"]
    np.testing.assert_allclose(
        ds.read("resid_post_grad.0"), dataset.read("resid_post_grad.0"), atol=1e-6
    )
    spile.extract(Recipe(objective="logprob"), dataset.url)  # nothing is left to do


CHATS = [
    {"chat": [{"role": "user", "content": f"how much is {n} and {n}?"},
              {"role": "assistant", "content": f"it is {2 * n}, twice {n}"}],
     "good": 40 + n, "bad": 80 + n}
    for n in range(6)
]  # fmt: skip
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
OWN = """
def total():
    return {"resid_post.1": lambda rows: (rows**2).sum(-1), "logprob": lambda rows: 0.5 * rows}
"""


@pytest.fixture(scope="module")
def chats(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("chats")
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "c.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    (folder / "own.py").write_text(OWN)
    width = json.loads((Path(str(recipe.model)) / "config.json").read_text())["hidden_size"]
    np.save(folder / "v.npy", np.random.default_rng(0).standard_normal(width).astype(np.float32))
    return dataclasses.replace(
        recipe, corpus=str(folder / "c.jsonl"), messages="chat", taps="resid_post_grad:0",
        template=str(folder / "template.jinja"), seq_len=128, max_docs=None,
    )  # fmt: skip


@pytest.mark.full
def test_other_objectives_have_their_own_gradients(chats: Recipe, tmp_path: Path) -> None:
    folder = Path(str(chats.corpus)).parent
    vector = torch.tensor(np.load(folder / "v.npy"))
    model = AutoModelForCausalLM.from_pretrained(str(chats.model), dtype=torch.float32)
    reference = Reference(model)
    flags: list[torch.Tensor] = []
    seen: list[torch.Tensor] = []
    last = model.model.layers[1].register_forward_hook(
        lambda module, args, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )

    def by_token(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]

    wanted: dict[str, Any] = {
        "loss:assistant": lambda logits, ids: -(by_token(logits, ids) * flags[-1][1:]).sum(),
        "logit-diff:good,bad": None,
        f"direction:resid_post.1={folder / 'v.npy'}": lambda *_: (seen[-1] @ vector).sum(),
        f"{folder / 'own.py'}:total": lambda logits, ids: (
            (seen[-1] ** 2).sum() + 0.5 * by_token(logits, ids).sum()
        ),
    }
    for number, (objective, of_hf) in enumerate(wanted.items()):
        ds = made(chats, tmp_path / str(number), objective=objective)
        for doc in (0, 3):
            document = ds.document(doc)
            assert (document.index["pos"] == document.index["offset"]).all(), "one context"
            flags.append(torch.tensor((document.index["flags"] & 256 > 0).astype(np.float32)))
            row = CHATS[doc]
            own = of_hf or (
                lambda logits, ids, row=row: logits[-1, row["good"]] - logits[-1, row["bad"]]
            )
            ids = torch.tensor(document.index["token_id"].astype(np.int64))
            truth = gradients(model, reference.points, ids, own)["resid_post.0"]
            found = document.read("resid_post_grad.0")
            assert np.abs(found - truth).max() < TOLERANCE * np.abs(truth).max(), objective
        told = str(ds.recipe.objective)
        assert str(folder) not in told
        if told.startswith("function"):
            with pytest.raises(ConfigError, match="check runs no function of your own"):
                check(ds.url, samples=2)
        else:
            assert check(ds.url, samples=2).ok, objective
    last.remove()
    with pytest.raises(ConfigError, match="give it with --objective"):
        spile.extract(Recipe(), ds.url)
    with pytest.raises(DriftError, match="objective: stored .function total"):
        spile.extract(dataclasses.replace(chats, objective="logprob"), ds.url)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"objective": "logprob", "taps": "resid_post:0"}, "no tap holds a gradient"),
        ({"objective": "loss"}, "--objective loss: write loss:ROLE"),
        ({"objective": "loss:assistant"}, "holds no chats"),
        ({"objective": "up"}, "--objective up: choose from logprob"),
        ({"objective": "direction:embed=v.npy"}, "v.npy"),
        ({"objective": "direction:z:0=v.npy", "taps": "resid_post_grad:0"}, "v.npy"),
        ({"objective": "direction:attn_pattern:1=v.npy"}, "cannot be differentiated"),
        ({"objective": "{own}:early"}, "does not depend on mlp_out.0, which is computed later"),
        ({"taps": "logprob_grad"}, "gradients are those of"),
        ({"compute_dtype": "float16"}, "computed in bfloat16 or float32, not float16"),
    ],
)
def test_what_has_no_gradient_is_refused(
    options: dict[str, Any], told: str, recipe: Recipe, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text('def early():\n    return {"attn_out.0": lambda rows: rows.sum(-1)}\n')
    options = {
        name: value.format(own=own) if name == "objective" else value
        for name, value in options.items()
    }
    with pytest.raises(SpileError, match=told):
        asked = dataclasses.replace(recipe, **options)
        spile.extract(asked, str(tmp_path / "out"))
