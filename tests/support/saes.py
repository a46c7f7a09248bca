"""Sparse autoencoders of random weights, laid out as SAELens and Gemma Scope publish theirs, and
transcoders as circuit-tracer does.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from spile.core.tensors import write_tensors

ARCHITECTURES = ("standard", "gated", "jumprelu", "topk")
WIDTH = 32  # of `tiny`'s model


def random_tensors(
    architecture: str, width: int = WIDTH, latents: int = 80, seed: int = 0
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"W_enc": (width, latents), "W_dec": (latents, width), "b_dec": (width,)}
    more = {"gated": ("b_gate", "b_mag", "r_mag"), "jumprelu": ("b_enc", "threshold")}
    shapes |= dict.fromkeys(more.get(architecture, ("b_enc",)), (latents,))
    tensors = {n: rng.standard_normal(s).astype(np.float32) * 0.5 for n, s in shapes.items()}
    if "threshold" in tensors:
        tensors["threshold"] = np.abs(tensors["threshold"])
    return tensors


def write_sae(
    folder: Path,
    kind: str = "jumprelu",
    *,
    hook: str | None = None,
    latents: int = 80,
    width: int = WIDTH,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write an SAE as SAELens 6 does; `changes` go into its cfg.json, and None removes a key."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(kind, width, latents, seed)
    write_tensors(folder / "sae_weights.safetensors", tensors)
    config = {
        "d_in": width,
        "d_sae": latents,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {"sae_lens_version": "6.54.12", **({"hook_name": hook} if hook else {})},
        "architecture": kind,
        **({"k": 9, "rescale_acts_by_decoder_norm": False} if kind == "topk" else {}),
        **changes,
    }
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "cfg.json").write_text(json.dumps(kept))
    return folder


def plain_encode(
    rows: np.ndarray,
    tensors: dict[str, np.ndarray],
    architecture: str,
    *,
    k: int = 9,
    subtract: bool = True,
    rescale: bool = False,
) -> np.ndarray:
    """Compute all latents of some rows in float64, by formulas written out for one row."""
    wide = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    found = np.zeros((len(rows), wide["W_enc"].shape[1]))
    for number, row in enumerate(rows.astype(np.float64)):
        inside = (row - wide["b_dec"] if subtract else row) @ wide["W_enc"]
        if architecture == "gated":
            size = inside * np.exp(wide["r_mag"]) + wide["b_mag"]
            found[number] = np.where(inside + wide["b_gate"] > 0, size.clip(0), 0)
            continue
        inside = inside + wide["b_enc"]
        if architecture == "jumprelu":
            found[number] = np.where(inside > wide["threshold"], inside.clip(0), 0)
        elif architecture == "topk":
            inside = inside * (np.sqrt((wide["W_dec"] ** 2).sum(axis=1)) if rescale else 1)
            chosen = sorted(range(len(inside)), key=lambda i: -inside[i])[:k]
            found[number, chosen] = inside[chosen].clip(0)
        else:
            found[number] = inside.clip(0)
    return found


def write_crosscoder(folder: Path, latents: int = 80) -> Path:
    """Write a crosscoder of two models, as dictionary_learning publishes one."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    shapes = {
        "encoder.weight": (2, WIDTH, latents), "encoder.bias": (latents,),
        "decoder.weight": (2, latents, WIDTH), "decoder.bias": (2, WIDTH),
    }  # fmt: skip
    tensors = {n: rng.standard_normal(s).astype(np.float32) * 0.3 for n, s in shapes.items()}
    write_tensors(folder / "model.safetensors", tensors)
    config = {"activation_dim": WIDTH, "dict_size": latents, "encoder_layers": None}
    (folder / "config.json").write_text(json.dumps({**config, "num_layers": 2}))
    return folder


def write_transcoders(folder: Path, layers: range, hook: str = "mlp.hook_in") -> Path:
    """Write a JumpReLU transcoder with a skip for each layer; its seed is the layer's number."""
    folder.mkdir(parents=True, exist_ok=True)
    for layer in layers:
        made = random_tensors("jumprelu", seed=layer)
        turned = np.ascontiguousarray(made.pop("W_enc").T)
        threshold = {"activation_function.threshold": made.pop("threshold")}
        tensors = {**made, **threshold, "W_enc": turned, "W_skip": skip_matrix(layer)}
        write_tensors(folder / f"layer_{layer}.safetensors", tensors)
    hooks = f"feature_input_hook: {hook}\nfeature_output_hook: hook_mlp_out\n"
    (folder / "config.yaml").write_text(f"model_kind: transcoder_set\n{hooks}")
    return folder


def write_cross_layer(
    folder: Path, layers: range, hook: str = "hook_resid_mid", decoders_from: int = 100
) -> Path:
    """Write a cross-layer transcoder of a model's first layers; a layer's seed is its number."""
    folder.mkdir(parents=True, exist_ok=True)
    for layer in layers:
        made = random_tensors("jumprelu", seed=layer)
        turned = np.ascontiguousarray(made.pop("W_enc").T)
        named = {name: made[name] for name in ("b_enc", "b_dec", "threshold")} | {"W_enc": turned}
        tensors = {f"{name}_{layer}": tensor for name, tensor in named.items()}
        write_tensors(folder / f"W_enc_{layer}.safetensors", tensors)
        decoders = {f"W_dec_{layer}": cross_decoders(layer, layers.stop, decoders_from)}
        write_tensors(folder / f"W_dec_{layer}.safetensors", decoders)
    hooks = f"feature_input_hook: {hook}\nfeature_output_hook: hook_mlp_out\n"
    (folder / "config.yaml").write_text(f"model_kind: cross_layer_transcoder\n{hooks}")
    return folder


def cross_decoders(layer: int, layers: int, seed: int = 100) -> np.ndarray:
    """What the latents of a layer write to it and to later ones: [latents, layers, width]."""
    rng = np.random.default_rng(seed + layer)
    return rng.standard_normal((80, layers - layer, WIDTH)).astype(np.float32) * 0.3


def skip_matrix(layer: int) -> np.ndarray:
    return np.random.default_rng(layer).standard_normal((WIDTH, WIDTH)).astype(np.float32)
