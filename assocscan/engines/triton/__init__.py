"""The Triton engine: generated kernels, their launch, the interpreter, and multi-pass scans."""
