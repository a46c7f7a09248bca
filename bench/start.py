"""Where the seconds go from the command's start to the first step's end, on this machine.

    python bench/start.py [--shape 7B] [--work /dev/shm/spile-start] [--runs 3]

A model of real shapes with random weights is in the page cache. Each run is a separate process; the
first has no compiled programs yet, the others find them in XLA's cache. Stages overlap: the model
is loaded while the first texts are read and the step is compiled.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from material import SEQ_LEN, SHAPES, make_corpus, make_model

STAGES = ("loading", "reading", "preparing", "compiling", "waited_at_first", "waited_for_model")


def once(work: Path, layer: int) -> None:
    """One run; prints the seconds of each stage as JSON."""
    begin = float(os.environ["SPILE_BENCH_BEGIN"])
    import spile
    from spile.metrics import Counters
    from spile.run import extract  # the verb's own imports

    found = {"interpreter and imports": time.time() - begin}
    before, prepared = time.time(), extract.prepared_device
    prepared()
    found["device"] = time.time() - before
    counters = Counters()
    recipe = spile.Recipe(
        model=str(work / "model"), corpus=str(work / "corpus.jsonl"), taps=f"resid_post:{layer}",
        seq_len=SEQ_LEN,
    )  # fmt: skip
    run = threading.Thread(
        target=spile.extract, args=(recipe, str(work / "out")), kwargs={"counters": counters}
    )
    run.start()
    while not counters["computed"] and run.is_alive():
        time.sleep(0.005)
    found["to the end of the first step"] = time.time() - begin
    found |= {stage: counters[stage] for stage in STAGES}
    run.join()
    print(json.dumps({name: round(value, 2) for name, value in found.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="7B")
    parser.add_argument("--work", default="/dev/shm/spile-start")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    work, layer = Path(options.work), SHAPES[options.shape][2] - 1
    if options.once:
        return once(work, layer)
    shutil.rmtree(work, ignore_errors=True)
    try:
        make_model(work / "model", options.shape)
        make_corpus(work / "corpus.jsonl", work / "model", 12 * 16384)
        with tempfile.TemporaryDirectory() as cache:
            for number in range(options.runs):
                shutil.rmtree(work / "out", ignore_errors=True)
                begun = {"SPILE_BENCH_BEGIN": str(time.time()), "JAX_COMPILATION_CACHE_DIR": cache}
                command = [sys.executable, *sys.argv, "--once"]
                done = subprocess.run(
                    command, env={**os.environ, **begun}, capture_output=True, text=True
                )
                last = (done.stdout or done.stderr).splitlines()[-1]
                print(f"run {number + 1}: {last}", flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
