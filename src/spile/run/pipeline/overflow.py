"""Find where a float16 product overflowed: the first tap of a context that is too large for it.

Products take float16 and add up in float32 (`--compute-dtype float16`), so the values at every site
are known, however large, and become NaN only where a product takes them. The model is read from its
files once more, block by block, for one context.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spile.models.forward.decoder import (
    Beside,
    Inputs,
    by_stage,
    changed_places,
    of_any_block,
    stage_kinds,
)
from spile.models.forward.ops import FLOAT16_MAX
from spile.models.forward.splice import load_changes
from spile.models.forward.streamed import Passing, SweptModel, load_blocks, walk
from spile.models.forward.weight_loader import ArrayLoader
from spile.models.forward.weights import LayerSchedule, WeightArrays
from spile.models.taps import Tap, all_taps
from spile.plan.job import ExtractionJob
from spile.run.step.devices import StepDevices
from spile.run.step.settings import Stage, StepSettings

# The sites whose values products take.
_FACTORS = ("attn_in", "ssm_in", "kv_latent", "q_rot", "k_rot", "v", "z", "ssm_z", "mlp_in",
            "mlp_hidden", "final_norm")  # fmt: skip


@dataclass(frozen=True)
class Overflow:
    """A tap whose values are too large for a float16 product."""

    tap: str
    largest: float

    @property
    def told(self) -> str:
        return (
            f"{self.tap} reaches {self.largest:,.0f}, and float16 holds at most {FLOAT16_MAX:,.0f}"
        )


class _Found(Exception):
    def __init__(self, overflow: Overflow | None) -> None:
        self.overflow = overflow


def find_overflow(job: ExtractionJob, context: np.ndarray, device: Any) -> Overflow | None:
    """Return the first overflow in a context's token ids; None if no tap shows one."""
    arch, depth = job.checkpoint.arch, job.layers
    schedule = LayerSchedule.of(arch, depth, whole=True).one_by_one
    settings = StepSettings(
        arch=arch,
        taps=(),
        schedule=schedule,
        place=StepDevices(device),
        compute_dtype="float16",
        store_dtype="float32",
    )
    loader = ArrayLoader(job.checkpoint, schedule, jnp.dtype(jnp.float16), None)
    blocks = load_blocks(loader, ["disk"] * depth, device)
    changes, _ = load_changes(job.splices, settings.computed, None)
    changed_places(changes)
    factors = [tap for tap in all_taps(arch) if tap.site in _FACTORS and _within(tap, job)]
    tapped, spliced = by_stage(factors, depth), by_stage(changes, depth)
    kinds = stage_kinds(arch, depth)[: depth + 1 + job.needs_head]
    ids = jnp.asarray(context[None], jnp.int32)
    inputs = Inputs(ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids))
    run_stage = jax.jit(partial(settings.stage_values, contexts=1), static_argnames="stage")

    def run(
        number: int, weights: WeightArrays, beside: Beside, each: Passing
    ) -> tuple[Any, Any, Any]:
        stage = Stage(
            kinds[number + 1],
            tuple(dict.fromkeys(map(of_any_block, tapped[number]))),
            tuple(map(of_any_block, spliced[number])),
            scores_all=False,
        )
        own = tuple(changes[tap] for tap in spliced[number])
        stream, onward, found = run_stage(
            stage=stage, weights=weights, changes=own, entering=(each.stream, beside), inputs=inputs
        )
        for tap in tapped[number]:
            largest = float(jnp.abs(found[of_any_block(tap).name]).max())
            if not largest <= FLOAT16_MAX:
                # NaN: the values come from an overflow that no tap shows, as inside an expert.
                raise _Found(Overflow(tap.name, largest) if np.isfinite(largest) else None)
        return stream, onward, stream

    model = SweptModel(blocks, loader.outer(head=job.needs_head))
    try:
        walk(kinds, model, [Passing()], run)
    except _Found as found:
        return found.overflow
    return None


def _within(tap: Tap, job: ExtractionJob) -> bool:
    """Whether a tap is computed on the way to the taps of a job."""
    return job.needs_head if tap.layer is None else tap.layer < job.layers
