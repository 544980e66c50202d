"""What `monoid` means: names, calls, identities, lift and lower, generated source, check."""

import inspect
import itertools
import operator
import subprocess
import sys
from typing import Any

import pytest
import torch
from table import AFFINE, CASES, Engine, affine, matrix_affine
from torch import Tensor

import assocscan
from assocscan import MonoidError, associative_scan, monoid, ops
from assocscan.testing import assert_scan_close, reference_scan

PyTree = Any


def draw(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


def test_names_resolve() -> None:
    frontend_named = monoid(lambda left, right: left * 0 + right, name="frontend_named")
    x = torch.tensor([3, 1, 2])
    assert torch.equal(associative_scan("frontend_named", x), x)
    assert torch.equal(associative_scan("sum", x), torch.tensor([3, 4, 6]))
    assert assocscan.monoids()["frontend_named"] is frontend_named
    assert assocscan.monoids()["affine"] is ops.affine


def test_monoids_returns_a_copy() -> None:
    assocscan.monoids().clear()
    assert "sum" in assocscan.monoids()


def test_the_name_is_the_functions_unless_given() -> None:
    @monoid
    def frontend_default_name(left: Tensor, right: Tensor) -> Tensor:
        return right

    assert assocscan.monoids()["frontend_default_name"] is frontend_default_name


def test_defining_the_same_function_again_replaces_it() -> None:
    def define(factor: int) -> None:
        @monoid
        def frontend_redefined(left: Tensor, right: Tensor) -> Tensor:
            return left + factor * right

    x = torch.tensor([1, 1, 1])
    define(1)
    assert associative_scan("frontend_redefined", x).tolist() == [1, 2, 3]
    define(2)
    assert associative_scan("frontend_redefined", x).tolist() == [1, 3, 5]


def test_two_functions_under_one_name_are_refused() -> None:
    monoid(lambda left, right: left, name="frontend_taken")
    with pytest.raises(MonoidError, match="frontend_taken"):
        monoid(operator.add, name="frontend_taken")


def test_a_lambda_needs_a_name() -> None:
    with pytest.raises(MonoidError, match="name"):
        monoid(lambda left, right: left)


@pytest.mark.exhaustive
def test_builtin_names_may_be_shadowed() -> None:
    """In a process of its own: a name stays shadowed."""
    program = """
import torch, assocscan
@assocscan.monoid
def sum(left, right):
    return right
assert assocscan.associative_scan("sum", torch.tensor([1, 2])).tolist() == [1, 2]
assert assocscan.associative_scan(assocscan.ops.sum, torch.tensor([1, 2])).tolist() == [1, 3]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_monoid_maps_over_leading_batch_dimensions() -> None:
    op = CASES["matrix"].op
    left, right = ((draw(3, 4, 2, 2), draw(3, 4, 2)), (draw(3, 4, 2, 2) + 1, draw(3, 4, 2) - 1))
    got = op(left, right)
    for i, j in ((0, 0), (2, 3), (1, 2)):
        one = matrix_affine(*(tuple(leaf[i, j] for leaf in side) for side in (left, right)))
        for leaf, want in zip(got, one, strict=True):
            assert torch.equal(leaf[i, j], want)


def test_a_call_broadcasts_batch_dimensions() -> None:
    left, right = (draw(3, 1), draw(3, 1)), (draw(1, 4), draw(1, 4) + 1)
    for got, want in zip(AFFINE(left, right), affine(left, right), strict=True):
        assert torch.equal(got, want)


def test_identity_like_has_the_full_batch_shape() -> None:
    A, h = AFFINE.identity_like((draw(1, 5), draw(2, 5)))
    assert torch.equal(A, torch.ones(2, 5))
    assert torch.equal(h, torch.zeros(2, 5))
    A, h = CASES["matrix"].op.identity_like((draw(4, 3, 3), draw(4, 3)))
    assert torch.equal(A, torch.eye(3).expand(4, 3, 3))
    assert torch.equal(h, torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("xs", "error", "words"),
    [
        ((draw(3, 4), draw(5, 4)), ValueError, r"do not broadcast \(xs\[0\]: \[3, 4\], xs\[1\]"),
        ((draw(4), draw(4).to("meta")), ValueError, r"xs\[1\] is on meta"),
        ((draw(4), draw(4).to_sparse()), TypeError, r"xs\[1\] has the layout"),
        ((draw(4), 1.0), TypeError, r"xs\[1\] is the float 1.0"),
    ],
    ids=["shapes", "devices", "sparse", "number"],
)
def test_identity_like_refuses_what_a_scan_refuses(
    xs: PyTree, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        AFFINE.identity_like(xs)


def test_source_and_check_call_their_argument_by_its_name() -> None:
    for call in (AFFINE.check, lambda like: AFFINE.source("cpp", like=like)):
        with pytest.raises(TypeError, match=r"^like is a tensor"):
            call(draw(4))


def test_identity_like_speaks_of_the_state() -> None:
    closing, opening = CASES["brackets"].op.identity_like(torch.zeros(4, dtype=torch.int8))
    assert torch.equal(closing, torch.zeros(4, dtype=torch.int32))
    assert torch.equal(opening, torch.zeros(4, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64], ids=str)
def test_an_infinite_identity_saturates(dtype: torch.dtype) -> None:
    x = torch.zeros(2, dtype=dtype)
    assert torch.equal(ops.max.identity_like(x), torch.full_like(x, torch.iinfo(dtype).min))
    assert torch.equal(ops.min.identity_like(x), torch.full_like(x, torch.iinfo(dtype).max))


@pytest.mark.parametrize(
    "identity,dtype",
    [(0.5, torch.int32), (1 << 40, torch.int32), (1j, torch.float32), (float("nan"), torch.int64)],
)
def test_an_identity_that_its_dtype_cannot_hold(identity: complex, dtype: torch.dtype) -> None:
    op = monoid(operator.add, identity=identity, name="monoid_identity_too_large")
    with pytest.raises(ValueError, match=f"{dtype}"[6:] + " cannot hold"):
        associative_scan(op, torch.ones(3, dtype=dtype))


def test_an_infinite_identity_of_bool_saturates() -> None:
    x = torch.tensor([True, False])
    assert ops.max.identity_like(x).tolist() == [False, False]
    assert ops.min.identity_like(x).tolist() == [True, True]


def count_and_sum(left: PyTree, right: PyTree) -> PyTree:
    return left[0] + right[0], left[1] + right[1]


def lift_count(x: Tensor) -> PyTree:
    return 1, x


def test_lift_may_return_numbers(engine: Engine) -> None:
    op = monoid(
        count_and_sum,
        identity=(0, 0.0),
        name="monoid_running_mean",
        lift=lift_count,
        lower=lambda state: state[1] / state[0],
    )
    x = draw(3, 40)
    y, (count, total) = engine.scan(op, engine.put(x), 1, return_final=True)
    assert_scan_close(y, x.double().cumsum(1) / torch.arange(1, 41), length=40)
    assert count.tolist() == [40] * 3
    assert torch.equal(total.cpu(), x.sum(1))


@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
def test_lower_sees_the_inputs_at_its_own_step(
    engine: Engine, reverse: bool, inclusive: bool
) -> None:
    op = monoid(
        operator.add, identity=0, name="monoid_lower_inputs", lower=lambda s, x: 100 * s + x
    )
    x = torch.arange(1, 61).view(2, 30)
    y = engine.scan(op, engine.put(x), 1, reverse=reverse, inclusive=inclusive)
    before = (x.flip(1).cumsum(1).flip(1) if reverse else x.cumsum(1)) - (0 if inclusive else x)
    assert torch.equal(y.cpu(), 100 * before + x)


def test_a_default_makes_lower_a_function_of_the_state_alone(engine: Engine) -> None:
    op = monoid(
        operator.add, identity=0, name="monoid_lower_default", lower=lambda s, scale=3: scale * s
    )
    assert engine.scan(op, engine.put(torch.arange(4))).tolist() == [0, 3, 9, 18]


def test_a_dict_is_lifted_as_one_argument(engine: Engine) -> None:
    op = monoid(
        affine,
        name="monoid_lift_dict",
        lift=lambda xs: (xs["decay"], xs["x"]),
        lower=lambda state, xs: {"h": state[1], "x": xs["x"]},
    )
    xs = {"x": draw(20), "decay": draw(20) / 2}
    got = engine.scan(op, engine.put(xs))
    assert set(got) == {"h", "x"}
    assert_scan_close(got, reference_scan(op, xs), length=20)


def test_a_tuple_is_lifted_as_several_arguments(engine: Engine) -> None:
    op = monoid(
        affine, name="monoid_lift_tuple", lift=lambda a, b: (a / 2, b), lower=lambda state: state[1]
    )
    xs = (draw(2, 20), draw(2, 20) + 1)
    for structure in (tuple, list):
        got = engine.scan(op, engine.put(structure(xs)), 1)
        assert_scan_close(got, reference_scan(op, structure(xs), 1), length=20)


def test_positions_are_an_input_like_any_other(engine: Engine) -> None:
    """The last position so far at which x was positive, or −1."""
    op = monoid(
        torch.maximum,
        identity=-1,
        name="monoid_last_positive",
        lift=lambda x, position: torch.where(x > 0, position, -1),
    )
    x = draw(2, 30)
    y = engine.scan(op, engine.put((x, torch.arange(30).expand(2, 30))), 1)
    want = torch.where(x > 0, torch.arange(30), -1).cummax(1).values
    assert torch.equal(y.cpu(), want)


def test_dtypes_are_those_of_eager_lift_and_lower(engine: Engine) -> None:
    op = monoid(
        operator.add,
        identity=0,
        name="monoid_dtypes",
        lift=lambda x: x.to(torch.int32),
        lower=lambda state: (state > 3, state / 2),
    )
    x = torch.tensor([1, 2, 3, 4], dtype=torch.int8)
    (large, half), final = engine.scan(op, engine.put(x), return_final=True)
    assert (large.dtype, half.dtype, final.dtype) == (torch.bool, torch.float32, torch.int32)
    assert large.tolist() == [False, False, True, True]
    assert half.tolist() == [0.5, 1.5, 3.0, 5.0]


def test_source_is_readable_code() -> None:
    doubled = monoid(lambda left, right: left * 0 + 37 * right, name="monoid_source")
    text = doubled.source("cpp", torch.zeros((), dtype=torch.int64))
    assert "37" in text
    assert "{" in text


def test_source_follows_the_dtypes() -> None:
    """By default float32, int64 or bool after the identity's Python types."""
    like = [torch.zeros((), dtype=dtype) for dtype in (torch.float32, torch.float64, torch.int64)]
    single, double, integer = ((leaf, leaf) for leaf in like)
    assert AFFINE.source("cpp") == AFFINE.source("cpp", single)
    assert AFFINE.source("cpp") != AFFINE.source("cpp", double)
    bicyclic = CASES["bicyclic"].op
    assert bicyclic.source("cpp") == bicyclic.source("cpp", like=integer)


def test_source_needs_an_example_without_an_identity() -> None:
    with pytest.raises(TypeError, match="like"):
        CASES["band"].op.source("cpp")


def test_check_accepts_monoids() -> None:
    AFFINE.check((torch.zeros(()), torch.zeros(())))
    AFFINE.check((torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)))
    CASES["band"].op.check((torch.zeros(()), torch.zeros((), dtype=torch.int64)), samples=20)
    ops.matmul.check(torch.zeros(2, 2, dtype=torch.float64))
    ops.logaddexp.check(torch.zeros(()))


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtypes", [*itertools.product(FLOATS, FLOATS)], ids=str)
def test_check_combines_leaves_of_different_floats_as_scans_do(dtypes: tuple[Any, ...]) -> None:
    like = tuple(torch.zeros((), dtype=dtype) for dtype in dtypes)
    AFFINE.check(like)
    states = torch.Generator().manual_seed(2)
    AFFINE.check(like, tuple(torch.randn(40, dtype=d, generator=states) for d in dtypes))


def test_check_finds_a_counterexample_to_associativity() -> None:
    average = monoid(lambda left, right: (left + right) / 2, name="monoid_average")
    with pytest.raises(MonoidError, match=r"(?s)associative.*-?\d"):
        average.check(torch.zeros(()))
    difference = monoid(operator.sub, name="monoid_difference")
    with pytest.raises(MonoidError, match="associative"):
        difference.check(torch.zeros((), dtype=torch.int32))


def test_check_finds_a_wrong_identity() -> None:
    wrong = monoid(operator.add, identity=1, name="monoid_wrong_identity")
    with pytest.raises(MonoidError, match="identity"):
        wrong.check(torch.zeros((), dtype=torch.int64))


def test_check_finds_an_identity_of_one_side_only() -> None:
    one_sided = monoid(lambda left, right: right, identity=0, name="monoid_one_sided")
    with pytest.raises(MonoidError, match="identity"):
        one_sided.check(torch.zeros((), dtype=torch.int64))


def test_check_draws_from_valid_states() -> None:
    """(0, 0) is the identity of the bicyclic monoid on numbers that are not negative."""
    op, zero = CASES["bicyclic"].op, torch.zeros((), dtype=torch.int64)
    with pytest.raises(MonoidError, match="identity"):
        op.check((zero, zero), samples=(torch.tensor([-2, -1]), torch.tensor([-1, -3])))
    op.check((zero, zero), samples=(torch.arange(10), torch.arange(10).flip(0)))


SAMPLES = (
    ((torch.rand(8), torch.rand(3)), r"samples\[1\] holds 3 states and samples\[0\] 8"),
    ((torch.rand(8, 2), torch.rand(8, 2)), r"samples\[0\] has shape \[8, 2\], expected \[n\]"),
    ((torch.rand(()), torch.rand(8)), r"samples\[0\] has shape \[\], expected \[n\]"),
    ((torch.rand(8), [1.0] * 8), r"samples\[1\] is a list"),
    (
        (torch.rand(8), torch.rand(8) + 0j),
        r"samples\[1\] is torch.complex64, .*float32; pass like=",
    ),
    ((torch.rand(8), 1.0), r"samples\[1\] is a float, expected a tensor"),
    (torch.rand(8), "samples is a Tensor, expected a tuple of 2"),
    (0, "samples is 0"),
)


@pytest.mark.parametrize(("samples", "message"), SAMPLES)
def test_check_says_which_samples_are_no_states(samples: Any, message: str) -> None:
    with pytest.raises((assocscan.ScanValueError, assocscan.ScanTypeError), match=message):
        AFFINE.check(samples=samples)


def test_check_of_drawn_states_names_samples() -> None:
    wrong = monoid(operator.add, identity=1, name="monoid_wrong_identity_again")
    with pytest.raises(MonoidError, match=r"(?s)\n  expected a = .*pass samples="):
        wrong.check()
    with pytest.raises(MonoidError) as given:
        wrong.check(samples=torch.arange(5))
    assert "samples" not in str(given.value)


def test_signature() -> None:
    """Of the options the names and defaults are shown, by which tools complete them."""
    parameters = inspect.signature(monoid).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "fn": None, "identity": None, "name": None, "element_ndim": 0, "lift": None, "lower": None,
        "adjoint": None,
    }  # fmt: skip
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name != "fn")
