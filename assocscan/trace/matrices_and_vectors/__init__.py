"""Traced functions as programs over whole leaves: matrices, and vectors with an axis for states."""
