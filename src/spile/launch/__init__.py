"""Start `spile extract` elsewhere: on this machine, over ssh, on clusters and clouds. No jax.

Each target returns exactly the commands to run, without running them (`render` and its siblings);
`command.py` runs them.
"""
