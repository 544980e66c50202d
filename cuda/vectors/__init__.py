"""CUDA kernels of scans over vectors of states."""
