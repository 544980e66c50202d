"""Series: exponentially weighted moments and moving windows."""
