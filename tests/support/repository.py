"""Where the checkout lies, of which the tests are a part."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
BENCH = ROOT / "bench"  # where a checkout has `assocscan_bench`


def modules() -> dict[str, Path]:
    """Every module below the package, by its name in it."""
    found = {}
    for folder, prefix in (("assocscan", ()), ("cuda", ("cuda",)), ("ops", ("ops",))):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = (*prefix, *path.relative_to(ROOT / folder).with_suffix("").parts)
            if folder == "assocscan" and parts[0] in ("cuda", "ops"):
                continue  # the links of a checkout
            found[".".join(parts).removesuffix("__init__").rstrip(".")] = path
    return found


def bench_modules() -> dict[str, Path]:
    """Every module of the benchmarks, by its name."""
    return {
        ".".join(path.relative_to(BENCH).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((BENCH / "assocscan_bench").rglob("*.py"))
    }
