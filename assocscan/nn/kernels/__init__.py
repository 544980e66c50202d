"""Triton kernels of the layers; nothing here is imported before a layer runs on a GPU."""
