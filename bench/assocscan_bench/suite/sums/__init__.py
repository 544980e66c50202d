"""Suites of sums: beside torch, of one long row, compensated."""
