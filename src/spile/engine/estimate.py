"""What a job will cost, before it runs: documents, tokens, bytes, memory. No jax."""

from collections.abc import Iterator
from dataclasses import dataclass

from spile.config import Runtime
from spile.engine.resolve import Job
from spile.errors import ConfigError
from spile.index import INDEX_DTYPE
from spile.models.specs import num_params
from spile.tensors import DTYPES_BY_NAME, HEADER_ALIGN

_BATCH_TOKENS = {"cpu": 1024}  # 2048 and more were slower on every CPU run tried
_BATCH_TOKENS_ACCELERATOR = 16384


@dataclass(frozen=True)
class Estimate:
    """Sizes are bytes; tokens and what follows from them are estimated from a sample."""

    documents: int
    tokens: int
    rows: int
    units: int
    units_done: int
    bytes_per_tap: dict[str, int]
    index_bytes: int
    overhead_bytes: int
    remaining_bytes: int
    free_bytes: int | None
    batch_rows: int
    weights_bytes: int
    device_bytes: int
    host_bytes: int
    warnings: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_per_tap.values()) + self.index_bytes + self.overhead_bytes


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
    compute = DTYPES_BY_NAME[recipe.compute_dtype].itemsize
    kept, table = job.table.kept, job.table.taps
    per_row = sum(info.row_bytes for info in table.values())
    remaining = sum(unit.tokens for unit in job.units if unit.id not in done) * kept
    rows = batch_rows(job, runtime, platform)
    step_tokens = rows * recipe.seq_len
    weights = num_params(arch, job.layers, head=job.needs_head) * compute
    # What lives at once inside a block: the stream, q, k, v, the MLP's two halves (of each
    # expert a token goes to).
    inner = arch.mlp_width * (arch.experts.chosen if arch.experts else 1)
    block = 4 * arch.width + 2 * arch.num_heads * arch.head_dim + 3 * inner
    # Away from the CPU, or where they are tapped, every pair of a row is scored, in float32, and
    # once more by the softmax.
    scored = platform != "cpu" or any(tap.site == "attn_pattern" for tap in job.taps)
    scores = 2 * 4 * rows * arch.num_heads * recipe.seq_len**2 * scored
    # Whatever is filtered: buffers are as wide as the row of which most is kept.
    taps = step_tokens * per_row
    # Beside its rows a unit has statistics, and each of its files a header.
    overhead = sum(HEADER_ALIGN + 16 * info.width for info in table.values()) + 2 * HEADER_ALIGN
    in_flight = 2 * runtime.queue_depth + 1
    return Estimate(
        documents=sum(unit.num_docs for unit in job.units),
        tokens=tokens,
        rows=int(tokens * kept),
        units=len(job.units),
        units_done=len(done),
        bytes_per_tap={tap: int(tokens * kept) * info.row_bytes for tap, info in table.items()},
        index_bytes=int(tokens * kept) * INDEX_DTYPE.itemsize,
        overhead_bytes=len(job.units) * overhead,
        remaining_bytes=int(remaining * (per_row + INDEX_DTYPE.itemsize))
        + sum(unit.id not in done for unit in job.units) * overhead,
        free_bytes=free_bytes,
        batch_rows=rows,
        weights_bytes=weights,
        device_bytes=weights + taps + step_tokens * block * compute + scores * (job.layers > 0),
        host_bytes=in_flight * taps + 64 * max(unit.tokens for unit in job.units),
        warnings=tuple(_warnings(job)),
    )


def _warnings(job: Job) -> Iterator[str]:
    """Taps whose rows are many times a residual stream's, which is easily overlooked."""
    stream = job.checkpoint.arch.width * DTYPES_BY_NAME[job.recipe.store_dtype].itemsize
    advice = {
        "attn_pattern": "it grows with --seq-len; choose few layers, shorter contexts, or --where",
        "logits": "logprob and entropy, or --where, may be enough",
    }
    for site, instead in advice.items():
        named = [tap.name for tap in job.taps if tap.site == site]
        if named:
            each = job.table.taps[named[0]].row_bytes
            yield (
                f"{site} takes {each:,} bytes per row and tap, {each / stream:.0f} times a "
                f"residual stream's: {instead}"
            )


def refuse_if_too_large(cost: Estimate, where: str) -> None:
    """Stop before a run that would fill the disk."""
    if cost.free_bytes is not None and cost.remaining_bytes > cost.free_bytes:
        raise ConfigError(
            f"{where}: about {cost.remaining_bytes / 1e9:.2f} GB would be written, "
            f"{cost.free_bytes / 1e9:.2f} GB are free; choose fewer taps or documents, or "
            "--ignore-space"
        )
