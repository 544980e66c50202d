"""CUDA kernels that walk: scans by steps that are not associative."""
