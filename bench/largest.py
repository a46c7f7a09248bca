"""Ways to find the largest 64 of each token's logits on a GPU, and what they add to their readings.

    python bench/largest.py [--tokens 4096] [--vocab 152064] [--count 64] [--seconds 0.3]

`spile` is what `top_logits` uses: parts of the vocabulary, and in them a threshold. The others
differ in the length of a part, in the bits that a pass finds of a threshold, or sort instead. Each
must find what the first finds. `next token` is all that the tap computes from the logits, and
`logprob` what is computed anyway. All programs compile at once, in threads.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock


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
    sorts = 1 << 30

    def found(logits: Any) -> Any:
        return search.largest(logits, count)

    def summed(sites: tuple[str, ...], logits: Any) -> Any:
        tops = dict.fromkeys(("top_token_ids", "top_logprobs"), count)
        return next_token(logits, targets, known, sites, tops)

    everything = ("logprob", "logsumexp", "next_rank", "top_token_ids", "top_logprobs")
    cases: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
        "spile": (found, {}),
        "2 bits a pass": (found, {"_DIGIT": 2}),
        "1 bit a pass": (found, {"_DIGIT": 1}),
        "parts of 32": (found, {"part_size": lambda total, count: 32}),
        "parts of 128": (found, {"part_size": lambda total, count: 128}),
        "sorts": (found, {"_LONG": sorts}),
        "logprob": (partial(summed, ("logprob",)), {}),
        "next token": (partial(summed, everything), {}),
        "next token, sorts": (partial(summed, everything), {"_LONG": sorts}),
    }
    given = {"bfloat16": wide, "float32": wide.astype("float32")}
    lowered: dict[tuple[str, str], Any] = {}
    for dtype, logits in given.items():
        for name, (function, changed) in cases.items():
            if dtype == "float32" and changed and name != "sorts":
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
        if cases[name][0] is found:
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
