"""Operations that torch does not have for some dtypes, such as gcd of floats.

Fake tensors take them, and kernels would be generated that compute something; so a function is run
once on real elements before it is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import UnsupportedOperation
from ..torch_private import pytree
from .fx_trace import Signature, isolated

_WORDS = ("not implemented for", "not supported for", "is not supported")


def is_missing(error: BaseException) -> bool:
    """Whether torch says that it has no operation for these dtypes."""
    kinds = (NotImplementedError, TypeError, RuntimeError)
    return isinstance(error, kinds) and any(words in str(error) for words in _WORDS)


def require_implemented(
    fn: Callable[..., Any], spec: pytree.TreeSpec, arguments: Sequence[Signature], name: str
) -> None:
    """Run a traced function on ones; raise UnsupportedOperation where torch lacks an operation.

    Other errors come from the values, not from the dtypes, and are left to the scan.
    """
    ones = [torch.ones(a.shape, dtype=a.dtype, device="cpu") for a in arguments]
    try:
        with isolated(), torch.no_grad():
            fn(*pytree.tree_unflatten(ones, spec))
    except Exception as error:
        if is_missing(error):
            dtypes = ", ".join(dict.fromkeys(str(a.dtype) for a in arguments))
            raise UnsupportedOperation(
                f"torch has no operation that {name} needs for {dtypes}: {error}"
            ) from error
