"""Private parts of torch are named in one module, `assocscan/torch_private.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from repository import bench_modules, modules

MODULES = modules() | bench_modules()
HOME = "torch_private"
# Not torch's: of named tuples, of `sys`, of Triton's interpreter.
OTHERS = {"_replace", "_fields", "_getframe", "_patch_lang", "_patch_lang_tensor"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OTHERS


def chain(node: ast.expr) -> list[str]:
    """`a.b.c` as its names; empty where it does not begin with a name."""
    if isinstance(node, ast.Attribute):
        before = chain(node.value)
        return [*before, node.attr] if before else []
    return [node.id] if isinstance(node, ast.Name) else []


def aliases(tree: ast.AST) -> dict[str, list[str]]:
    """What the imported names of a module stand for in torch."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name.split(".")
                if whole[0] == "torch":
                    found[alias.asname or "torch"] = whole if alias.asname else ["torch"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                found[alias.asname or alias.name] = [*str(node.module).split("."), alias.name]
    return found


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every private name of torch: imports, attributes of torch's modules and of
    other objects, `getattr` by name, and modules named in strings."""
    known = aliases(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                before = str(node.module) if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    parts = f"{before}.{alias.name}".strip(".").split(".")
                    own = isinstance(node, ast.ImportFrom) and node.level
                    if parts[0] == "torch" and not own and any(map(is_private, parts)):
                        yield node.lineno, ".".join(parts)
            case ast.Attribute() if is_private(node.attr):
                parts = chain(node)
                parts = [*known.get(parts[0], parts[:1]), *parts[1:]] if parts else []
                # An ATen operation may begin with an underscore; so may what is a module's own.
                of_self = parts[:1] in (["self"], ["cls"]) and len(parts) == 2
                if not of_self and parts[:2] != ["torch", "ops"] and parts[:1] != ["aten"]:
                    yield node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[of, ast.Constant(name), *_]):
                if isinstance(name, str) and is_private(name) and chain(of)[:1] != ["self"]:
                    yield node.lineno, ast.unparse(node)
            case ast.Constant(str() as text) if text.startswith("torch._"):
                yield node.lineno, repr(text)


@pytest.mark.skipif(not MODULES, reason="not in a checkout")
def test_private_names_of_torch_stand_in_one_module() -> None:
    wrong = [
        f"{path.name}:{line} {text}"
        for name, path in MODULES.items()
        if name != HOME
        for line, text in private_names(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not wrong, "\n".join(wrong)


def test_private_names_are_found() -> None:
    source = """
import torch._inductor
from torch._guards import tracing
from torch.utils import _pytree
from torch.autograd import forward_ad
from . import _own
torch._C._functorch.peek_interpreter_stack()
torch.autograd.function._SingleLevelFunction
forward_ad._current_level
getattr(forward_ad, "_current_level")
t.untyped_storage()._cdata
self.tensor._version
error.startswith("torch._subclasses")
torch.ops.aten._to_copy, self._own, torch.nn.functional, t.__class__, pair._replace(a=1)
"""
    lines = sorted({line for line, _ in private_names(ast.parse(source))})
    assert lines == [2, 3, 4, 7, 8, 9, 10, 11, 12, 13]
