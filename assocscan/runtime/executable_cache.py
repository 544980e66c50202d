"""The cache of executables: `prepare` returns a cached one or has the backend's engine make it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..caching.bounded import BoundedCache
from ..engines.base import forced_choices as overrides
from ..engines.base.commands import Tensors
from ..engines.base.executable import Executable
from ..engines.base.scan_spec import MaybeTensor, ScanSpec, TensorSpec, plain
from . import backends
from .native import runner

_PREPARED: BoundedCache[Any, Executable] = BoundedCache()


def prepare(backend: str, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]) -> Executable:
    """The executable for tensors with the shapes, strides, dtypes, devices and alignments of these,
    which are in the order of `spec.names`.

    Raises BackendError where the backend cannot run it.
    """
    specs = tuple([None if t is None else TensorSpec.of(t, with_address=True) for t in tensors])
    threads = torch.get_num_threads() if spec.device.type == "cpu" else 0
    key = backend, spec, specs, overrides.generation, threads
    found = _PREPARED.get(key)
    if found is None:
        made = backends.preparer(backend, spec)(spec, specs)
        found = _PREPARED.insert(key, made)
    return found


def run(
    backend: str, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]
) -> tuple[Tensors, Tensors]:
    """Outputs and finals, without derivatives."""
    tensors = [t if t is None else plain(t) for t in tensors]
    return runner.run(prepare(backend, spec, tensors), tensors)
