"""Useful tokens per second of 1, 2 and 4 joined processes on the same cores: what joining costs.

    python bench/worlds.py [--docs 60] [--cores 2]

All worlds are pinned to the same cores and read the same documents with the demo model; each
process has one device, and the mesh is `data`, so that only the joining itself is measured.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run(processes: int, docs: int, cores: set[int], out: Path) -> tuple[float, int]:
    """Return the seconds from the first to the last commit, and the tokens committed meanwhile."""
    shutil.rmtree(out, ignore_errors=True)
    flags = (
        f"--model demo --corpus demo --taps resid_post:5 --seq-len 256 --unit-tokens 4k "
        f"--max-docs {docs} --batch-tokens 1k --threads 1 --out {out} --quiet"
    ).split()
    joined = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(processes)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "spile.cli", "extract", *flags,
             *(joined if processes > 1 else []), *(["--process-id", str(n)] * (processes > 1))],
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        for n in range(processes)
    ]  # fmt: skip
    codes = [process.wait() for process in started]
    assert not any(codes), codes
    records = sorted((path.stat().st_mtime, path) for path in (out / "done").glob("*/*"))
    tokens = sum(json.loads(path.read_bytes())["tokens"] for _, path in records[1:])
    return records[-1][0] - records[0][0], tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--docs", type=int, default=60)
    parser.add_argument("--cores", type=int, default=2)
    options = parser.parse_args()
    cores = set(sorted(os.sched_getaffinity(0))[: options.cores])
    alone = None
    with tempfile.TemporaryDirectory() as folder:
        for processes in (1, 2, 4):
            begin = time.perf_counter()
            seconds, tokens = run(processes, options.docs, cores, Path(folder) / "out")
            rate = tokens / seconds
            alone = alone or rate
            whole = time.perf_counter() - begin
            print(
                f"{processes} processes: {rate:>8,.0f} tok/s  {rate / alone:.2f} of one  "
                f"({whole:.0f} s with starting)",
                flush=True,
            )


if __name__ == "__main__":
    main()
