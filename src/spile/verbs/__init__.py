"""What each verb does: call one function, print what it gives.

Everything heavy is imported by the verb that needs it, so that `status`, `verify` and `--help`
start at once and run where jax is absent.
"""
