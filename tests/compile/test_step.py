"""`spile compile`: the step for devices that are not here."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import spile
from spile.cli.model import compile_text
from spile.compile.step import Compiled, Question, compile_step
from spile.compile.targets import CompileTarget, find_target
from spile.core.config import Recipe, Runtime
from spile.core.errors import ConfigError
from spile.models.config.hf_config import read_config
from spile.models.files.checkpoint import read_arch
from spile.models.files.lenses import tuned_files
from spile.models.layout import Layout
from spile.plan.chips import parse_topology
from spile.plan.splices import find_splices
from spile.run.step.resident import ResidentStep
from support import quick, saes, tiny, zygote
from support.libtpu import LIBTPU, needs_libtpu

CONFIGS = Path(__file__).parent.parent / "fixtures/configs"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds a config.json and nothing else."""
    directory = tmp_path_factory.mktemp("config")
    changes = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
    (directory / "config.json").write_text(json.dumps({**tiny.CONFIG, **changes}))
    return directory


def run(
    *arguments: object, on_libtpu: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `spile compile`; libtpu knows no flags of CPUs."""
    return zygote.run(
        [sys.executable, "-m", "spile.cli", "compile", *map(str, arguments)],
        env={**tiny.environment(), "XLA_FLAGS": "" if on_libtpu else quick.FLAGS},
        **options,
    )


def test_a_config_is_enough_for_a_pod_of_virtual_devices(config: Path) -> None:
    result = run(
        "--model", config, "--taps", "resid_post:2", "--topology", "v5e-16", "--on", "cpu",
        "--mesh", "data=8,model=2", "--batch-tokens", "128", "--seq-len", "64", "--json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["devices"], found["hosts"], found["mesh"]) == (16, 4, "data=8,model=2")
    assert found["tokens"] == 8 * 128
    sums = found["collectives"]["all-reduce"]
    assert sums["count"] == 2 * 3 + 1
    # What the CPU sends as float32 is bfloat16 on the chip: half as much.
    assert sums["sent"] == sums["count"] * 128 * 64 * 2
    assert found["fits"] is True and found["memory"] > 16e9
    assert found["tokens_per_second"] > found["tokens_one_by_one"] > 0
    assert found["dollars"] > found["dollars_spot"] > 0
    assert found["limit"] in found["seconds"]


@pytest.mark.full
def test_an_encoder_is_compiled_with_the_step_and_counted(config: Path, tmp_path: Path) -> None:
    sae = saes.write_sae(tmp_path / "sae", "topk", width=64, latents=4096)
    given = ("--model", config, "--taps", "resid_post:2", "--topology", "v5e-4", "--on", "cpu",
             "--mesh", "data=4", "--batch-tokens", "128", "--seq-len", "64", "--json")  # fmt: skip
    dense = json.loads(run(*given).stdout)
    result = run(*given, "--encode", sae, "--latents", "5")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    # Its matrix is bfloat16, and every device has it; five values of two bytes and their ids leave.
    assert found["weights"] - dense["weights"] >= 64 * 4096 * 2
    assert found["flops"] - dense["flops"] >= 2 * 64 * 4096 * 128
    assert found["taps"] < dense["taps"], "twenty bytes of a row instead of 128"
    scaled = run(*given, "--encode", sae, "--latents", "5", "--store-dtype", "int8")
    assert scaled.returncode == 0, scaled.stderr
    assert json.loads(scaled.stdout)["taps"] < found["taps"]
    refused = run(*given, "--encode", tmp_path / "nowhere")
    assert refused.returncode == 2 and "nowhere" in refused.stderr


def test_changes_are_compiled_with_the_step_and_counted(config: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "two.npy", np.eye(2, 64))
    sae = saes.write_sae(tmp_path / "sae", width=64, latents=4096)
    arch, target = read_arch(str(config)), find_target(None, None)
    recipe, runtime = Recipe(taps="resid_post:2", seq_len=64), Runtime(batch_tokens=128)
    splice = f"ablate:resid_post.0={tmp_path}/two.npy,replace-with-sae:mlp_out.1={sae}"
    clean, changed = (
        compile_step(question, question.layout())
        for question in (
            Question(arch, recipe, runtime, target, {}, find_splices(each, (), arch))
            for each in ("none", splice)
        )
    )
    products = 4 * 2 * 64 + 4 * 64 * 4096
    assert changed.flops - clean.flops == 128 * products
    assert changed.weights - clean.weights == 4 * (2 * 64 + 2 * 64 * 4096)  # in float32


def backward(config: Path, **options: Any) -> Compiled:
    recipe = Recipe(seq_len=64, compute_dtype="float32", **options)
    target = find_target(None, None)
    question = Question.of(read_arch(str(config)), recipe, Runtime(batch_tokens=128), target)
    return compile_step(question, question.layout())


def test_gradients_paths_and_edges_are_compiled_with_the_step_and_counted(config: Path) -> None:
    one, two = (
        backward(config, taps="mlp_out_attr:1", objective="logit-diff:a,b", steps=steps)
        for steps in (1, 2)
    )
    assert two.flops > 1.5 * one.flops
    edges = backward(config, taps="resid_post_edge:1", writers="embed,mlp_out:all")
    assert edges.taps > one.taps
    recipe = Recipe(taps="resid_post_edge:1", writers="z:all", seq_len=64)
    target = find_target(None, None)
    question = Question.of(read_arch(str(config)), recipe, Runtime(batch_tokens=128), target)
    work = question.workload(question.layout())
    apart = dataclasses.replace(work, writers=())
    assert work.flops - apart.flops == 128 * 2 * (2 * 64 * 64), "two layers' projections"
    assert all(each.temporaries for each in (one, two, edges))


@pytest.mark.full
def test_baselines_and_lenses_are_compiled_with_the_step(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    """Another dataset's rows stand beside each token; a lens has a matrix for each layer."""
    recipe = Recipe(
        model=str(model), corpus=str(corpus), taps="z:1", seq_len=64, max_docs=3,
        compute_dtype="float32",
    )  # fmt: skip
    spile.extract(recipe, tmp_path / "rows")
    spile.extract(dataclasses.replace(recipe, reduce="mean"), tmp_path / "means")
    options: dict[str, Any] = {"taps": "z_attr:1", "objective": "loss:assistant"}
    plain = backward(model, **options)
    for steps in (None, 2):
        means = backward(model, **options, steps=steps, baseline=str(tmp_path / "means"))
        rows = backward(model, **options, steps=steps, baseline=str(tmp_path / "rows"))
        assert rows.temporaries and means.temporaries
    assert backward(model, **options, baseline=str(tmp_path / "rows")).taps >= plain.taps
    arch = read_arch(str(model))
    maps = {1: (np.zeros((arch.width, arch.width)), np.zeros(arch.width))}
    (tmp_path / "lens").mkdir()
    for name, data in tuned_files(maps, layers=arch.num_layers, model="tiny").items():
        (tmp_path / "lens" / name).write_bytes(data)
    lensed = backward(model, taps="lens_top:1", lens=str(tmp_path / "lens"))
    assert lensed.temporaries
    assert lensed.flops > backward(model, taps="resid_post:1").flops


def test_blocks_that_are_streamed_have_no_edges(config: Path) -> None:
    arch, target = read_arch(str(config)), find_target("h200", "cpu")
    recipe = Recipe(taps="resid_post_edge:1", writers="embed", seq_len=64)
    question = Question.of(arch, recipe, Runtime(weights="disk"), target)
    with pytest.raises(ConfigError, match="--writers: edges need the values of several blocks at"):
        compile_step(question, question.layout())
    with pytest.raises(ConfigError, match="--taps is missing"):
        Question.of(arch, Recipe(seq_len=64), Runtime(), target)


def test_pooled_rows_and_sums_are_compiled_with_the_step_and_counted(config: Path) -> None:
    arch, target, runtime = read_arch(str(config)), find_target(None, None), Runtime(
        batch_tokens=128
    )  # fmt: skip

    def compiled(**options: str) -> Compiled:
        recipe = Recipe(taps="resid_post:0", seq_len=64, **options)
        question = Question(arch, recipe, runtime, target)
        return compile_step(question, question.layout())

    dense, pooled, sums = compiled(), compiled(pool="mean"), compiled(reduce="mean,cov")
    assert pooled.taps < dense.taps and "room for 4 documents" in " ".join(pooled.notes)
    assert sums.flops - dense.flops == 2 * 128 * 64 * 64, "of the products"
    assert sums.taps >= 4 * 2 * 64 * 64 and sums.store_dtype == "float64"
    for options, why in (
        ({"pool": "mean", "store_dtype": "int8"}, "int8 saves little"),
        ({"reduce": "cov:resid_post.0"}, "leave resid_post.0 out of --taps"),
    ):
        with pytest.raises(ConfigError, match=why):
            compiled(**options)


@pytest.mark.full
@pytest.mark.parametrize("options", [
    ("--pool", "max"), ("--reduce", "mean,var"), ("--reduce", "mean,cov"),
    ("--reduce", "cov:resid_post.2"),
])  # fmt: skip
def test_pooled_steps_are_compiled_for_a_mesh(config: Path, options: tuple[str, str]) -> None:
    result = run(
        "--model", config, "--taps", "resid_post:0-1,logprob", "--topology", "v5e-4", "--on", "cpu",
        "--mesh", "data=2,model=2", "--batch-tokens", "128", "--seq-len", "64", "--json", *options,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["fits"] is True and found["collectives"]["all-reduce"]["count"] > 0


@pytest.mark.full
def test_the_text_says_what_is_not_the_chips(config: Path) -> None:
    given = ("--model", config, "--taps", "q:1", "--topology", "v6e-8", "--seq-len", "64")
    result = run(*given, "--on", "cpu", "--search", "--batch-tokens", "64")
    assert result.returncode == 0, result.stderr
    for said in ("v6e-8: 8 devices on 1 host", "virtual CPU devices", "assumed", "tok/s"):
        assert said in result.stdout
    table = result.stdout.split("limited by\n")[1]
    assert {line.split()[0] for line in table.splitlines()} >= {"data=8", "data=4,model=2"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--topology", "v5e-9"), "choose from v5e-4"),
        (("--topology", "v5e-16", "--on", "qemu"), "--on must be one of libtpu, cpu, here"),
        (("--on", "cpu"), "needs a --topology"),
        (("--topology", "v5e-16", "--on", "here"), "this machine has"),
        (("--topology", "v5e-16", "--on", "cpu", "--mesh", "data=3"), "product is that"),
        (("--topology", "v5e-4", "--on", "cpu", "--seq-len", "512"), "at most 128"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    config: Path, arguments: tuple[str, ...], said: str
) -> None:
    result = run("--model", config, "--taps", "resid_post:0", *arguments)
    assert result.returncode == 2
    assert said in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.skipif(LIBTPU, reason="libtpu is here")
def test_without_libtpu_asking_for_it_is_one_line() -> None:
    with pytest.raises(ConfigError, match="libtpu is not installed.*--on cpu"):
        find_target("v5e-64", "libtpu")
    with pytest.raises(ConfigError, match="for TPUs"):
        find_target("h200", "libtpu")


@needs_libtpu
@pytest.mark.parametrize("topology", ["v4-8", "v5e-8", "v5e-64", "v6e-8", "v5p-8", "v5p-64"])
def test_libtpu_makes_as_many_devices_as_the_name_says(topology: str) -> None:
    code = (
        "from spile.compile.targets import find_target as f;"
        f"print(len(f({topology!r}, 'libtpu').devices))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == parse_topology(topology).chips


@needs_libtpu
def test_libtpu_compiles_the_step_and_says_what_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((CONFIGS / "Qwen2.5-7B.json").read_text())
    given = ("--model", tmp_path, "--taps", "resid_post:-1", "--topology", "v5e-16", "--json")
    found = json.loads(run(*given, "--mesh", "data=4,model=4", on_libtpu=True).stdout)
    assert found["on"] == "libtpu" and found["fits"] is True
    assert 0 < found["temporaries"] < 4e9
    assert found["collectives"]
    crowded = run(*given, "--mesh", "data=16", "--batch-tokens", "128k", on_libtpu=True)
    assert json.loads(crowded.stdout)["fits"] is False


def test_this_machines_devices_are_taken_if_nothing_is_named(config: Path) -> None:
    target = find_target(None, None)
    assert (target.on, target.platform) == ("here", jax.default_backend())
    recipe = Recipe(taps="resid_post:0", seq_len=16, store_dtype="int8")
    question = Question(read_arch(str(config)), recipe, Runtime(batch_tokens=32), target)
    found = compile_step(question, Layout(len(target.devices)))
    assert found.temporaries and found.taps and not found.collectives
    assert found.to_json()["on"] == "here"


def test_a_program_that_the_compiler_refuses_for_its_size_does_not_fit(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip = parse_topology("v5e-4").chip
    target = CompileTarget("v5e-4", chip, jax.devices()[:1], 1, "libtpu")
    recipe = Recipe(taps="resid_post:0", seq_len=16)
    question = Question(read_arch(str(config)), recipe, Runtime(batch_tokens=32), target)
    said = "RESOURCE_EXHAUSTED: CompileTimeHbmOom: Used 20.1G, exceeds available HBM (15.75G)"

    def refuse(*_: object) -> None:
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(ResidentStep, "compile", refuse)
    found = compile_step(question, Layout())
    assert found.fits is False
    assert (found.temporaries, found.tokens_per_second) == (None, None)
    assert any(said in note for note in found.notes)
    assert "does not fit" in compile_text([found])
    said = "INVALID_ARGUMENT: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        compile_step(question, Layout())


def pretended(topology: str, name: str, taps: str = "resid_post:-1", **given: Any) -> Question:
    """A question whose devices are never used: only their number matters."""
    wanted = parse_topology(topology)
    target = CompileTarget(topology, wanted.chip, [None] * wanted.chips, wanted.hosts, "cpu")
    arch = read_config(json.loads((CONFIGS / f"{name}.json").read_text()), name)[1]
    return Question(arch, Recipe(taps=taps), Runtime(**given), target)


@pytest.mark.parametrize(
    ("topology", "name", "mesh"),
    [
        ("v5e-64", "Qwen2.5-0.5B", "data=64"),
        ("v6e-8", "Llama-3.1-8B", "data=8"),
        ("v5e-8", "Llama-3.1-8B", "data=4,model=2"),
        ("v5e-64", "Llama-3.3-70B-Instruct", "data=4,fsdp=4,model=4"),
        ("v5p-64", "Llama-3.3-70B-Instruct", "data=16,model=2"),
        ("h200", "Llama-3.1-8B", "1"),
    ],
)
def test_auto_chooses_the_fastest_mesh_that_fits(topology: str, name: str, mesh: str) -> None:
    assert str(pretended(topology, name).layout()) == mesh


def test_a_step_has_as_many_rows_as_fit_unless_a_number_is_asked_for() -> None:
    layout = Layout(1, 1, 4)
    roomy = pretended("v5p-8", "Llama-3.1-8B").workload(layout)
    many = "resid_post:all,mlp_hidden:all,z:all"
    tight = pretended("v5e-4", "Llama-3.1-8B", many).workload(layout)
    assert (roomy.rows, roomy.seq_len) == (8, 2048)
    assert tight.rows < roomy.rows
    asked = pretended("v5e-4", "Llama-3.1-8B", "resid_post:all", batch_tokens="64k")
    assert asked.workload(layout).rows == 31
    assert not asked.holds(asked.workload(layout))


def test_a_t4_computes_in_float16_and_streams_what_it_cannot_hold() -> None:
    small = pretended("t4", "Qwen2.5-0.5B")
    work = small.workload(Layout())
    assert small.compute_dtype == "float16" and small.holds(work)
    assert not small.residency(work).streams
    assert pretended("h200", "Qwen2.5-0.5B").compute_dtype == "bfloat16"
    huge = pretended("t4", "Llama-3.1-8B")
    assert huge.residency(huge.workload(Layout())).streams


def test_rows_can_be_shared_by_all_hosts() -> None:
    work = pretended("v5e-64", "Llama-3.1-8B", batch_tokens="2048").workload(Layout(2, 1, 32))
    assert work.rows == 16


def test_a_search_leaves_out_what_cannot_hold_the_weights() -> None:
    layouts = pretended("v5e-16", "Llama-3.1-8B").layouts()
    assert Layout(16) not in layouts
    assert Layout(4, 1, 4) in layouts
    assert pretended("v5e-8", "Llama-3.3-70B-Instruct").layouts() == []


def test_a_model_larger_than_the_device_is_compiled_block_by_block() -> None:
    _, arch = read_config({**tiny.CONFIG, "num_hidden_layers": 24}, "deep")
    chip = dataclasses.replace(parse_topology("h200").chip, memory=350_000)
    target = CompileTarget("small", chip, jax.devices()[:1], 1, "cpu")
    recipe = Recipe(taps="resid_post:23", seq_len=64)
    found = {
        weights: compile_step(Question(arch, recipe, Runtime(weights=weights), target), Layout())
        for weights in ("auto", "resident")
    }
    assert found["auto"].fits and not found["resident"].fits
    assert found["auto"].weights < found["resident"].weights
    assert "in host memory" in found["auto"].kept and found["resident"].kept == "all on the device"
    assert found["auto"].host_memory > 0 and not found["resident"].host_memory
    text = compile_text([found["auto"]])
    assert "tokens pass each before the next" in text and "of blocks" in text
