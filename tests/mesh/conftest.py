"""These tests need eight devices: `tests/run/test_mesh.py` starts them with virtual ones."""

import jax

DEVICES = 8

collect_ignore_glob = ["test_*.py"] if jax.device_count() < DEVICES else []
