"""How headway starts its own modules in further Python processes."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path


def module_command(module: str, *args: str, python: str = sys.executable) -> list[str]:
    """Returns the command that runs a module of headway, and never imports from the current directory.

    With `-m` alone, Python searches that directory first, and in a shared one another user may have put a `json.py`.

    >>> module_command("headway", "run", "train.py", python="python3")
    ['python3', '-P', '-m', 'headway', 'run', 'train.py']
    """
    return [python, "-P", "-m", module, *args]


def import_path() -> list[str]:
    """Returns the directories from which this process imports, as absolute paths: the first may be the current one.

    >>> all(map(os.path.isabs, import_path()))
    True
    """
    return [str(Path(entry or ".").absolute()) for entry in sys.path]


def module_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables with which a new Python process imports the same headway as this process.

    If headway is not installed, this process may have found it in the current directory, or on a path set by a script.
    """
    home = Path(__file__).resolve().parents[1]
    installed = (*site.getsitepackages(), site.getusersitepackages())
    if home in [Path(place).resolve() for place in installed]:
        # PYTHONPATH precedes the standard library: packages that are installed there could hide its modules
        return dict(environ)
    return {**environ, "PYTHONPATH": os.pathsep.join([str(home), *filter(None, [environ.get("PYTHONPATH")])])}
