"""Monoids where torch cannot trace at all: their functions are run once on example tensors, to
learn the structures, shapes and dtypes that the eager engine needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, GraphModule

from ..program.operator import Leaf
from ..pytrees import TreeSpec, template
from ..trace.declared_identity import resolve_identity
from ..trace.fx_trace import Signature, Trace, observe
from ..trace.traced_monoid import Steps, TracedMonoid


def observed(
    monoid: Any, input_spec: TreeSpec, inputs: tuple[Leaf, ...], why_not: str
) -> TracedMonoid:
    """`trace_monoid` without programs; `why_not` says why torch cannot trace."""
    steps = ObservedSteps(monoid, input_spec, inputs)
    state_spec, state = steps.lifted()
    steps.check_combine(state_spec, state)
    output_spec, outputs = steps.lowered(state_spec, state)
    identity = resolve_identity(monoid, state_spec, state)
    return TracedMonoid(
        input_spec, state_spec, output_spec, inputs, state, outputs, identity,
        lambda: (None, why_not), pointwise=False,
    )  # fmt: skip


class ObservedSteps(Steps):
    """`Steps` that run the functions and record no graph."""

    def trace(self, role: str, spec: TreeSpec, leaves: Sequence[Leaf], wide: bool) -> Trace:
        arguments = [Signature(leaf.dtype, leaf.shape) for leaf in leaves]
        fn, roles = getattr(self.monoid, role), self.roles(role, len(template(spec)))
        return Trace(
            GraphModule({}, Graph()), *observe(fn, spec, arguments, self.label(role), roles)
        )
