"""The command line: one file for each group of verbs."""

from spile.cli.parser import main, make_parser, run

__all__ = ["main", "make_parser", "run"]
