"""Moving windows in CUDA, and their gradients."""
