"""Single-pass CUDA kernels and their launcher (see README.md in this folder).

The folder shares its name with NVIDIA's namespace package ``cuda``. With the repository root on
``sys.path`` it would hide ``cuda.pathfinder`` and ``cuda.bindings``, which CuPy and torch import;
extending the path keeps both reachable.
"""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)
