"""Start `spile extract` elsewhere: on this machine, over ssh, on clusters and clouds. No jax.

Each target says, without doing anything, exactly what would be run (`render` and its sisters);
`command.py` runs it.
"""
