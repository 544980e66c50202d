"""Scans over vectors: their gradient, and their part of the library operation."""
