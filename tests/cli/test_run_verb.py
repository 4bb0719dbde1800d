"""`headway run`, and the same script under the launchers of one machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from headway.cli import main

WHO = str(Path(__file__).parents[1] / "scripts" / "who.py")
BIN = Path(sys.executable).parent


def run(*command: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return warm.run(command, capture_output=True, text=True, timeout=180, cwd=cwd, env=os.environ | environ)


@pytest.mark.parametrize(
    ("launcher", "command", "size"),
    [
        ("none", [sys.executable], 1),
        ("torchrun", [str(BIN / "torchrun"), "--nproc-per-node=2"], 2),
        ("headway", [str(BIN / "headway"), "run", "--nproc=2"], 2),
    ],
)
def test_the_same_script_on_one_machine(launcher: str, command: list[str], size: int) -> None:
    done = run(*command, WHO)
    assert done.returncode == 0, done.stderr
    total = sum(range(1, size + 1))
    expected = [f"{launcher} rank {r}/{size} local {r}/{size} node 0/1 sum {total}" for r in range(size)]
    assert sorted(done.stdout.splitlines()) == expected
    assert re.search(rf"launched by: {'python alone' if size == 1 else launcher}", done.stderr)


def test_arguments_and_environment_reach_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "show.py").write_text(
        "import os, sys\n"
        "facts = ' '.join(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS'))\n"
        "sys.stdout.write(f'{sys.argv[1:]} {facts}\\n')"  # in one piece: the other rank prints, too
    )
    command = [
        sys.executable,
        "-m",
        "headway",
        "run",
        "--nproc",
        "2",
        "-m",
        "pkg.show",
        "--nproc",
        "x y",
        "--",
        "-m",
    ]
    done = run(*command, cwd=tmp_path, OMP_NUM_THREADS="7")
    assert sorted(done.stdout.splitlines()) == [
        f"['--nproc', 'x y', '--', '-m'] {rank} 2 7" for rank in range(2)
    ]


def test_a_script_that_knows_nothing_of_headway_is_supervised_too(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(50)\n")
    done = run(str(BIN / "headway"), "run", "--nproc=2", str(script))
    assert done.returncode == 1
    late, cause = done.stderr.splitlines()
    assert late == "headway: rank 0 did not exit in time after another rank had ended: sending SIGTERM"
    assert cause.startswith("headway: rank 1 of 2") and "exited with code 3" in cause


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_cause_is_said_once(ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "boom.py"
    script.write_text("import headway as hw\nhw.init()\nraise ValueError('the third step is cursed')\n")
    done = run(str(BIN / "headway"), "run", "--nproc", str(ranks), str(script))
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1] == "ValueError: the third step is cursed"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["run", "--nproc", "0", WHO], "argument --nproc: '0' is not a whole number of 1 or more"),
        (["run", "--nproc", "100000", WHO], "--nproc 100000: this machine's free memory is enough for about"),
        (["run", "nowhere.py"], "there is no file 'nowhere.py'"),
        (["rnu", "x.py"], "there is no verb 'rnu' (did you mean 'run'?); see: headway --help"),
    ],
)
def test_bad_input(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_help_shows_every_verb_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "headway run --nproc 2 train.py" in text
    assert main(["--version"]) == 0
