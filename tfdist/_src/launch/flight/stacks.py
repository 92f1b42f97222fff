"""The user's part of the stack of Python's main thread."""

from __future__ import annotations

import re
from pathlib import Path

_THREAD = re.compile(r"^(?:Current t|T)hread \S+.*$", re.MULTILINE)
_FRAME = re.compile(r'^ +File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages|lib(?:64)?/python3\.\d+)/|^<frozen ")
_OWN = f"{Path(__file__).parents[3]}/"
_MOST = 3


def user_frames(stacks: str, program: str) -> tuple[str, ...]:
    """The innermost calls of the main thread that are not those of a library.

    Args:
        stacks: of all threads, as faulthandler prints them.
        program: the name of the script; its frames are the user's wherever it lies.

    Returns:
        Up to three, innermost first, as in `"load (/app/data.py:12)"`; if all of the thread's
        frames are those of libraries, their innermost.
    """
    threads = [_FRAME.findall(text) for text in _THREAD.split(stacks)[1:]]
    # The main thread runs the script, and Python prints it last.
    last = threads[-1] if threads else []
    main = next((frames for frames in reversed(threads) if _runs_script(frames)), last)
    own = [frame for frame in main if Path(frame[0]).name == program or not _is_library(frame[0])]
    return tuple(f"{function} ({file}:{line})" for file, line, function in (own or main)[:_MOST])


def _runs_script(frames: list[tuple[str, str, str]]) -> bool:
    return any(function == "<module>" for _, _, function in frames)


def _is_library(file: str) -> bool:
    return bool(_LIBRARY.search(file)) or file.startswith(_OWN)
