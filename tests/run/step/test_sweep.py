"""Sweeps: a model that is streamed block by block gives the rows of a resident one."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import spile
from spile.core.config import Recipe, Runtime
from spile.core.errors import ConfigError, DriftError, InputError
from spile.dataset.records.ledger import Ledger
from spile.models.forward import streamed
from spile.objects import open_objects
from spile.plan import residency
from spile.run.step.load import StepLoader
from support import families, saes, tiny
from support.marks import some
from support.stored import unit_files

# A tap of every kind, at every stage: before the blocks, inside them, between them, behind them.
TAPS = (
    "embed,resid_pre:0+2,attn_in:0,q:1.h1,attn_pattern:1,attn_top:2.h3,attn_summary:0+2.h1,z:all,resid_post:0+1,mlp_hidden:2,"
    "final_norm,logprob"
)


def recipe(model: Path, corpus: Path, **more: Any) -> Recipe:
    fields = {"taps": TAPS, "seq_len": 64, "unit_tokens": 700, "store_dtype": "float32", **more}
    return Recipe(model=str(model), corpus=str(corpus), **fields)


def extracted(given: Recipe, out: Path, kept: str, **more: Any) -> dict[tuple[int, str], bytes]:
    spile.extract(given, out, Runtime(weights=kept, batch_tokens=128, **more))
    return unit_files(out)


def check_same(given: Recipe, folder: Path) -> None:
    whole = extracted(given, folder / "whole", "resident")
    assert extracted(given, folder / "swept", "disk") == whole


CHANGES: dict[str, dict[str, Any]] = {
    "some rows": {"where": "not bos and pos % 3 == 1"},
    "float8": {"store_dtype": "float8_e4m3"},
    "int8": {"store_dtype": "int8", "taps": "resid_post:0+2,z:1"},
    "attention weights": {"taps": "attn_pattern:1,resid_post:2"},
    "part of a block": {"taps": "attn_in:2"},
    "logits": {"taps": "logits"},
    "embeddings alone": {"taps": "embed"},
}


@pytest.mark.parametrize("kind", some(CHANGES))
def test_a_swept_model_gives_the_same_bytes(
    kind: str, model: Path, corpus: Path, tmp_path: Path
) -> None:
    check_same(recipe(model, corpus, **CHANGES[kind]), tmp_path)


def test_every_kind_of_tap_has_the_same_bytes_in_a_sweep(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    check_same(recipe(model, corpus), tmp_path)


@pytest.mark.full
def test_latents_of_two_names_of_one_place_have_their_own_encoders(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    taps = ("resid_post:0", "resid_pre:1")
    written = [saes.write_sae(tmp_path / str(n), seed=n) for n in (0, 1)]
    encode = f"resid_post.0={written[0]},resid_pre.1={written[1]}"
    check_same(recipe(model, corpus, taps=",".join(taps), encode=encode, latents=4), tmp_path)


@pytest.mark.parametrize(
    "kind",
    some(
        ["gpt2", "gemma2-gqa", "gemma3-gqa", "mixtral-gqa", "gptoss-gqa", "neox", "olmo2-gqa",
         "bloom", "opt", "gptj", "glm4moe-gqa", "qwen2moe-mqa-mixed", "qwen35-gqa",
         "olmohybrid-gqa", "deepseek3", "mamba2", "nemotronh-gqa", "falconh1-gqa", "lfm2-gqa",
         "gemma4-gqa", "gemma4-experts-all", "kimilinear"]
    ),
)  # fmt: skip
def test_a_model_of_any_kind_can_be_swept(kind: str, corpus: Path, tmp_path: Path) -> None:
    model = families.randomised(families.FAMILIES[kind])
    families.save(model, tmp_path / "model")
    tiny.write_tokenizer(tmp_path / "model")
    taps = "embed,resid_pre:0,resid_post:all,logprob"
    taps += "" if kind == "mamba2" else ",z:all"
    if kind in ("mamba2", "nemotronh-gqa", "falconh1-gqa"):
        taps += ",conv_out:all,ssm_read:0,ssm_z:0.h1,ssm_out:all"
    if kind == "lfm2-gqa":
        taps += ",conv_in:0,conv_out:all,conv_gate:all"
    if kind in ("qwen35-gqa", "olmohybrid-gqa"):
        taps += ",q:all,conv_out:all,delta_state_norm:0,attn_gate:all,z:4.h1"
    if kind == "kimilinear":
        taps += ",conv_out:all,attn_gate:all,kv_latent:all,router_logits:all"
    if kind == "deepseek3":
        taps += ",kv_latent:all,k:0+1,v:all,z:1.h1"
    if kind.startswith("gemma4"):
        taps += ",k_rot:all,v:all,layer_embed:all,layer_embed_out:0+6"
    check_same(recipe(tmp_path / "model", corpus, taps=taps), tmp_path)


@pytest.mark.parametrize("spilled", some([0, 1], 1), ids=["on the device", "in host memory"])
@pytest.mark.full
def test_a_sweep_of_several_batches_is_the_sum_of_them(
    spilled: int, model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows do not depend on where the streams of batches wait for the next block."""
    given = recipe(model, corpus, taps="resid_post:0+2")
    whole = extracted(given, tmp_path / "whole", "resident")
    real = residency.Residency

    def longer(*fields: Any, **named: Any) -> Any:
        kept, rows, _, *others = fields
        return real(kept, rows, 3 * rows, *others, stream_bytes=spilled, **named)

    waiting: list[int] = []
    fetch = streamed.SpilledStreams.fetch

    def fetched(self: Any, passing: Any, number: int) -> None:
        fetch(self, passing, number)
        kinds = [each.stream.sharding.memory_kind for each in passing if each.stream is not None]
        waiting.append(kinds.count("pinned_host"))

    monkeypatch.setattr(residency, "Residency", longer)
    monkeypatch.setattr(streamed.SpilledStreams, "fetch", fetched)
    assert extracted(given, tmp_path / "swept", "disk") == whole
    assert max(waiting, default=0) == spilled, "of three, one is used and one arrives"


def test_a_sweep_holds_two_blocks_at_a_time(
    model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most: list[int] = []
    real = streamed.StreamedBlocks.used

    def used(self: Any, layer: int, result: Any) -> None:
        real(self, layer, result)
        most.append(len(self._coming) + len(self._reading))

    monkeypatch.setattr(streamed.StreamedBlocks, "used", used)
    given = recipe(model, corpus, taps="resid_post:2")
    spile.extract(given, tmp_path / "out", Runtime(weights="disk"))
    assert most and max(most) <= 2


@pytest.mark.full
@pytest.mark.parametrize("moment", some(["first", "later", "later, of parts"], "later"))
def test_a_disk_that_fails_in_a_sweep_ends_the_run_in_one_line(
    moment: str, model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "parts" in moment:  # one tensor holds queries, keys and values
        model = tmp_path / "model"
        families.save(families.randomised(families.FAMILIES["gpt2"]), model)
        tiny.write_tokenizer(model)
    given, out = recipe(model, corpus, taps="resid_post:2"), tmp_path / "out"
    real, reads = os.preadv, list[int]()

    def failing(descriptor: int, into: Sequence[memoryview], start: int) -> int:
        # (GPT-2's matrices are transposed, or hold several; nothing else is that large. And a row
        # of the embedding is no larger than that.)
        reads.extend([start] if len(into[0]) > (4096 if "parts" in moment else 128) else [])
        if len(reads) == {"first": 2, "later": 100}.get(moment, 30):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, into, start)

    def begins(self: StepLoader, *given: Any) -> Any:
        monkeypatch.setattr(os, "preadv", failing)
        return step(self, *given)

    step = StepLoader.step
    monkeypatch.setattr(StepLoader, "step", begins)
    with pytest.raises(InputError, match=r"model.safetensors: cannot be read \(Input/output"):
        extracted(given, out, "disk")
    monkeypatch.undo()
    assert extracted(given, out, "disk") == extracted(given, tmp_path / "whole", "resident")


def test_weights_other_than_the_datasets_are_refused_before_a_commit(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    given, out = recipe(model, corpus, taps="resid_post:0", unit_tokens=300), tmp_path / "out"
    spile.extract(given, out, Runtime(weights="disk", max_bytes=200_000))
    done = sorted(path.name for path in (out / "done").glob("*/*"))
    (out / "model.json").unlink()
    Ledger(open_objects(str(out))).check_weights({"model.embed_tokens.weight": 32 * "0"})
    with pytest.raises(DriftError, match="weights of"):
        spile.extract(given, out, Runtime(weights="disk"))
    assert sorted(path.name for path in (out / "done").glob("*/*")) == done


def test_processes_that_are_joined_do_not_stream() -> None:
    with pytest.raises(ConfigError, match="cannot stream"):
        residency.choose_residency(
            lambda rows: cast(Any, SimpleNamespace(device_bytes=0)),
            (1, 1),
            Runtime(weights="disk"),
            residency.Machine("gpu", processes=2),
            most_rows=1,
        )
