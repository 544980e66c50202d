"""User's function → FX graph of core ATen operations, by `make_fx` on fake tensors.

Tracing happens once per (function, dtypes, shapes). What cannot be a pure function of its arguments
is refused here with the user's own line: branches on data, mutation of an argument, captured
tensors.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.autograd import forward_ad
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from ..caching.fork_safe_locks import ForkSafeLock
from ..errors import (
    AssocScanError,
    ResultTypeError,
    TraceError,
    UnsupportedOperation,
    UntraceableError,
)
from ..pytrees import describe, leaf_paths
from ..torch_private import (
    FAKE_TENSORS,
    FORWARD_LEVEL,
    LOGGERS,
    FakeTensorMode,
    TorchDispatchMode,
    WithoutTorchFunction,
    WithTorchFunction,
    are_saved_tensors_hooks_enabled,
    compiling_in,
    is_functorch_tensor,
    jit_tracing_state,
    one_symbol_per_size,
    pytree,
    schema_of,
    set_jit_tracing_state,
    storage_number,
    without_dispatch_modes,
    without_transforms,
)
from ..torch_state import without_autocast
from ..wording import is_users, kind_of, user_line
from .closure_captures import captured
from .decompositions import decompositions
from .tracer_import import MakeFx, tracer

_LOCK = ForkSafeLock()


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Outside the caller's autocast, default device, torch.func transforms, tracers, modes, and
    whatever compilation is under way."""
    with (
        without_transforms(),
        without_dispatch_modes(),
        WithoutTorchFunction(),  # of the default device, and of torch.export
        compiling_in(None),
        without_autocast("cpu"),
        _without_tracer(),
        _without_saving(),
    ):
        yield


@contextlib.contextmanager
def _without_saving() -> Iterator[None]:
    """Unseen by the caller's saved-tensor hooks, which count (torch.utils.checkpoint)."""
    if not are_saved_tensors_hooks_enabled():
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        yield


@contextlib.contextmanager
def _without_tracer() -> Iterator[None]:
    """Unseen by torch.jit.trace."""
    state = jit_tracing_state()
    set_jit_tracing_state(None)
    try:
        yield
    finally:
        set_jit_tracing_state(state)


@dataclass(frozen=True)
class Signature:
    """Dtype and shape of one traced argument or result."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass
class Trace:
    """A traced function: its graph, and the structure and signatures of what it returns.

    along: see `_along_dimension`.
    """

    graph: GraphModule
    spec: pytree.TreeSpec
    results: tuple[Signature, ...]
    along: str = ""


class _Silence(logging.Filter, threading.local):
    """Drops what a thread that traces would log: the error is raised with everything in it."""

    active = False

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.active


_SILENCE = _Silence()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch logs fifteen lines for an operation that fails on fake tensors."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_SILENCE)  # the same one is added once
    before, _SILENCE.active = _SILENCE.active, True
    try:
        yield
    finally:
        _SILENCE.active = before


def trace(
    fn: Callable[..., Any],
    spec: pytree.TreeSpec,
    arguments: Sequence[Signature],
    name: str,
    any_size: bool = False,
    roles: Sequence[str] = ("left", "right"),
    lifted: bool = False,
) -> Trace:
    """Trace `fn(*tree)` where `tree` is the tuple of arguments that `spec` describes.

    roles: what the arguments are called in error messages.
    lifted: a lift made them of xs, for the same.
    any_size: the sizes given are examples; raise UnsupportedOperation where the trace depends on
    them. Raises BackendError where torch cannot trace anything here.
    """
    structure: dict[str, Any] = {}

    def flat(*leaves: torch.Tensor) -> list[torch.Tensor]:
        memory = [(storage_number(t), t.dim()) for t in leaves]
        result = fn(*pytree.tree_unflatten(list(leaves), spec))
        if memory != [(storage_number(t), t.dim()) for t in leaves]:  # no graph shows that
            raise TraceError(
                f"operator {name!r} gives one of its arguments other memory, by `.data` or `set_`; "
                "compute a new tensor instead"
            )
        outputs, structure["spec"] = pytree.tree_flatten(result)
        return [as_tensor(o, leaves) for o in outputs]

    if any(map(_is_wrapped, captured(fn))):
        raise UntraceableError(
            f"operator {name!r} uses a captured tensor that torch.func or forward mode transforms; "
            "pass it as a leaf of xs (k.expand(x.shape) copies nothing)"
        )
    with _LOCK, isolated(), torch.no_grad():
        before = _draws()
        graph = _make_graph(tracer(), _Call(name, spec, arguments, roles, lifted), flat, any_size)
        if _draws() != before:
            raise TraceError(
                f"operator {name!r} draws random numbers of Python or NumPy, which would be the "
                "same for all steps; draw them before, as a tensor with a number for each step, "
                "and pass it as a leaf of xs"
            )
    if any_size:
        _refuse_sizes(graph, name)
    _refuse_impure(graph, flat, arguments, name)
    numbers = not any(a.shape for a in arguments)
    along = _along_dimension(graph, flat, arguments, name) if numbers else ""
    values = [n.meta["val"] for n in _output_nodes(graph)]
    results = tuple(Signature(v.dtype, tuple(v.shape)) for v in values)
    return Trace(graph, structure["spec"], results, along)


def _draws() -> Any:
    """The state of the generators of Python and NumPy, whose numbers leave no trace in a graph."""
    numpy: Any = sys.modules.get("numpy")
    found = None if numpy is None else numpy.random.get_state()
    if isinstance(found, tuple):  # of the usual generator; others are not looked at
        found = found[1].tobytes(), *found[2:]
    return random.getstate(), found if isinstance(found, tuple) else None


def observe(
    fn: Callable[..., Any],
    spec: pytree.TreeSpec,
    arguments: Sequence[Signature],
    name: str,
    roles: Sequence[str],
) -> tuple[pytree.TreeSpec, tuple[Signature, ...]]:
    """The structure and the signatures of what a function returns, found by running it on ones:
    where torch cannot trace."""
    examples = [torch.ones(a.shape, dtype=a.dtype) for a in arguments]
    try:
        with isolated(), torch.no_grad():
            leaves, result_spec = pytree.tree_flatten(fn(*pytree.tree_unflatten(examples, spec)))
            values = [as_tensor(leaf, examples) for leaf in leaves]
    except Exception as error:
        raise _explain(_Call(name, spec, arguments, roles, False), error) from error
    return result_spec, tuple(Signature(v.dtype, tuple(v.shape)) for v in values)


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether it stands for another one. Tracing such a tensor leaves torch's modes as they were in
    the middle of an operation (2.13)."""
    if is_functorch_tensor(tensor):
        return True
    level = getattr(forward_ad, FORWARD_LEVEL)
    return level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


@dataclass(frozen=True)
class _Call:
    """What is traced, for error messages."""

    name: str
    spec: pytree.TreeSpec
    arguments: Sequence[Signature]
    roles: Sequence[str]
    lifted: bool

    def __str__(self) -> str:
        """`left[0]: float32[], left[1]: …`"""
        paths: list[str] = []
        for role, part in zip(self.roles, self._trees(), strict=True):
            paths.extend(leaf_paths(pytree.tree_flatten(part)[1], role))
        return ", ".join(f"{p}: {a}" for p, a in zip(paths, self.arguments, strict=True))

    def structure(self) -> str:
        """What the arguments are, for an operator that took them for something else."""
        kinds = [
            "a tensor" if pytree.tree_is_leaf(tree) else describe(tree) for tree in self._trees()
        ]
        origin = "as lift makes them" if self.lifted else "as xs is"
        if len(set(kinds)) == 1 and len(kinds) > 1:
            return f"{' and '.join(self.roles)} are each {kinds[0]}, {origin}"
        return ", ".join(f"{r} is {kind}" for r, kind in zip(self.roles, kinds, strict=True))

    def _trees(self) -> Any:
        return pytree.tree_unflatten(list(range(self.spec.num_leaves)), self.spec)


def _make_graph(
    make_fx: MakeFx, call: _Call, flat: Callable[..., Any], any_size: bool
) -> GraphModule:
    def traced(function: Callable[..., Any]) -> GraphModule:
        examples = [torch.zeros(a.shape, dtype=a.dtype) for a in call.arguments]
        mode: Literal["symbolic", "fake"] = "symbolic" if any_size else "fake"
        traceable = make_fx(function, decomposition_table=decompositions(), tracing_mode=mode)
        with one_symbol_per_size():
            graph: GraphModule = traceable(*examples)
        return without_squeeze_in_place(graph)

    try:
        # Writes into temporaries are made functional; only then, since a custom autograd.Function
        # may refuse to run under a functorch transform.
        with _quiet():
            graph = traced(flat)
            return traced(torch.func.functionalize(flat)) if _writes(graph) else graph
    except AssocScanError:
        raise
    except Exception as error:
        if type(error).__name__ in _BRANCHES and _converts(flat, call.arguments):
            raise TraceError(_converting(call.name, user_line(error))) from error
        raise _explain(call, error) from error


def _refuse_sizes(graph: GraphModule, name: str) -> None:
    """Raise UnsupportedOperation where a symbolic trace assumed something of a size."""
    first = next(n for n in graph.graph.nodes if n.op == "placeholder")
    environment = first.meta["val"].fake_mode.shape_env
    if environment.guards:
        raise UnsupportedOperation(f"operator {name!r} looks at sizes")


def without_squeeze_in_place(graph: GraphModule) -> GraphModule:
    """torch's vector @ matrix squeezes its own temporary in place: written as a plain squeeze."""
    packet, plain = torch.ops.aten.squeeze_, torch.ops.aten.squeeze
    replaced = {getattr(packet, name): getattr(plain, name) for name in packet.overloads()}
    for node in graph.graph.nodes:
        if node.target in replaced:
            source: Any = node.args[0]
            if source.op == "call_function" and len(source.users) == 1:
                node.target = replaced[node.target]
    return graph


def _writes(graph: GraphModule) -> bool:
    schemas = (schema_of(n.target) for n in graph.graph.nodes)
    return any(schema is not None and schema.is_mutable for schema in schemas)


def _explain(call: _Call, error: Exception) -> Exception:
    """The error to raise for what the user's function did while it was traced."""
    name = call.name
    if "convert all Tensors to FakeTensors" in str(error):
        return UntraceableError(
            f"operator {name!r} uses a captured tensor{user_line(error)}; pass it as a leaf of xs "
            "(k.expand(x.shape) copies nothing), or use a Python number"
        )
    eager_only = type(error).__module__.startswith(FAKE_TENSORS)
    kind = UntraceableError if eager_only else TraceError
    return failure(f"operator {name!r} failed on ({call})", name, error, kind, _hint(call, error))


SQUARE = "; left, right and the result have one shape: matrices that are multiplied must be square"


NUMBERS = (
    "; this operator's elements are numbers, tensors without dimensions; where they are to be "
    "matrices or vectors, declare element_ndim: 2 for matrices, 1 for vectors, (2, 1) for a matrix "
    "and a vector"
)


def _is_of_dimensions(error: Exception) -> bool:
    """Whether torch says that a tensor has too few dimensions, in the words of many operations."""
    words = ("dim", "1D", "2D", "3D", "subscripts", _OF_CAT)
    of_size = _OF_TUPLE in str(error) and ".shape" in user_line(error)
    return of_size or any(word.lower() in str(error).lower() for word in words)


def not_square(shapes: Sequence[Sequence[int]]) -> bool:
    """Whether some leaf is a matrix that is not square."""
    return any(len(s) >= 2 and s[-1] != s[-2] for s in shapes)


def _hint(call: _Call, error: Exception) -> str:
    """What is likely to be wrong with the arguments."""
    of_shapes = isinstance(error, (RuntimeError, ValueError, IndexError, AssertionError))
    shapes = [a.shape for a in call.arguments]
    if of_shapes and tuple(call.roles) == ("left", "right") and not_square(shapes):
        return SQUARE
    misread = isinstance(error, (TypeError, IndexError, KeyError, AttributeError, ValueError))
    hint = f"; {call.structure()}" if misread or call.lifted else ""
    of_two = tuple(call.roles) == ("left", "right")
    if isinstance(error, TypeError) and of_two and not user_line(error):
        hint += "; an operator is called as op(left, right) and returns an element like both"
    if _OF_WHERE in str(error):
        hint += "; torch.where takes the mask first, a tensor of bool: are inputs swapped?"
    if _OF_FUNC in str(error):
        hint += "; torch.func.grad and its like cannot be traced: write the derivative out"
    without = of_shapes and not any(shapes) and not call.lifted
    return hint + NUMBERS if without and _is_of_dimensions(error) else hint


# What torch says of `if`, `and`, `or`, `min` and `max` on tensors: while it traces, under vmap, and
# on tensors of several values. The same exceptions come of `float(x)`, the other words are of that.
_BRANCHES = ("GuardOnDataDependentSymNode", "DataDependentOutputException")
_CONVERSION_WORDS = (
    "calling .item()",
    ".numpy() is not supported",
    "only one element tensors can be converted",
    "cannot be converted to Scalar",
)
# What comes of torch.cat on fake tensors without dimensions.
_OF_CAT = "list assignment index out of range"
# What torch.where says of a mask that is none.
_OF_WHERE = "expected predicate to be bool"
# What torch says of a transform of torch.func while it traces.
_OF_FUNC = "don't yet support saved tensor hooks"
# What Python says of x.shape[-1] for an x without dimensions.
_OF_TUPLE = "tuple index out of range"
_BRANCH_WORDS = ("data-dependent control flow", "with more than one value is ambiguous")


def failure(
    what: str, name: str, error: Exception, kind: type[TraceError] = TraceError, hint: str = ""
) -> TraceError:
    """The error to raise for what the user's function raised; `what` says on which arguments."""
    line, text = user_line(error), str(error)
    if text == _OF_CAT and not is_users(traceback.extract_tb(error.__traceback__)[-1].filename):
        text = "torch.cat joins tensors along a dimension, and these have none"
    text = text.partition(", but expected one of:")[0].replace("FakeTensor", "Tensor")
    text = text.partition(". Use `tensor.item()`")[0]
    if type(error).__name__ in _BRANCHES or any(words in text for words in _BRANCH_WORDS):
        return TraceError(
            f"operator {name!r} branches on the value of a tensor{line}; use torch.where in place "
            "of `if`, `and`, `or`, and torch.maximum and torch.minimum in place of `max` and `min`"
        )
    if any(words in text for words in _CONVERSION_WORDS):
        return TraceError(_converting(name, line))
    if isinstance(error, NoTensor):
        return ResultTypeError(f"{what}{line}: TypeError: {text.rstrip('.')}{hint}")
    return kind(f"{what}{line}: {type(error).__name__}: {text.rstrip('.')}{hint}")


def _converting(name: str, line: str) -> str:
    """The message for an operator that needs the value of a tensor, other than to branch on it."""
    return (
        f"operator {name!r} makes a Python number or an array of a tensor{line}; tensors must stay "
        "tensors: torch.exp(x), not math.exp(x), and no float(x), x.item() or x.numpy()"
    )


class NoTensor(TypeError):
    """A function returned something else than a tensor."""


def as_tensor(value: Any, like: Sequence[torch.Tensor]) -> torch.Tensor:
    """A leaf that a function returned: a tensor, or a Python number made one."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, float):
        floats = [t.dtype for t in like if t.dtype.is_floating_point]
        return torch.tensor(value, dtype=floats[0] if floats else None)
    if isinstance(value, (bool, int, complex)):
        return torch.tensor(value)
    hint = " (is a `return` missing?)" if value is None else ""
    raise NoTensor(f"it returned {kind_of(value)}, expected a tensor{hint}")


def _output_nodes(graph: GraphModule) -> list[Any]:
    output = next(n for n in graph.graph.nodes if n.op == "output")
    return list(output.args[0])


def _refuse_impure(
    graph: GraphModule, flat: Callable[..., Any], arguments: Sequence[Signature], name: str
) -> None:
    """Raise for a read of a value into Python, and for a write to an argument."""
    for node in graph.graph.nodes:
        if _reads(node.target):
            line = _line_of(flat, arguments, _reads)
            raise TraceError(_converting(name, line))
        schema = schema_of(node.target)
        if schema is not None and schema.is_mutable:
            line = _line_of(flat, arguments, _writes_to)
            raise TraceError(
                f"operator {name!r} changes one of its arguments in place{line}; "
                "compute a new tensor instead"
            )


# These change no value of a tensor, whatever its dimensions are.
_ADD_OR_DROP = ("unsqueeze", "squeeze")


def _along_dimension(
    graph: GraphModule, flat: Callable[..., Any], arguments: Sequence[Signature], name: str
) -> str:
    """Of an operation along a dimension of a tensor without dimensions, as `sum(-1)`: that it is
    there, and the user's line. Empty where there is none. torch takes a number for a vector of one
    component, so that nothing fails where element_ndim was forgotten."""
    for node in graph.graph.nodes:
        value = getattr(node.args[0], "meta", {}).get("val") if node.args else None
        if _is_along_dimension(node.target, [value, *node.args[1:]]):
            line = _line_of(flat, arguments, _is_along_dimension)
            return f"operator {name!r} works along a dimension of an element{line}"
    return ""


def _is_along_dimension(func: Any, args: Any, *_: Any) -> bool:
    """Whether an ATen operation is given a dimension of a tensor that has none."""
    schema = schema_of(func)
    if schema is None or not args or not isinstance(args[0], torch.Tensor) or args[0].dim():
        return False
    if schema.name.removeprefix("aten::") in _ADD_OR_DROP:
        return False
    for k, argument in enumerate(schema.arguments):
        if argument.name in ("dim", "dims"):
            dims = args[k] if k < len(args) else argument.default_value
            return dims is not None and dims != []
    return False


class Found(Exception):
    """Raised inside of a user's function, to end it at what was looked for."""


class FunctionWatch(TorchFunctionMode):
    """Raises Found at a function of torch of which matches(name, args, kwargs) is true."""

    def __init__(self, matches: Callable[..., bool]) -> None:
        super().__init__()
        self.matches = matches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.matches(getattr(func, "__name__", ""), args, kwargs):
            raise Found
        return func(*args, **(kwargs or {}))


def _line_of(
    flat: Callable[..., Any],
    arguments: Sequence[Signature],
    matches: Callable[[Any, Any, Sequence[torch.Tensor]], bool],
) -> str:
    """The user's line that calls the first matching ATen operation, found by running it again."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if matches(func, args, examples):
                raise Found
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        examples = [torch.zeros(a.shape, dtype=a.dtype) for a in arguments]
        try:
            with Watch():
                flat(*examples)
        except Found as found:
            return user_line(found)
    return ""


CONVERSIONS = ("__float__", "__int__", "__index__", "__complex__", "__array__", "item")


def _converts(flat: Callable[..., Any], arguments: Sequence[Signature]) -> bool:
    """Whether the first value that a function needs is for a Python number or an array, not for a
    branch: found by running it again."""

    with FakeTensorMode():
        examples = [torch.zeros(a.shape, dtype=a.dtype) for a in arguments]
        try:
            with WithTorchFunction(), FunctionWatch(lambda name, *_: name in CONVERSIONS):
                flat(*examples)
        except Found:
            return True
        except Exception:
            return False
    return False


def _reads(func: Any, *_: Any) -> bool:
    return func is torch.ops.aten._local_scalar_dense.default


def _writes_to(func: Any, args: Any, leaves: Sequence[torch.Tensor]) -> bool:
    for k, argument in enumerate(schema_of(func).arguments[: len(args)]):
        info = argument.alias_info
        if info is not None and info.is_write and _shares(args[k], leaves):
            return True
    return False


def _shares(value: Any, tensors: Sequence[torch.Tensor]) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    number = storage_number(value)
    return any(storage_number(t) == number for t in tensors)
