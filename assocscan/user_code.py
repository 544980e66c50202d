"""The line of the user's code that an error or a warning is about, past torch's and our own."""

from __future__ import annotations

import sys
import traceback
import warnings
from pathlib import Path

import torch

from .errors import FallbackWarning

_FOLDERS = [str(Path(module).parent) for module in (torch.__file__, __file__)]
_OTHERS = (*_FOLDERS, "<frozen", "<string>", "<eval")


def is_users(filename: str) -> bool:
    return not filename.startswith(_OTHERS)


def user_line(error: BaseException) -> str:
    """` (file.py:12: code)` for the innermost of the user's frames."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f" ({Path(last.filename).name}:{last.lineno}: {last.line})"


def warn(text: str) -> None:
    """A FallbackWarning at the innermost of the user's lines; at the outermost line of a thread
    that has none, as autograd's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, FallbackWarning, stacklevel=level)
