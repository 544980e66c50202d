"""The public functions: argument checks, the path of a call, explain, check, printed sources."""
