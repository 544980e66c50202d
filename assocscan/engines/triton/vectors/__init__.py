"""Triton kernels of scans over vectors."""
