"""Programs with the same values in fewer instructions, for a language that has the means."""
