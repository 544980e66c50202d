"""Scans over vectors (`program/vector_operator`) on the CPU: forward, and backward by recomputation."""
