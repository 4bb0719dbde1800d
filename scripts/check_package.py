"""Installs a wheel into clean environments, core only and with each extra alone, and tries it out of the source tree.

    python scripts/check_package.py dist                    core, then every extra
    python scripts/check_package.py dist core web           these

Each environment is temporary. torch, which is large, is borrowed from the interpreter that runs this script, by links;
everything else is installed by pip, at the versions of constraints.txt. Exits with 1 at the first thing that is wrong.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
BORROWED = "torch"
CORE = "core"

# For each environment, Python that must work in it.
TRIES = {
    CORE: "import headway as hw, headway.data, headway.train; hw.plan.preset('llama-3.1-8b'); hw.Pipeline",
    "arrays": "import xarray, headway.data.arrays",
    "images": "import numpy, io, PIL.Image as I; from headway.data import decode_rgb; b = io.BytesIO(); "
    "I.new('RGB', (8, 9)).save(b, 'png'); assert decode_rgb(memoryview(b.getvalue())).shape == (9, 8, 3)",
    "launch": "import cloudpickle, headway as hw; assert hw.launch(lambda: 6 * 7, on=hw.Local()).result() == 42",
    "mpi": "import mpi4py",  # it loads the MPI of the site when it is used
    "mlflow": "import mlflow, sqlalchemy, headway.record.sinks",
    "tensorboard": "import tensorboard, headway.record.sinks",
    "wandb": "import wandb, headway.record.sinks",
    "web": "import starlette, uvicorn; import headway.watch.web.app",
}
# Without these extras, Python that must name them.
NEEDED = {
    "images": "from headway.data import decode_rgb; decode_rgb(memoryview(b'x'))",
    "web": "from headway.cli import main; raise SystemExit(main(['web', '--root', '.']))",
}


def main(directory: str, *wanted: str) -> None:
    (wheel,) = Path(directory).resolve().glob("headway-*.whl")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = [CORE, *(name for name in extras if name not in ("all", "dev", "docs"))]
    for name in wanted or names:
        if name not in names or name not in TRIES:
            raise SystemExit(f"check_package: there is no extra {name!r}; there are {', '.join(names)}")
        with tempfile.TemporaryDirectory(prefix="headway-package-") as place:
            check(name, wheel, Path(place))


def check(name: str, wheel: Path, place: Path) -> None:
    """Makes one environment and tries the package in it, from a directory of its own."""
    say(f"{name}: installing")
    python = make_environment(place / "env", place / BORROWED)
    what = f"headway[{name}] @ {wheel.as_uri()}" if name != CORE else str(wheel)
    run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", "--constraint",
         ROOT / "constraints.txt", what], place
    )  # fmt: skip
    run([sys.executable, "-m", "pip", "--python", python, "check"], place)
    here = place / "elsewhere"
    here.mkdir()
    home = run([python, "-c", "import headway; print(headway.__file__)"], here)
    if not home.startswith(str(place)):
        raise SystemExit(f"check_package: {name}: headway comes from {home}")
    run([python, "-c", TRIES[name]], here)
    headway = python.with_name("headway")
    told = run([headway, "--version"], here)
    if told != f"headway {wheel.name.split('-')[1]}":
        raise SystemExit(f"check_package: {name}: headway --version says {told!r}")
    for words in (["--help"], ["plan", "list"], ["completion", "bash"], ["run", "--help"]):
        run([headway, *words], here)
    if name == CORE:
        for extra, code in NEEDED.items():
            missing = run([python, "-c", code], here, fails=True)
            if f"pip install 'headway[{extra}]'" not in missing:
                raise SystemExit(f"check_package: without {extra}: {missing}")
    if name in (CORE, "images"):
        run([headway, "demo", "--quick", "demo"], here)
    say(f"{name}: works")


def make_environment(path: Path, borrowed: Path) -> Path:
    """Makes a virtual environment with torch, and returns its interpreter."""
    venv.create(path, symlinks=True)
    borrowed.mkdir()
    for distribution in requirements(BORROWED):
        for top in {
            file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")
        }:
            (borrowed / top).symlink_to(Path(str(distribution.locate_file(top))))
    (site,) = path.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    return path / "bin" / "python"


def requirements(name: str, seen: set[str] | None = None) -> list[metadata.Distribution]:
    """Returns a distribution and all that it needs here, but what headway needs itself."""
    seen = {"numpy"} if seen is None else seen
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in seen:
        return []
    seen.add(key)
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:  # of another platform, or of an extra
        return []
    needed = [line for line in found.requires or () if "extra ==" not in line]
    below = [each for line in needed for each in requirements(re.split(r"[^\w.-]", line)[0], seen)]
    return [found, *below]


def run(command: list[str | Path], directory: Path, *, fails: bool = False) -> str:
    """Runs a command there, and returns what it prints."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("HEADWAY_", "PYTHON"))}
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True)
    if (done.returncode != 0) is not fails:
        line = " ".join(map(str, command))
        raise SystemExit(
            f"check_package: `{line}` ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return (done.stdout + done.stderr if fails else done.stdout).strip()


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
