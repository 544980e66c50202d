"""From a Python function to a program: tracing, captures, scalarising, unrolling."""
