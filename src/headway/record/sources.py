"""The sources of an attempt: the script and the modules that it imported from its own directories, as they were.

    code/sources-1.json         {"train.py": "import torch\\n...", "model.py": ...}: of attempt 1, and of those after it
    code/sources-3.json         attempt 3 began with other ones

Unlike a commit, these are the files that ran, tracked by git or not.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import SequenceMatcher, unified_diff
from pathlib import Path
from types import ModuleType

from headway.run import Run
from headway.run.info import read_json
from headway.system import files
from headway.system.redact import redact
from headway.system.text import plural

Sources = Mapping[str, str]
"""text by name"""

_MAX_FILES = 200
_MAX_BYTES = 2_000_000
"""of all files; what is beyond is not kept"""
_PACKAGE = Path(__file__).parents[1]


def collect() -> dict[str, str]:
    """Returns the sources of this process, without secrets; packages that are installed are not among them.

    >>> list(collect())  # doctest: +SKIP
    ['train.py', 'model.py']
    """
    found: dict[str, str] = {}
    left = _MAX_BYTES
    for name, path in sorted(_own_files()):
        with suppress(OSError, UnicodeError):
            text = redact(path.read_text())
            left -= len(text)
            if left < 0 or len(found) == _MAX_FILES:
                break
            found[name] = text
    return found


def _own_files() -> Iterator[tuple[str, Path]]:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    here = Path.cwd()
    roots = [here]
    if main:
        script = Path(main).absolute()
        roots.insert(0, script.resolve().parent)
        if script.is_relative_to(here):  # a job starts among links: this is the directory to which they lead
            roots.append(script.resolve().parents[len(script.relative_to(here).parts) - 1])
    libraries = {str(path) for path in (*sysconfig.get_paths().values(), _PACKAGE)}
    installed = tuple(
        {f"{spelling}{os.sep}" for path in libraries for spelling in (path, os.path.realpath(path))}
    )
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        # thousands of modules are imported: only the paths of the few that are not installed are resolved
        if not isinstance(file, str) or not file.endswith(".py") or file.startswith(installed):
            continue
        path = Path(file).resolve()
        if "site-packages" in path.parts or str(path).startswith(installed):
            continue
        for root in roots:
            if path.is_relative_to(root):
                yield str(path.relative_to(root)), path
                break


def write(run: Run, attempt: int, sources: Sources) -> None:
    """Records the sources of an attempt that begins, unless they are those of the attempt before."""
    with files.storage(f"write the code of {run.path}"):
        files.write_atomic(run.sources_file(attempt), json.dumps(sources).encode() + b"\n")


def recorded(run: Run) -> list[tuple[int, Sources]]:
    """Returns the sources that attempts of a run began with, in their order; damaged records are left out."""
    numbers = sorted(
        int(number)
        for path in run.code_dir.glob("sources-*.json")
        if (number := path.stem.removeprefix("sources-")).isdecimal()
    )
    found = ((number, read_json(run.sources_file(number))) for number in numbers)
    return [(number, sources) for number, sources in found if sources is not None]


def summarize(before: Sources, now: Sources) -> list[str]:
    """Returns a few words on each file that differs.

    >>> summarize({"train.py": "lr = 1\\nx\\n", "old.py": ""}, {"train.py": "lr = 2\\nx\\n", "new.py": ""})
    ['train.py: 1 line differs', 'new.py is new', 'old.py is gone']
    """
    words = []
    for name, text in now.items():
        if name not in before:
            words.append(f"{name} is new")
        elif before[name] != text:
            matcher = SequenceMatcher(None, before[name].splitlines(), text.splitlines())
            count = sum(max(b - a, d - c) for kind, a, b, c, d in matcher.get_opcodes() if kind != "equal")
            words.append(f"{name}: {plural(count, 'line differs', 'lines differ')}")
    return words + [f"{name} is gone" for name in before if name not in now]


def compare(before: Sources, now: Sources, *, names: tuple[str, str]) -> list[str]:
    """Returns the lines of a unified diff; `names` are those of the two sides."""
    lines: list[str] = []
    for name in dict.fromkeys([*before, *now]):
        one, other = (each.get(name, "").splitlines() for each in (before, now))
        lines += unified_diff(one, other, f"{names[0]}: {name}", f"{names[1]}: {name}", lineterm="")
    return lines
