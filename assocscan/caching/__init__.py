"""Bounded caches, fork-safe locks, the cache folder with its checks of ownership, the end of a
process."""
