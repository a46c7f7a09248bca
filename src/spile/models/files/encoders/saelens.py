"""SAELens' own directories, of any version: `cfg.json` and `sae_weights.safetensors`."""

from spile.core.bounded_json import Json
from spile.models.files.encoders.sae import (
    ARCHITECTURES,
    NORMALIZATIONS,
    Sae,
    is_size,
    stored_tensors,
)
from spile.models.files.encoders.settings import SaeSettings
from spile.objects.paths import AnyPath, read_json

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"

_TRANSCODERS = {  # their kinds, by their names
    "transcoder": "standard", "skip_transcoder": "standard",
    "jumprelu_transcoder": "jumprelu", "jumprelu_skip_transcoder": "jumprelu",
}  # fmt: skip

# Keys of cfg.json about the training. None of them changes the latents.
_IGNORED = frozenset((
    "dtype", "device", "metadata", "model_name", "model_class_name", "hook_layer", "context_size",
    "model_from_pretrained_kwargs", "prepend_bos", "exclude_special_tokens", "neuronpedia_id",
    "seqpos_slice", "dataset_path", "dataset_trust_remote_code", "sae_lens_version",
    "sae_lens_training_version", "hf_hook_name", "finetuning_scaling_factor",
    "hook_name", "hook_name_out", "hf_hook_name_out", "hook_point", "hook_point_head_index",
    "hook_head_index",
    # (these belong to the decoder and to training)
    "l1_coefficient", "lp_norm", "l1_warm_up_steps", "use_ghost_grads", "noise_scale",
    "normalize_sae_decoder", "decoder_orthogonal_init", "decoder_heuristic_init",
    "decoder_heuristic_init_norm", "decoder_init_norm", "init_encoder_as_decoder_transpose",
    "scale_sparsity_penalty_by_decoder_norm", "mse_loss_normalization", "aux_loss_coefficient",
    "use_sparse_activations", "jumprelu_init_threshold", "jumprelu_bandwidth",
    "jumprelu_sparsity_loss_mode", "jumprelu_tanh_scale", "l0_coefficient", "l0_warm_up_steps",
    "pre_act_loss_coefficient", "n_batches_for_norm_estimate", "use_ste",
))  # fmt: skip


def read_saelens(folder: AnyPath) -> Sae:
    path = folder / CONFIG
    config = SaeSettings(str(path), read_json(path))
    architecture, k = config.take("architecture", "standard"), config.take("k", None)
    activation = config.take("activation_fn", config.take("activation_fn_str", "relu"))
    given: Json = config.take("activation_fn_kwargs", None) or {}
    if not isinstance(given, dict):
        config.refuse("activation_fn_kwargs", given, "an object")
    named = architecture if isinstance(architecture, str) else ""
    transcodes, architecture = named in _TRANSCODERS, _TRANSCODERS.get(named, architecture)
    # How SAELens before version 6 says it.
    if activation == "topk":
        architecture, k = "topk", given.get("k")
    if architecture not in ARCHITECTURES:
        config.refuse("architecture", architecture, ", ".join((*ARCHITECTURES, *_TRANSCODERS)))
    if activation not in ("relu", "topk") or (given and {*given} != {"k"}):
        config.refuse("activation_fn", f"{activation} {given or ''}".strip(), "relu or topk")
    if (architecture == "topk") != (k is not None) or (k is not None and not is_size(k)):
        config.refuse("k", k, "a number for topk, and for nothing else")
    normalize = config.take("normalize_activations", None) or "none"
    normalize = "expected_average_only_in" if normalize is True else normalize
    if normalize not in (NORMALIZATIONS[:1] if transcodes else NORMALIZATIONS):
        config.refuse(
            "normalize_activations", normalize,
            f"{', '.join(NORMALIZATIONS)}; if what it divides by is known, fold it into the "
            "weights (sae.fold_activation_norm_scaling_factor) and save it again",
        )  # fmt: skip
    reshape = config.take("reshape_activations", "none")
    if reshape not in ("none", "hook_z"):
        config.refuse("reshape_activations", reshape, "none or hook_z")
    about: Json = config.values.get("metadata")
    told = {**about, **config.values} if isinstance(about, dict) else config.values
    head = told.get("hook_head_index", config.take("hook_head_index", None))
    if head is not None:
        config.refuse("hook_head_index", head, "an encoder of all heads together")
    hook = told.get("hook_name", told.get("hook_point"))
    width, latents = config.take("d_in", None), config.take("d_sae", None)
    if not is_size(width) or not is_size(latents):
        config.refuse("d_in and d_sae", f"{width} and {latents}", "two numbers")
    subtracts = config.take("apply_b_dec_to_input", not transcodes)
    rescales = config.take("rescale_acts_by_decoder_norm", False)
    if type(subtracts) is not bool or type(rescales) is not bool:
        config.refuse("apply_b_dec_to_input or rescale_acts_by_decoder_norm", "neither", "a switch")
    target, writes = config.take("d_out", width), told.get("hook_name_out") if transcodes else None
    if not is_size(target) or (target != width and not transcodes):
        config.refuse("d_out", target, "a number, for transcoders")
    config.refuse_unknown(_IGNORED)
    return Sae(
        directory=folder, file=folder / WEIGHTS, architecture=architecture, width=width,
        latents=latents, k=min(k, latents) if k else None, normalize=normalize,
        subtracts=subtracts and not transcodes, rescales=rescales and architecture == "topk",
        hook=hook if isinstance(hook, str) else None,
        writes=writes if isinstance(writes, str) else None, target=target,
        skips=transcodes and "skip" in named,
        places=stored_tensors(folder / WEIGHTS, {"W_skip": "W_skip T"}),
    )  # fmt: skip
