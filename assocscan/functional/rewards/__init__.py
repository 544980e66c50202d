"""Scans of rewards: what episodes return, and by how much that is better than expected."""
