"""Which cases run by default depends on their own names."""

import thinning
import torch

NAMES = [f"test_sums-{dtype}-{length}" for dtype in ("float32", "int64") for length in range(50)]


def test_another_case_changes_no_other_one() -> None:
    kept = thinning.kept(NAMES, 4)
    for name in NAMES:
        others = [other for other in NAMES if other != name]
        assert thinning.kept(others, 4) == kept - {name}
        assert thinning.kept([f"test_sums-first-{name}", *NAMES], 4) >= kept


def test_about_one_in_n_is_kept_and_at_least_one() -> None:
    assert thinning.kept(NAMES, 1) == set(NAMES)
    assert 10 <= len(thinning.kept(NAMES, 4)) <= 40
    for name in NAMES:
        assert thinning.kept([name], 1000) == {name}


def test_none_may_be_kept() -> None:
    assert thinning.kept(NAMES[:1], 1, at_least=0) == set(NAMES[:1])
    assert not thinning.kept(NAMES[:1], 10**9, at_least=0)


def test_what_is_kept_of_fewer_is_kept_of_more() -> None:
    for n in range(1, 20):
        assert thinning.kept(NAMES, n + 1) <= thinning.kept(NAMES, n)


def test_a_case_is_named_by_its_value() -> None:
    assert thinning.case_name(torch.bfloat16) == "bfloat16"
    assert thinning.case_name((2, 5, 0)) == "(2, 5, 0)"
    assert thinning.case_name({"b", "a"}) == "('a', 'b')"
    assert thinning.case_name(torch.nn.Linear(2, 2)) == "Linear"
    assert thinning.case_name((lambda: None,)) is None
    assert thinning.case_name((torch.zeros(2),)) is None
