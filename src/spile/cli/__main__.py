"""`python -m spile.cli` is `spile`."""

from spile.cli.parser import main

if __name__ == "__main__":
    main()
