"""`Monoid`: an associative operator with its identity, lift and lower; `monoid`, the decorator.

Also the registry of names, and raw callables, which are operators without any of that.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, overload

import torch

from ..caching.bounded import BoundedCache, Calls
from ..caching.fork_safe_locks import ForkSafeLock
from ..errors import (
    BackendError,
    MonoidError,
    ScanTypeError,
    ScanValueError,
    TraceError,
    UntraceableError,
)
from ..hooks import HOOKS
from ..program.operator import Leaf
from ..program.operator_names import checked
from ..pytrees import TreeSpec, flatten, leaf_paths, spread, template, unflatten
from ..trace.expected_structure import require_function, require_inputs
from ..trace.fx_trace import isolated
from ..trace.signatures import require_call, takes_inputs
from ..trace.traced_monoid import TracedMonoid, first_line, observed, trace_monoid
from ..wording import shown
from .call_errors import checked_call, checked_methods
from .captured_values import MOST_VERSIONS, present
from .dynamo_tokens import token_of
from .leaf_checks import broadcast_batches, check_leaves
from .leaf_names import LeafNames
from .names_elsewhere import OPERATORS

_LOCK = ForkSafeLock()
_REGISTRY: dict[str, Monoid] = {}
BUILT_IN = "assocscan.ops"
MAX_TRACED = 1024
MOST_WIDTHS = 64  # of windows, whose calls are kept


@checked_methods
class Monoid:
    """An associative operator on elements; made by the decorator `monoid`.

    Calling it combines two states, mapped over leading batch dimensions where there are any.

    >>> import torch
    >>> from assocscan import ops
    >>> ops.affine((0.5, 8.0), (0.5, 1.0))            # h ↦ 0.5·h + 8, then h ↦ 0.5·h + 1
    (0.25, 5.0)
    >>> ops.max(torch.tensor([1.0, 5.0]), torch.tensor([3.0, 2.0]))
    tensor([3., 5.])

    The arguments are those of `monoid`, and attributes of the same names. A Monoid that is made
    without the decorator is not registered.

    Raises what `monoid` raises.
    """

    # Of steps that are not associative (`program.operator.Operator`).
    sequential: bool = False
    constant: tuple[int, ...] = ()
    # Of operators made inside a function that is compiled (`torch_compile.compiled_calls`).
    guarded: Monoid | None = None

    def __init__(
        self,
        combine: Callable[[Any, Any], Any],
        *,
        identity: Any = None,
        name: str | None = None,
        element_ndim: Any = 0,
        lift: Callable[..., Any] | None = None,
        lower: Callable[..., Any] | None = None,
        adjoint: tuple[Monoid, Callable[..., Any]] | None = None,
    ) -> None:
        require_function(combine, "monoid needs a function of two elements")
        for role, fn in (("lift", lift), ("lower", lower)):
            if fn is not None and not callable(fn):
                raise ScanTypeError(f"{role} must be a function, got {shown(fn)}")
        self.combine = combine
        self.identity = identity
        own_name = getattr(combine, "__name__", type(combine).__name__)
        self.name = checked(own_name if name is None else name)
        if self.name == "<lambda>":
            raise MonoidError("a lambda has no name to register it under; pass name=")
        check_options(self.name, element_ndim, adjoint)
        self.element_ndim = element_ndim
        self.lift, self.lower, self.adjoint = lift, lower, adjoint
        self._traced: BoundedCache[Hashable, TracedMonoid] = BoundedCache(MAX_TRACED)
        self._ndims: dict[TreeSpec, list[int]] = {}
        self.ranks: dict[TreeSpec, list[int]] = {}  # of `monoids.calls`
        # `runtime.prepared.prepared_call`; of windows, by their width.
        self.calls, self.reductions = Calls(), Calls()
        self.windows: BoundedCache[int, Calls] = BoundedCache(MOST_WIDTHS)
        self.recipe: tuple[Any, ...] | None = None  # of `monoids.combinators`
        self.fields: tuple[str, ...] = ()  # the entries of an element, for error messages
        # Of `captured_values`.
        self.sees_nothing = False
        self.held: list[Any] = []
        self.versions: BoundedCache[Hashable, Monoid] = BoundedCache(MOST_VERSIONS)
        self.token = token_of(self)
        functools.update_wrapper(self, combine, updated=())

    def __repr__(self) -> str:
        return f"<Monoid {self.name!r}>"

    @property
    def origin(self) -> tuple[str, str]:
        """Where the function was defined: redefining it there replaces the monoid."""
        return (
            getattr(self.combine, "__module__", "") or "",
            getattr(self.combine, "__qualname__", self.name),
        )

    @functools.cached_property
    def lower_takes_inputs(self) -> bool:
        """Whether there is a `lower` that is called as lower(state, xs)."""
        return self.lower is not None and takes_inputs(self.lower)

    @property
    def exclusive_form(self) -> Monoid:
        """The monoid that runs in an exclusive scan: another one for segmented operators."""
        return self if self.recipe is None else HOOKS.exclusive_form(self)

    def guarded_copy(self) -> Monoid:
        """The same operator, with the same token, whose captured values a graph guards already."""
        copy = object.__new__(Monoid)
        copy.__dict__.update(self.__dict__, guarded=self)
        return copy

    def element_ndims(self, spec: TreeSpec, what: str = "xs") -> list[int]:
        """The element dimensions of each leaf of xs, which errors call `what`; raises where it has
        the wrong structure."""
        known = self._ndims.get(spec)
        if known is None:
            tree = template(spec)
            require_inputs(self, tree, what)
            known = spread(tree, self.element_ndim, f"element_ndim of {self.name!r}")
            if not torch.compiler.is_dynamo_compiling():  # a change that a graph would repeat
                self._ndims[spec] = known
        return known

    def trace_for(self, spec: TreeSpec, leaves: tuple[Leaf, ...]) -> TracedMonoid:
        """The traced monoid for these input leaves, traced at the first use."""
        key = (spec, leaves, torch.get_default_dtype())
        known = self._traced.get(key)
        if known is None:
            try:
                with isolated():
                    known = self._traced.insert(key, trace_monoid(self, spec, leaves))
            except BackendError as error:  # torch cannot trace; it may be able to later
                return observed(self, spec, leaves, str(error))
            except UntraceableError as error:  # which a raw callable may be
                raise TraceError(str(error)) from error.__cause__
        return known

    def of(self, xs: Any, what: str = "xs") -> tuple[TracedMonoid, list[torch.Tensor], list[int]]:
        """Specialised to a tree of example leaves, which errors call `what`: with those leaves and
        their element ranks."""
        leaves, spec = flatten(xs)
        ndims = self.element_ndims(spec, what)
        self = present(self)
        paths = leaf_paths(spec, "xs"), leaf_paths(spec, what)
        check_leaves(leaves, spec, LeafNames({"xs": what, **dict(zip(*paths, strict=True))}))
        for path, t, n in zip(paths[1], leaves, ndims, strict=True):
            if t.dim() < n:
                raise ScanValueError(
                    f"{path} has shape {list(t.shape)}, but an element has {n} dimensions"
                )
        kinds = tuple(
            Leaf(t.dtype, tuple(t.shape[t.dim() - n :])) for t, n in zip(leaves, ndims, strict=True)
        )
        return self.trace_for(spec, kinds), leaves, ndims

    def traced(self) -> list[TracedMonoid]:
        """What the monoid was traced for so far."""
        return list(self._traced.values())

    def __call__(self, left: Any, right: Any) -> Any:
        """left ∘ right for two states (after lift), mapped over leading batch dimensions.

        The elements may be without any: tensors of an element's shape, or for scalar elements
        Python numbers, whose result is numbers.

        >>> from assocscan import ops
        >>> ops.sum(1.0, 2.0)
        3.0
        """
        from .direct_calls import combine_states

        return combine_states(self, left, right)

    def identity_like(self, xs: Any) -> Any:
        """The identity as a state with the full batch shape of `xs`.

        Raises MonoidError where the monoid declares none, TypeError where a leaf of xs is no dense
        tensor, and ValueError where the leaves are on several devices or their batch shapes do not
        broadcast.

        >>> import torch
        >>> from assocscan import ops
        >>> ops.affine.identity_like((torch.zeros(2), torch.zeros(2)))
        (tensor([1., 1.]), tensor([0., 0.]))
        """
        traced, leaves, ndims = self.of(xs)
        if traced.identity is None:
            raise MonoidError(f"{self.name!r} declares no identity")
        batch = broadcast_batches(leaf_paths(flatten(xs)[1], "xs"), leaves, ndims)
        values = [
            v.to(leaves[0].device, leaf.dtype).expand((*batch, *leaf.shape)).clone()
            for v, leaf in zip(traced.identity, traced.state, strict=True)
        ]
        return unflatten(values, traced.state_spec)

    def source(self, target: str, like: Any = None) -> str:
        """The code generated for `target`: "triton", "cuda" or "cpp".

        `like` gives example leaves of xs; by default the identity's structure, with its tensors'
        shapes, and float32, int64 or bool after the types of its Python numbers, or with a `lift` a
        number for each of its parameters. It is needed where these do not tell the leaves: with no
        identity, with one that is a function, or with a `lift` of vectors, matrices or dicts.

        Raises TypeError where `like` is needed and BackendError where the target cannot express the
        operator.

        >>> from assocscan import ops
        >>> "combine" in ops.affine.source("cpp")
        True
        """
        return HOOKS.monoid_source(self, target, like)

    def check(self, like: Any = None, samples: Any = 100) -> None:
        """Test associativity, and the identity where there is one, on random states and itself.

        They are random inputs, after `lift` where there is one. Half of the inputs have numbers of
        size 1 (integers up to 20), the others of up to 10⁴, where an operator may saturate.

        `like` gives example leaves of xs (dtypes and element shapes; default as in `source`), such
        as (torch.eye(3), torch.zeros(3)); their values do not matter. `samples` is how many random
        states are drawn, or the states themselves, where not every number is possible (weights
        that are not negative): in the structure of what combine takes, after `lift`, with one
        leading dimension. The tolerance scales with dtype and magnitude. Raises MonoidError with
        the counterexample.

        How errors grow in long scans, `assocscan.testing.error_growth` says.

        >>> from assocscan import ops
        >>> ops.affine.check()                          # nothing is printed: it is a monoid
        """
        HOOKS.check_monoid(self, like, samples)

    def __reduce__(self) -> tuple[Any, ...]:
        """By reference, or by what it was made of: see `pickling`."""
        return HOOKS.pickled_monoid(self)

    def __copy__(self) -> Monoid:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Monoid:
        """Itself, as for functions: a monoid does not change, and its traces are kept in it."""
        return self


def check_options(name: str, element_ndim: Any, adjoint: Any) -> None:
    """Refuse what would only fail, or mislead, at the first scan."""
    for n in flatten(element_ndim)[0]:
        if isinstance(n, bool) or not isinstance(n, int):
            raise ScanTypeError(f"element_ndim must hold ints, got {shown(n)}")
        if n < 0:
            raise ScanValueError(f"element_ndim must not be negative, got {n}")
    if adjoint is None:
        return
    pair = isinstance(adjoint, tuple) and len(adjoint) == 2
    if not (pair and isinstance(adjoint[0], Monoid) and callable(adjoint[1])):
        raise ScanTypeError(f"adjoint must be (Monoid, function), got {shown(adjoint)}")
    who = f"the function of the adjoint of {name!r}"
    require_call(adjoint[1], 3, who, "element(y_t, x_next, g_t)")


if TYPE_CHECKING:

    class PlainMonoid(Monoid):
        """A monoid without lift and lower, for type checkers: the results of its scans have the
        structure of xs. When the program runs, it is a `Monoid`."""


Function = Callable[[Any, Any], Any]
Adjoint = tuple[Monoid, Callable[..., Any]]


@overload
def monoid(
    fn: Function,
    *,
    identity: Any = None,
    name: str | None = None,
    element_ndim: Any = 0,
    lift: None = None,
    lower: None = None,
    adjoint: Adjoint | None = None,
) -> PlainMonoid: ...
@overload
def monoid(
    fn: Function,
    *,
    identity: Any = None,
    name: str | None = None,
    element_ndim: Any = 0,
    lift: Callable[..., Any] | None = None,
    lower: Callable[..., Any] | None = None,
    adjoint: Adjoint | None = None,
) -> Monoid: ...
@overload
def monoid(
    fn: None = None,
    *,
    identity: Any = None,
    name: str | None = None,
    element_ndim: Any = 0,
    lift: None = None,
    lower: None = None,
    adjoint: Adjoint | None = None,
) -> Callable[[Function], PlainMonoid]: ...
@overload
def monoid(
    fn: None = None,
    *,
    identity: Any = None,
    name: str | None = None,
    element_ndim: Any = 0,
    lift: Callable[..., Any] | None = None,
    lower: Callable[..., Any] | None = None,
    adjoint: Adjoint | None = None,
) -> Callable[[Function], Monoid]: ...
@checked_call
def monoid(
    fn: Any = None,
    *,
    identity: Any = None,
    name: str | None = None,
    element_ndim: Any = 0,
    lift: Callable[..., Any] | None = None,
    lower: Callable[..., Any] | None = None,
    adjoint: Adjoint | None = None,
) -> Any:
    """Make a `Monoid` of a function of two elements, and register it.

    combine(left, right): left is the earlier element. Written with torch functions for one pair of
    elements; traced, never called on data by the generated engines.

    identity: a pytree of numbers or of tensors of the element's shape. A number stands for a whole
        vector or matrix: 1.0 is a matrix of ones, and what `@` needs is torch.eye. Or a callable
        that makes the pytree from the shapes of one state (after `lift`), such as
        lambda A, b: (torch.eye(A[-1]), torch.zeros(b)). It gets one argument for each top-level
        entry, always by position: of a dict in the order in which xs has its keys. Numbers and
        tensors are cast to the dtypes of xs; ±inf is the least or greatest number of an integer or
        bool dtype.
    name: the name to register under; the function's by default. A lambda needs one. 1 to 200
        characters, no control characters or line breaks among them.
    element_ndim: how many trailing dimensions of each leaf of xs belong to one element: a number
        for all leaves, 0 by default, or one for each in the structure of xs, as (2, 1).
    lift, lower: fused maps before and after the scan: lift(*xs) (lift(xs) where xs is not a tuple
        or list) makes a state of the inputs at t; lower(state) makes the output, or lower(state,
        xs) if it requires two positional arguments.
    adjoint: (M, element), a hand-written derivative: a monoid M and a function element(h, e, g). It
        gets the state h[t] before any lower, the lifted input e[t+1], and g[t], the gradient of the
        loss in h[t] through the output at t alone. The scan of what it returns, by M from the end,
        after the lower of M, must be the gradient in h[t] through all outputs. After the last step
        e[0] stands for the e that is missing; results must not depend on it.

    Numbers that the functions see (closures, globals, attributes, entries) are read at every call;
    a new value is traced and compiled anew. Tensors are refused: pass them as leaves of xs.

    Raises MonoidError for a lambda without name, for a name that another user function has, and for
    what cannot be a name.

    >>> @monoid(identity=(1.0, 0.0), name="affine_example")
    ... def affine(left, right):
    ...     a1, b1 = left
    ...     a2, b2 = right
    ...     return a2 * a1, a2 * b1 + b2
    >>> affine
    <Monoid 'affine_example'>
    """

    def made(function: Function) -> Monoid:
        return register(Monoid(
            function, identity=identity, name=name, element_ndim=element_ndim, lift=lift,
            lower=lower, adjoint=adjoint,
        ))  # fmt: skip

    return made if fn is None else made(fn)


def register(made: Monoid) -> Monoid:
    """Put a monoid into the registry. The same function again replaces it."""
    with _LOCK:
        known = _REGISTRY.get(made.name)
        built_in = known is not None and known.origin[0].startswith(BUILT_IN)
        if known is not None and not built_in and not same_definition(known, made):
            raise MonoidError(
                f"the name {made.name!r} is taken by {defined(known)}; give {defined(made)} "
                f"{'a name' if made.origin[1].endswith(made.name) else 'another name'} by name="
            )
        _REGISTRY[made.name] = made
    return made


def defined(op: Monoid) -> str:
    """Which function a monoid is made of, and the line where it is written."""
    return ".".join(op.origin) + first_line(op.combine)


def same_definition(known: Monoid, made: Monoid) -> bool:
    """The same qualified name, as when a notebook cell runs again; for lambdas the same code."""
    if known.origin != made.origin:
        return False
    codes = [getattr(m.combine, "__code__", None) for m in (known, made)]
    if not known.origin[1].endswith("<lambda>") or None in codes:
        return True
    first, second = ((c.co_code, c.co_consts, c.co_names) for c in codes if c is not None)
    return first == second


@checked_call
def monoids() -> dict[str, Monoid]:
    """A copy of the registry: name → Monoid, built-in ones included.

    >>> import assocscan
    >>> assocscan.monoids()["affine"]
    <Monoid 'affine'>
    """
    with _LOCK:
        return dict(_REGISTRY)


def by_name(op: Any) -> Any:
    """The registered monoid that `op` names; `op` itself where it is no name of one."""
    return _REGISTRY.get(op, op) if type(op) is str else op


def resolve(name: str) -> Monoid:
    """The registered monoid of this name. Raises ValueError with the nearest known name."""
    with _LOCK:
        found = _REGISTRY.get(name)
        known = list(_REGISTRY)
    if found is None:
        raise ScanValueError(f"no monoid is registered as {name!r}{nearest(name, known)}")
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of the message for a name that no operator has."""
    right = OPERATORS.get(name)
    if right is None:
        right = next(iter(difflib.get_close_matches(name, known, 1, 0.0)), "")
    return f"; did you mean {right!r}?" if right else ""
