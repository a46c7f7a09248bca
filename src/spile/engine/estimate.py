"""What a job will cost, before it runs: documents, tokens, bytes, memory. No jax."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from spile.config import STORE_DTYPES, Runtime
from spile.engine.resolve import Job
from spile.errors import ConfigError
from spile.index import INDEX_DTYPE
from spile.models.fused import why_unfused
from spile.models.specs import num_params
from spile.tensors import DTYPES_BY_NAME, HEADER_ALIGN

_NARROW = 2048  # a model whose matrix products are small: more tokens make up for it
_MEMORY_SHARE = 0.9  # of a device that a step may fill by our estimate


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
    memory: int | None  # of the device
    host_bytes: int
    bytes_by_dtype: dict[str, int]  # what the whole would take in every stored form
    warnings: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_per_tap.values()) + self.index_bytes + self.overhead_bytes


def batch_rows(job: Job, runtime: Runtime, platform: str, memory: int | None = None) -> int:
    """Packed rows in a step: enough tokens for the device, never more than a unit holds.

    Unless a number was asked for it is halved until the step fits into the device's `memory`.
    """
    tokens = runtime.batch_tokens or _sweet_spot(job, platform)
    largest = max(unit.tokens for unit in job.units)
    rows = max(1, min(tokens // job.recipe.seq_len, -(-largest // job.recipe.seq_len)))
    if memory and not runtime.batch_tokens:
        while rows > 1 and _device_bytes(job, rows, platform) > _MEMORY_SHARE * memory:
            rows //= 2
    return rows


def _sweet_spot(job: Job, platform: str) -> int:
    """Tokens in a step beyond which nothing is gained: docs/benchmarks.md has the curves."""
    if platform == "cpu":
        return 1024
    return 32768 if job.checkpoint.arch.width < _NARROW else 16384


def _weights_bytes(job: Job) -> int:
    compute = DTYPES_BY_NAME[job.recipe.compute_dtype].itemsize
    return num_params(job.checkpoint.arch, job.layers, head=job.needs_head) * compute


def _device_bytes(job: Job, rows: int, platform: str) -> int:
    """Weights, taps, and what lives at once inside a block."""
    recipe, arch = job.recipe, job.checkpoint.arch
    tokens = rows * recipe.seq_len
    compute = DTYPES_BY_NAME[recipe.compute_dtype].itemsize
    # The stream, q, k, v, the MLP's two halves (of each expert a token goes to).
    inner = arch.mlp_width * (arch.experts.chosen if arch.experts else 1)
    block = 4 * arch.width + 2 * arch.num_heads * arch.head_dim + 3 * inner
    # Without a kernel, or where they are tapped, every pair of a row is scored, in float32, and
    # once more by the softmax.
    unfused = why_unfused(platform, arch, recipe.compute_dtype, recipe.seq_len) is not None
    scored = unfused or any(tap.site == "attn_pattern" for tap in job.taps)
    scores = 2 * 4 * tokens * recipe.seq_len * arch.num_heads * (scored and job.layers > 0)
    # Whatever is filtered, buffers are as wide as the row of which most is kept. What is stored
    # in eight bits is made of values as they were computed, and all of it once more without gaps.
    taps = job.table.taps.values()
    made = sum(info.width * max(compute, info.storage.itemsize) for info in taps)
    stored = sum(info.row_bytes for info in taps)
    return _weights_bytes(job) + tokens * (made + stored + block * compute) + scores


def estimate(
    job: Job,
    runtime: Runtime,
    platform: str,
    *,
    done: set[int],
    free_bytes: int | None,
    memory: int | None = None,
) -> Estimate:
    """Add up a job. `memory`: of the device, where that is known."""
    recipe = job.recipe
    tokens = sum(unit.tokens for unit in job.units)
    kept, table = job.table.kept, job.table.taps
    per_row = sum(info.row_bytes for info in table.values())
    remaining = sum(unit.tokens for unit in job.units if unit.id not in done) * kept
    rows = batch_rows(job, runtime, platform, memory)
    taps = rows * recipe.seq_len * per_row
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
        weights_bytes=_weights_bytes(job),
        device_bytes=_device_bytes(job, rows, platform),
        memory=memory,
        # Three units at once: one is packed, one computes, one is committed.
        host_bytes=in_flight * taps + 3 * 64 * max(unit.tokens for unit in job.units),
        bytes_by_dtype={
            dtype: int(tokens * kept) * (_row_bytes(job, dtype) + INDEX_DTYPE.itemsize)
            + len(job.units) * overhead
            for dtype in STORE_DTYPES
        },
        warnings=tuple(_warnings(job)),
    )


def _row_bytes(job: Job, store_dtype: str) -> int:
    """Of all taps, were they stored in this form."""
    infos = zip(job.taps, job.table.taps.values(), strict=True)
    return sum(replace(info, dtype=tap.dtype(store_dtype)).row_bytes for tap, info in infos)


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
    """Stop before a run that would fill the disk, or whose weights alone fill the device."""
    if cost.memory is not None and cost.weights_bytes > cost.memory:
        raise ConfigError(
            f"the weights take {cost.weights_bytes / 1e9:.1f} GB, the device has "
            f"{cost.memory / 1e9:.1f} GB: choose shallower taps, a smaller model or more devices"
        )
    if cost.free_bytes is not None and cost.remaining_bytes > cost.free_bytes:
        raise ConfigError(
            f"{where}: about {cost.remaining_bytes / 1e9:.2f} GB would be written, "
            f"{cost.free_bytes / 1e9:.2f} GB are free; choose fewer taps or documents, or "
            "--ignore-space"
        )
