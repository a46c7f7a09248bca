"""Load the references of a check: HF models that compute exactly, and as the recipe does."""

import importlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from spile.core.config import activation_dtype
from spile.core.libraries import import_library
from spile.core.system import available_memory
from spile.objects.paths import local_copy
from spile.plan.job import ExtractionJob

_log = logging.getLogger("spile.check")
Taps = Callable[..., dict[str, np.ndarray]]  # the taps of a context, by name


@dataclass(frozen=True)
class References:
    """The taps of a context, as the reference computes them in several ways."""

    exact: Taps
    rough: Taps  # as the recipe computes
    again: Taps  # alternatives to those: with noise, as correct
    told: str  # in which dtype the exact ones are, in words
    half: Taps | None = None  # in bfloat16, beside float8


def load_references(job: ExtractionJob) -> References:
    dtype = job.recipe.compute_dtype
    if dtype != "float32":
        model = _reference(job, "float16" if dtype == "float16" else activation_dtype(dtype))
        exact = _reference(job, "float32").taps
        if dtype == "float16":
            rough = partial(_in_float16, model)
            return References(exact, rough, rough, "in float32")
        if dtype != "float8_e4m3":
            return References(exact, model.taps, model.taps, "in float32")

        def multiplied(float8: bool, *context_and_names: Any, **options: Any) -> Any:
            model.multiply_in_float8(float8)
            return model.taps(*context_and_names, **options)

        rough = partial(multiplied, True)
        return References(exact, rough, rough, "in float32", half=partial(multiplied, False))
    torch = importlib.import_module("torch")
    both: Any = None
    try:
        _check_memory(job)
        both = _reference(job, "float64")
        both.taps(np.zeros(2, np.int64), {"logits", "router_logits"})
    except (MemoryError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
    else:
        reason = None
    if reason is not None:
        both = None  # free its memory first
        return _two_attentions(job, reason)

    def taps(dtype: Any, *context_and_names: Any, **options: Any) -> dict[str, np.ndarray]:
        both.compute_in(dtype)  # convert one model: a second one would need half as much again
        return both.taps(*context_and_names, **options)

    exact, rough = partial(taps, torch.float64), partial(taps, torch.float32)
    return References(exact, rough, rough, "in float64")


def _in_float16(model: Any, *context_and_names: Any, **options: Any) -> dict[str, np.ndarray]:
    """Compute in float16, or in bfloat16 from the first context on whose values are too large.

    Spile's stream is in float32, HF's is not.
    """
    torch = importlib.import_module("torch")
    with np.errstate(all="ignore"):
        found = model.taps(*context_and_names, **options)
    if all(np.isfinite(values).all() for values in found.values()):
        return found
    _log.warning("HF transformers overflows in float16; the floor is its distance in bfloat16")
    model.compute_in(torch.bfloat16)
    return model.taps(*context_and_names, **options)


def _two_attentions(job: ExtractionJob, reason: str) -> References:
    """Without float64, measure float32's precision by two attention implementations of HF."""
    model = _reference(job, "float32")
    try:
        model.attend_by("sdpa")
        spread = ", by the spread of eager and sdpa attention"
    except ValueError:
        spread = ""
    _log.warning("check compares in float32%s, without float64: %s", spread, reason)

    def taps(way: str, *context_and_names: Any, **options: Any) -> dict[str, np.ndarray]:
        model.attend_by(way)
        return model.taps(*context_and_names, **options)

    exact = partial(taps, "eager")
    rough = partial(taps, "sdpa") if spread else exact
    return References(exact, rough, exact, f"in float32{spread}")


def _check_memory(job: ExtractionJob) -> None:
    """Raise MemoryError if the model does not fit in float64; else the system would kill us."""
    needed = 8 * sum(math.prod(shape) for shape in job.checkpoint.shapes().values())
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        free: int = torch.cuda.mem_get_info()[0]
    else:
        free = available_memory() or needed
    if needed > free:
        raise MemoryError(
            f"the model takes {needed / 1e9:.1f} GB in float64, and {free / 1e9:.1f} GB are free"
        )


def _reference(job: ExtractionJob, dtype: str) -> Any:
    """Load the model with transformers, with access to its taps."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    reference = importlib.import_module("spile.check.reference")
    # Not from the recipe's stored sources: files may have moved since.
    directory, adapter = job.checkpoint.directory, job.checkpoint.adapter
    _log.info("loading %s with transformers in %s", directory, dtype)
    transformers.utils.logging.disable_progress_bar()
    with local_copy(directory) as folder:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        )
    if adapter:
        peft = import_library("peft", "check of an adapter", "peft")
        with local_copy(adapter.directory) as folder:
            model = peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lens = None
    if job.lens:
        rows = importlib.import_module("spile.check.lens_rows")
        lens = rows.LensRows(job.lens, job.checkpoint.arch)
    splices = importlib.import_module("spile.check.hf_splices").HfSplices(job.splices)
    return reference.Reference(model.to(device), splices, lens)


def versions() -> str:
    return ", ".join(
        f"{name} {importlib.import_module(name).__version__}" for name in ("transformers", "torch")
    )
