"""Make a small encoder of every published kind with its own project's code, and what it computes.

python scripts/make_encoder_fixtures.py tests/fixtures/encoders

Run it with a Python that has torch 2.13.0 and sae-lens 6.54.12, and beside them, installed with
`--no-deps`, dictionary-learning 0.1.0, eai-sparsify 1.3.3, llamascopium 2.0.0b34 and circuit-tracer
0.5.0 (with natsort).
Crosscoders are made if the variable CROSSCODERS names a folder with two checkouts of GitHub:
jkminder/dictionary_learning@48debb2 in `dictionary_learning`, and in `kissane`
ckkissane/crosscoder-model-diff-replication.
Weights are random, in float32. Each folder NAME has the project's files, as its own code saves
them, and `wanted.npz`: `rows`, their `latents` and the `decoded` rows, by the project's own code.
What is there stays as it is; remove a folder to make it anew.
`tests/models/files/encoders/test_layouts.py` reads them.
"""

import importlib
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

WIDTH, LATENTS, K, ROWS = 16, 48, 6, 20
NAMES = ("rows", "latents", "decoded")


def bare(name: str) -> types.ModuleType:
    """Import a package without running its `__init__`, which may need an engine."""
    spec = importlib.util.find_spec(name)
    assert spec and spec.submodule_search_locations
    module = types.ModuleType(name)
    module.__path__ = list(spec.submodule_search_locations)
    sys.modules[name] = module
    return module


for package in (
    "dictionary_learning", "sparsify", "circuit_tracer", "circuit_tracer.transcoder",
    "llamascopium", "llamascopium.models", "llamascopium.backend", "llamascopium.utils",
):  # fmt: skip
    bare(package)
bare("circuit_tracer.utils").get_default_device = lambda: torch.device("cpu")  # type: ignore
dictionary = importlib.import_module("dictionary_learning.dictionary")
top_k = importlib.import_module("dictionary_learning.trainers.top_k")
batch_top_k = importlib.import_module("dictionary_learning.trainers.batch_top_k")
matryoshka = importlib.import_module("dictionary_learning.trainers.matryoshka_batch_top_k")
sparse_coder = importlib.import_module("sparsify.sparse_coder")
single_layer = importlib.import_module("circuit_tracer.transcoder.single_layer_transcoder")
cross_layer = importlib.import_module("circuit_tracer.transcoder.cross_layer_transcoder")
loaders = importlib.import_module("sae_lens.loading.pretrained_sae_loaders")
sae_lens = importlib.import_module("sae_lens")
openmoss = importlib.import_module("llamascopium.models.sae")

Made = tuple[Any, Any, Any]  # rows, latents, decoded
_MADE: dict[str, Callable[[Path], Made]] = {}


def kind(function: Callable[[Path], Made]) -> Callable[[Path], Made]:
    _MADE[function.__name__] = function
    return function


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, ROWS, WIDTH)


def randomized(module: Any) -> Any:
    """Give every parameter random values, positive where it is a threshold."""
    for name, values in module.state_dict().items():
        if not torch.is_floating_point(values):
            continue
        values.copy_(torch.randn(values.shape) * 0.4)
        if "threshold" in name:
            values.abs_()
    return module


# -- dictionary_learning -----------------------------------------------------------------------


def saved_dictionary(folder: Path, made: Any, **trainer: Any) -> Made:
    torch.save(randomized(made).state_dict(), folder / "ae.pt")
    if trainer.pop("threshold", None):
        state = made.state_dict()
        state["threshold"].fill_(0.7)
        torch.save(state, folder / "ae.pt")
    about = {
        "trainer_class": "Trainer", "dict_class": type(made).__name__, "activation_dim": WIDTH,
        "dict_size": LATENTS, "layer": 1, "lm_name": "EleutherAI/pythia-70m-deduped",
        "submodule_name": "resid_post_layer_1", "seed": 0, "steps": 10, **trainer,
    }  # fmt: skip
    about = {"trainer": about, "buffer": {"d_submodule": WIDTH, "ctx_len": 128}}
    (folder / "config.json").write_text(json.dumps(about, indent=1))
    path = str(folder / "ae.pt")
    loaded = type(made).from_pretrained(path, **({"k": K} if "k" in trainer else {}))
    x = rows()
    latents = loaded.encode(x)
    return x, latents, loaded.decode(latents)


@kind
def dictionary_learning_standard(folder: Path) -> Made:
    return saved_dictionary(folder, dictionary.AutoEncoder(WIDTH, LATENTS))


@kind
def dictionary_learning_new(folder: Path) -> Made:
    return saved_dictionary(folder, dictionary.AutoEncoderNew(WIDTH, LATENTS))


@kind
def dictionary_learning_gated(folder: Path) -> Made:
    return saved_dictionary(folder, dictionary.GatedAutoEncoder(WIDTH, LATENTS))


@kind
def dictionary_learning_jumprelu(folder: Path) -> Made:
    return saved_dictionary(folder, dictionary.JumpReluAutoEncoder(WIDTH, LATENTS))


@kind
def dictionary_learning_topk(folder: Path) -> Made:
    return saved_dictionary(folder, top_k.AutoEncoderTopK(WIDTH, LATENTS, K), k=K, threshold=True)


@kind
def dictionary_learning_batchtopk(folder: Path) -> Made:
    made = batch_top_k.BatchTopKSAE(WIDTH, LATENTS, K)
    return saved_dictionary(folder, made, k=K, threshold=True)


@kind
def dictionary_learning_matryoshka(folder: Path) -> Made:
    made = matryoshka.MatryoshkaBatchTopKSAE(WIDTH, LATENTS, K, [16, 32])
    return saved_dictionary(folder, made, k=K, threshold=True, group_sizes=[16, 32])


# -- sparsify ----------------------------------------------------------------------------------


def saved_coder(folder: Path, name: str, **settings: Any) -> Made:
    config = sparse_coder.SparseCoderConfig(num_latents=LATENTS, k=K, **settings)
    made = randomized(sparse_coder.SparseCoder(WIDTH, config))
    made.save_to_disk(folder / name)
    loaded = sparse_coder.SparseCoder.load_from_disk(folder / name)
    x = rows()
    top = loaded.encode(x)
    latents = torch.zeros(ROWS, LATENTS).scatter(1, top.top_indices, top.top_acts)
    return x, latents, loaded(x).sae_out


@kind
def sparsify(folder: Path) -> Made:
    return saved_coder(folder, "layers.1")


@kind
def sparsify_transcoder(folder: Path) -> Made:
    return saved_coder(folder, "layers.1.mlp", transcode=True, skip_connection=True)


# -- SAELens, and those that its loaders read --------------------------------------------------


@kind
def qwen_scope(folder: Path) -> Made:
    """Shapes of `Qwen/SAE-Res-*`; SAELens is the only published code that loads them."""
    name = f"SAE-Res-Qwen3-1.7B-Base-W32K-L0_{K}"
    (folder / name).mkdir()
    shapes = {"W_enc": (LATENTS, WIDTH), "W_dec": (WIDTH, LATENTS), "b_enc": (LATENTS,),
              "b_dec": (WIDTH,)}  # fmt: skip
    for layer in range(2):
        made = {tensor: torch.randn(shape) * 0.4 for tensor, shape in shapes.items()}
        torch.save(made, folder / name / f"layer{layer}.sae.pt")
    loaders.hf_hub_download = lambda repo_id, filename, **_: str(folder / name / filename)
    config, state, _ = loaders.qwen_scope_sae_huggingface_loader(f"Qwen/{name}", "layer1.sae.pt")
    return by_saelens({**config, "d_in": WIDTH, "d_sae": LATENTS}, state)


@kind
def llama_scope(folder: Path) -> Made:
    """Shapes of `fnlp/Llama3_1-8B-Base-LXR-8x`; by SAELens's loader, with its scale folded in."""
    (folder / "checkpoints").mkdir()
    shapes = {"encoder.weight": (LATENTS, WIDTH), "encoder.bias": (LATENTS,),
              "decoder.weight": (WIDTH, LATENTS), "decoder.bias": (WIDTH,)}  # fmt: skip
    made = {tensor: torch.randn(shape) * 0.4 for tensor, shape in shapes.items()}
    save_file(made, folder / "checkpoints" / "final.safetensors")
    length = 6.3125
    about = {
        "d_model": WIDTH, "d_sae": LATENTS, "use_decoder_bias": True, "act_fn": "jumprelu",
        "apply_decoder_bias_to_pre_encoder": False, "jump_relu_threshold": 1.2021484375,
        "norm_activation": "dataset-wise", "top_k": 50, "sparsity_include_decoder_norm": True,
        "dataset_average_activation_norm": {"in": length, "out": length},
        "hook_point_in": "blocks.1.hook_resid_post", "hook_point_out": "blocks.1.hook_resid_post",
    }  # fmt: skip
    (folder / "hyperparams.json").write_text(json.dumps(about, indent=1))
    loaders.hf_hub_download = lambda repo_id, filename, subfolder="", **_: str(
        folder / subfolder.removeprefix("x").strip("/") / filename.removeprefix("x/")
    )
    config, state, _ = loaders.llama_scope_sae_huggingface_loader(
        "fnlp/x", "x", cfg_overrides={"dtype": "float32"}
    )
    return by_saelens(config, state, WIDTH**0.5 / length)


def saved_by_saelens(folder: Path, architecture: str) -> Made:
    registry = importlib.import_module("sae_lens.registry")
    sae_class, config_class = registry.get_sae_class(architecture)
    config = config_class(d_in=WIDTH, d_sae=LATENTS, d_out=WIDTH // 2, apply_b_dec_to_input=False)
    config.metadata.hook_name = "blocks.1.mlp.hook_in"
    config.metadata.hook_name_out = "blocks.1.hook_mlp_out"
    randomized(sae_class(config)).save_model(folder)
    loaded = sae_lens.SAE.load_from_disk(folder)
    x = rows()
    return x, loaded.encode(x), loaded(x)


@kind
def saelens_transcoder(folder: Path) -> Made:
    return saved_by_saelens(folder, "transcoder")


@kind
def saelens_skip_transcoder(folder: Path) -> Made:
    return saved_by_saelens(folder, "jumprelu_skip_transcoder")


def by_saelens(config: dict[str, Any], state: dict[str, Any], scale: float | None = None) -> Made:
    registry = importlib.import_module("sae_lens.registry")
    config = loaders.handle_pre_6_0_config(config)
    sae_class, config_class = registry.get_sae_class(config["architecture"])
    made = sae_class(config_class.from_dict(config))
    made.process_state_dict_for_loading(state)
    made.load_state_dict(state)
    if scale:
        made.fold_activation_norm_scaling_factor(scale)
    x = rows()
    latents = made.encode(x)
    decoded = made(x) if hasattr(made, "W_skip") else made.decode(latents)
    return x, latents, decoded


# -- circuit-tracer ----------------------------------------------------------------------------


def saved_transcoders(folder: Path, activation: Any, *, skip: bool) -> Made:
    made = [
        randomized(
            single_layer.SingleLayerTranscoder(
                WIDTH, LATENTS, activation(), layer, skip_connection=skip, dtype=torch.float32
            )
        )
        for layer in range(2)
    ]
    hooks = ("mlp.hook_in", "hook_mlp_out")
    single_layer.TranscoderSet(dict(enumerate(made)), *hooks).to_safetensors(str(folder))
    about = f'model_name: "x/y"\nmodel_kind: transcoder_set\nfeature_input_hook: "{hooks[0]}"\n'
    (folder / "config.yaml").write_text(about + f'feature_output_hook: "{hooks[1]}"\nscan: "x"\n')
    loaded = single_layer.load_relu_transcoder(str(folder / "layer_1.safetensors"), 1)
    x = rows()
    return x, loaded.encode(x), loaded(x)


@kind
def circuit_tracer_relu(folder: Path) -> Made:
    return saved_transcoders(folder, lambda: torch.nn.functional.relu, skip=False)


@kind
def circuit_tracer_skip(folder: Path) -> Made:
    def activation() -> Any:
        return single_layer.JumpReLU(torch.zeros(LATENTS))

    return saved_transcoders(folder, activation, skip=True)


@kind
def circuit_tracer_clt(folder: Path) -> Made:
    """Three layers; `rows`, `latents` and `decoded` have a first axis of layers."""
    made = cross_layer.CrossLayerTranscoder(
        3, LATENTS, WIDTH, "jump_relu", lazy_decoder=False, dtype=torch.float32
    )
    randomized(made).to_safetensors(str(folder))
    about = 'model_name: "x/y"\nmodel_kind: cross_layer_transcoder\n'
    hooks = 'feature_input_hook: "hook_resid_mid"\nfeature_output_hook: "hook_mlp_out"\n'
    (folder / "config.yaml").write_text(about + hooks)
    loaded = cross_layer.load_clt(str(folder), dtype=torch.float32)
    x = rows(3)
    return x, loaded.encode(x), loaded(x)


# -- Gemma Scope, by circuit-tracer's loaders --------------------------------------------------

_PARAMS = {"w_enc": (WIDTH, LATENTS), "w_dec": (LATENTS, WIDTH), "b_enc": (LATENTS,),
           "b_dec": (WIDTH,), "threshold": (LATENTS,)}  # fmt: skip


def params(**more: tuple[int, ...]) -> dict[str, torch.Tensor]:
    made = {name: torch.randn(shape) * 0.4 for name, shape in {**_PARAMS, **more}.items()}
    made["threshold"].abs_()
    return made


def gemma_config(reads: str, writes: str | None = None, **more: Any) -> str:
    layer = "model.layers.1."
    about = {"architecture": "jump_relu", "model_name": "gemma-v3-270m-pt", "width": LATENTS,
             "hf_hook_point_in": layer + reads, "l0": 10, **more}  # fmt: skip
    return json.dumps(about | ({"hf_hook_point_out": layer + writes} if writes else {}))


@kind
def gemma_scope_transcoder(folder: Path) -> Made:
    upper = {("W" + n[1:] if n[0] == "w" else n): t.numpy() for n, t in params().items()}
    np.savez(folder / "params.npz", **upper)
    loaded = single_layer.load_gemma_scope_transcoder(str(folder / "params.npz"), 1)
    x = rows()
    return x, loaded.encode(x), loaded(x)


@kind
def gemma_scope_2(folder: Path) -> Made:
    (folder / "config.json").write_text(gemma_config("output"))
    return saved_gemma_scope_2(folder, params())


@kind
def gemma_scope_2_transcoder(folder: Path) -> Made:
    config = gemma_config(
        "pre_feedforward_layernorm.output", "post_feedforward_layernorm.output",
        affine_connection=True,
    )  # fmt: skip
    (folder / "config.json").write_text(config)
    return saved_gemma_scope_2(folder, params(affine_skip_connection=(WIDTH, WIDTH)))


def saved_gemma_scope_2(folder: Path, made: dict[str, torch.Tensor]) -> Made:
    save_file(made, folder / "params.safetensors")
    loaded = single_layer.load_gemma_scope_2_transcoder(str(folder / "params.safetensors"), 1)
    x = rows()
    return x, loaded.encode(x), loaded(x)


@kind
def gemma_scope_2_clt(folder: Path) -> Made:
    """As above, three layers; circuit-tracer stacks them."""
    (folder / "config.json").write_text(
        gemma_config("pre_feedforward_layernorm.output", "post_feedforward_layernorm.output")
    )
    paths: dict[int, str] = {}
    for layer in range(3):
        paths[layer] = str(folder / f"params_layer_{layer}.safetensors")
        save_file(params(w_dec=(LATENTS, 3, WIDTH)), paths[layer])
    # (It reads `max(paths)` of them, one less than there are.)
    loaded = cross_layer.load_gemma_scope_2_clt({**paths, 3: ""}, dtype=torch.float32)
    x = rows(3)
    return x, loaded.encode(x), loaded(x)


# -- OpenMOSS ----------------------------------------------------------------------------------


def saved_by_llamascopium(folder: Path, writes: str, lengths: Any, **settings: Any) -> Made:
    """Shapes of `OpenMOSS-Team/Llama-Scope-2-*`; `lengths`: of rows that it reads and writes."""
    config = openmoss.SAEConfig(
        d_model=WIDTH, expansion_factor=LATENTS / WIDTH, top_k=K, dtype=torch.float32,
        device="cpu", hook_point_out=f"blocks.1.{writes}", **settings,
    )  # fmt: skip
    made = randomized(openmoss.SparseAutoEncoder(config))
    hooks = config.hook_point_in, config.hook_point_out
    if lengths:
        made.set_dataset_average_activation_norm(dict(zip(hooks, lengths, strict=True)))
    made.save_pretrained(folder)
    config.save_hyperparameters(folder)
    loaded = openmoss.SparseAutoEncoder.from_local(str(folder))
    x = rows()
    given = {hooks[0]: x, hooks[1]: x}
    scaled, factors = loaded.normalize_activations(given, return_scale_factor=True)
    latents = loaded.encode(scaled[hooks[0]])
    decoded = loaded.denormalize_activations({hooks[1]: loaded.decode(latents)}, factors)
    return x, latents, decoded[hooks[1]]


@kind
def llama_scope_2(folder: Path) -> Made:
    stream = "hook_resid_post"
    return saved_by_llamascopium(
        folder, stream, (6.25, 6.25), hook_point_in=f"blocks.1.{stream}", act_fn="jumprelu"
    )


@kind
def llama_scope_2_transcoder(folder: Path) -> Made:
    return saved_by_llamascopium(
        folder, "hook_mlp_out", (2.5, 0.75), hook_point_in="blocks.1.ln2.hook_normalized",
        act_fn="topk",
    )  # fmt: skip


@kind
def llama_scope_2_folded(folder: Path) -> Made:
    stream = "hook_resid_post"
    return saved_by_llamascopium(
        folder, stream, None, hook_point_in=f"blocks.1.{stream}", act_fn="topk",
        norm_activation="inference", sparsity_include_decoder_norm=False,
    )  # fmt: skip


# -- crosscoders -------------------------------------------------------------------------------

CROSSCODERS = Path(os.environ.get("CROSSCODERS", "none"))


def checked_out(path: Path, name: str) -> types.ModuleType:
    """Import a file of a checkout, under a name of its own."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def paired_dictionaries() -> types.ModuleType:
    """Import the dictionaries of the branch that has crosscoders, beside the package's own."""
    folder = CROSSCODERS / "dictionary_learning" / "dictionary_learning"
    package = types.ModuleType("paired")
    package.__path__ = [str(folder)]
    sys.modules["paired"] = package
    utils = types.ModuleType("paired.utils")
    utils.set_decoder_norm_to_unit_norm = None  # type: ignore
    sys.modules["paired.utils"] = utils
    return checked_out(folder / "dictionary.py", "paired.dictionary")


def saved_crosscoder(folder: Path, made: Any, **trainer: Any) -> Made:
    """Save it to `ae.pt` with its trainer's settings, or as the Hub has it without any."""
    loader = type(made).from_pretrained
    if trainer:
        about = {"dict_class": type(made).__name__, "activation_dim": WIDTH, "layer": 1,
                 "dict_size": LATENTS, "num_layers": 2, **trainer}  # fmt: skip
        (folder / "config.json").write_text(json.dumps({"trainer": about}, indent=1))
        torch.save(made.state_dict(), folder / "ae.pt")
        loaded = loader(str(folder / "ae.pt"))
    else:
        made.save_pretrained(folder)
        (folder / "README.md").unlink()
        loaded = loader(str(folder), from_hub=True)
    x = rows().reshape(ROWS // 2, 2, WIDTH) * 1.5
    latents = loaded.encode(x)
    return x.flatten(1), latents, loaded.decode(latents).flatten(1)


def randomized_crosscoder(made: Any) -> Any:
    for name in ("encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"):
        made.state_dict()[name].copy_(torch.randn(made.state_dict()[name].shape) * 0.3)
    return made


if CROSSCODERS.is_dir():
    paired = paired_dictionaries()

    @kind
    def crosscoder(folder: Path) -> Made:
        return saved_crosscoder(
            folder, randomized_crosscoder(paired.CrossCoder(WIDTH, LATENTS, 2, target_rms=1.0))
        )

    @kind
    def crosscoder_batchtopk(folder: Path) -> Made:
        made = paired.BatchTopKCrossCoder(
            WIDTH, LATENTS, 2, k=K, activation_mean=torch.randn(2, WIDTH), target_rms=2.0,
            activation_std=torch.rand(2, WIDTH) + 0.5, code_normalization="MIXED",
        )  # fmt: skip
        randomized_crosscoder(made).state_dict()["threshold"].fill_(0.9)
        return saved_crosscoder(folder, made)

    @kind
    def crosscoder_trained(folder: Path) -> Made:
        made = paired.BatchTopKCrossCoder(WIDTH, LATENTS, 2, k=K)
        randomized_crosscoder(made).state_dict()["threshold"].fill_(3.0)
        return saved_crosscoder(folder, made, code_normalization="CROSSCODER", k=K)

    @kind
    def crosscoder_kissane(folder: Path) -> Made:
        names = {"torch": torch, "einops": importlib.import_module("einops"), "json": json}
        sys.modules["utils"] = types.ModuleType("utils")
        vars(sys.modules["utils"]).update(names, Path=Path)
        published = checked_out(CROSSCODERS / "kissane" / "crosscoder.py", "kissane")
        about = {"d_in": WIDTH, "dict_size": LATENTS, "enc_dtype": "fp32", "seed": 0,
                 "dec_init_norm": 0.08, "device": "cpu",
                 "hook_point": "blocks.1.hook_resid_pre"}  # fmt: skip
        (folder / "cfg.json").write_text(json.dumps(about, indent=1))
        torch.save(randomized(published.CrossCoder(about)).state_dict(), folder / "cc_weights.pt")
        published.hf_hub_download = lambda repo_id, filename: str(folder / Path(filename).name)
        loaded = published.CrossCoder.load_from_hf()
        x = rows().reshape(ROWS // 2, 2, WIDTH)
        latents = loaded.encode(x)
        return x.flatten(1), latents, loaded.decode(latents).flatten(1)


def main(to: Path) -> None:
    for name, make in _MADE.items():
        if (to / name).exists():
            continue
        (to / name).mkdir(parents=True)
        torch.manual_seed(len(name) * 1000 + sum(name.encode()))
        with torch.no_grad():
            made = make(to / name)
        arrays = {n: v.detach().numpy() for n, v in zip(NAMES, made, strict=True)}
        active = (arrays["latents"] != 0).mean()
        assert 0.02 < active < 0.7, (name, active)
        np.savez_compressed(to / name / "wanted.npz", **arrays)
        print(f"{name}: {active:.2f} of its latents are active")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
