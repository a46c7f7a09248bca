"""The benchmark runs and compares; its figures are for `make bench`, not for a busy machine."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from spile.models.config.hf_config import read_config
from support import quick, tiny

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.full
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
        line = r"^  (\S.*?)\s{2,}\d+   spile is (\d+\.\d+)x; +\d+ per processor second, [\d.]+x$"
        rates = dict(re.findall(line, block, re.MULTILINE))
        assert set(rates) == {"spile", "HF batch 8", "HF batch 1", "HF sorted 8"}
        assert float(rates["spile"]) == 1.0
        assert all(float(ratio) > 0 for ratio in rates.values())


@pytest.mark.full
def test_the_gpu_benchmark_prints_rates_and_ratios_on_a_cpu_too(tmp_path: Path) -> None:
    small = ["--shape", "tiny", "--seconds", "0.1", "--taps", "1", "--batch-tokens", "1024"]
    few = ["--peers", "", "--profile", "0", "--sink-bytes", "1e6", "--compute-dtypes", "bfloat16"]
    places = ["--sinks", str(tmp_path), "--work", str(tmp_path / "work")]
    kept = tmp_path / "results.json"
    result = subprocess.run(
        [sys.executable, str(BENCH / "gpu.py"), *small, *few, *places, "--results", str(kept)],
        capture_output=True,
        text=True,
        env={**tiny.environment(), "XLA_FLAGS": quick.FLAGS},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rate = r"^(\S.*?)\s{2,}([\d,.]+) (?:tok/s +[\d.]+%(?: +[\d.]+ GB/s)?|GB/s)$"
    rates = dict(re.findall(rate, result.stdout, re.MULTILINE))
    full = f"spile, taps: 1, bfloat16, {tmp_path}"
    assert set(rates) == {
        "matrix products",
        "compute, taps: 1",
        f"{tmp_path} alone",
        full,
    }, result.stdout
    assert all(float(value.replace(",", "")) > 0 for value in rates.values()), result.stdout
    ratios = dict(re.findall(r"^  (\S.*?)\s{2,}(\d+\.\d+)$", result.stdout, re.MULTILINE))
    assert set(ratios) == {
        "of the matrix products",
        "of the step",
        f"of {tmp_path}, by bytes",
    }, result.stdout
    measured = json.loads(kept.read_text())["results"]
    assert set(measured) == set(rates)
    over = measured[full]["tok/s"] / measured["compute, taps: 1"]["tok/s"]
    assert float(ratios["of the step"]) == pytest.approx(over, abs=1e-3)
    assert [path.name for path in tmp_path.iterdir()] == [kept.name], "nothing else is left"


def test_both_sides_read_every_model_of_the_families_as_it_is_cut() -> None:
    families = runpy.run_path(str(BENCH / "families.py"))
    for name in families["MODELS"] + families["MIXERS"]:
        config, layers = families["cut_config"](name, families["depth_of"](name, 6), 8)
        saved = AutoConfig.for_model(**config).to_dict()
        _, arch = read_config({**saved, "architectures": config["architectures"]}, name)
        assert arch.num_layers == layers


@pytest.mark.full
def test_the_families_print_distances_of_both_sides_from_float32() -> None:
    small = ["--layers", "1", "--seq-len", "128", "--models", "pythia-70m"]
    result = subprocess.run(
        [sys.executable, str(BENCH / "families.py"), "--parity", *small],
        capture_output=True,
        text=True,
        env=tiny.environment(),
        check=False,
    )
    found = re.search(r"^pythia-70m +HF (\d\.\d+), auto (\d\.\d+)$", result.stdout, re.MULTILINE)
    assert found, result.stdout + result.stderr
    hf, spile = map(float, found.groups())
    assert 0 < spile < 2 * hf
