"""Ways to find the largest 64 of each token's logits on a GPU, and what they add to their readings.

    python bench/largest.py [--tokens 4096] [--vocab 152064] [--count 64] [--seconds 0.3]

`spile` is what `top_logits` uses: it sorts the maxima of parts of the vocabulary, and what the best
parts hold. Others differ in the length of a part, sort in three levels, sort one integer for each
value (16 bits of the value, 16 of its place), or find a threshold bit by bit. Each must find what
the first finds. `next token` is all that the tap computes from the
logits, and `logprob` what is computed anyway. All programs compile at once, in threads.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock


def by_levels(values: Any, count: int, sizes: tuple[int, ...], packed: bool) -> tuple[Any, Any]:
    """Find the largest values by sorts, in one more level than there are lengths of parts."""
    import jax
    import jax.numpy as jnp

    lead = values.shape[:-1]

    def best(values: Any) -> Any:
        """Return the places of the largest values, the largest first."""
        if not packed:
            wide = jnp.where(values == 0, 0, values).astype(jnp.float32)
            return jax.lax.top_k(wide, count)[1]
        # In the order of the values, the largest first, and of equal ones in that of their places.
        place = jax.lax.broadcasted_iota(jnp.uint32, values.shape, values.ndim - 1)
        keys = ((0xFFFF - in_order(values).astype(jnp.uint32)) << 16) | place
        return (jax.lax.sort(keys, is_stable=False)[..., :count] & 0xFFFF).astype(jnp.int32)

    base = jnp.zeros((*lead, 1), jnp.int32)  # the place of the first member of each group
    members = values[..., None, :]
    for size in sizes:
        each = members.shape[-1] // size
        members = members.reshape(*lead, -1, size)
        base = (base[..., None] + size * jnp.arange(each, dtype=jnp.int32)).reshape(*lead, -1)
        part = jax.lax.sort(best(members.max(axis=-1)), is_stable=False)
        members = jnp.take_along_axis(members, part[..., None], axis=-2)
        base = jnp.take_along_axis(base, part, axis=-1)
    flat = members.reshape(*lead, -1)
    place = best(flat)
    found = jnp.take_along_axis(flat, place, axis=-1).astype(jnp.float32)
    return found, jnp.take_along_axis(base, place // sizes[-1], axis=-1) + place % sizes[-1]


def by_thresholds(values: Any, count: int, digit: int) -> tuple[Any, Any]:
    """Find the largest values as `largest` does, with thresholds in place of both sorts."""
    import jax
    import jax.numpy as jnp

    from spile.models.forward.largest import part_size

    size = part_size(values.shape[-1], count)
    by_part = values.reshape(*values.shape[:-1], -1, size)
    part = above_threshold(by_part.max(axis=-1), count, digit)
    members = jnp.take_along_axis(by_part, part[..., None], axis=-2)
    members = members.reshape(*values.shape[:-1], count * size)
    place = above_threshold(members, count, digit)
    found = jnp.take_along_axis(members, place, axis=-1).astype(jnp.float32)
    found, order = jax.lax.top_k(found, count)
    place = jnp.take_along_axis(place, order, axis=-1)
    return found, jnp.take_along_axis(part, place // size, axis=-1) * size + place % size


def above_threshold(values: Any, count: int, digit: int) -> Any:
    """Return the places of the largest values, ascending, for an axis of at most 32,767 values.

    The threshold is the largest number that `count` values reach. Its bits are found from the
    highest down, some in each pass, by counting how many values reach each candidate.
    """
    import jax
    import jax.numpy as jnp

    lead, total = values.shape[:-1], values.shape[-1]
    keys = in_order(values)
    threshold = found_threshold(keys, count, digit)[..., None]
    above, ties = keys > threshold, keys == threshold
    # Two sums at once: of values above the threshold, and, in the upper bits, of ties.
    sums = jnp.cumsum(above.astype(jnp.int32) + (ties.astype(jnp.int32) << 16), axis=-1)
    above_so_far, ties_so_far = sums & 0xFFFF, sums >> 16
    wanted_ties = count - above_so_far[..., -1:]
    chosen = above | (ties & (ties_so_far <= wanted_ties))
    slot = above_so_far + jnp.minimum(ties_so_far, wanted_ties) - 1
    slot = jnp.where(chosen, slot, count).reshape(-1, total)  # others are dropped
    row, place = (jax.lax.broadcasted_iota(jnp.int32, slot.shape, axis) for axis in (0, 1))
    found = jnp.zeros((slot.shape[0], count), jnp.int32)
    return found.at[row, slot].set(place, mode="drop").reshape(*lead, count)


def found_threshold(keys: Any, count: int, digit: int) -> Any:
    """Return the `count`-th largest key."""
    import jax.numpy as jnp
    import numpy as np

    found = jnp.zeros(keys.shape[:-1], keys.dtype)
    for shift in range(keys.dtype.itemsize * 8 - digit, -1, -digit):
        added = jnp.zeros(found.shape, keys.dtype)
        for candidate in range(1, 1 << digit):
            least = found + np.array(candidate << shift, keys.dtype)
            reached = (keys >= least[..., None]).sum(axis=-1, dtype=jnp.int32) >= count
            added = added + reached.astype(keys.dtype)
        found = found + (added << np.array(shift, keys.dtype))
    return found


def in_order(values: Any) -> Any:
    """Return integers in the order of the values; 0.0 and -0.0 are equal."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    bits = values.dtype.itemsize * 8
    unsigned = jnp.dtype(f"uint{bits}")
    raw = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0, values), unsigned)
    sign = np.array(1 << (bits - 1), unsigned)
    return jnp.where(raw >= sign, ~raw, raw | sign)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=152_064)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.3)
    options = parser.parse_args()
    import jax
    import jax.numpy as jnp
    import numpy as np

    from spile.models.forward import largest as search
    from spile.models.forward.next_token import next_token

    count, shape = options.count, (options.tokens, options.vocab)
    # (As skewed as logits are: the maxima of parts differ.)
    wide = jax.random.normal(jax.random.key(0), shape, "bfloat16") * jnp.asarray(3, "bfloat16")
    targets = jnp.zeros(options.tokens, jnp.int32)
    known = jnp.ones(options.tokens, bool)

    def found(logits: Any) -> Any:
        return search.largest(logits, count)

    def summed(sites: tuple[str, ...], logits: Any) -> Any:
        tops = dict.fromkeys(("top_token_ids", "top_logprobs"), count)
        return next_token(logits, targets, known, sites, tops)

    everything = ("logprob", "logsumexp", "next_rank", "top_token_ids", "top_logprobs")
    cases: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
        "spile": (found, {}),
        "parts of 32": (found, {"part_size": lambda total, count: 32}),
        "parts of 128": (found, {"part_size": lambda total, count: 128}),
        "three levels": (partial(by_levels, count=count, sizes=(128, 8), packed=False), {}),
        "packed": (partial(by_levels, count=count, sizes=(64,), packed=True), {}),
        "packed, 3 levels": (partial(by_levels, count=count, sizes=(128, 8), packed=True), {}),
        "thresholds, 4 bits": (partial(by_thresholds, count=count, digit=4), {}),
        "thresholds, 2 bits": (partial(by_thresholds, count=count, digit=2), {}),
        "logprob": (partial(summed, ("logprob",)), {}),
        "next token": (partial(summed, everything), {}),
    }
    given = {"bfloat16": wide, "float32": wide.astype("float32")}
    lowered: dict[tuple[str, str], Any] = {}
    for dtype, logits in given.items():
        for name, (function, changed) in cases.items():
            if dtype == "float32" and name not in ("spile", "three levels", "next token"):
                continue
            with mock.patch.multiple(search, **changed) if changed else mock.patch.dict({}):
                lowered[dtype, name] = jax.jit(lambda x, f=function: f(x)).lower(logits)
    begin = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        programs = pool.map(lambda each: each.compile(), lowered.values())
        compiled = dict(zip(lowered, programs, strict=True))
    print(f"compiled {len(compiled)} programs in {time.perf_counter() - begin:.1f} s", flush=True)
    for (dtype, name), program in compiled.items():
        logits = given[dtype]
        result = jax.block_until_ready(program(logits))
        if name not in ("logprob", "next token"):
            first = compiled[dtype, "spile"](logits)
            same = all(np.array_equal(a, b) for a, b in zip(result, first, strict=True))
            by_hand = np.argsort(-np.asarray(logits[:4], np.float32), axis=-1, kind="stable")
            exact = np.array_equal(result[1][:4], by_hand[:, :count])
            told = "exact" if same and exact else "WRONG"
        else:
            told = ""
        begin, calls = time.perf_counter(), 0
        while time.perf_counter() - begin < options.seconds:
            jax.block_until_ready([program(logits) for _ in range(4)])
            calls += 4
        taken = (time.perf_counter() - begin) / calls
        print(f"{dtype:<9} {name:<20} {taken * 1e3:8.3f} ms  {told}", flush=True)


if __name__ == "__main__":
    main()
