"""Compiling in a hurry: what a test runs for a moment gains nothing by being optimized."""

import jax

OPTIONS: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
if jax.__version_info__[:2] == (0, 10):  # elsewhere untried, and an unknown flag ends the process
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
