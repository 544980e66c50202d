"""Hidden Markov models in parallel over time."""
