"""Scans by torch operations: of functions, and of programs instruction by instruction."""
