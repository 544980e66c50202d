"""Prepared calls, and their backward passes."""
