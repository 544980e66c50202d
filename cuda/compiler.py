"""Compiles CUDA C++ with NVRTC, or takes the machine code (a cubin) from the cache folder.

CuPy's RawModule is not used: it adds `-ftz=true` to NVRTC's options, which would flush denormals to
zero. No CUDA header is included, so that a kernel compiles in a fraction of a second.

The cache is keyed by the source, the headers, the options, the architecture and NVRTC's version.
"""

from __future__ import annotations

import functools
import hashlib

from ..caching import cache_folder as disk_cache
from ..errors import BackendError
from .source import headers

# For walks. A kernel has several copies of the step, which must round alike: the compiler fuses no
# product with a sum there, walk/step.py does.
ROUNDED_ALIKE = ("-fmad=false",)
OPTIONS = ("-std=c++17", "-ftz=false", "-prec-div=true", "-prec-sqrt=true",
           "-default-device", "-diag-suppress=177")  # fmt: skip


def cubin(source: str, capability: tuple[int, int], options: tuple[str, ...] = ()) -> bytes:
    """The machine code, from the cache folder or compiled with OPTIONS and others."""
    options = (*OPTIONS, *options)
    architecture = f"sm_{capability[0]}{capability[1]}{'a' if capability[0] >= 9 else ''}"
    key = hashlib.sha256(
        "\0".join([source, *headers().values(), *options, architecture, nvrtc_version()]).encode()
    ).hexdigest()[:32]
    name = f"{key}.cubin"
    known = disk_cache.read(name)
    if known is not None:
        return known
    code = compile_source(source, (*options, f"-arch={architecture}"))
    disk_cache.store(name, code)
    return code


@functools.cache
def nvrtc_version() -> str:
    from cupy.cuda import nvrtc

    return ".".join(map(str, nvrtc.getVersion()))


def compile_source(source: str, options: tuple[str, ...]) -> bytes:
    """Compile to a cubin with NVRTC. Raises BackendError with the compiler's messages."""
    from cupy.cuda import nvrtc

    texts = headers()
    program = nvrtc.createProgram(
        source, "scan.cu", [t.encode() for t in texts.values()], [name.encode() for name in texts]
    )
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except Exception as error:
        words = nvrtc.getProgramLog(program).strip()[-4000:]
        raise BackendError(f"NVRTC failed on a generated kernel: {error}\n{words}") from error
    finally:
        nvrtc.destroyProgram(program)
