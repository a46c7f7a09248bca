"""What a job will cost, before it runs: documents, tokens, bytes, memory. No jax."""

from dataclasses import dataclass

from spile.config import Runtime
from spile.engine.resolve import Job
from spile.errors import ConfigError
from spile.index import INDEX_DTYPE
from spile.models.specs import num_params
from spile.tensors import DTYPES_BY_NAME

_BATCH_TOKENS = {"cpu": 1024}  # 2048 and more were slower on every CPU run tried
_BATCH_TOKENS_ACCELERATOR = 16384


@dataclass(frozen=True)
class Estimate:
    """Sizes are bytes; tokens and what follows from them are estimated from a sample."""

    documents: int
    tokens: int
    units: int
    units_done: int
    bytes_per_tap: dict[str, int]
    index_bytes: int
    remaining_bytes: int
    free_bytes: int | None
    batch_rows: int
    weights_bytes: int
    device_bytes: int
    host_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_per_tap.values()) + self.index_bytes


def batch_rows(job: Job, runtime: Runtime, platform: str) -> int:
    """Packed rows in a step: enough tokens for the device, never more than a unit holds."""
    tokens = runtime.batch_tokens or _BATCH_TOKENS.get(platform, _BATCH_TOKENS_ACCELERATOR)
    largest = max(unit.tokens for unit in job.units)
    return max(1, min(tokens // job.recipe.seq_len, -(-largest // job.recipe.seq_len)))


def estimate(
    job: Job, runtime: Runtime, platform: str, *, done: set[int], free_bytes: int | None
) -> Estimate:
    """Add up a job."""
    recipe, arch = job.recipe, job.checkpoint.arch
    tokens = sum(unit.tokens for unit in job.units)
    store, compute = (
        DTYPES_BY_NAME[name].itemsize for name in (recipe.store_dtype, recipe.compute_dtype)
    )
    per_token = sum(job.table.taps.values()) * store
    remaining = sum(unit.tokens for unit in job.units if unit.id not in done)
    rows = batch_rows(job, runtime, platform)
    step_tokens = rows * recipe.seq_len
    weights = num_params(arch, job.layers, head=job.needs_head) * compute
    # What lives at once inside a block: the stream, q, k, v, the MLP's two halves.
    block = 4 * arch.width + 2 * arch.num_heads * arch.head_dim + 3 * arch.mlp_width
    # Away from the CPU every pair of a row is scored, in float32, and once more by the softmax.
    scores = 0 if platform == "cpu" else 2 * 4 * rows * arch.num_heads * recipe.seq_len**2
    taps = step_tokens * per_token
    in_flight = 2 * runtime.queue_depth + 1
    return Estimate(
        documents=sum(unit.num_docs for unit in job.units),
        tokens=tokens,
        units=len(job.units),
        units_done=len(done),
        bytes_per_tap={tap: tokens * width * store for tap, width in job.table.taps.items()},
        index_bytes=tokens * INDEX_DTYPE.itemsize,
        remaining_bytes=remaining * (per_token + INDEX_DTYPE.itemsize),
        free_bytes=free_bytes,
        batch_rows=rows,
        weights_bytes=weights,
        device_bytes=weights + taps + step_tokens * block * compute + scores * (job.layers > 0),
        host_bytes=in_flight * taps + 64 * max(unit.tokens for unit in job.units),
    )


def refuse_if_too_large(cost: Estimate, where: str) -> None:
    """Stop before a run that would fill the disk."""
    if cost.free_bytes is not None and cost.remaining_bytes > cost.free_bytes:
        raise ConfigError(
            f"{where}: about {cost.remaining_bytes / 1e9:.2f} GB would be written, "
            f"{cost.free_bytes / 1e9:.2f} GB are free; choose fewer taps or documents, or "
            "--ignore-space"
        )
