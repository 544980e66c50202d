"""What a monoid takes, as far as its declaration says: the structure of its states and inputs."""

from __future__ import annotations

import builtins
import types
from typing import Any

import torch

from .. import wording
from ..errors import ScanTypeError, TraceError
from ..pytrees import align, describe, flatten, is_leaf, template, top_level
from .signatures import positional, require_call, signature_of, takes_any_number


def require_inputs(monoid: Any, tree: Any, what: str = "xs") -> None:
    """Raise where `tree`, whose leaves are numbers, cannot be the structure of the monoid's xs,
    which errors call `what`."""
    if monoid.lift is None:
        require_state(monoid, tree, what)
        return
    entries = tree if type(tree) in (tuple, list) else (tree,)
    call = "lift(xs)"
    if type(tree) in (tuple, list):
        call = f"lift(*xs) with {len(tree)} argument{'s' * (len(tree) != 1)}"
    who = f"the lift of {monoid.name!r}"
    try:
        require_call(monoid.lift, len(entries), who, f"{call}, since {what} is {shown(tree)}")
    except TraceError as error:
        raise TraceError(f"{error}{remedy(monoid.lift, tree)}") from None
    require_ranks(monoid, tree, what)


def remedy(lift: Any, tree: Any) -> str:
    """What xs would be right for a lift of these parameters."""
    signature = signature_of(lift)
    if signature is None or takes_any_number(signature):
        return ""
    names = [p.name for p in positional(lift) if p.default is p.empty]
    return f"; pass xs = {tuple_of(names)}" if len(names) > 1 else "; pass one tensor as xs"


def require_state(monoid: Any, tree: Any, what: str) -> None:
    """Raise ScanTypeError where `tree`, whose leaves are numbers, is no state of the monoid's."""
    identity = monoid.identity
    if callable(identity):
        require_entries(monoid, tree, what)
    elif identity is not None and not fits(template(flatten(identity)[1]), tree):
        wanted = template(flatten(identity)[1])
        told = advice(wanted, tree, what) or one_for_each(identity, tree)
        raise ScanTypeError(
            f"{what} is {shown(tree)}, but {monoid.name!r} takes {kind(wanted)}, as its identity "
            f"is{told or inner_difference(wanted, tree, what)}"
        )
    elif monoid.fields and not fits(tuple(range(len(monoid.fields))), tree):
        wanted = tuple(range(len(monoid.fields)))
        raise ScanTypeError(
            f"{what} is {shown(tree)}, but {monoid.name!r} takes {kind(wanted)}, "
            f"{tuple_of(list(monoid.fields))}{'' if is_leaf(tree) else advice(wanted, tree, what)}"
        )
    if monoid.lift is None:
        require_ranks(monoid, tree, what)


def require_entries(monoid: Any, tree: Any, what: str) -> None:
    """An identity that is a plain function has one parameter per top-level entry of the state."""
    if not isinstance(monoid.identity, (types.FunctionType, types.MethodType)):
        return
    signature = signature_of(monoid.identity)
    if signature is None or takes_any_number(signature):
        return
    names = [p.name for p in positional(monoid.identity)]
    required = [p for p in positional(monoid.identity) if p.default is p.empty]
    count = len(top_level(tree) or (tree,))
    if not names or len(required) <= count <= len(names):
        return
    wanted = f"a tuple {tuple_of(names)}" if len(names) > 1 else "one tensor"
    raise ScanTypeError(
        f"{what} is {shown(tree)}, but {monoid.name!r} takes {wanted}, as its identity "
        f"{monoid.name}.identity{signature} says"
    )


def require_lifted(monoid: Any, state: Any) -> None:
    """Raise ScanTypeError where lift does not make a state in the structure of the identity."""
    identity = monoid.identity
    if identity is None or callable(identity) or fits(template(flatten(identity)[1]), state):
        return
    raise ScanTypeError(
        f"the lift of {monoid.name!r} makes {shown(state)}, but its identity {identity} is "
        f"{describe(identity)}: lift makes elements as the operator combines them"
    )


def require_carry(operator: Any, state: Any, init: Any, what: str = "init") -> None:
    """Raise ScanTypeError where `init`, which errors call `what`, has not the structure of `state`,
    whose leaves are numbers. Numbers may stand for leaves, so that the identity shows what is
    expected."""
    tree = template(flatten(init)[1])
    if fits(state, tree):
        return
    example = operator.identity
    like = "as xs is" if operator.lift is None else "as its lift makes them"
    if example is not None and not callable(example):
        like = f"such as its identity {example}"
    seen = wording.kind_of(init) if is_leaf(tree) else describe(tree)
    remedy = "; pass one for each" if is_leaf(tree) else advice(state, tree, what)
    remedy = remedy or inner_difference(state, tree, what)
    raise ScanTypeError(
        f"{what} is {seen}, but a state of {operator.name!r} is {kind(state)}, {like}{remedy}"
    )


def require_function(fn: Any, wanted: str) -> None:
    """Raise ScanTypeError where `fn` cannot be an operator; `wanted`: what it has to be."""
    if not callable(fn):
        raise ScanTypeError(f"{wanted}, got {wording.kind_of(fn)}")
    refuse_scan(fn)
    name = getattr(fn, "__name__", "")
    if name in OF_PYTHON and getattr(builtins, name) is fn:
        raise ScanTypeError(f"Python's {name} is no function of two tensors; use {OF_PYTHON[name]}")
    if wording.is_of_numpy(fn):
        instead = [f"torch.{name}"] if hasattr(torch, name) else []
        instead += [f"assocscan.ops.{OF_NUMPY[name]}"] if name in OF_NUMPY else []
        remedy = " or ".join(instead) or "torch functions"
        raise ScanTypeError(f"NumPy's {name} takes arrays, not tensors; use {remedy}")


def refuse_scan(fn: Any) -> None:
    """Raise ScanTypeError where `fn` is itself a scan, of this package, torch or NumPy."""
    name = getattr(fn, "__name__", "")
    if name not in SCANS:
        return
    of_torch = any(getattr(owner, name, None) is fn for owner in (torch, torch.Tensor))
    is_own = str(getattr(fn, "__module__", "")).startswith(OWN)
    if is_own or of_torch or wording.is_of_numpy(fn):
        operator = SCANS[name]
        instead = f"; its operator is {operator}" if operator else ""
        raise ScanTypeError(
            f"op is {name}, which is itself a scan: call it on its own, or pass the operator that "
            f"combines two elements{instead}"
        )


PACKAGE = __name__.partition(".")[0]
OWN = tuple(f"{PACKAGE}.{floor}." for floor in ("api", "functional", "distributed"))
# The scans by name, each with its operator where that is one of `ops`.
SCANS = {
    "cumsum": "ops.sum", "cumprod": "ops.prod", "cummax": "ops.max", "cummin": "ops.min",
    "logcumsumexp": "ops.logaddexp", "linear_recurrence": "ops.affine",
    "matrix_recurrence": "ops.matrix_affine", "forward_fill": "ops.last_valid",
    "ewm_mean": "ops.ema", "ewm_var": "ops.ema_variance", "sosfilt": "",
    "windowed": "", "nonlinear_recurrence": "",
    "lfilter": "", "gae": "", "discounted_returns": "", "vtrace": "", "hmm_filter": "",
    "hmm_smoother": "", "viterbi": "", "kalman_filter": "", "rts_smoother": "", "compact": "",
    "selective_scan": "", "run_lengths": "",
    "associative_scan": "", "reduce": "", "explain": "", "stream": "",
}  # fmt: skip
OF_PYTHON = {
    "sum": "ops.sum or torch.add", "max": "ops.max or torch.maximum",
    "min": "ops.min or torch.minimum", "any": "ops.any or torch.logical_or",
    "all": "ops.all or torch.logical_and",
}  # fmt: skip
OF_NUMPY = {
    "add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min", "matmul": "matmul",
    "logaddexp": "logaddexp", "logical_and": "all", "logical_or": "any", "logical_xor": "xor",
    "gcd": "gcd",
}  # fmt: skip


def require_ranks(monoid: Any, tree: Any, what: str) -> None:
    """`element_ndim` may have a number in the place of a subtree, not another container."""
    wanted = monoid.element_ndim
    if not fits(wanted, tree, prefix=True):
        raise ScanTypeError(
            f"{what} is {shown(tree)}, but {monoid.name!r} takes {kind(wanted)}, as its "
            f"element_ndim {wanted} says{advice(wanted, tree, what)}"
        )


def fits(wanted: Any, tree: Any, prefix: bool = False) -> bool:
    """Whether both have one structure; with `prefix` a leaf of `wanted` stands for any tree."""
    if prefix and is_leaf(wanted):
        return True
    if prefix and type(wanted) is type(tree) and type(tree) in (tuple, list):
        return len(wanted) == len(tree) and all(
            fits(part, other, prefix) for part, other in zip(wanted, tree, strict=True)
        )
    try:
        align(wanted, tree, "")
    except ScanTypeError:
        return False
    return True


def inner_difference(wanted: Any, tree: Any, what: str) -> str:
    """Where two trees differ that look alike from outside, as `: init[0] is a leaf, expected …`;
    empty for others."""
    if describe(wanted) != describe(tree):
        return ""
    try:
        align(wanted, tree, what)
    except ScanTypeError as error:
        return f": {error}"
    return ""


def shown(tree: Any) -> str:
    return "a tensor" if is_leaf(tree) else describe(tree)


def kind(tree: Any) -> str:
    """`one tensor`, `a tuple of 2 tensors`, …"""
    if is_leaf(tree):
        return "one tensor"
    flat = isinstance(tree, (tuple, list)) and all(is_leaf(part) for part in tree)
    return f"{describe(tree)}{' tensor' + 's' * (len(tree) != 1) if flat else ''}"


def one_for_each(identity: Any, tree: Any) -> str:
    """Where a number was declared as the identity of a tuple of tensors: the tuple to declare."""
    is_number = isinstance(identity, (bool, int, float, complex))
    if not is_number or type(tree) is not tuple or not all(map(is_leaf, tree)):
        return ""
    return (
        "; where it combines such tuples, the identity has an entry for each tensor: "
        f"identity={tuple_of([repr(identity)] * len(tree))}"
    )


def tuple_of(names: list[str]) -> str:
    return f"({', '.join(names)}{',' * (len(names) == 1)})"


def advice(wanted: Any, tree: Any, what: str, fields: bool = False) -> str:
    """What to write in place of what was given, where that is plain."""
    if is_leaf(wanted) and isinstance(tree, (tuple, list)) and len(tree) == 1:
        return f"; pass {what}[0]"
    if type(wanted) is tuple and type(tree) is list and len(wanted) == len(tree):
        return f"; pass tuple({what})"
    if type(wanted) is tuple and type(tree) is dict and len(wanted) == len(tree):
        return f"; pass {tuple_of([f'{what}[{key!r}]' for key in tree])}, in the operator's order"
    if type(wanted) is tuple and is_leaf(tree) and not fields:
        return f"; pass {tuple_of([f'{what}{k}' for k in range(len(wanted))])}"
    return ""
