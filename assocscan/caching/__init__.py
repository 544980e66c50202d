"""Bounded caches, fork-safe locks, and the cache folder with its checks of ownership."""
