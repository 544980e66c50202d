"""Configuration of the site: `sphinx-build -W docs docs/_build`."""

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_extensions"))

import assocscan  # noqa: E402

project = "assocscan"
author = "assocscan authors"
copyright = "assocscan authors, MIT licence"
version = release = assocscan.__version__

extensions = [
    "myst_parser",
    "operator_pages",
    "plain_docstrings",
    "reference_pages",
    "sphinx.ext.autodoc",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = [
    "_build",
    "README.md",
    "figures",
    "tutorials",
    "tutorials.md",  # the site has the gallery
    "gallery/*.ipynb",
    "reference/operators.md",  # for readers of the files; the site has ops.rst
    "sg_execution_times.rst",
]
nitpicky = False
default_role = "code"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "none"  # the docstrings say what is taken and returned
autodoc_member_order = "bysource"
add_module_names = False

sphinx_gallery_conf = {
    "examples_dirs": ["tutorials"],
    "gallery_dirs": ["gallery"],
    "filename_pattern": r"/\d\d_",  # every tutorial is run
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "min_reported_time": 5,
    "show_memory": False,
}

html_theme = "furo"
html_title = "assocscan"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
templates_path: list[str] = []


def without_unknown(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str, returned: str
) -> tuple[str, str] | None:
    """`*surplus` and `**unknown` are there for error messages, not for users."""
    if not signature:
        return None
    return signature.replace(", *surplus", ", *").replace(", **unknown", ""), returned


def links_to_pages(app: Any, page: str, source: list[str]) -> None:
    """Links to files, for readers of the repository, lead to their pages."""
    pages = re.sub(r"\(((?:\.\./)*)tutorials/(\w+)\.py\)", r"(\1gallery/\2.rst)", source[0])
    pages = re.sub(r"\(((?:\.\./)*)tutorials\.md\)", r"(\1gallery/index.rst)", pages)
    pages = pages.replace("reference/operators.md)", "reference/ops.rst)")
    source[0] = pages.replace("(../../cuda/README.md", "(cuda.md")  # which includes that file


LIGHT = re.compile(r"^!\[(.*?)\]\((\S+?)\.svg\)$", re.MULTILINE)


def pictures_for_dark_pages(app: Any, page: str, source: list[str]) -> None:
    """A picture NAME.svg beside which there is NAME_dark.svg: that one on dark pages."""
    folder = (HERE / page).parent

    def both(found: re.Match[str]) -> str:
        words, name = found.groups()
        if not (folder / f"{name}_dark.svg").exists():
            return found[0]
        directives = (
            f"```{{image}} {name}{suffix}.svg\n:alt: {words}\n:class: only-{shade}\n```"
            for suffix, shade in (("", "light"), ("_dark", "dark"))
        )
        return "\n\n".join(directives)

    source[0] = LIGHT.sub(both, source[0])


def in_frames(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Each picture in an element that can scroll; not the small ones of the list of tutorials."""
    if page != "gallery/index" and "body" in context:
        body = context["body"]
        context["body"] = re.sub(r"<img [^>]+>", r'<span class="picture">\g<0></span>', body)


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", without_unknown)
    app.connect("html-page-context", in_frames)
    app.connect("source-read", links_to_pages)
    app.connect("source-read", pictures_for_dark_pages)
