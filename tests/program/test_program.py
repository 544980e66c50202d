"""`Program`: what its builder simplifies, what it must not, that no result changes; `vjp`."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from assocscan.autodiff.derivative_rules import RULES, vjp
from assocscan.autodiff.evaluate import OPERATIONS, TORCH_DTYPES, evaluate
from assocscan.errors import UnsupportedOperation
from assocscan.program.program_builder import (
    FOLDS,
    PREDICATES,
    Builder,
    Instruction,
    Program,
    encode,
    round_to,
)

FLOATS, INTEGERS = ("f32", "f64"), ("u8", "i8", "i16", "i32", "i64")
INF, NAN = math.inf, math.nan
EDGES = {
    **dict.fromkeys(FLOATS, (0.0, -0.0, 1.0, -1.0, 0.1, 0.5, 1e-40, 3e38, INF, -INF, NAN)),
    **dict.fromkeys(INTEGERS, (0, 1, -1, 7, 127, 255, (1 << 31) - 1, -(1 << 31))),
    "b1": (False, True),
}
ALWAYS = ("min", "max", *sorted(PREDICATES))
ARITHMETIC = ("add", "sub", "mul", "neg", "abs", *ALWAYS)
LOGIC = ("and", "or", "xor", "not")
VALID = {
    **dict.fromkeys(FLOATS, ("div", *ARITHMETIC)),
    **dict.fromkeys(INTEGERS, (*LOGIC, *ARITHMETIC)),
    "b1": (*LOGIC, *ALWAYS),
}
UNARY = {"neg", "abs", "not", "floor", "isnan", "isinf", "signbit"}


def exactly(program: Program, inputs: Sequence[Tensor] = ()) -> list[Tensor]:
    """`evaluate`, but with float32 values in float32."""
    with mock.patch.dict(TORCH_DTYPES, f32=torch.float32):
        return evaluate(program, inputs)


def tensor(values: object, kind: str) -> Tensor:
    return torch.tensor(values, dtype=torch.float32 if kind == "f32" else TORCH_DTYPES[kind])


def same(one: Tensor, other: Tensor) -> bool:
    """Whether all values are equal, −0.0 told from 0.0 and NaN equal to NaN."""
    one, other = torch.broadcast_tensors(one, other)
    if one.dtype != other.dtype or not one.is_floating_point():
        return torch.equal(one, other) and one.dtype == other.dtype
    nan = one.isnan()
    equal = torch.where(nan, other.isnan(), (one == other) & (one.signbit() == other.signbit()))
    return bool(equal.all())


def emitted(kind: str, op: str, operands: Sequence[object]) -> tuple[Builder, int]:
    """A builder with one input of this dtype, and `op` of it ("x") and of constants."""
    builder = Builder((kind,))
    values = [0 if v == "x" else builder.const(v, kind) for v in operands]
    return builder, builder.emit(op, *values)


FLOAT, INTEGER = " ".join(FLOATS), " ".join(INTEGERS)
ANY, DISCRETE, BOOL = f"{FLOAT} {INTEGER} b1", f"{INTEGER} b1", "b1"


@pytest.mark.parametrize(
    "kinds,op,operands,result",
    [
        (FLOAT, "add", ("x", -0.0), "x"), (FLOAT, "add", (-0.0, "x"), "x"),
        (FLOAT, "sub", ("x", 0.0), "x"), (FLOAT, "div", ("x", 1.0), "x"),
        (FLOAT, "mul", ("x", 1.0), "x"), (FLOAT, "mul", (1.0, "x"), "x"),
        (INTEGER, "add", ("x", 0), "x"), (INTEGER, "add", (0, "x"), "x"),
        (INTEGER, "sub", ("x", 0), "x"), (INTEGER, "shl", ("x", 0), "x"),
        (INTEGER, "shr", ("x", 0), "x"), (INTEGER, "mul", ("x", 1), "x"),
        (INTEGER, "mul", (1, "x"), "x"), (INTEGER, "mul", ("x", 0), 0),
        (INTEGER, "mul", (0, "x"), 0), (ANY, "max", ("x", "x"), "x"),
        (ANY, "min", ("x", "x"), "x"), (DISCRETE, "and", ("x", "x"), "x"),
        (DISCRETE, "or", ("x", "x"), "x"), (DISCRETE, "isnan", ("x",), False),
        (DISCRETE, "isinf", ("x",), False), (BOOL, "and", ("x", True), "x"),
        (BOOL, "and", (False, "x"), False), (BOOL, "or", (True, "x"), True),
        (BOOL, "or", ("x", False), "x"), (BOOL, "xor", ("x", False), "x"),
        (BOOL, "xor", (False, "x"), "x"), (BOOL, "xor", ("x", True), "not"),
    ],
)  # fmt: skip
def test_rule(kinds: str, op: str, operands: tuple[object, ...], result: object) -> None:
    for kind in kinds.split():
        builder, value = emitted(kind, op, operands)
        if isinstance(result, str):
            assert value == (0 if result == "x" else builder.emit(result, 0))
        else:
            assert value == builder.const(result, builder.dtype(value))


def test_rules_of_negation_and_where() -> None:
    for kind, op in [("f32", "neg"), ("f64", "neg"), ("i8", "neg"), ("i64", "not"), ("b1", "not")]:
        builder = Builder(("b1", kind, kind))
        once = builder.emit(op, 1)
        assert once != 1
        assert builder.emit(op, once) == 1
        yes, no = builder.const(True, "b1"), builder.const(False, "b1")
        assert builder.emit("where", yes, 1, 2) == 1
        assert builder.emit("where", no, 1, 2) == 2
        assert builder.emit("where", 0, 2, 2) == 2
        assert builder.emit("where", 0, 1, 2) not in (1, 2)


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize(
    "op,operands",
    [
        ("add", ("x", 0.0)), ("add", (0.0, "x")), ("sub", ("x", -0.0)), ("sub", (0.0, "x")),
        ("sub", (-0.0, "x")), ("mul", ("x", 0.0)), ("mul", (0.0, "x")), ("mul", ("x", -0.0)),
        ("mul", ("x", -1.0)), ("mul", (-1.0, "x")), ("div", (0.0, "x")), ("div", ("x", 0.0)),
        ("div", ("x", -1.0)), ("div", (1.0, "x")), ("sub", ("x", "x")), ("div", ("x", "x")),
        ("eq", ("x", "x")), ("ne", ("x", "x")), ("le", ("x", "x")), ("lt", ("x", "x")),
        ("max", ("x", -INF)), ("max", (-INF, "x")), ("min", ("x", INF)), ("max", ("x", NAN)),
        ("max", ("x", 0.0)), ("max", (0.0, "x")), ("max", ("x", -0.0)), ("min", (-0.0, "x")),
    ],
)  # fmt: skip
def test_no_rule_loses_a_sign_a_nan_or_an_infinity(
    kind: str, op: str, operands: tuple[object, ...]
) -> None:
    """x + 0.0 is not x at −0.0, x·0.0 is not 0 at inf, x − x is not 0 at NaN."""
    builder, value = emitted(kind, op, operands)
    x = tensor(EDGES[kind], kind)
    name = {"div": "true_divide", "max": "maximum", "min": "minimum"}.get(op, op)
    direct = getattr(torch, name)(*(x if v == "x" else tensor(v, kind) for v in operands))
    assert same(exactly(builder.build([value]), [x])[0], direct)


def test_a_cast_there_and_back_stays_where_it_loses_values() -> None:
    lost = {"f64": 0.1, "f32": 0.1, "i64": (1 << 53) + 1, "i32": (1 << 24) + 1, "i16": 300, "i8": 2}
    keeping = "i8-i16 u8-i16 i32-i64 i16-f32 u8-f32 i32-f64 f32-f64 b1-i32 b1-f32 f32-f32"
    losing = "f64-f32 f32-i64 f64-b1 i32-f32 i64-f64 i64-f32 i32-i8 i16-i8 i16-u8 i8-b1"
    for pair in (keeping + " " + losing).split():
        kind, through = pair.split("-")
        builder = Builder((kind,))
        back = builder.cast(builder.cast(0, through), kind)
        assert (back == 0) == (pair in keeping.split()), pair
        if back != 0:
            x = tensor([lost[kind]], kind)
            assert not same(exactly(builder.build([back]), [x])[0], x), pair


@pytest.mark.parametrize("kind", VALID)
def test_constants_are_folded_as_torch_computes(kind: str) -> None:
    """Or left to the machine: ties (signs of zero), NaN, a zero divisor."""
    values = [v for v in EDGES[kind] if kind not in INTEGERS or round_to(v, kind) == v]
    for op in FOLDS.keys() & set(VALID[kind]):
        for a, b in product(values, values[:1] if op in UNARY else values):
            operands = (a,) if op in UNARY else (a, b)
            builder, machine = Builder(()), Builder((kind, kind))
            result = builder.emit(op, *(builder.const(v, kind) for v in operands))
            kept = machine.build([machine.emit(op, *range(len(operands)))])
            got = exactly(builder.build([result]))[0]
            want = exactly(kept, [tensor(a, kind), tensor(b, kind)])[0]
            assert same(got, want), f"{op} {operands}: {got}, not {want}"
            if builder.literal(result) is None:
                assert b == 0 if op == "div" else op in ("min", "max") and not (a < b or b < a)


def test_square_roots_are_folded_correctly_rounded() -> None:
    """torch's own are off by a bit in places."""
    roots = {-0.0: -0.0, 2.0: float.fromhex("0x1.6a09e6p0"), INF: INF, -1.0: None, NAN: None}
    for value, root in roots.items():
        builder, folded = emitted("f32", "sqrt", (value,))
        assert repr(builder.literal(folded)) == repr(root)


@pytest.mark.parametrize("source,target", list(product(VALID, VALID)))
def test_constant_casts_are_folded_as_torch_casts(source: str, target: str) -> None:
    for value in EDGES[source]:
        if source in INTEGERS and round_to(value, source) != value:
            continue
        builder = Builder(())
        literal = builder.literal(builder.cast(builder.const(value, source), target))
        if literal is None:  # out of range: what the machine does is not ours to say
            assert source in FLOATS and target in INTEGERS
            assert not math.isfinite(value) or round_to(int(value), target) != int(value)
        else:
            assert same(tensor(literal, target), tensor(value, source).to(tensor(0, target).dtype))


def test_constants_are_told_apart_by_value_and_dtype() -> None:
    builder = Builder(())
    different = [(0.0, "f32"), (-0.0, "f32"), (NAN, "f32"), (0.0, "f64"), (0, "i32"), (0, "i64"),
                 (False, "b1"), (1, "i32"), (True, "b1"), (1.0, "f32"), (0.1, "f64")]  # fmt: skip
    values = [builder.const(v, d) for v, d in different]
    assert len(set(values)) == len(values)
    assert [builder.const(v, d) for v, d in different] == values
    for k, (v, d) in zip(values, different, strict=True):
        assert same(tensor(builder.literal(k), d), tensor(v, d))
    assert builder.const(0.1, "f32") == builder.const(tensor(0.1, "f32").item(), "f32")
    assert builder.const(256 + 7, "u8") == builder.const(7, "u8")


@pytest.mark.parametrize(
    "value,kind,expected",
    [
        (-1, "u8", 255), (256, "u8", 0), (128, "i8", -128), (1 << 31, "i32", -(1 << 31)),
        ((1 << 63) + 5, "i64", 5 - (1 << 63)), (2.9, "i16", 2), (-2.9, "i16", -2),
        (INF, "i8", 127), (-INF, "u8", 0), (NAN, "i64", 0), (0.5, "b1", True), (NAN, "b1", True),
        (1e39, "f32", INF), (-1e39, "f32", -INF), (3.4028235e38, "f32", 3.4028234663852886e38),
        (1e-46, "f32", 0.0), (1 << 24 | 1, "f32", float(1 << 24)),
    ],
)  # fmt: skip
def test_rounding(value: float, kind: str, expected: float) -> None:
    rounded = round_to(value, kind)
    assert (rounded, type(rounded)) == (expected, type(expected))


def test_rounding_of_large_integers() -> None:
    assert round_to((1 << 54) + (1 << 30) + 1, "f32") == (1 << 54) + (1 << 31)
    assert round_to(1 << 1023, "f64") == 2.0**1023
    assert round_to(-1 << 1024, "f64") == -INF


def test_equal_expressions_are_one_value() -> None:
    builder = Builder(("i32", "i32"))
    commutative = ("add", "mul", "and", "or", "xor", "eq", "ne")
    for op in (*commutative, "sub", "max", "lt", "floordiv", "shl"):
        assert builder.emit(op, 0, 1) == builder.emit(op, 0, 1)
        assert (builder.emit(op, 0, 1) == builder.emit(op, 1, 0)) == (op in commutative)
    assert builder.cast(0, "f32") != builder.cast(0, "f64")


def some_program() -> Program:
    builder = Builder(("f32", "f32", "i32"))
    exponential = builder.emit("exp", 0)
    total = builder.emit("add", builder.emit("mul", 0, 1), builder.const(0.5, "f32"))
    larger = builder.emit("gt", total, exponential)
    builder.emit("sin", total)
    return builder.build([total, 1, total, builder.emit("where", larger, 0, total)])


def test_what_no_output_needs_is_dropped() -> None:
    program = some_program()
    assert [i.op for i in program.instructions] == ["exp", "mul", "const", "add", "gt", "where"]
    assert (program.used_inputs, program.inputs) == ({0, 1}, ("f32", "f32", "i32"))
    assert program.output_dtypes == ("f32", "f32", "f32", "f32")


def test_programs_are_compared_and_printed() -> None:
    program, again = some_program(), some_program()
    assert (program, hash(program)) == (again, hash(again))
    assert len({program, again, program.select([0, 1, 2, 3]), program.select([0])}) == 2
    assert str(program.select([0])).splitlines() == [
        "program(v0: f32, v1: f32, v2: i32)",
        "  v3: f32 = mul v0 v1",
        "  v4: f32 = const 0x1.0000000000000p-1",
        "  v5: f32 = add v3 v4",
        "  return v5",
    ]


def test_select() -> None:
    program, x = some_program(), [torch.tensor([0.5, 2.0, -3.0]) * k for k in (1, 2, 3)]
    for chosen in ([0], [1], [3, 1], [2, 0, 0], []):
        selected = program.select(chosen)
        values = zip(chosen, evaluate(selected, x), strict=True)
        assert all(same(value, evaluate(program, x)[k]) for k, value in values)
        assert selected.inputs == program.inputs
    assert program.select([]) == Program(program.inputs, (), ())


INPUTS = ("f32", "f32", "f64", "i32", "i32", "b1")
# Three lanes: fewer than a vector, so that torch runs the same scalar code on all of them.
lanes = st.tuples(
    *(st.lists(st.sampled_from(EDGES[kind]), min_size=3, max_size=3) for kind in INPUTS)
)
SHIFTS = tuple(Instruction("const", (), "i32", n) for n in (0, 1, 31))


@st.composite
def raw_programs(draw: st.DrawFn) -> Program:
    """Instructions as they are drawn, nothing simplified."""
    kinds, instructions = [*INPUTS, "i32", "i32", "i32"], list(SHIFTS)

    def pick(*wanted: str) -> tuple[int, ...]:
        having = ([v for v, k in enumerate(kinds) if k == kind] for kind in wanted)
        return tuple(draw(st.sampled_from(values)) for values in having)

    for _ in range(draw(st.integers(1, 24))):
        kind = draw(st.sampled_from(["f32", "f64", "i32", "b1"]))
        form = draw(st.sampled_from("const cast where shift apply apply apply".split()))
        op, args, literal = form, (), None
        if form == "const":
            literal = encode(draw(st.sampled_from(EDGES[kind])), kind)
        elif form == "cast":
            args = (draw(st.integers(0, len(kinds) - 1)),)
        elif form == "where":
            args = pick("b1", kind, kind)
        elif form == "shift":
            op, kind = draw(st.sampled_from(["shl", "shr"])), "i32"
            args = (*pick(kind), len(INPUTS) + draw(st.integers(0, 2)))
        else:
            op = draw(st.sampled_from([*VALID[kind], *(["floor"] if kind in FLOATS else [])]))
            args = pick(kind) if op in UNARY else pick(kind, kind)
            kind = "b1" if op in PREDICATES else kind
        kinds.append(kind)
        instructions.append(Instruction(op, args, kind, literal))
    outputs = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=6))
    return Program(INPUTS, tuple(instructions), tuple(outputs))


@pytest.mark.slow
@settings(max_examples=500)
@given(raw=raw_programs(), values=lanes)
def test_simplified_programs_compute_the_same(raw: Program, values: tuple[list, ...]) -> None:
    inputs = [tensor(v, kind) for v, kind in zip(values, INPUTS, strict=True)]
    builder = Builder(INPUTS)
    simple = builder.build(builder.inline(raw, range(len(INPUTS))))
    pairs = zip(exactly(simple, inputs), exactly(raw, inputs), strict=True)
    for k, (got, want) in enumerate(pairs):
        assert same(got, want), f"output {k}: {got}, not {want}\n{raw}\nbecame\n{simple}"
    assert len(simple.instructions) <= len(raw.instructions)
    assert simple.select(range(len(simple.outputs))) == simple


# The domain of each operand, and what brings a number into it.
DOMAINS = {
    **dict.fromkeys("neg abs sin cos tanh asinh sigmoid erf erfc".split(), ("any",)),
    **dict.fromkeys("exp exp2 expm1 sinh cosh tan asin acos atanh".split(), ("in (-1, 1)",)),
    **dict.fromkeys("log log2 log10 log1p sqrt rsqrt".split(), ("positive",)),
    **dict.fromkeys("add sub mul max min fmax fmin copysign".split(), ("any", "any")),
    **dict.fromkeys("div remainder fmod atan2 hypot".split(), ("any", "positive")),
    "acosh": ("above 1",),
    "atan": ("float32",),
    "pow": ("positive", "in (-1, 1)"),
    "where": ("condition", "any", "any"),
}


def bring(b: Builder, domain: str, x: int) -> int:
    number = b.const({"in (-1, 1)": 0.9, "above 1": 1.5}.get(domain, 0.5), "f64")
    if domain == "in (-1, 1)":
        return b.emit("mul", b.emit("tanh", x), number)
    if domain == "float32":
        return b.cast(b.cast(x, "f32"), "f64")
    if domain == "condition":
        return b.emit("gt", x, number)
    return x if domain == "any" else b.emit("add", b.emit("mul", x, x), number)


steps = st.tuples(st.sampled_from(sorted(DOMAINS)), *(st.integers(0, 9) for _ in range(3)))
numbers = st.floats(-2, 2, width=16) | st.sampled_from([0.0, 1.0])
tables = st.lists(st.lists(numbers, min_size=4, max_size=4), min_size=3, max_size=3)


def ignoring_nan(extremum: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """fmax or fmin with the gradient that torch gives them since 2.15: at a tie half to each."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        known = extremum(torch.where(a.isnan(), b, a), torch.where(b.isnan(), a, b))
        return torch.where(b.isnan(), a, torch.where(a.isnan(), b, known))

    return function


def check_vjp(chain: Sequence[tuple], rows: Sequence[Sequence[float]]) -> bool:
    """The cotangents of a chain of operations are autograd's; False where it grows too large."""
    builder, values = Builder(("f64",) * 3), [0, 1, 2]
    for op, *chosen in chain:
        pairs = zip(DOMAINS[op], chosen, strict=False)
        operands = [bring(builder, domain, values[k % len(values)]) for domain, k in pairs]
        values.append(builder.emit(op, *operands))
    program = builder.build(values[-3:])
    inputs = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        for name, extremum in (("fmax", torch.maximum), ("fmin", torch.minimum)):
            patch.setitem(OPERATIONS, name, ignoring_nan(extremum))
        outputs = evaluate(program, inputs)
    if any(float(y.detach().abs().max()) > 1e6 for y in outputs):
        return False
    seeds = list(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double())
    wanted = torch.autograd.grad(outputs, inputs, seeds, materialize_grads=True)
    builder = Builder(("f64",) * 6)
    found = vjp(builder, program, range(3), range(3, 6))
    derived = builder.build([builder.const(0.0, "f64") if g is None else g for g in found])
    gradients = evaluate(derived, [*(x.detach() for x in inputs), *seeds])
    for g, w in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(g.expand(4), w, rtol=1e-8, atol=1e-8, msg=str(program))
    return True


@pytest.mark.parametrize("op", DOMAINS)
def test_vjp_of_every_operation(op: str) -> None:
    assert RULES.keys() - {"round_f16", "round_bf16"} <= DOMAINS.keys()
    rows = [[0.5, -1.5, 1.0, 2.0], [1.5, 0.5, 1.0, -0.25], [0.1, 2.0, -1.0, 0.7]]
    assert check_vjp([(op, 0, 1, 2)], rows)


@settings(max_examples=300)
@given(chain=st.lists(steps, min_size=1, max_size=8), rows=tables)
def test_vjp_of_random_programs(chain: list[tuple], rows: list[list[float]]) -> None:
    assume(check_vjp(chain, rows))


def test_structural_zeros_of_vjp() -> None:
    """Where nothing flows there is None; integers and comparisons pass nothing on."""
    inputs, seeds = ("f32", "f32", "i32", "f32"), ("f32",) * 3
    builder = Builder(inputs)
    counted = builder.emit("mul", 0, builder.cast(2, "f32"))
    program = builder.build([counted, builder.emit("floor", 1), builder.emit("digamma", 3)])
    builder = Builder((*inputs, *seeds))
    first = vjp(builder, program, range(4), (4, 5, None))
    assert [g is None for g in first] == [False, True, True, True]
    assert vjp(builder, program, range(4), (None,) * 3) == [None] * 4
    with pytest.raises(UnsupportedOperation, match="digamma"):
        vjp(builder, program, range(4), (4, 5, 6))
