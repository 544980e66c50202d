"""Tables of suites that are made for CPUs and for GPUs in the same way."""

from tables import NONE, OURS, Row, Runs, digits, lines, ms, ratio, sizes


def packed(runs: Runs) -> str:
    names = {
        "sum": "`cumsum`",
        "total of each": "`reduce(ops.sum, …)`",
        "logaddexp": "`ops.logaddexp`",
    }
    counts = sorted({int(row["x"]) for row in runs.read("packed")})
    table = []
    for part, title in names.items():
        cells = [title]
        for count in counts:
            where = {"group": part, "x": str(count)}
            both = (runs.find("packed", c, **where) for c in (OURS, "one sequence"))
            cells.append(", ".join(map(runs.time, both)))
        table.append(cells)
    head = f"{runs.unit_name}, packed and as one sequence | "
    return lines(head + " | ".join(f"{count} sequences" for count in counts), table)


def windows(runs: Runs, names: tuple[str, ...]) -> str:
    """In multiples of the time of the scan, of which that in the middle is shown."""
    table = []
    rows = [row for name in names for row in runs.read(name)]
    groups = list(dict.fromkeys(row["group"] for row in rows))
    widths = ("16", "257", "4096")
    for group in (g for g in groups if g.endswith(", forward")):
        name, _, rest = group.partition(", ")
        cells = [f"`{name}`, {rest.partition(' float')[0]}"]
        for which in ("forward", "forward and backward"):
            wanted = f"{name}, {rest.removesuffix('forward')}{which}"
            own = [r for r in rows if r["group"] == wanted]
            times = {(r["contender"], r["x"]): r for r in own}
            scan = sorted((r for r in own if r["contender"] == "the scan"), key=ms)
            cells.append(runs.time(scan[len(scan) // 2]) if scan else NONE)
            for width in widths:
                ours, theirs = times.get((OURS, width)), times.get(("the scan", width))
                cells.append(digits(ms(ours) / ms(theirs)) if ours and theirs else "")
        table.append(cells)
    head = f"operator, float32, axis 1 | scan, {runs.unit_name} | width 16 | width 257 | width 4096"
    return lines(f"{head} | scan and gradient, {runs.unit_name} | 16 | 257 | 4096", table)


def passes(runs: Runs, name: str, is_layer: bool, contenders: tuple[str, ...]) -> list[list[str]]:
    """A line for each size and pass, a column for each contender."""
    own = [r for r in runs.read(name) if r["group"].startswith("layers") == is_layer]
    table = []
    for shape in dict.fromkeys(r["shape"] for r in own):
        for which in ("forward", "forward and backward"):
            cells = [r for r in own if r["shape"] == shape and r["group"].endswith(f", {which}")]
            times: dict[str, Row] = {r["contender"]: r for r in cells}
            first = sizes(shape) if which == "forward" else ""
            table.append([first, which, *(runs.time(times.get(c)) for c in contenders)])
    return table


def calls(runs: Runs, names: tuple[str, ...]) -> str:
    """Microseconds, and in brackets times those of torch.cumsum; for each run a pair of columns."""
    table = []
    for name in dict.fromkeys(r["contender"] for r in runs.read(names[0])):
        cells = [f"`{name}`" if " " not in name else name]
        for run in names:
            for which in ("forward", "forward and backward"):
                row, torchs = (runs.find(run, c, x_name=which) for c in (name, "torch.cumsum"))
                factor = "" if name == "torch.cumsum" else f" ({ratio(row, torchs)})"
                cells.append(runs.time(row, 1000) + factor)
        table.append(cells)
    return lines("call | " + " | ".join(heads(runs, names)), table)


def heads(runs: Runs, names: tuple[str, ...]) -> list[str]:
    """Of CPUs with the number of threads."""
    found = []
    for run in names:
        count = runs.threads(run)
        with_threads = f", {count} thread{'s' * (count > 1)}" if runs.device == "cpu" else ""
        found += [f"{which}{with_threads}" for which in ("forward", "both")]
    return found
