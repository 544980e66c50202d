"""Layers whose recurrent weights are one number per channel and gate."""
