"""Checks of a monoid: whether it is one, and how the errors of its scans grow."""
