"""The runner of executables in C++: compiled in the background, used when it is ready."""
