"""The benchmark runs and compares; its figures are for `make bench`, not for a busy machine."""

import re
import subprocess
import sys
from pathlib import Path

import tiny

BENCH = Path(__file__).parents[2] / "bench"


def test_the_cpu_benchmark_prints_a_ratio_for_every_setting() -> None:
    small = ["--layers", "1", "--tokens", "400", "--rounds", "1"]
    result = subprocess.run(
        [sys.executable, str(BENCH / "cpu.py"), *small],
        capture_output=True,
        text=True,
        env=tiny.environment(),
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lengths = re.split(r"^(?:natural|equal) lengths: .*$", result.stdout, flags=re.MULTILINE)[1:]
    assert len(lengths) == 2
    for block in lengths:
        rates = dict(
            re.findall(r"^  (\S.*?)\s{2,}\d+   spile is (\d+\.\d+)x$", block, re.MULTILINE)
        )
        assert set(rates) == {"spile", "HF batch 8", "HF batch 1", "HF sorted 8"}
        assert float(rates["spile"]) == 1.0
        assert all(float(ratio) > 0 for ratio in rates.values())
