"""Packed sequences: offsets, padding, and nested tensors."""
