"""Taps of every kind from the command to the reader: names, shapes, dtypes and values."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import spile
from chaos.harness import Work, check_sound, run
from spile.check.reference import Reference
from spile.core.index import LAST
from support import tiny
from support.families import FAMILIES, randomised

SEQ_LEN = 64
TAPS = (
    "embed,q:1,k:1,attn_pattern:0,z:all,resid_pre:1,resid_post:0,router_logits:1,expert_weights:1,"
    "expert_ids:all,logprob,entropy"
)
SHAPES = {
    "embed": (48,), "q.1": (4, 12), "k.1": (2, 12), "attn_pattern.0": (4, SEQ_LEN),
    "z.0": (4, 12), "z.1": (4, 12), "z.2": (4, 12), "resid_pre.1": (48,), "resid_post.0": (48,),
    "router_logits.1": (6,), "expert_weights.1": (2,), "expert_ids.0": (2,), "expert_ids.1": (2,),
    "expert_ids.2": (2,), "logprob": (), "entropy": (),
}  # fmt: skip


@pytest.fixture(scope="module")
def mixtral() -> Any:
    return randomised(FAMILIES["mixtral-gqa"])


@pytest.fixture(scope="module")
def made(mixtral: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Work, Path]:
    """A mixture of experts, some rows of each context, through the command."""
    folder = tmp_path_factory.mktemp("taps")
    mixtral.save_pretrained(folder / "model")
    tiny.write_tokenizer(folder / "model")
    corpus = tiny.write_corpus(folder / "docs.jsonl", 12, seed=3, mean=2.0)
    options = {
        "taps": TAPS,
        "where": "pos % 3 != 1",
        "seq_len": SEQ_LEN,
        "unit_tokens": 400,
        "compute_dtype": "float32",
        "batch_tokens": 256,
        "shard_bytes": 16384,
    }
    work = Work(folder / "model", corpus, options)
    result = run("extract", *work.flags(folder / "out"))
    assert result.code == 0, result.err
    return work, folder / "out"


def test_every_tap_is_stored_in_its_own_shape_and_dtype(made: tuple[Work, Path]) -> None:
    _, out = made
    check_sound(out)
    dataset = spile.open(str(out))
    assert {tap: dataset.shape(tap) for tap in dataset.taps} == SHAPES
    for tap, shape in SHAPES.items():
        dtype = "int16" if tap.startswith("expert_ids") else "float32"
        assert dataset.dtype(tap).name == dtype
        rows = dataset.read(tap, 0, dataset.num_tokens)
        assert (rows.shape, rows.dtype.name) == ((dataset.num_tokens, *shape), dtype)
    status = run("status", out, "--json").json
    assert {tap: tuple(shape) for tap, shape in status["taps"].items()} == SHAPES
    assert "attn_pattern.0 [4, 64]" in run("status", out).out


def test_stored_values_are_those_of_the_reference(made: tuple[Work, Path], mixtral: Any) -> None:
    _, out = made
    dataset = spile.open(str(out))
    texts = [json.loads(line)["text"] for line in made[0].corpus.read_text().splitlines()]
    chosen = max(i for i, text in enumerate(texts) if len(text) + 1 <= SEQ_LEN)
    document = dataset.document(chosen)
    tokens = np.array(_tokens(made[0].model, texts[chosen]))
    assert np.array_equal(document.index["token_id"], tokens[document.index["offset"]])
    truth = Reference(mixtral).taps(tokens)
    for tap in dataset.taps:
        wanted, found = truth[tap][document.index["offset"]], document[tap]
        if tap.startswith("attn_pattern"):
            assert not found[:, :, len(tokens) :].any()
            found = found[:, :, : len(tokens)]
        assert found.shape == wanted.shape, tap
        if tap.startswith("expert_ids"):
            assert np.array_equal(found, wanted), tap
        else:
            atol = 2e-5 * max(1.0, np.abs(wanted).max())
            np.testing.assert_allclose(found, wanted, rtol=0, atol=atol, err_msg=tap)


def test_what_must_hold_of_the_values_holds(made: tuple[Work, Path]) -> None:
    dataset = spile.open(str(made[1]))
    index = dataset.index(0, dataset.num_tokens)

    def rows(tap: str) -> np.ndarray:
        return dataset.read(tap, 0, dataset.num_tokens)

    pattern = rows("attn_pattern.0")
    np.testing.assert_allclose(pattern.sum(-1), 1.0, atol=1e-5)
    visible = np.arange(SEQ_LEN)[None, :] <= index["pos"][:, None]
    assert not pattern[~np.broadcast_to(visible[:, None], pattern.shape)].any()
    last = index["flags"] & LAST != 0
    assert 0 < last.sum() < len(last)
    assert not rows("logprob")[last].any()
    assert (rows("logprob")[~last] < 0).all()
    assert ((rows("entropy") > 0) & (rows("entropy") <= np.log(tiny.VOCAB))).all()
    order = np.argsort(-rows("router_logits.1"), axis=-1, kind="stable")
    assert np.array_equal(rows("expert_ids.1"), order[:, :2])
    np.testing.assert_allclose(rows("expert_weights.1").sum(-1), 1.0, atol=1e-6)
    assert {*rows("expert_ids.0").ravel()} <= set(range(6))
    for tap in SHAPES:
        wide = rows(tap).reshape(len(index), -1).astype(np.float64)
        stats = dataset.statistics(tap)
        np.testing.assert_allclose(stats.mean, wide.mean(0), atol=1e-5)
        assert stats.max_abs == np.abs(wide).max()


def test_names_of_other_tools_are_stored_and_understood(made: tuple[Work, Path]) -> None:
    _, out = made
    stored = json.loads((out / "units.json").read_bytes())["taps"]
    assert stored["q.1"] == {
        "shape": [4, 12],
        "dtype": "float32",
        "aliases": ["blocks.1.attn.hook_q", "blocks.1.attn.q.hook_out"],
        "latents": 0,
    }
    assert stored["resid_post.0"]["aliases"] == [
        "blocks.0.hook_resid_post", "blocks.0.hook_out", "hidden_states[1]", "aux_hidden_states[1]",
    ]  # fmt: skip
    assert stored["logprob"]["aliases"] == []
    dataset = spile.open(str(out))
    for tap, info in stored.items():
        assert dataset.aliases(tap) == tuple(info["aliases"])
        for alias in info["aliases"]:
            # The stream between two blocks has a name at either: the values are the same.
            found = dataset.read(alias, 0, dataset.num_tokens)
            assert found.tobytes() == dataset.read(tap, 0, dataset.num_tokens).tobytes()
    (batch,) = dataset.batches(["hidden_states[1]", "blocks.1.attn.hook_q"], 10**6, seed=1)
    assert batch["hidden_states[1]"].shape == (dataset.num_tokens, 48)
    assert batch["blocks.1.attn.hook_q"].shape == (dataset.num_tokens, 4, 12)


def test_taps_may_be_asked_for_by_the_names_of_other_tools(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    others = "hidden_states[1],blocks.0.attn.hook_q,hook_embed,aux_hidden_states[0]"
    ours = "resid_post:0,q:0,embed,resid_pre:0"
    work = Work(model, corpus, {"seq_len": 64, "taps": others})
    assert run("extract", *work.flags(tmp_path / "out")).code == 0
    dataset = spile.open(str(tmp_path / "out"))
    assert dataset.taps == ["embed", "resid_pre.0", "q.0", "resid_post.0"]
    # The same recipe in other words: nothing is refused, nothing is left to do.
    result = run("extract", *work.flags(tmp_path / "out", taps=ours))
    assert result.code == 0, result.err


def _tokens(model: Path, text: str) -> list[int]:
    return Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
