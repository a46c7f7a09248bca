"""Kernels that accelerators run in place of plain jax, a file for each kind of work."""
