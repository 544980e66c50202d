"""The CPU engine: generated C++, its headers, the compiler, and the choice of the kernel's form and
loop order."""
