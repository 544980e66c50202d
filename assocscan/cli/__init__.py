"""The command line: demo, env, bench, stress."""
