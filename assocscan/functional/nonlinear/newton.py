"""Newton's method for recurrences whose steps are not associative (`autodiff.newton_operator`).

The axis is solved in windows, each from the state that the one before left: iterations of linear
scans, until |h[t] − step(h[t−1], x[t])| ≤ tolerance · (1 + |h[t]|) at every step of a chain; one
more iteration follows. Chains that do not come as far in a window are walked in it by the kernel of
the loop, so that the result is never NaN where the loop's is not.

Derivatives are taken at these states: as the loop takes them, by walking the axis, or by a scan
(`Dispatch.scans_back`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...autodiff.evaluate import evaluate
from ...autodiff.newton_operator import NewtonOperator, derive_newton
from ...engines.base.commands import Tensors
from ...engines.base.executable import Executable
from ...engines.base.scan_spec import MaybeTensor, NewtonOptions, ScanSpec, plain
from ...engines.base.shifted_leaves import at_last_steps, previous_state
from ...engines.eager.owned_results import owned
from ...engines.eager.program_interpreter import joined
from ...errors import BackendError, UnsupportedOperation
from ...program.dtypes import EXACT_DTYPES
from ...program.element_components import component_views, from_components
from ...program.operator import Operator, without_outputs
from ...program.transforms import with_outputs
from ...runtime import executable_cache as executables
from ...runtime.generated_gradient import along_axis
from ...runtime.native import runner
from ...runtime.operation_arguments import Dispatch, Results, call
from ...torch_state import needs_dispatcher

# Steps of a window. A GPU is filled by long windows; longer ones take one or two iterations more.
WINDOW, WINDOW_ON_GPU = 8192, 65536
MAX_ITERATIONS = 24
# The first iteration whose distance from a solution the host reads. Earlier distances are not read,
# as reading waits for the GPU.
UNSEEN = 3
Spec = ScanSpec[Operator]
Iteration = tuple["Guess", torch.Tensor]


@dataclass
class Report:
    """What a solution took. windows: how many there were, of all chains. iterations: of Newton's
    method, summed over them; where one kernel solves no chain by itself, all chains iterate
    together, and windows of several chains count once. walked: how many windows were walked."""

    iterations: int = 0
    walked: int = 0
    windows: int = 0

    def __str__(self) -> str:
        return f"{self.iterations} iterations, {self.walked} of {self.windows} windows were walked"


@dataclass(frozen=True)
class NewtonDispatch(Dispatch):
    """Runs a sequential scan by Newton's method; the scans of its derivatives run directly.

    once: the step is affine in h, so that the first iteration is the result.
    """

    tolerance: float | None = None
    max_iterations: int = MAX_ITERATIONS
    once: bool = False
    report: Report | None = None

    @property
    def options(self) -> tuple[float | None, int]:
        return self.tolerance, self.max_iterations

    def run(self, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]) -> Results:
        if self.always or needs_dispatcher():
            return call(self.backend, spec, tensors)
        is_derivative = not spec.operator.sequential or spec.exclusive
        if is_derivative or spec.length == 0:
            return executables.run(self.backend, spec, tensors)
        if not self.once:
            found = self.by_kernel(spec, tensors)
            return Solution(self, spec, tensors).solved() if found is None else found
        found = Solution(self, spec, tensors).affine()
        results = [t for part in found for t in part]
        if not results or bool(torch.stack([t.isfinite().all() for t in results]).all()):
            return found
        return executables.run(self.backend, spec, tensors)

    def by_kernel(self, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]) -> Results | None:
        """The solution by one kernel; None where there is none for this scan."""
        executable = self.kernel(spec, tensors)
        return None if executable is None else runner.run(executable, tensors)

    def kernel(self, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]) -> Executable | None:
        """The kernel that solves such scans; None where there is none."""
        if self.backend == "auto" and spec.device.type == "cpu":
            return None
        tensors = [t if t is None else plain(t) for t in tensors]
        try:
            return executables.prepare(self.backend, self.in_windows(spec), tensors)
        except BackendError:
            return None

    def in_windows(self, spec: ScanSpec[Any]) -> ScanSpec[Any]:
        """The scan with `NewtonOptions` set: the request for a kernel that solves it in windows."""
        return replace(spec, newton=NewtonOptions(self.near(spec), self.max_iterations))

    def near(self, spec: ScanSpec[Any]) -> float:
        """The tolerance; where none was given, the root of the precision of the coarsest state."""
        count = derive_newton(spec.operator).states
        kinds = [leaf.accumulator for leaf in spec.operator.state[:count]]
        if self.tolerance is not None:
            return self.tolerance
        return float(max(torch.finfo(kind).eps for kind in kinds) ** 0.5)


@dataclass
class Guess:
    """States as an iteration reads them: before each step, and after the last one of a chain."""

    before: Tensors
    last: Tensors

    def states(self, spec: Spec, offsets: MaybeTensor) -> Tensors:
        """The state after each step: the one before the next step."""
        return [
            previous_state(before, last, spec.axis, not spec.reverse, offsets)
            for before, last in zip(self.before, self.last, strict=True)
        ]


class Solution:
    """A sequential scan, solved. Raises UnsupportedOperation where its step has no derivative."""

    def __init__(self, method: NewtonDispatch, spec: Spec, tensors: Sequence[MaybeTensor]) -> None:
        self.method, self.spec = method, spec
        self.newton: NewtonOperator = derive_newton(spec.operator)
        count, n = self.newton.states, len(spec.operator.inputs)
        every = [t for t in tensors if t is not None]
        assert len(every) == len(tensors)
        self.x, self.h = every[:n], every[n : n + count]
        self.given = every
        self.offsets = None if spec.sequences is None else every[-1]
        constants = along_axis(spec, tensors)
        self.p = [constants[k] for k in spec.operator.constant]

    def affine(self) -> Results:
        spec = self.window_spec(self.spec.length)
        # With the guess g = 0 the offset f − J g is f itself: nothing cancels.
        zero = Guess(
            [t.new_zeros(()).expand(spec.batch) for t in self.h],
            [t.new_zeros(()).expand(t.shape) for t in self.h],
        )
        guess, _ = next(self.iterations(zero, self.p, self.x, self.h, spec))
        return self.shown(guess.states(spec, self.offsets))

    def solved(self) -> Results:
        spec = self.spec
        length = spec.length
        window = WINDOW if spec.device.type == "cpu" else WINDOW_ON_GPU
        size = length if spec.sequences is not None else min(window, length)
        starts = range(0, length, size)
        carry, parts = self.h, []
        for start in reversed(starts) if spec.reverse else starts:
            count = min(size, length - start)
            cut = [t if t.shape[spec.axis] == 1 and length != 1 else
                   t.narrow(spec.axis, start, count) for t in (*self.p, *self.x)]  # fmt: skip
            p, x = cut[: len(self.p)], cut[len(self.p) :]
            states = self.solve_window(p, x, carry, self.window_spec(count))
            carry = [t.select(spec.axis, 0 if spec.reverse else count - 1) for t in states]
            parts.append(states)
        if spec.reverse:
            parts.reverse()
        if len(parts) == 1:
            return self.shown(parts[0])
        return self.shown([torch.cat(list(p), spec.axis) for p in zip(*parts, strict=True)])

    def window_spec(self, count: int) -> Spec:
        """The scan of one iteration in a window of so many steps."""
        spec, newton = self.spec, self.newton
        batch = (*spec.batch[: spec.axis], count, *spec.batch[spec.axis + 1 :])
        moving = tuple(range(newton.matrix_size, len(newton.operator.state)))
        ahead = tuple(range(newton.states, 2 * newton.states))
        return ScanSpec(
            newton.operator, batch, spec.axis, spec.device, spec.reverse, True, moving[:-1],
            False, moving, ahead, ahead, spec.sequences,
        )  # fmt: skip

    def iterations(
        self, guess: Guess, p: Tensors, x: Tensors, carry: Tensors, spec: Spec
    ) -> Iterator[Iteration]:
        """Guess after guess, each with how far every chain of the one before was from a solution.
        From the second iteration on all tensors lie in memory alike, so one executable runs."""
        packed = [] if self.offsets is None else [self.offsets]
        leaves, backend = self.newton.operator.outputs, self.method.backend
        entering = [
            part for t, leaf in zip(carry, leaves, strict=True) for part in component_views(t, leaf)
        ]
        for count in itertools.count():
            given = [*guess.before, *guess.before, *p, *x, *entering, *guess.last, *packed]
            if count < 2:
                executable = executables.prepare(backend, spec, given)
            before, ends = runner.run(executable, given)
            parts, last = iter(ends[:-1]), []
            for leaf in leaves:
                components: list[MaybeTensor] = [next(parts) for _ in range(leaf.components)]
                last.append(from_components(components, leaf, spec.carry_batch, ends[-1]))
            guess = Guess(before, last)
            yield guess, ends[-1]

    def solve_window(self, p: Tensors, x: Tensors, carry: Tensors, spec: Spec) -> Tensors:
        method = self.method
        tolerance = method.near(self.spec)
        first = min(UNSEEN, method.max_iterations)
        guesses = self.iterations(self.first_guess(carry, spec), p, x, carry, spec)
        for count, found in enumerate(itertools.islice(guesses, method.max_iterations), 1):
            guess, distance = found
            if count < first:
                continue
            is_solved = distance <= tolerance  # NaN is not
            walked = int((~is_solved).sum())
            if not walked:
                break
        if method.report is not None:
            method.report.iterations += count
            method.report.walked += walked
            method.report.windows += is_solved.numel()
        states = guess.states(spec, self.offsets)
        if not walked:
            return states
        loop = self.walk(x, carry, spec)
        chosen = self.spread(is_solved, spec)
        return [torch.where(chosen, g, w) for g, w in zip(states, loop, strict=True)]

    def spread(self, t: torch.Tensor, spec: Spec) -> torch.Tensor:
        """A tensor with a number per chain, in the shape of the batch."""
        if self.offsets is None:
            return t.unsqueeze(spec.axis)
        lengths = self.offsets.to(spec.device).diff()
        return t.repeat_interleave(lengths, 0, output_size=spec.length).movedim(0, spec.axis)

    def first_guess(self, carry: Tensors, spec: Spec) -> Guess:
        """The entering state as the guess at every step; for packed sequences, that of the first
        sequence for all of them."""
        entering = carry if self.offsets is None else [t.select(0, 0) for t in carry]
        before = [t.unsqueeze(spec.axis).expand(spec.batch) for t in entering]
        return Guess(before, list(carry))

    def walk(self, x: Tensors, carry: Tensors, window: Spec) -> Tensors:
        """The states of the loop in a window."""
        spec, op = self.spec, self.spec.operator
        shown = self.states_shown()
        scan = replace(spec, operator=shown, batch=window.batch, final=())
        rest = self.given[len(op.inputs) + len(carry) :]
        return executables.run(self.method.backend, scan, [*x, *carry, *rest])[0]

    def states_shown(self) -> Operator:
        """The operator with the states in the place of its outputs, not rounded."""
        op, count = self.spec.operator, self.newton.states
        shown: Operator = with_outputs(without_outputs(op), tuple(range(count)))
        return replace(
            shown, outputs=tuple(replace(leaf, dtype=leaf.accumulator) for leaf in shown.outputs)
        )

    def shown(self, states: Tensors) -> Results:
        """The outputs and finals of the scan with these states."""
        spec, op = self.spec, self.spec.operator
        parts: Tensors = []
        whole = [*states, *self.p]
        for k, leaf in enumerate(op.state):
            wide = replace(leaf, dtype=leaf.accumulator)
            if k < len(whole):
                parts.extend(component_views(whole[k], wide))
            else:  # x, which lower reads as an input
                parts.extend([torch.zeros((), device=spec.device)] * leaf.components)
        raw = [
            c for t, leaf in zip(self.x, op.inputs, strict=True) for c in component_views(t, leaf)
        ]
        edge = torch.zeros((), dtype=torch.bool, device=spec.device)
        lowered = evaluate(op.lower, [*parts, *raw, edge], EXACT_DTYPES)
        outputs = [joined(lowered, op.outputs, k, spec.batch) for k in range(len(op.outputs))]
        outputs = owned(outputs, self.given)
        where = spec.axis, spec.reverse, self.offsets
        finals = [at_last_steps(states[k], *where, self.h[k]).clone() for k in spec.final]
        return outputs, finals


def is_solvable(op: Operator) -> bool:
    """Whether Newton's method can be used: the step has derivatives, and a state of floats."""
    try:
        derive_newton(op)
    except UnsupportedOperation:
        return False
    return True
