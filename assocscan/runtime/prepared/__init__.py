"""Calls as they are remembered, and their backward passes."""
