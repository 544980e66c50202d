"""What the benchmark compares results with, and what it says of what it measured."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import printed
from repository import ROOT
from torch import Tensor

from assocscan import ops
from assocscan.pytrees import flatten
from assocscan.testing import reference_scan
from assocscan_bench import operator_inputs
from assocscan_bench.cases import ENGINE, OURS, PEER, TORCH
from assocscan_bench.measuring.checks import Lanes, error_of, final_check, scan_check
from assocscan_bench.measuring.reference import reference
from assocscan_bench.output import plots, styles
from assocscan_bench.output.records import Record, environment, origin
from assocscan_bench.output.report import speed_ups
from assocscan_bench.settings import Settings


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 10, 23, 64, 65])
def test_reference_is_the_oracle(length: int) -> None:
    """Cut into chunks, with and without a rest; floats equal but for rounding in float64."""
    a, b = torch.rand(2, length, 3), torch.randn(2, length, 3)
    for op, xs, axis in (
        (ops.affine, (a, b), 1), (ops.argmax, (b, (9 * a).long()), 1),
        (ops.welford, b[0, :, 0], 0), (ops.brackets, (3 * a).int() - 1, 1),
    ):  # fmt: skip
        got, want = flatten(reference(op, xs, axis))[0], flatten(reference_scan(op, xs, axis))[0]
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("op", operator_inputs.OPERATORS, ids=lambda op: op.name)
def test_reference_of_every_operator(op: Any) -> None:
    torch.manual_seed(0)
    xs = operator_inputs.inputs(op, (2, 11, 2), "cpu")
    got, want = flatten(reference(op, xs, 1))[0], flatten(reference_scan(op, xs, 1))[0]
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lane", [(0, 0), (5, 99), (3, 50)])
def test_wrong_lanes_are_found(lane: tuple[int, int]) -> None:
    """One of the lanes that are compared is wrong at one step, or not a number."""
    x = torch.rand(6, 40, 100)
    check = scan_check(ops.sum, x, 1)
    right = x.cumsum(1)
    assert not check(right).is_wrong
    indices = Lanes((6, 40, 100), 1).index
    assert indices[0] is None and indices[1] is None
    assert indices[2] is not None and {0, 99} <= set(indices[2].tolist())
    batch, column = lane
    near = int(indices[2][(indices[2] - column).abs().argmin()])
    for value in (right[batch, 20, near] * 1.1, math.nan, math.inf):
        wrong = right.clone()
        wrong[batch, 20, near] = value
        assert check(wrong).is_wrong
    assert check(right[:, :-1]).is_wrong and check((right, right)).is_wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_bounds_leave_room_for_other_orders_of_summation(dtype: torch.dtype) -> None:
    """A loop that rounds at each step to the dtype passes, a sum of one element more does not."""
    x = torch.rand(3, 200, 2).to(dtype)
    steps = [x[:, 0]]
    for t in range(1, 200):
        steps.append(steps[-1] + x[:, t])
    looped = torch.stack(steps, 1)
    check = scan_check(ops.sum, x, 1)
    assert not check(looped).is_wrong
    assert check(looped * 1.2).is_wrong


def test_final_states_are_compared() -> None:
    a, b = torch.rand(2, 9, 30), torch.rand(2, 9, 30)
    h = reference_scan(ops.affine, (a, b), 1)[1]
    from assocscan_bench.suite.rnn import RECURRENCE

    check = final_check(RECURRENCE, (a, b), 1)
    assert not check(h[:, -1].float()).is_wrong and check(h[:, -2].float()).is_wrong


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([math.inf, 1.0], [-math.inf, 1.0], math.inf),
        ([1.0, 1.0], [math.inf, 1.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_errors_are_relative_to_the_largest_value(
    got: list[float], want: list[float], error: float
) -> None:
    assert error_of(torch.tensor(got), torch.tensor(want, dtype=torch.float64)) == error


def test_integers_must_be_equal() -> None:
    x = torch.tensor([1, 2])
    assert error_of(x, x) == 0.0 and error_of(x, x + 1) == math.inf
    assert error_of(x, torch.tensor([1])) == math.inf


def record(contender: str, kind: str, ms: float | None = 1.0, **options: Any) -> Record:
    found = {"ms_low": ms, "ms_high": ms, "of_copy": 0.5, "spread": 0.0, "copy_spread": 0.0}
    found |= {"group": "group", "x_name": "L", "x": 8, **options}
    return Record(
        "suite", shape="2 x 8", dtype="float32", contender=contender, kind=kind, ms=ms, **found
    )


def test_speed_ups_are_over_torch_and_over_the_best_peer() -> None:
    found = [
        record("assocscan", OURS, 2.0), record("assocscan, rows", OURS, 1.0),
        record("loop", TORCH, 10.0), record("slow", PEER, 8.0), record("fast", PEER, 3.0),
        record("faster but wrong", PEER, 0.1, is_wrong=True), record("cuda", ENGINE, 0.5),
        record("absent", PEER, None, note="not installed"),
        record("assocscan", OURS, 4.0, x=16), record("loop", TORCH, 8.0, x=16),
        record("assocscan", OURS, 4.0, x=32),
    ]  # fmt: skip
    printed = speed_ups(found).splitlines()
    assert "5.00x loop" in printed[2] and "1.50x fast" in printed[2] and "L 8" in printed[2]
    assert "2.00x loop" in printed[3] and printed[3].endswith(" -")
    assert "geometric mean" in printed[4] and "3.16x" in printed[4] and "1.50x" in printed[4]
    assert len(printed) == 5
    assert speed_ups([record("assocscan", OURS)]) == ""


@pytest.mark.parametrize("flag", [{"spread": 0.5}, {"copy_spread": 0.5}, {"of_copy": 6.0}])
@pytest.mark.parametrize("flagged", ["ours", "theirs"])
def test_flagged_figures_are_left_out_of_the_means(flag: dict[str, float], flagged: str) -> None:
    ours, theirs = (flag if flagged == name else {} for name in ("ours", "theirs"))
    found = [
        record("assocscan", OURS, 1.0, **ours), record("loop", TORCH, 113.0, **theirs),
        record("assocscan", OURS, 1.0, x=16), record("loop", TORCH, 2.0, x=16),
        record("assocscan", OURS, 1.0, x=32), record("loop", TORCH, 8.0, x=32),
    ]  # fmt: skip
    rows = speed_ups(found).splitlines()[2:]
    assert [" ± 113.00x loop" in row for row in rows[:3]] == [True, False, False]
    assert "geometric mean" in rows[3] and " 4.00x (2 of 3)" in rows[3] and rows[3].endswith(" -")
    assert rows[4].endswith("the means leave them out") and len(rows) == 5


def test_all_figures_flagged_leave_no_mean() -> None:
    found = [record("assocscan", OURS, 1.0, spread=0.5), record("loop", TORCH, 113.0)]
    assert " - (0 of 1)" in speed_ups(found).splitlines()[3]


def test_varying_times_are_marked() -> None:
    found = [
        record("steady", OURS, spread=0.29), record("varies", PEER, spread=0.45),
        record("beside", PEER, copy_spread=1.51),
    ]  # fmt: skip
    lines = printed(found).splitlines()
    by_name = {name: next(line for line in lines if name in line) for name in
               ("steady", "varies", "beside")}  # fmt: skip
    assert "±" not in by_name["steady"]
    assert by_name["varies"].endswith("± 45%") and by_name["beside"].endswith("copy ± 151%")
    assert "± marks 2 of 3 figures" in lines[-1]


def test_copies_that_other_programs_held_up_are_marked() -> None:
    """A copy that is slow in all its calls has no spread that would show it."""
    lines = printed([record("steady", OURS, of_copy=3.6), record("slow", OURS, of_copy=151.0)])
    first, second, last = lines.splitlines()[-3:]
    assert "slow copy" not in first and second.endswith("slow copy")
    assert "slow copy marks 1 figures that are more than 5 of copy" in last


def test_wrong_results_are_marked_with_their_time() -> None:
    text = printed([record("bad", PEER, 2.0, is_wrong=True, note="wrong: error 3e-01")])
    assert "2.00 ms" in text and "wrong: error 3e-01" in text


def many(groups: int, sizes: list[int], contenders: int) -> list[Record]:
    return [
        record(f"contender {c}", PEER, 1.0 + c, group=f"group {g}", x=n, copy_ms=1.0)
        for g in range(groups) for n in sizes for c in range(contenders)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(plots.why_not() is not None, reason="needs matplotlib")
def test_figures_hold_everything(tmp_path: Path) -> None:
    """Panels that fill more than a page are on several; each is as wide as a page and not higher,
    the legend included."""
    from matplotlib import image

    paths = plots.draw(tmp_path, "name", many(14, [8, 16, 32], 16), "cpu")
    assert [p.name for p in paths] == ["name.png", "name-2.png", "name-3.png"]
    paths += plots.draw(tmp_path, "bars", many(5, [8], 20), "cpu")
    paths += plots.draw(tmp_path, "tall", many(1, [8], 90), "cpu")
    for path in paths:
        height, width = image.imread(path).shape[:2]
        assert width == pytest.approx(plots.WIDTH * 160, abs=1)
        assert height <= (plots.HEIGHT + 1) * 160


@pytest.mark.skipif(plots.why_not() is not None, reason="needs matplotlib")
@pytest.mark.parametrize(("largest", "scale"), [(2.1e-3, "linear"), (0.9, "log")])
def test_bars_of_nearly_equal_errors_begin_at_zero(
    largest: float, scale: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A logarithmic axis, on which bars begin anywhere, only where errors differ by far."""
    from matplotlib import pyplot

    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    found = [record(str(e), PEER, None, error=e) for e in (2e-3, largest)]
    plots.draw(tmp_path, "name", found, "cpu")
    (axis,) = figures[0].axes
    assert axis.get_xscale() == scale
    assert axis.get_xlim()[0] == 0 if scale == "linear" else axis.get_xlim()[0] > 0
    assert axis.get_xlabel() == ("error" if scale == "linear" else "error (log scale)")


def test_panels_stay_in_order() -> None:
    """Two in a row; one, where what stands beside a bar is long."""
    groups = [(str(k), many(1, [8], 3)) for k in range(5)]
    (page,) = plots.pages_of(groups)
    assert [[name for name, _ in row] for row in page] == [["0", "1"], ["2", "3"], ["4"]]
    long = [record("a contender with a long name and parameters", PEER)]
    (page,) = plots.pages_of([("0", long), ("1", groups[0][1])])
    assert [[name for name, _ in row] for row in page] == [["0"], ["1"]]


def test_every_contender_has_a_look_of_its_own() -> None:
    found = styles.styles_of(many(1, [8], 24))
    assert len({(s.colour, s.marker, s.dashes) for s in found.values()}) == 24
    assert len({s.colour for s in list(found.values())[:21]}) == 21
    for each in ([s.width for s in found.values()], [s.size for s in found.values()]):
        assert each == sorted(each, reverse=True) and len(set(each)) == 24


def test_ours_comes_first_in_every_figure() -> None:
    """So it has the same colour everywhere, and the widest line."""
    found = styles.styles_of([record("loop", TORCH), record("assocscan", OURS)])
    assert list(found) == ["assocscan", "loop"]
    assert found["assocscan"].colour == styles.COLOURS[0]


def test_curves_on_one_another_are_named() -> None:
    curves = {
        "a": {8: 1.0, 16: 10.0}, "b": {8: 1.01, 16: 10.1}, "other": {8: 1.0, 16: 5.0},
        "part of a": {16: 10.0}, "elsewhere": {32: 10.0},
    }  # fmt: skip
    assert plots.equal_curves(curves) == [["a", "b", "part of a"]]
    assert plots.equal_curves({"a": {8: 1.0}}) == plots.equal_curves({}) == []


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that are drawn from now on."""
    from matplotlib import pyplot

    found: list[Any] = []
    monkeypatch.setattr(pyplot, "close", found.append)
    return found


@pytest.mark.skipif(plots.why_not() is not None, reason="needs matplotlib")
@pytest.mark.parametrize("sizes", [[8], [8, 16, 32]])
def test_titles_and_notes_stay_in_the_figure(
    sizes: list[int], figures: list[Any], tmp_path: Path
) -> None:
    """Beside long labels, panels are narrow; titles and the names of equal curves take two lines
    there."""
    found = [
        record(name, PEER, ms, x=n, group=f"(8, L, 1536, 16) {dtype}, forward and backward")
        for dtype in ("float32", "bfloat16") for n in sizes
        for name, ms in (("a loop of torch calls", 1.0), ("a scan of torch's own", 1.0),
                         ("other", n))
    ]  # fmt: skip
    plots.draw(tmp_path, "name", found, "cpu")
    figure = figures[0]
    figure.canvas.draw()
    boxes = [a.title.get_window_extent() for a in figure.axes]
    boxes += [a.xaxis.label.get_window_extent() for a in figure.axes]
    inside = figure.bbox
    for box in boxes:
        assert box.width > 0 and inside.x0 <= box.x0 and box.x1 <= inside.x1
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    below = figure.axes[0].get_xlabel()
    assert ("a loop of torch calls ≈" in below) == (len(sizes) > 1)


@pytest.mark.skipif(plots.why_not() is not None, reason="needs matplotlib")
def test_bars_show_the_spread_and_are_not_fat(figures: list[Any], tmp_path: Path) -> None:
    found = many(1, [8, 16, 32], 2)
    found += [record("wide", OURS, 1.0, group="one", ms_low=0.5, ms_high=2.0, of_copy=0.4)]
    plots.draw(tmp_path, "name", found, "cpu")
    _, axis = figures[0].axes
    assert list(axis.lines[0].get_xdata()) == [0.2, 0.8]
    (bar,) = axis.patches
    assert bar.get_window_extent().height <= plots.HIGHEST_BAR * figures[0].dpi


def shown_texts(figure: Any) -> list[str]:
    return [t.get_text() for axis in figure.axes for t in axis.texts]


@pytest.mark.skipif(plots.why_not() is not None, reason="needs matplotlib")
def test_flagged_bars_are_pale_and_marked(figures: list[Any], tmp_path: Path) -> None:
    found = [
        record("steady", OURS, of_copy=0.9), record("varied", PEER, spread=0.5, of_copy=0.8),
        record("beside", PEER, copy_spread=0.5, of_copy=0.7),
        record("held up", PEER, of_copy=122.0),
    ]  # fmt: skip
    plots.draw(tmp_path, "name", found, "a CPU, torch 2, 2 threads, 2026-11-26")
    (axis,) = figures[0].axes
    assert shown_texts(figures[0]) == ["0.90", "0.80 ±", "0.70 ±", "122, slow copy"]
    assert [bar.get_alpha() for bar in axis.patches] == [1, *[plots.PALE] * 3]
    assert max(bar.get_width() for bar in axis.patches) == 5  # 122 would hide the others
    title = figures[0].get_suptitle().replace("\n", " ")
    assert title.startswith("name: a CPU, torch 2, 2 threads, 2026-11-26 hollow, or pale with ±")
    assert "slow copy: over 5 of copy" in title


@pytest.mark.skipif(plots.why_not() is not None, reason="needs matplotlib")
def test_flagged_points_are_hollow(figures: list[Any], tmp_path: Path) -> None:
    sizes, spreads = (8, 16, 32), (0.0, 0.5, 0.0)
    found = [record("a", OURS, x=n, spread=s) for n, s in zip(sizes, spreads, strict=True)]
    plots.draw(tmp_path, "name", found, "cpu")
    hollow = [line for line in figures[0].axes[0].lines if line.get_markerfacecolor() == "white"]
    assert [list(line.get_xdata()) for line in hollow] == [[16]]
    assert hollow[0].get_markeredgecolor() == styles.COLOURS[0]
    assert "slow copy" not in figures[0].get_suptitle() and "30%" in figures[0].get_suptitle()


@pytest.mark.skipif(plots.why_not() is not None, reason="needs matplotlib")
def test_titles_stay_in_the_figure(figures: list[Any], tmp_path: Path) -> None:
    """However long the names of the device and of torch are."""
    where = {"device": "AMD EPYC 7B13 64-Core Processor with a long name", "threads": 2,
             "torch": "2.14.1+cu130.local.build", "date": "2026-11-26T01:02:03+00:00"}  # fmt: skip
    found = [*many(1, [8, 16, 32], 2), record("varied", OURS, group="group 0", x=8, spread=0.5)]
    plots.draw(tmp_path, "norm_linear_gelu", found, origin(where))
    figure = figures[0]
    figure.canvas.draw()
    box = figure._suptitle.get_window_extent()
    assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
    assert "2 threads, 2026-11-26" in figure.get_suptitle().replace("\n", " ")


def test_the_origin_of_figures_names_the_device_torch_threads_and_the_day() -> None:
    where = environment(Settings(torch.device("cpu")))
    assert origin({**where, "device": "a CPU", "torch": "2.14", "threads": 1}) == (
        f"a CPU, torch 2.14, 1 thread, {where['date'][:10]}"
    )


def test_fractions_beside_bars_have_as_many_digits_as_their_neighbours() -> None:
    values = (0.0011, 0.9, 0.983, 1.008, 1.25, 12.0, 124.0)
    assert [plots.fraction(value) for value in values] == [
        "0.0011", "0.90", "0.98", "1.0", "1.2", "12", "124",
    ]  # fmt: skip


def test_single_sizes_are_bars() -> None:
    assert plots.is_bars(many(1, [8], 2))
    assert not plots.is_bars(many(1, [8, 16], 2))
    assert plots.is_bars(many(1, [8, 16], 16))
    assert not plots.is_bars(many(1, [8, 16, 32], 16))


@pytest.mark.skipif(plots.why_not() is not None, reason="needs matplotlib")
def test_logarithmic_axes_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from matplotlib import pyplot

    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    plots.draw(tmp_path, "name", many(1, [8, 16, 32], 3), "cpu")
    (axis,) = (a for a in figures[0].axes if a.get_visible())
    assert axis.get_xlabel() == "L (log scale)" and axis.get_ylabel() == "ms (log scale)"
    assert axis.get_xscale() == axis.get_yscale() == "log"
    (legend,) = figures[0].legends
    figures[0].canvas.draw()
    inside = figures[0].bbox.padded(1)
    box = legend.get_window_extent()
    assert inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0


def test_lanes_leave_broadcast_dimensions() -> None:
    few = Lanes((20, 5, 40), 1)
    x: Tensor = torch.rand(1, 5, 40)
    assert few.of(x).shape == (1, 5, 8)


def test_the_runs_of_the_docs_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plot of docs/benchmarks is of a run there that the script names."""
    folder = ROOT / "docs" / "figures"
    monkeypatch.syspath_prepend(folder)
    space = runpy.run_path(str(folder / "benchmark_plots.py"))
    of_runs = {path for runs, names in space["PLOTS"].items() for name in names
               for path in space["drawn"](runs.folder, name)}  # fmt: skip
    assert of_runs == {*(ROOT / "docs" / "benchmarks").glob("*/*.png")}
    for runs, names in space["PLOTS"].items():
        for name in set(names) & runs.notes.keys():
            read = space["read"](runs, name)
            assert read and all(r.is_measured for r in read)
            assert all(r.suite == runs.notes[name]["words"].split()[0] for r in read)
