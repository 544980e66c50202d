"""Operators over vectors as programs with an axis for their states."""
