"""Calls that were made before: of scans, and of functions that scan views of their tensors."""
