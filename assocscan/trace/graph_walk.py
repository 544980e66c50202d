"""One walk over an FX graph of core ATen operations, and the operations that walks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..program.program_builder import Builder
from ..program.symbolic_tensors import Sym, Tensors
from .pointwise import Pointwise, operation_name, refuse_random, result_dtype


class GraphWalk:
    """One walk over one graph; `call` says what an operation does. Subclasses have operations of
    their own, these among them:"""

    op_amax: Callable[..., Sym]
    op_sum: Callable[..., Sym]
    op_dot: Callable[..., Sym]

    def __init__(self, builder: Builder, constants: object) -> None:
        self.tensors = Tensors(builder)
        self.pointwise = Pointwise(builder, self.tensors)
        self.constants = constants

    def run(self, graph: Graph, inputs: Sequence[Sym]) -> Any:
        env: dict[Node, Any] = {}
        remaining = iter(inputs)
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = next(remaining)
            elif node.op == "get_attr":
                env[node] = getattr(self.constants, str(node.target))
            elif node.op == "output":
                return torch.fx.node.map_arg(node.args[0], lambda n: env[n])
            else:
                args: Any = torch.fx.node.map_arg(node.args, lambda n: env[n])
                kwargs: Any = torch.fx.node.map_arg(node.kwargs, lambda n: env[n])
                env[node] = self.call(node, operation_name(node), args, kwargs)
        raise AssertionError("an FX graph ends with an output node")

    def call(self, node: Node, name: str, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def run_concretely(self, node: Node, name: str, args: Any, kwargs: Any) -> Any:
        """The result of an operation on constants."""
        refuse_random(node)
        target: Any = node.target
        result = target(*args, **kwargs)
        return torch.zeros_like(result) if name.startswith(("empty", "new_empty")) else result

    def op_complex(self, node: Node, real: Any, imag: Any) -> Sym:
        part = torch.empty(0, dtype=result_dtype(node)).real.dtype
        planes = [self.tensors.symbolic(v, part).ids for v in (real, imag)]
        return Sym.of(torch.broadcast_tensors(*planes), result_dtype(node))

    def op_polar(self, node: Node, radius: Any, angle: Any) -> Sym:
        part = torch.empty(0, dtype=result_dtype(node)).real.dtype
        r, phi = self.tensors.symbolic(radius, part), self.tensors.symbolic(angle, part)
        planes = [
            self.apply("mul", part, [r, self.apply(f, part, [phi])]).ids for f in ("cos", "sin")
        ]
        return Sym.of(planes, result_dtype(node))

    def apply(self, name: str, dtype: torch.dtype, operands: list[Sym]) -> Sym:
        """A pointwise operation whose operands and result have one dtype."""
        return self.pointwise.apply(name, dtype, dtype, operands)

    def op__softmax(self, node: Node, x: Any, dim: int, half_to_float: bool) -> Sym:
        dtype = result_dtype(node)
        _, exponentials, total = self.exponentials(node, x, dim)
        return self.apply("div", dtype, [exponentials, total])

    def op__log_softmax(self, node: Node, x: Any, dim: int, half_to_float: bool) -> Sym:
        dtype = result_dtype(node)
        offset, _, total = self.exponentials(node, x, dim)
        log = self.apply("log", dtype, [total])
        return self.apply("sub", dtype, [offset, log])

    def exponentials(self, node: Node, x: Any, dim: int) -> tuple[Sym, Sym, Sym]:
        """x − max, its exponentials, and their sum over `dim`."""
        dtype = result_dtype(node)
        x = self.tensors.symbolic(x, dtype)
        offset = self.apply("sub", dtype, [x, self.op_amax(node, x, dim, True)])
        exponentials = self.apply("exp", dtype, [offset])
        return offset, exponentials, self.op_sum(node, exponentials, dim, True)

    def op_vdot(self, node: Node, a: Any, b: Any) -> Sym:
        dtype = result_dtype(node)
        a = self.tensors.symbolic(a, dtype)
        return self.op_dot(node, self.apply("_conj", dtype, [a]) if dtype.is_complex else a, b)


def contains_sym(value: Any) -> bool:
    """Whether a nest of arguments holds a symbolic tensor."""
    if isinstance(value, (tuple, list)):
        return any(contains_sym(v) for v in value)
    if isinstance(value, dict):
        return any(contains_sym(v) for v in value.values())
    return isinstance(value, Sym)
