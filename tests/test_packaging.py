"""What an installation contains, and what importing the package does to others."""

import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from repository import ROOT

import assocscan

PACKAGES = {
    "assocscan": "assocscan",
    "assocscan.cuda": "cuda",
    "assocscan.ops": "ops",
    "assocscan_bench": "bench/assocscan_bench",
}
DATA_SUFFIXES = {".csv", ".cuh", ".h"}


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter in `folder`, which comes first on its sys.path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )


def folder_packages() -> dict[str, Path]:
    """Import name → folder, for every folder of the checkout that has an __init__.py."""
    folders = {}
    for package, place in PACKAGES.items():
        top = ROOT / place
        for init in top.rglob("__init__.py"):
            name = ".".join((package, *init.parent.relative_to(top).parts))
            folders.setdefault(name, init.parent)
    return folders


def package_files() -> set[str]:
    """Files of the checkout that belong into a wheel, by their path in it."""
    wanted = {"assocscan/py.typed"}
    for name, folder in folder_packages().items():
        for path in folder.iterdir():
            if path.suffix == ".py" or path.suffix in DATA_SUFFIXES:
                wanted.add(f"{name.replace('.', '/')}/{path.name}")
    return wanted


def installed_distribution() -> importlib.metadata.Distribution:
    """The installed distribution; an egg-info folder in the working directory does not count."""
    site = sysconfig.get_path("purelib")
    found = importlib.metadata.Distribution.discover(name="torch-assocscan", path=[site])
    distribution = next(iter(found), None)
    if distribution is None:
        pytest.skip("torch-assocscan is not installed")
    return distribution


def test_import_pulls_in_no_gpu_package(tmp_path: Path) -> None:
    for name in ("triton", "cupy"):
        (tmp_path / f"{name}.py").touch()
    code = f"""
import sys, torch
before = set(sys.modules)
sys.path.insert(0, {str(tmp_path)!r})
import assocscan
print(*sorted({{"triton", "cupy"}} & (set(sys.modules) - before)))
"""
    result = run_python(code, Path(assocscan.__file__).parents[1])
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_one_version_everywhere() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = assocscan.__version__
    assert f'\nversion = "{version}"\n' in project
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert changes[0] == version


@pytest.mark.exhaustive
def test_layers_are_imported_at_their_first_use() -> None:
    code = """
import sys
import assocscan
assert "nn" in dir(assocscan) and "cumsum" in dir(assocscan)
assert "assocscan.nn" not in sys.modules
layer = assocscan.nn.RGLRU(4)
assert assocscan.nn is sys.modules["assocscan.nn"]
try:
    assocscan.no_such_name
except AttributeError as error:
    print(error)
"""
    result = run_python(code, ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "module 'assocscan' has no attribute 'no_such_name'"


def test_cuda_folder_does_not_hide_the_namespace_package() -> None:
    try:
        importlib.metadata.version("cuda-pathfinder")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("cuda-pathfinder is not installed")
    result = run_python("import cuda, cuda.pathfinder; print(cuda.__file__)", ROOT)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == ROOT / "cuda" / "__init__.py"


def test_ops_refuses_to_be_imported_by_its_folder_name() -> None:
    result = run_python("import ops", ROOT)
    assert result.returncode == 1
    assert "ImportError: import assocscan.ops" in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    not (ROOT / "assocscan" / "ops").exists(), reason="a source distribution has no links"
)
def test_subpackages_are_reached_through_the_links() -> None:
    code = "import assocscan.cuda, assocscan.ops; print(assocscan.ops.__file__)"
    result = run_python(code, ROOT)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == ROOT / "assocscan" / "ops" / "__init__.py"


@pytest.mark.exhaustive
def test_the_benchmarks_are_a_package_that_only_their_command_imports() -> None:
    """In a checkout the command takes those of the checkout, installed or not."""
    code = """
import sys
import assocscan.__main__ as main, assocscan.api.associative_scan, assocscan.nn
assert not [name for name in sys.modules if "bench" in name.split(".")[0]]
try:
    main.main(["bench", "--help"])
except SystemExit as end:
    print(end.code, sys.modules["assocscan_bench"].__file__)
"""
    result = run_python(code, ROOT)
    assert result.returncode == 0, result.stderr
    assert "python -m assocscan bench" in result.stdout
    file = ROOT / "bench" / "assocscan_bench" / "__init__.py"
    assert result.stdout.splitlines()[-1] == f"0 {file}"


def test_every_package_is_listed() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listing = re.search(r"^packages = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
    assert listing is not None
    assert set(re.findall(r'"(.+?)"', listing[1])) == set(folder_packages())


def test_installation_holds_every_file() -> None:
    distribution = installed_distribution()
    if '"editable": true' in (distribution.read_text("direct_url.json") or ""):
        pytest.skip("an editable installation lists no files")
    installed = {path.as_posix() for path in distribution.files or ()}
    assert package_files() - installed == set()


def test_version_is_that_of_the_distribution() -> None:
    assert assocscan.__version__ == installed_distribution().version


def test_readme_opens_with_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line.strip() for line in readme.splitlines()[1:] if line.strip()][:2]
    assert commands == [
        "python -m pip install . && python -m assocscan demo",
        "python -m pip install '.[test]' && python -m pytest",
    ]


def test_links_of_the_readme_become_absolute_for_an_index() -> None:
    file = ROOT / ".ci" / "absolute_links.py"
    if not file.exists():
        pytest.skip("a source archive has no .ci/absolute_links.py")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    absolute = runpy.run_path(str(file))["absolute"]
    text = absolute(readme, ROOT, "https://host/owner/name/", "v1")
    links = re.compile(r"\]\(([^)]+)\)")
    before, after = links.findall(readme), links.findall(text)
    assert len(before) == len(after) > 15 and all(t.startswith("https://") for t in after)
    assert "![Speed of a linear recurrence on one GPU](https://host/owner/name/raw/v1/docs/" in text
    folder = absolute("[a](docs/tutorials)", ROOT, "https://host/owner/name/", "v1")
    assert folder == "[a](https://host/owner/name/tree/v1/docs/tutorials)"
    assert "(https://host/owner/name/blob/v1/docs/selective_scan.md#where-it-runs)" in text
    assert "(https://pytorch.org/get-started/locally/)" in text
    with pytest.raises(SystemExit, match=r"no\.md: no such file"):
        absolute("[a](no.md)", ROOT, "https://host", "v1")
    kept = "```python\n[a](no.md)\n```\n"
    assert absolute(kept, ROOT, "https://host", "v1") == kept
