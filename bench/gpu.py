"""Useful tokens per second on a GPU, from text to files: Spile against its peers, in one run.

    python bench/gpu.py [--shape 7B] [--seconds 15] [--taps 8] [--sinks /dev/shm,/tmp]

All contestants read the same documents (log-normal lengths, mean about 1,000 tokens, cut at 2,048)
with the same random bfloat16 weights and store the same residual streams. Each contestant has its
own process, is warmed up, and is timed until its last file is complete (for Spile: durable and
committed). One limit is the model's own matrix products, chained, on the same card in the same run;
the other is the rate at which a few threads that only write fill the sink. Spile should reach the
lower of the two. Peers that are not installed are skipped with a message.
"""

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from material import SEQ_LEN, SHAPES, make_corpus, make_model

OURS = ("limit", "sink", "compute", "spile")  # in contestants.py
PEERS = {  # in peers.py
    "hf": "HF, hooks, padded batches of 8, .cpu()",
    "nnsight": "nnsight, padded batches of 8, .cpu()",
    "transformer_lens": "TransformerLens, padded batches, .cpu()",
    "tuned": "torch tuned: packed, compiled, overlapped",
}
WARM_UP = 4  # steps
STEP_TOKENS = 16384


class Bench:
    """Starts contestants, prints their results, and keeps them (also on disk)."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.results: dict[str, dict[str, Any]] = {}

    def run(self, title: str, name: str, **changes: Any) -> float | None:
        """Return tokens a second (for a sink, GB); None, with a message, if it could not run."""
        begin = time.perf_counter()
        settings = {**vars(self.options), **changes}
        file = "contestants.py" if name in OURS else "peers.py"
        shutil.rmtree(settings["out"], ignore_errors=True)
        missing = name in ("nnsight", "transformer_lens") and importlib.util.find_spec(name) is None
        reason = "not installed" if missing else ""
        if not missing:
            command = [sys.executable, str(Path(__file__).with_name(file)), name]
            try:
                done = subprocess.run(
                    [*command, json.dumps(settings)], capture_output=True, text=True, check=False,
                    timeout=self.options.patience + 4 * self.options.seconds,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                reason = "did not come to an end"
                done = None
            if done is None:
                pass
            elif done.returncode:
                lines = [line for line in done.stderr.splitlines() if line.strip()]
                reason = "failed: " + (lines[-1] if lines else f"exit {done.returncode}")[:300]
            else:
                self.results[title] = json.loads(done.stdout.splitlines()[-1])
        shutil.rmtree(settings["out"], ignore_errors=True)
        if reason:
            print(f"{title:<46} {reason}", flush=True)
            return None
        result = self.results[title]
        if name == "sink":
            print(f"{title:<46} {result['GB/s']:>10.2f} GB/s", flush=True)
            return result["GB/s"]
        rate = result["tok/s"]
        self.results[title]["took"] = round(time.perf_counter() - begin, 1)
        if self.options.results:
            everything = {"options": vars(self.options), "results": self.results}
            Path(self.options.results).write_text(json.dumps(everything, indent=1))
        share = rate / self.results["matrix products"]["tok/s"]
        written = f" {result['GB/s']:>8.2f} GB/s" if "GB/s" in result else ""
        print(f"{title:<46} {rate:>10,.0f} tok/s {share:>8.1%}{written}", flush=True)
        for kind in ("shares", "profile"):
            parts = [f"{name} {value:.3g}" for name, value in result.get(kind, {}).items()]
            print(f"  {kind}: {', '.join(parts)}", flush=True) if parts else None
        for name, found in result.get("long", {}).items():
            print(f"  {name}: {', '.join(found)}", flush=True) if found else None
        return rate

    def ratio(self, what: str, ours: float | None, other: float | None) -> None:
        if ours and other:
            print(f"  {what:<44} {ours / other:>10.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="7B")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--taps", type=int, default=8)
    parser.add_argument("--batch-tokens", type=int)
    parser.add_argument("--sinks", default="/dev/shm,/tmp")
    parser.add_argument(
        "--repeats", type=int, default=1, help="only the run with all taps, N times"
    )
    parser.add_argument("--sink-bytes", type=float, default=16e9, help="written to measure a sink")
    parser.add_argument("--dtypes", default="bfloat16,float8_e4m3")
    parser.add_argument("--compute-dtypes", default="bfloat16,float8_e4m3", help="for one tap")
    parser.add_argument("--weights", default="auto", help="where they are kept, for one tap")
    parser.add_argument("--skip-step", action="store_true", help="only runs from text to files")
    parser.add_argument("--work", default="/dev/shm/spile-bench")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--profile", type=float, default=4.0, help="seconds; 0: none")
    parser.add_argument("--patience", type=float, default=120, help="seconds to load and compile")
    parser.add_argument("--stubs", help="directory for modules that a peer imports and never uses")
    parser.add_argument("--results", help="write everything measured to this file, as JSON")
    parser.add_argument("--families", action="store_true", help="only bench/families.py --hf")
    options = parser.parse_args()
    if options.families:
        script = str(Path(__file__).with_name("families.py"))
        sys.exit(subprocess.call([sys.executable, script, "--layers", "6", "--hf"]))
    bench = Bench(options)
    prepare(options)
    try:
        measure(bench)
    finally:
        shutil.rmtree(options.work, ignore_errors=True)


def prepare(options: argparse.Namespace) -> None:
    work = Path(options.work)
    shutil.rmtree(work, ignore_errors=True)
    make_model(work / "model", options.shape)
    options.model, options.corpus = str(work / "model"), str(work / "corpus.jsonl")
    options.seq_len, options.size, options.store_dtype = SEQ_LEN, 8, "bfloat16"
    options.compute_dtype = "bfloat16"
    options.step_tokens = options.batch_tokens or STEP_TOKENS
    options.out = f"{options.work}/out"
    options.max_docs = None


def measure(bench: Bench) -> None:
    options = bench.options
    width, _, layers, *_ = SHAPES[options.shape]
    profile, options.profile = options.profile, 0.0
    counts = [1, options.taps] if options.taps > 1 and options.repeats == 1 else [options.taps]
    chosen = {count: tapped(range(layers - count, layers)) for count in counts}
    limit = bench.run("matrix products", "limit", seconds=min(8.0, options.seconds))
    assert limit
    most = int(options.seconds * limit * 2.2) + 20 * options.step_tokens  # half depth runs faster
    mean = make_corpus(Path(options.corpus), Path(options.model), most)

    def sized(rate: float) -> dict[str, Any]:
        """Return options for as many documents as take the time at this rate, in two units."""
        tokens = int(options.seconds * rate) + 2 * WARM_UP * options.step_tokens
        return {"max_docs": int(tokens / mean), "unit_tokens": tokens // 2}

    computed: dict[int, float | None] = {}
    for count in () if options.skip_step else counts:
        title = f"compute, taps: {count}"
        given = {"profile": profile, **chosen[count], **sized(limit)}
        computed[count] = bench.run(title, "compute", **given)
        bench.ratio("of the matrix products", computed[count], limit)
    narrow = [dtype for dtype in options.compute_dtypes.split(",") if dtype != "bfloat16"]
    for dtype in () if options.skip_step or options.repeats > 1 else narrow:
        given = {"profile": profile, **chosen[1], **sized(1.6 * limit), "compute_dtype": dtype}
        rate = bench.run(f"compute in {dtype}, taps: 1", "compute", **given)
        bench.ratio("over bfloat16", rate, computed[1])

    places = [place for place in options.sinks.split(",") if place]
    full, narrowest, place, out = None, None, "", ""
    for place in places:
        out = f"{place}/spile-bench-out"
        most_bytes = min(options.sink_bytes, shutil.disk_usage(place).free / 3)
        taken = bench.run(f"{place} alone", "sink", out=out, sink_bytes=most_bytes)
        assert taken
        for count in counts if place == places[-1] else counts[-1:]:
            for dtype in options.dtypes.split(",") if count > 1 else ["bfloat16"]:
                row_bytes = count * (width * 2 if dtype == "bfloat16" else width + 4)
                reachable = min(computed.get(count) or limit, taken * 1e9 / row_bytes)
                given = {"out": out, "store_dtype": dtype, **chosen[count], **sized(reachable)}
                given["weights"] = "resident"
                title = f"spile, taps: {count}, {dtype}, {place}"
                rate = bench.run(title, "spile", **given)
                full = rate if count == 1 else full
                bench.ratio("of the step", rate, computed.get(count))
                for number in range(2, 1 + options.repeats):
                    again = bench.run(f"{title}, run {number}", "spile", **given)
                    bench.ratio("of the step", again, computed.get(count))
                written = bench.results.get(title, {}).get("GB/s")
                bench.ratio(f"of {place}, by bytes", written, taken)
                if reachable < (computed.get(count) or limit):  # a disk's rate drifts: once more
                    given = {"out": out, "sink_bytes": most_bytes}
                    again = bench.run(f"{place} alone, afterwards", "sink", **given)
                    bench.ratio("of that", written, again)
    for where in options.weights.split(",") if full and options.weights != "auto" else ():
        given = {"out": out, **chosen[1], **sized(limit), "weights": where}
        rate = bench.run(f"spile, weights {where}, taps: 1, {place}", "spile", **given)
        bench.ratio("over all of them on the device", rate, full)
    for dtype in narrow if full else ():
        given = {"out": out, **chosen[1], **sized(1.6 * limit), "compute_dtype": dtype}
        given["weights"] = "resident"
        rate = bench.run(f"spile, computed in {dtype}, taps: 1, {place}", "spile", **given)
        bench.ratio("over bfloat16", rate, full)
        narrowest = rate
    if full and len(counts) > 1:
        given = {"out": out, **tapped([layers // 2 - 1]), **sized(2 * limit)}
        early = bench.run(f"spile, one tap at half depth, {place}", "spile", **given)
        bench.ratio("over full depth", early, full)
    if profile and places:
        given = {"profile": profile, **chosen[counts[-1]], **sized(limit)}
        bench.run(f"spile, taps: {counts[-1]}, bfloat16, traced", "spile", **given)

    title = f"spile, taps: {counts[-1]}, bfloat16, {places[0] if places else ''}"
    ours = bench.results.get(title, {}).get("tok/s")
    for peer in filter(None, options.peers.split(",")):
        given = {**chosen[counts[-1]], "out": out or options.out}
        rate = bench.run(f"{PEERS[peer]}, taps: {counts[-1]}", peer, **given)
        bench.ratio("spile over it", ours, rate)
        if counts[-1] == 1:
            bench.ratio("spile in 8 bits over it", narrowest, rate)


def tapped(layers: Iterable[int]) -> dict[str, Any]:
    found = list(layers)
    return {"layers": found, "tapped": f"resid_post:{found[0]}-{found[-1]}"}


if __name__ == "__main__":
    main()
