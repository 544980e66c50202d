"""The CPU engine: generated C++, its headers, the compiler, and the choice of a form."""
