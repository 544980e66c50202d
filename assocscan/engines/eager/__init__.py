"""Scans by torch operations: of a user's function, or of a program, one instruction at a time."""
