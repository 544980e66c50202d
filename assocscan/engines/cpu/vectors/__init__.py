"""Scans over vectors on the CPU: forward, and backward by recomputation."""
