"""Triton kernels of operators over whole matrices."""
