"""Bounded caches, locks that survive a fork, and the cache folder with its checks of ownership."""
