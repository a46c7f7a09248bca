"""Spile taps a language model while it reads a corpus, and keeps the activations."""

__version__ = "0.1.0"
