"""Series of observations: exponentially weighted moments."""
