"""The tables of what things take on a GPU, from the runs of `measure_gpu`.

python docs/figures/gpu_tables.py

A dash stands for what was not measured. Sentences that give figures are made here too.
"""

import math

import shared_tables
import tables
from tables import (
    GPU,
    MOST_SPREAD,
    NONE,
    OURS,
    Block,
    Row,
    digits,
    error,
    gpu,
    lines,
    ms,
    pages,
    paragraph,
    ratio,
    rewrite,
    sizes,
    version,
)

NAME = "gpu_tables"
DTYPES = ("float32", "bfloat16")
ENGINES = ("triton", "cuda", "multipass")
PASSES = ("forward", "forward and backward")
LONG = 8192  # steps, from which on the front page says how fast the recurrence is
PEERS = {
    "assocscan": "assocscan, axis 1",
    "assocscan, rows": "assocscan, rows",
    "accelerated-scan": "accelerated-scan, rows",
    "fpscan": "fpscan, rows",
    "fla chunk": "fla `chunk_hgrn`, axis 1",
    "torch associative_scan": "torch's prototype, compiled, axis 1",
    "jax": "JAX, axis 1",
}
SCANS = {
    "sum": "sum, ",
    "recurrence": "recurrence, ",
    "backward": "backward pass of the recurrence, ",
    "second order": "2×2 matrix and vector (24 bytes in float32), ",
}


def machine() -> str:
    """The GPU, the versions and the day."""
    where = GPU.environment
    others = {"Triton": where["triton"], "CuPy": where["cupy"]}
    named = "".join(f", {name} {version(number)}" for name, number in others.items())
    return f"{GPU.title(next(iter(GPU.notes)))}{named}".replace("one ", "One ", 1)


def of_copy(row: Row | None) -> str:
    return tables.of_copy(row, "{:.2f}".format)


def span(values: list[float]) -> str:
    ends = dict.fromkeys(f"{value:.2f}" for value in (min(values), max(values)))
    return " to ".join(ends)


def power(size: int) -> str:
    """The size, as a power of two where it is a large one."""
    exponent = size.bit_length() - 1
    return f"2^{exponent}" if size == 1 << exponent and exponent > 17 else str(size)


def place(shape: str) -> str:
    """Which axis of what is scanned, of the cases of `bench engines`."""
    of = [int(size) for size in shape.split(" x ")]
    inside = ", ".join(map(power, of))
    if len(of) == 1:
        return f"one row of {inside}"
    return f"rows ({inside})" if len(of) == 2 else f"axis 1 of ({inside})"


def joined(cells: list[str]) -> str:
    """Of the two dtypes; nothing where neither was measured."""
    return NONE if set(cells) == {NONE} else ", ".join(cells)


def engines() -> str:
    rows = [r for r in GPU.read("engines") if r["contender"] == "auto"]
    found = {(*r["group"].split(", "), r["shape"]): r for r in rows}
    table, seen = [], set()
    for kind, dtype, shape in found:
        if dtype not in DTYPES:
            row = found[kind, dtype, shape]
            title = f"{dtype} {SCANS[kind]}{place(shape)}"
            table.append([title, GPU.time(row), of_copy(row), ""])
        elif (kind, shape) not in seen:
            seen.add((kind, shape))
            both = [found.get((kind, dtype, shape)) for dtype in DTYPES]
            cub = GPU.find("engines", "CUB", group=f"{kind}, float32", shape=shape)
            table.append([
                SCANS[kind] + place(shape), joined([GPU.time(row) for row in both]),
                joined([of_copy(row) for row in both]), "" if cub is None else GPU.time(cub),
            ])  # fmt: skip
    head = "scan, float32 and bfloat16 | µs | of copy | CUB, float32, µs"
    return f"{lines(head, table)}\n\n{among_engines(rows)}"


def among_engines(rows: list[Row]) -> str:
    """How `auto` stands to the fastest engine by name, in words."""
    if not rows:
        return ""
    of_dtype = {
        dtype: [float(r["of_copy"]) for r in rows if r["dtype"] == dtype]
        for dtype in dict.fromkeys(r["dtype"] for r in rows)
    }
    spans = ", ".join(f"{span(values)} in {dtype}" for dtype, values in of_dtype.items())
    factors = []
    for row in rows:
        where = {"group": row["group"], "shape": row["shape"]}
        named = [GPU.find("engines", name, **where) for name in ENGINES]
        best = min((ms(r) for r in named if r is not None), default=math.inf)
        factors.append(ms(row) / best)
    return paragraph(
        f"These are times of `auto`. Its fractions of copy are {spans}. In the {len(rows)} cases "
        f"it takes at most {max(factors):.2f} times as long as the fastest engine called by name."
    )


def short() -> str:
    """Axes of few steps, of copy."""
    cases = (
        ("sum, axis 1 of", "short-sums", OURS),
        ("recurrence, axis 1 of", "short-recurrences", OURS),
        ("recurrence, rows of", "short-recurrences", "assocscan, rows"),
    )
    table = []
    for title, name, contender in cases:
        for shape in dict.fromkeys(r["shape"] for r in GPU.read(name)):
            both = [GPU.find(name, contender, shape=shape, dtype=dtype) for dtype in DTYPES]
            cells = joined([GPU.time(r) for r in both]), joined([of_copy(r) for r in both])
            batch, length, width = shape.split(" x ")
            rows = contender.endswith("rows")
            of = (batch, width, length) if rows else (batch, length, width)
            table.append([f"{title} ({', '.join(of)})", *cells])
    return lines("scan, float32 and bfloat16 | µs | of copy", table)


def timed(row: Row | None) -> str:
    """The time, with the fraction of copy in brackets."""
    if row is None:
        return NONE
    varied = "± " if float(row["spread"]) > MOST_SPREAD else ""
    wrong = ", wrong" if row["is_wrong"] == "True" else ""
    return f"{varied}{digits(GPU.unit * ms(row))} ({of_copy(row)}{wrong})"


def peers() -> str:
    rows = GPU.read("recurrence")
    lengths = sorted({int(r["x"]) for r in rows})
    table = []
    for dtype in reversed(DTYPES):
        for which in PASSES:
            own = {(r["contender"], int(r["x"])): r for r in rows
                   if r["group"].endswith(f" {dtype}, {which}")}  # fmt: skip
            table.append([f"**{which}, {dtype}**", *("" for _ in lengths)])
            for name, title in PEERS.items():
                if any(contender == name for contender, _ in own):
                    table.append([title, *(timed(own.get((name, n))) for n in lengths)])
    return lines("| " + " | ".join(f"L = {n}" for n in lengths), table)


def others() -> str:
    rows = GPU.read("others")
    table = []
    for name, title in PEERS.items():
        both = [next((r for r in rows if (r["contender"], r["dtype"]) == (name, dtype)), None)
                for dtype in DTYPES]  # fmt: skip
        if any(both):
            table.append([title, *(cell for r in both for cell in (timed(r), error(r)))])
    return lines("µs (of copy) | float32 | error | bfloat16 | error", table)


def layers() -> str:
    """Sums and layers beside what torch has."""
    gelu = "`NormLinearGELU` 8192 × 1024 → 4096, {}, {}"
    eager = {"eager torch": "eager torch"}
    unfused = {"unfused": "unfused torch operations and our recurrence"}
    torchs = {"torch.cumsum": "`torch.cumsum`"}
    cases: list[tuple[str, str, dict[str, str], dict[str, str]]] = [
        ("`cumsum`, axis 1 of (4, 8192, 512), float32", "cumsum",
         {"group": "(4, L, 512) float32", "shape": "4 x 8192 x 512"}, torchs),
        ("the same of (4, 512, 512)", "cumsum",
         {"group": "(4, L, 512) float32", "shape": "4 x 512 x 512"}, torchs),
        ("`cumsum` of one row of 2^28, float32", "long",
         {"group": "sum, float32", "shape": str(1 << 28)}, {**torchs, "CUB": "CUB's scan alone"}),
    ]  # fmt: skip
    for dtype in reversed(DTYPES):
        for which in PASSES:
            where = {"group": f"{dtype}, {which}"}
            cases.append((f"RG-LRU (8, 8192, 1536), {dtype}, {which}", "rglru", where, unfused))
    for dtype in reversed(DTYPES):
        for which in PASSES:
            where = {"group": f"{dtype}, {which}", "x": "8192"}
            cases.append((gelu.format(dtype, which), "norm_linear_gelu", where, eager))
    table = []
    for title, name, where, contenders in cases:
        # "forward" alone is a part of "forward and backward" too, but never at the end of it.
        others = ", ".join(
            f"{said} {GPU.time(ending(name, who, where))}" for who, said in contenders.items()
        )
        table.append([title, GPU.time(ending(name, OURS, where)), others])
    return lines("| assocscan, µs | the other, µs", table)


def ending(name: str, contender: str, where: dict[str, str]) -> Row | None:
    """The row of the group that ends in these words."""
    rest = {key: value for key, value in where.items() if key != "group"}
    rows = (
        row for row in GPU.read(name)
        if row["contender"] == contender and row["ms"] and row["group"].endswith(where["group"])
        and all(row[column].removesuffix(".0") == value for column, value in rest.items())
    )  # fmt: skip
    return next(rows, None)


def selective_rows() -> list[tuple[str, str, dict[str, tuple[Row | None, Row | None]]]]:
    """(size, pass, of each dtype assocscan and mamba_ssm), by size."""
    rows = GPU.read("selective")
    shapes = dict.fromkeys(r["shape"] for r in rows)
    found = []
    for shape in sorted(shapes, key=lambda s: [int(n) for n in s.split(" x ")]):
        for which in PASSES:
            pairs = {}
            for dtype in DTYPES:
                where = {"group": f"{dtype}, {which}", "shape": shape}
                pair = (ending("selective", who, where) for who in (OURS, "mamba_ssm"))
                pairs[dtype] = next(pair), next(pair)
            found.append((shape, which, pairs))
    return found


def selective() -> str:
    table, slower, count = [], [], 0
    for shape, which, pairs in selective_rows():
        size = "(" + ", ".join(shape.split(" x ")[:2]) + ")"
        cells = [size if which == "forward" else "", which]
        for dtype, (ours, theirs) in pairs.items():
            cells += [GPU.time(ours), GPU.time(theirs), ratio(ours, theirs)]
            if ours and theirs:
                count += 1
                if ms(ours) > ms(theirs):
                    slower.append(f"{size} in {dtype}, {which}")
        table.append(cells)
    head = " | ".join(f"{dtype}, µs | mamba_ssm, µs | ratio" for dtype in DTYPES)
    text = lines(f"(batch, L) | | {head}", table)
    if not count:
        return text
    said = f"A ratio above 1 says that mamba_ssm is faster: {cases_of(slower, count)}."
    return f"{text}\n\n{paragraph(said)}"


def slower_than_mamba() -> tuple[int, int]:
    """In how many cases, of how many."""
    pairs = [pair for *_, both in selective_rows() for pair in both.values() if all(pair)]
    return sum(ms(ours) > ms(theirs) for ours, theirs in pairs if ours and theirs), len(pairs)


def cases_of(named: list[str], count: int) -> str:
    if not named:
        return f"in none of {count} cases"
    return f"in {len(named)} of {count} cases: {'; '.join(named)}"


def limits() -> str:
    """Of selective scans: how near the exponentials' limit, and memory beside that of mamba_ssm."""
    table = []
    for shape, which, pairs in selective_rows():
        size = "(" + ", ".join(shape.split(" x ")[:2]) + ")"
        cells = [size if which == "forward" else "", which]
        for ours, theirs in pairs.values():
            cells += [number(ours, "of_exponentials"), mebibytes(ours), mebibytes(theirs)]
        table.append(cells)
    head = " | ".join(f"{d}, of exponentials | MiB | mamba_ssm, MiB" for d in DTYPES)
    return lines(f"(batch, L) | | {head}", table)


def number(row: Row | None, column: str) -> str:
    return digits(float(row[column])) if row and row[column] else NONE


def mebibytes(row: Row | None) -> str:
    return f"{float(row['memory']) / 2**20:.0f}" if row and row["memory"] else NONE


def compensated() -> str:
    """What compensation costs: the time with it, divided by that without it."""
    runs = "compensated", "compensated-both"
    titles = {"cumsum": "`cumsum`", "the layer's scan": "the scan of the layer"}
    table = []
    for part, title in titles.items():
        own = [r for r in GPU.read("compensated") if r["group"].startswith(part)]
        for shape in dict.fromkeys(r["shape"] for r in own):
            pairs = {
                (dtype, run): [
                    next((r for r in GPU.read(run) if r["group"].startswith(part)
                          and r["contender"] == contender
                          and (r["shape"], r["dtype"]) == (shape, dtype)), None)
                    for contender in (OURS, "assocscan, compensated")
                ]
                for dtype in DTYPES for run in runs
            }  # fmt: skip
            errors = [error(row) for row in pairs["float32", "compensated"]]
            ratios = [ratio(with_it, plain) for plain, with_it in pairs.values()]
            table.append([f"{title}, axis 1 of ({sizes(shape)})", *errors, *ratios])
    head = "| error, plain | compensated"
    return lines(f"{head} | float32, forward | both | bfloat16, forward | both", table)


def precision() -> str:
    """Errors of the recurrence at the greatest length that was measured."""
    rows = [r for r in GPU.read("precision") if r["group"].startswith("recurrence")]
    if not rows:
        return "Not measured."
    longest = max(rows, key=lambda r: float(r["x"]))["x"]
    own = {(r["contender"], r["dtype"]): r for r in rows if r["x"] == longest}
    dtypes = ("float32", "float16", "bfloat16")
    table = [
        [
            PEERS.get(name, name).partition(",")[0],
            *(error(own.get((name, dtype))) for dtype in dtypes),
        ]
        for name in dict.fromkeys(contender for contender, _ in own)
    ]
    return lines(f"errors of a recurrence of {longest} steps | " + " | ".join(dtypes), table)


def nonlinear() -> str:
    names = {
        OURS: "`nonlinear_recurrence`",
        "assocscan, Newton": "by Newton's method",
        "loop in Triton": "a loop in Triton",
        "Newton, whole axis": "Newton, whole axis",
        "jax lax.scan": "`jax.lax.scan`",
        "loop of torch operations": "torch loop",
    }
    head = "B, L, D | | " + " | ".join(names.values())
    return lines(head, shared_tables.passes(GPU, "nonlinear", False, tuple(names)))


def newton() -> str:
    names = ("assocscan, Newton", "assocscan, loop")
    table = []
    for shape in dict.fromkeys(r["shape"] for r in GPU.read("newton")):
        rows = {r["contender"]: r for r in GPU.read("newton") if r["shape"] == shape}
        if names[1] in rows:  # layers have no loop
            table.append(
                [shared_tables.sizes(shape), *(GPU.time(rows.get(n), 1000) for n in names)]
            )
    return lines('B, L, D | `"newton"` | `"loop"`', table)


def front() -> str:
    """How long the recurrence of the figure takes, in copies, over the long axes."""
    parts = []
    for pass_ in PASSES:
        group = f"(8, L, 1536) bfloat16, {pass_}"
        copies = sorted(
            1 / float(row["of_copy"])
            for row in GPU.read("recurrence")
            if (row["group"], row["contender"]) == (group, OURS) and float(row["x"]) >= LONG
        )
        parts.append(f"{copies[0]:.2f} to {copies[-1]:.2f} times")
    return paragraph(
        "How fast is it? For `a` and `b` of the shape (8, L, 1536) in bfloat16, and L of "
        f"{LONG} or more, `linear_recurrence` takes {parts[0]} as long as a copy of the same "
        f"number of bytes on one {gpu(GPU.environment)}, and with its gradient {parts[1]}:"
    )


BLOCKS = {
    "front": Block("index.md", front),
    "machine": Block("performance/index.md", lambda: f"{machine()}."),
    "engines": Block("performance/index.md", engines, ("engines",)),
    "short": Block("performance/index.md", short, ("short-sums", "short-recurrences")),
    "peers": Block("performance/index.md", peers, ("recurrence",)),
    "others": Block("performance/index.md", others, ("others",)),
    "layers": Block("performance/index.md", layers),
    "packed": Block("performance/index.md", lambda: shared_tables.packed(GPU), ("packed",)),
    "calls": Block(
        "performance/executables.md", lambda: shared_tables.calls(GPU, ("calls",)), ("calls",)
    ),
    "selective": Block("selective_scan.md", selective, ("selective",)),
    "limits": Block("performance/vectors.md", limits, ("selective",)),
    "compensated": Block("how/numbers.md", compensated, ("compensated", "compensated-both")),
    "precision": Block("how/numbers.md", precision, ("precision",)),
    "windows": Block("windows.md", lambda: shared_tables.windows(GPU, ("windows",)), ("windows",)),
    "newton": Block("nonlinear.md", newton, ("newton",)),
    "nonlinear": Block("nonlinear.md", nonlinear, ("nonlinear",)),
}


PAGES = pages(NAME, GPU, BLOCKS)

if __name__ == "__main__":
    rewrite(PAGES)
