"""These need eight devices: `tests/run/test_mesh.py` starts them where there are."""

import jax

DEVICES = 8

collect_ignore_glob = ["test_*.py"] if jax.device_count() < DEVICES else []
