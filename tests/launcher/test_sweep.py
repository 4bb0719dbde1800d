"""Sweeps: from what people write to one setting per run."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from headway.cli import main
from headway.errors import StorageError, UsageError
from headway.launcher.agent.agent import Agent
from headway.launcher.code import snapshot
from headway.launcher.sweep import arguments, grid, join, label, member
from headway.launcher.targets import read_target
from headway.plan.input.plan_file import read_plan_file
from headway.run import Run
from headway.run.job_record import record_start
from headway.watch.runs import resolve, summarize


def test_grid_keeps_order_and_spelling() -> None:
    assert [label(each) for each in grid(["lr=1e-3,3e-4", "seed=1,2"])] == [
        "lr=1e-3 seed=1",
        "lr=1e-3 seed=2",
        "lr=3e-4 seed=1",
        "lr=3e-4 seed=2",
    ]
    assert grid([]) == [{}]
    assert grid(['sizes="64,128",256']) == [{"sizes": "64,128"}, {"sizes": "256"}]
    assert grid(["flags=a=b,$(id); -x"]) == [{"flags": "a=b"}, {"flags": "$(id); -x"}]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "lr: [1.0e-3, 2]\nseed: 1\n", [{"lr": "0.001", "seed": "1"}, {"lr": "2", "seed": "1"}]),
        ("a.yaml", "at:\n- 12:30:00\n- 1:30\n", [{"at": "12:30:00"}, {"at": "1:30"}]),
        ("a.yaml", "- {lr: 1, seed: 2}\n- {lr: 3}\n", [{"lr": "1", "seed": "2"}, {"lr": "3"}]),
        (
            "a.json",
            '{"lr": ["1e-3"], "bn": [true, false]}',
            [{"lr": "1e-3", "bn": "True"}, {"lr": "1e-3", "bn": "False"}],
        ),
        ("a.csv", "lr,seed\n1e-3,1\n3e-4,2\n", [{"lr": "1e-3", "seed": "1"}, {"lr": "3e-4", "seed": "2"}]),
    ],
)
def test_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, expected: list[dict[str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    assert grid([name]) == expected
    assert len(grid([name, "depth=1,2,3"])) == 3 * len(expected)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (["lr"], "'lr' is neither NAME=V1,V2 nor a file"),
        (["--lr=1"], "neither NAME=V1,V2"),
        (["lr=1,,2"], "'lr' an empty value"),
        (["lr="], "'lr' an empty value"),
        (["lr=1", "lr=2"], "sets 'lr' twice"),
        (["lr=1,1"], "has lr=1 twice"),
        (["a=" + ",".join(map(str, range(200))), "b=" + ",".join(map(str, range(200)))], "40000 settings"),
        (["none.yaml"], "'none.yaml' cannot be read: No such file"),
        (["bad.yaml"], "cannot be read"),
        (["bad.json"], "cannot be read"),
        (["deep.yaml"], "'lr' no list of values"),
        (["list.yaml"], "has no settings"),
        (["empty.csv"], "has no settings"),
        (["short.csv"], "'seed' the value None"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, specs: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("a: [1, 2\n")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "deep.yaml").write_text("lr: {a: 1}\n")
    (tmp_path / "list.yaml").write_text("[1, 2]\n")
    (tmp_path / "empty.csv").write_text("lr,seed\n")
    (tmp_path / "short.csv").write_text("lr,seed\n1\n")
    with pytest.raises(UsageError) as caught:
        grid(specs)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_arguments() -> None:
    settings = {"lr": "1e-3", "seed": "{lr} $(id)"}
    assert arguments(["--epochs", "3"], settings) == ["--epochs", "3", "--lr=1e-3", "--seed={lr} $(id)"]
    assert arguments(["opt.lr={lr}", "x"], settings) == ["opt.lr=1e-3", "x", "--seed={lr} $(id)"]
    assert arguments(["{seed}", "{other}"], {"seed": "{lr}", "lr": "2"}) == ["{lr}", "{other}", "--lr=2"]
    assert arguments(["{seed}-{lr}"], {"seed": "1", "lr": "2"}) == ["1-2"]


def test_members(tmp_path: Path) -> None:
    runs = [Run.create(tmp_path, name="s") for _ in range(3)]
    settings = grid(["lr=1,2,3"])
    sweep = join(runs, settings)
    found = member(runs[2])
    assert found and (found.sweep, found.index, found.size, found.settings) == (sweep, 2, 3, {"lr": "3"})
    assert member(Run.create(tmp_path)) is None
    runs[0].sweep_file.write_text("{}")
    assert member(runs[0]) is None


def test_here_one_after_the_other_from_one_copy(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "train.py").write_text(
        "import os, sys; from pathlib import Path\n"
        "Path(os.environ['HEADWAY_RUN'], 'said').write_text(' '.join(sys.argv[1:]))\n"
        f"Path({str(project / 'train.py')!r}).write_text('raise SystemExit(9)')\n"  # the later ones run the copy
        "sys.exit(3 * ('--lr=1' in sys.argv))\n"
    )
    (project / ".git" / "info").mkdir(exist_ok=True)
    (project / ".git" / "info" / "exclude").write_text("runs/\n")
    assert main(["run", "--array", "lr=1,2", "--array", "seed=7,8", "train.py", "--seed", "{seed}"]) == 3
    runs = resolve([label_of(project)])
    assert [(run.path / "said").read_text() for run in runs] == [
        f"--seed {seed} --lr={lr}" for lr in (1, 2) for seed in (7, 8)
    ]
    assert [row.status.state for row in summarize(runs)] == ["failed", "failed", "done", "done"]
    said = capsys.readouterr().err
    assert "headway: 3 of 4: lr=2 seed=7 in " in said and f"headway compare {runs[0].path}" in said
    assert "left out" not in said, "that runs are not copied is no news"
    assert [path.name for run in runs for path in run.code_dir.glob("tree")] == ["tree"], "one copy for all"


def test_ctrl_c_ends_all_of_them(project: Path) -> None:
    (project / "train.py").write_text("import sys; sys.exit(130)")  # as a rank leaves that was interrupted
    assert main(["run", "--array", "lr=1,2", "train.py"]) == 130
    runs = resolve([label_of(project)])
    assert [row.status.state for row in summarize(runs)] == ["interrupted", "new"]


def test_ctrl_c_ends_all_of_them_when_the_first_has_saved(project: Path) -> None:
    stops = "import os, signal, sys; os.kill(os.getppid(), signal.SIGINT); sys.exit(75)"
    (project / "train.py").write_text("import signal; signal.signal(2, signal.SIG_IGN)\n" + stops)
    assert main(["run", "--array", "lr=1,2", "train.py"]) == 75
    runs = resolve([label_of(project)])
    assert [row.status.state for row in summarize(runs)] == ["stopped", "new"]


def test_the_end_of_the_jobs_time_ends_all_of_them(project: Path) -> None:
    """A run that watches the clock of its job stops by itself; another would end as soon."""
    (project / "train.py").write_text("import sys; sys.exit(75)")
    assert main(["run", "--array", "lr=1,2", "train.py"]) == 75
    runs = resolve([label_of(project)])
    assert [row.status.state for row in summarize(runs)] == ["stopped", "new"]


def test_a_run_of_a_sweep_on_this_machine_is_resumed(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that was interrupted and one that was never started: each with its settings, ranks and copy of the code."""
    (project / "train.py").write_text(
        "import os, sys; from pathlib import Path\n"
        "Path(os.environ['HEADWAY_RUN'], 'said-' + os.environ['RANK']).write_text(' '.join(sys.argv[1:]))\n"
        f"sys.exit(0 if Path({str(project / 'again')!r}).exists() else 130)\n"
    )
    assert main(["run", "--nproc", "2", "--array", "lr=1,2", "train.py", "--seed", "7"]) == 130
    (project / "train.py").write_text("raise SystemExit(9)")
    (project / "again").touch()
    runs = resolve([label_of(project)])
    assert main(["resume", runs[0].name]) == 2
    assert f"'{runs[0].name}' matches 2 runs in runs; give the path of a run" in capsys.readouterr().err
    for number, run in enumerate(runs, start=1):
        assert main(["resume", str(run.path)]) == 0, capsys.readouterr().err
        said = [(run.path / f"said-{rank}").read_text() for rank in (0, 1)]
        assert said == [f"--seed 7 --lr={number}"] * 2
    assert [row.status.state for row in summarize(runs)] == ["done", "done"]
    assert main(["resume", str(runs[0].path)]) == 2
    assert "is done: there is nothing to resume" in capsys.readouterr().err


def test_a_run_of_a_sweep_never_runs_twice_at_once(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first runs when somebody resumes it, and the second, which waits: only that starts, and only once."""
    (project / "train.py").touch()
    starts: list[str] = []

    def train(agent: Agent) -> int:
        starts.append(agent._environ["HEADWAY_RUN"])
        if len(starts) == 1:
            runs = resolve([label_of(project)])
            assert [row.status.state for row in summarize(runs)] == ["running", "new"]
            assert main(["resume", str(runs[0].path)]) == 2
            assert f"{runs[0].id} is running" in capsys.readouterr().err
            assert main(["resume", str(runs[1].path)]) == 0
        return 0

    monkeypatch.setattr(Agent, "run", train)
    assert main(["run", "--array", "lr=1,2", "train.py"]) == 0
    first, second = resolve([label_of(project)])
    assert starts == [str(first.path), str(second.path)]
    assert (
        f"lr=2 in {second.path} was skipped: another command has started it meanwhile"
        in capsys.readouterr().err
    )
    record_start(first)  # again, also where it has ended before
    first.ended_file.unlink()
    assert main(["resume", str(first.path)]) == 2 and len(starts) == 2


def test_on_how_many_processes_an_older_sweep_ran_must_be_said(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "train.py").write_text("import sys; sys.exit(130)")
    assert main(["run", "--array", "lr=1,2", "train.py"]) == 130
    run = resolve([label_of(project)])[1]
    run.info_file.write_text(json.dumps(run.info() | {"world": None}))
    assert main(["resume", str(run.path), "--dry-run"]) == 2
    assert f"headway resume {run.id} --nproc N" in capsys.readouterr().err
    assert main(["resume", str(run.path), "--dry-run", "--nproc", "2"]) == 0
    assert "would start on 2 processes" in capsys.readouterr().out


def test_an_agent_that_fails_is_the_end_of_its_run(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Agent) -> int:
        raise StorageError("no space left for its directory")

    (project / "train.py").touch()
    monkeypatch.setattr(Agent, "run", fail)
    assert main(["run", "--array", "lr=1,2", "train.py"]) == StorageError.exit_code
    first, second = (row.status for row in summarize(resolve([label_of(project)])))
    assert (first.state, second.state) == ("failed", "new")
    assert first.why == "StorageError: no space left for its directory"


def test_memory_that_others_take_meanwhile_ends_no_sweep(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there is enough is checked once, before anything is made."""
    (project / "train.py").touch()
    free = iter([1 << 40])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=next(free, 0)))
    assert main(["run", "--nproc", "2", "--array", "lr=1,2", "train.py"]) == 0
    assert [row.status.state for row in summarize(resolve([label_of(project)]))] == ["done", "done"]
    assert main(["run", "--nproc", "2", "--array", "lr=1,2", "train.py"]) == 2
    assert len(list(project.glob("runs/*"))) == 2


def test_a_sweep_that_cannot_begin_leaves_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise StorageError("no space left")

    (project / "train.py").touch()
    monkeypatch.setattr(snapshot, "take", full)
    assert main(["run", "--array", "lr=1,2", "train.py"]) == StorageError.exit_code
    assert not (project / "runs").exists()


def label_of(project: Path) -> str:
    first = min(path.parent for path in project.glob("runs/*/sweep.json") if '"index": 0' in path.read_text())
    return str(first)


@pytest.mark.parametrize("text", ["a\nb,c", "x" * 200_000])
def test_values_that_are_not_a_list_are_told_in_a_sentence(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"^--array 'x=.* is not a list of values: put a value with a line end"
    ):
        grid([f"x={text}"])


BOMB = "a: &a [1, 1]\n" + "".join(
    f"{c}: &{c} [*{b}, *{b}]\n" for b, c in pairwise("abcdefghijklmnopqrstuvwxyz")
)


@pytest.mark.parametrize(
    "read", [lambda path: grid([str(path)]), read_target, read_plan_file], ids=["sweep", "target", "plan"]
)
def test_a_name_that_a_file_gives_twice_is_refused(tmp_path: Path, read: Any) -> None:
    """The first of the two was silently dropped: half of a sweep did not run."""
    (tmp_path / "x.yaml").write_text("kind: slurm\nlr: [1, 2]\nlr: [3]\n")
    with pytest.raises(UsageError, match="a name is given twice in line 3"):
        read(tmp_path / "x.yaml")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("read", [lambda path: grid([str(path)]), read_target], ids=["sweep", "target"])
@pytest.mark.parametrize(
    "text", [BOMB, "a: &a [*a]\n", "[" * 5000, "pipe", "zero", "sparse"], ids=lambda text: text[:8]
)
def test_hostile_files_of_settings_are_told_in_a_sentence(tmp_path: Path, text: str, read: Any) -> None:
    path = tmp_path / "x.yaml"
    if text == "pipe":
        os.mkfifo(path)
    elif text == "zero":
        path.symlink_to("/dev/zero")
    elif text == "sparse":
        path.touch()
        os.truncate(path, 40 << 30)
    else:
        path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read(path)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
