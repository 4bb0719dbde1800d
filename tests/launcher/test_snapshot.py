"""The code that runs is the code that was submitted."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headway.errors import UsageError
from headway.launcher.code import project_files, snapshot, workspace
from headway.launcher.code.snapshot import adopt, load, take
from headway.run import Run


def git(path: Path, *command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=path, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def run(tmp_path: Path, project: Path) -> Run:  # noqa: ARG001  we stand in the project
    return Run.create(tmp_path / "runs", name="digits")


def runs(run: Run) -> str:
    """What the script says when it is started as a job would start it."""
    code = load(run)
    workspace.prepare(run)
    path = os.pathsep.join(map(str, code.python_path))
    return subprocess.run(
        [sys.executable, str(code.script)],
        cwd=code.start,
        env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_what_is_edited_later_does_not_run(project: Path, run: Run) -> None:
    (project / "model.py").write_text("size = 2\n")  # not committed
    assert take(run, "train.py") == run.snapshot_dir
    (project / "model.py").write_text("size = 3\n")
    (project / "train.py").write_text("raise SystemExit('new code ran')\n")
    assert runs(run) == "v1 2\n"
    assert git(run.snapshot_dir, "diff", "--stat", "--", "model.py").startswith("model.py | 2 +-")


def test_a_rewritten_history_and_a_deleted_repository(project: Path, run: Run) -> None:
    commit = git(project, "rev-parse", "HEAD")
    take(run, "train.py")
    git(project, "commit", "-q", "--amend", "-m", "other")
    git(project, "reflog", "expire", "--expire=now", "--all")
    git(project, "gc", "-q", "--prune=now")
    assert git(run.snapshot_dir, "rev-parse", "HEAD") == commit == run.info()["code"]["snapshot"]["commit"]
    assert git(run.snapshot_dir, "status", "--porcelain") == ""
    shutil.rmtree(project)
    assert git(run.snapshot_dir, "show", "HEAD:model.py") == "size = 1"
    assert runs(run) == "v1 1\n"


def test_an_older_git_will_do(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of Ubuntu 20.04 is 2.25: `--no-write-fetch-head` came with 2.29, `--deduplicate` with 2.31."""
    old = tmp_path / "bin" / "git"
    old.parent.mkdir()
    refuses = (
        'case " $* " in *" --deduplicate "* | *" --no-write-fetch-head "*) exec git --no-such-option;; esac'
    )
    path = os.environ["PATH"]
    old.write_text(f'#!/bin/sh\nPATH={shlex.quote(path)}\n{refuses}\nexec git "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{old.parent}:{path}")
    take(run, "train.py")
    assert run.info()["code"]["snapshot"]["note"] is None
    assert runs(run) == "v1 1\n" and not (run.snapshot_dir / ".git" / "FETCH_HEAD").exists()


def test_a_second_start_finds_the_first_copy(project: Path, run: Run) -> None:
    first = take(run, "train.py")
    (project / "model.py").write_text("size = 9\n")
    assert take(run, "train.py") == first
    assert runs(run) == "v1 1\n"


def test_a_submission_that_was_killed_halfway_is_made_anew(run: Run) -> None:
    run.snapshot_dir.mkdir()
    (run.snapshot_dir / "train.py").write_text("half")
    take(run, "train.py")
    assert runs(run) == "v1 1\n"


def test_untracked_files_that_matter_come_along_and_the_rest_is_named(project: Path, run: Run) -> None:
    (project / ".gitignore").write_text("_version.py\ndata/\n*.bin\n__pycache__\n.cache-of-a-tool\n.env\n")
    (project / ".cache-of-a-tool").mkdir()
    (project / ".cache-of-a-tool" / "x").touch()
    (project / ".env").touch()
    (project / "train.py").write_text("import layers, _version\nprint(layers.depth, _version.number)\n")
    (project / "layers.py").write_text("depth = 12\n")
    (project / "_version.py").write_text("number = 7\n")  # generated, ignored, imported
    (project / "config").mkdir()
    (project / "config" / "small.yaml").write_text("lr: 1\n")
    (project / "data").mkdir()
    (project / "data" / "images.py").write_text("")
    (project / "weights.bin").write_bytes(b"0")
    (project / "table.json").write_bytes(b"0" * 2_000_000)
    (project / "picture.png").write_bytes(b"0")
    take(run, "train.py")
    assert runs(run) == "12 7\n"
    assert load(run).added == ("_version.py", "config/small.yaml", "layers.py")
    assert set(load(run).left_out) == {
        ".gitignore (not tracked by git)",
        ".env (ignored by git)",
        "data/ (ignored by git)",
        "weights.bin (ignored by git)",
        "table.json (not tracked by git, and 2.0 MB large)",
        "picture.png (not tracked by git)",
    }
    assert not (run.snapshot_dir / "data").exists()


def test_deleted_and_staged_files(project: Path, run: Run) -> None:
    (project / "extra.py").write_text("")
    git(project, "add", "extra.py")
    (project / "model.py").unlink()
    (project / "train.py").write_text("print('alone')\n")
    take(run, "train.py")
    assert sorted(p.name for p in run.snapshot_dir.iterdir()) == [".git", "extra.py", "train.py"]


def test_runs_inside_the_project_are_not_copied_into_each_other(project: Path) -> None:
    for number in range(3):
        run = Run.create(project / "runs", name="digits")
        take(run, "train.py")
        assert not (run.snapshot_dir / "runs").exists(), number


def test_submodules(project: Path, tmp_path: Path, run: Run) -> None:
    library = tmp_path / "library"
    library.mkdir()
    git(library, "init", "-q")
    (library / "lib.py").write_text("name = 'committed'\n")
    git(library, "add", ".")
    git(library, "commit", "-qm", "lib")
    git(project, "submodule", "--quiet", "add", str(library), "vendor")
    git(project, "commit", "-qm", "vendor")
    (project / "vendor" / "lib.py").write_text("name = 'changed'\n")
    (project / "vendor" / "new.py").write_text("")
    (project / "train.py").write_text("from vendor import lib, new\nprint(lib.name)\n")
    take(run, "train.py")
    (project / "vendor" / "lib.py").write_text("name = 'later'\n")
    assert runs(run) == "changed\n"
    assert "vendor/new.py" in load(run).added
    assert run.info()["code"]["snapshot"]["submodules"] == {"vendor": git(library, "rev-parse", "HEAD")}


def test_a_submodule_that_is_not_there_is_named(project: Path, run: Run) -> None:
    git(project, "update-index", "--add", "--cacheinfo", f"160000,{git(project, 'rev-parse', 'HEAD')},vendor")
    take(run, "train.py")
    assert load(run).left_out == ("vendor/ (a submodule that is not checked out)",)


def test_a_script_in_a_folder_below(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "jobs").mkdir()
    shutil.copy(project / "train.py", project / "jobs")
    shutil.copy(project / "model.py", project / "jobs")
    assert take(run, "jobs/train.py") == run.snapshot_dir
    assert load(run).script == run.work_dir / "jobs" / "train.py"
    other = Run.create(run.path.parent, name="other")
    monkeypatch.chdir(project / "jobs")
    assert take(other, "train.py") == other.snapshot_dir / "jobs"
    third = Run.create(run.path.parent, name="third")
    monkeypatch.chdir("/")
    assert take(third, project / "jobs" / "train.py") == third.snapshot_dir / "jobs"
    assert runs(third) == "v1 1\n"


def test_packages_installed_from_the_project_come_from_the_copy(
    project: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "src" / "mine").mkdir(parents=True)
    (project / "src" / "mine" / "__init__.py").write_text("who = 'submitted'\n")
    (project / "train.py").write_text("import mine\nprint(mine.who)\n")
    monkeypatch.syspath_prepend(project / "src")  # what an editable install amounts to
    take(run, "train.py")
    (project / "src" / "mine" / "__init__.py").write_text("who = 'live'\n")
    assert load(run).python_path == (run.snapshot_dir / "src",)
    assert runs(run) == "submitted\n"


def test_links_are_not_followed_out_of_the_tree(project: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (project / "out").symlink_to("../secret.txt")
    (project / "inside").symlink_to(project / "model.py")
    git(project, "add", ".")
    take(run, "train.py")
    assert (run.snapshot_dir / "out").readlink() == tmp_path / "secret.txt"
    assert (run.snapshot_dir / "inside").readlink() == Path("model.py")


def test_a_folder_that_became_a_link_is_left_alone(project: Path, tmp_path: Path, run: Run) -> None:
    (project / "package").mkdir()
    (project / "package" / "a.py").write_text("")
    git(project, "add", ".")
    shutil.move(project / "package", tmp_path / "elsewhere")
    (project / "package").symlink_to(tmp_path / "elsewhere")
    take(run, "train.py")
    assert not (run.snapshot_dir / "package").exists()
    assert "package (not tracked by git)" in load(run).left_out


def test_only_the_owner_may_read_it(project: Path, run: Run) -> None:
    (project / "go.sh").write_text("#!/bin/sh\n")
    (project / "go.sh").chmod(0o755)
    before = os.umask(0)
    try:
        take(run, "train.py")
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (run.snapshot_dir, *run.snapshot_dir.iterdir())}
    assert modes["tree"] == 0o700 and modes["train.py"] == 0o600 and modes["go.sh"] == 0o700


def test_refuse(project: Path, run: Run) -> None:
    (project / "new.py").write_text("")
    with pytest.raises(UsageError, match=r"changes that are not committed \(new: new.py\): commit them"):
        take(run, "train.py", dirty="refuse")
    (project / "new.py").unlink()
    (project / "model.py").write_text("size = 2\n")
    with pytest.raises(UsageError, match="changes that are not committed"):
        take(run, "train.py", dirty="refuse")
    (project / ".gitignore").write_text("_version.py\nmine.py\n")
    git(project, "add", ".")
    git(project, "commit", "-qm", "second")
    (project / "_version.py").write_text("version = 1\n")  # generated: nobody can commit it
    (project / "mine.py").write_text("print(1)\n")
    with pytest.raises(UsageError, match=r"changes that are not committed \(new: mine.py\)"):
        take(run, "mine.py", dirty="refuse")  # a script is written by hand, though git ignores it
    assert take(run, "train.py", dirty="refuse") == run.snapshot_dir
    copied = {str(path.relative_to(run.snapshot_dir)) for path in run.snapshot_dir.rglob("*.py")}
    assert copied == {"model.py", "train.py"}, "the copy is the commit"
    assert load(run).left_out == ("_version.py (ignored by git)", "mine.py (ignored by git)")


def test_live(project: Path, run: Run) -> None:
    assert take(run, "train.py", dirty="live") == project
    (project / "model.py").write_text("size = 5\n")
    assert runs(run) == "v1 5\n"
    assert "live" in run.info()["code"]["snapshot"]["note"]
    assert not run.snapshot_dir.exists()


def test_without_git(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plain"
    for name in ("data", "datasets", ".venv", "env", "__pycache__", "runs/x"):
        (folder / name).mkdir(parents=True)
        (folder / name / "something").write_text("x")
    (folder / "env" / "pyvenv.cfg").touch()
    (folder / "datasets" / "mine.py").write_text("n = 4\n")  # a package, whatever its name
    (folder / "train.py").write_text("from datasets import mine\nprint(mine.n)\n")
    os.mkfifo(folder / "pipe")
    monkeypatch.chdir(folder)
    take(run, "train.py")
    (folder / "datasets" / "mine.py").write_text("n = 5\n")
    assert runs(run) == "4\n"
    assert sorted(p.name for p in run.snapshot_dir.iterdir()) == ["datasets", "train.py"]
    assert load(run).left_out == (
        "data/ (data or results, by its name)",
        "env/ (a virtual environment)",
        "pipe (not a file)",
        "runs/ (data or results, by its name)",
    )
    with pytest.raises(UsageError, match="has no commit to pin the job to"):
        take(Run.create(run.path.parent), "train.py", dirty="refuse")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")
@pytest.mark.parametrize("kind", ["git", "plain"])
def test_what_a_container_has_closed_is_left_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the database that a container, as root, keeps in a directory of the project."""
    with tempfile.TemporaryDirectory() as made:  # not in pytest's own directory, which is root's alone
        folder = Path(made)
        (folder / "train.py").touch()
        if kind == "git":
            (folder / ".gitignore").write_text("pgdata/\n")
            git(folder, "init", "-q")
        for path in (folder, *folder.rglob("*")):
            os.lchown(path, 65534, 65534)
        (folder / "pgdata").mkdir(mode=0o700)
        (folder / "pgdata/PG_VERSION").touch()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("HOME", "/nowhere")
        os.seteuid(65534)
        try:
            code = project_files.gather(folder / "train.py", limit=10**9)
        finally:
            os.seteuid(os.getuid())
    assert "train.py" in code.names and "pgdata/ (no permission to read it)" in code.left_out


def test_settings_of_a_home_in_git_are_not_code(tmp_path: Path, run: Run) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".gitconfig")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text("print('here')\n")
    take(run, tmp_path / "scripts" / "train.py")
    assert [p.name for p in run.snapshot_dir.iterdir()] == ["train.py"]
    assert runs(run) == "here\n"


def test_too_large_is_one_sentence_and_leaves_nothing(project: Path, run: Run) -> None:
    (project / "big.bin").write_bytes(b"0" * 3_000_000)
    git(project, "add", ".")
    with pytest.raises(UsageError) as caught:
        take(run, "train.py", limit=2_000_000)
    assert str(caught.value) == (
        f"the code in {project} has more than the 2.0 MB or 50000 files that a copy may have (largest: big.bin, "
        "3.0 MB): keep data elsewhere, or run the code where it is with --dirty live"
    )
    assert list(run.code_dir.iterdir()) == []


def test_too_many_files_are_refused_and_a_long_list_is_cut(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        (project / f"new-{number}.bin").touch()
    monkeypatch.setattr(project_files, "_MAX_NAMED", 3)
    code = project_files.gather(project / "train.py", limit=10**6)
    named = code.named_left_out
    assert named[:1] == ["new-0.bin (not tracked by git)"] and named[3:] == ["and 1 more"]
    monkeypatch.setattr(project_files, "_MAX_FILES", 1)
    with pytest.raises(UsageError, match="1 files that a copy may have"):
        project_files.gather(project / "train.py", limit=10**6)


def test_a_folder_that_is_too_large_is_not_read_to_its_end(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain" / "z").mkdir(parents=True)
    (tmp_path / "plain" / "big").write_bytes(b"0" * 1001)
    (tmp_path / "plain" / "train.py").touch()
    monkeypatch.setattr(project_files, "_not_code", lambda path: pytest.fail(f"looked at {path}"))
    monkeypatch.chdir(tmp_path / "plain")
    with pytest.raises(UsageError, match="largest: big"):
        take(run, "train.py", limit=1000)


def test_of_a_home_only_the_files_beside_the_script(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("import helper; print(helper.x)")
    (tmp_path / "helper.py").write_text("x = 1")
    (tmp_path / "photos.zip").touch()
    monkeypatch.chdir(tmp_path)
    take(run, "train.py")
    assert runs(run) == "1\n"
    assert sorted(p.name for p in run.snapshot_dir.iterdir()) == ["helper.py", "train.py"]
    assert "project/ (a directory in a home directory)" in load(run).left_out


def test_a_copy_that_fails_leaves_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_keep_commit", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        take(run, "train.py")
    assert list(run.code_dir.iterdir()) == [] and "snapshot" not in run.info()["code"]


def test_a_commit_that_cannot_be_kept_is_a_note(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_COPY_TIMEOUT_S", 0.0)
    take(run, "train.py")
    assert "the commit itself could not be kept" in run.info()["code"]["snapshot"]["note"]
    assert runs(run) == "v1 1\n" and not (run.snapshot_dir / ".git").exists()


def test_a_folder_without_code_to_start_in(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "results" / "today").mkdir(parents=True)
    monkeypatch.chdir(project / "results" / "today")
    assert take(run, project / "train.py") == run.snapshot_dir / "results" / "today"
    assert runs(run) == "v1 1\n"


def test_a_git_that_is_killed_does_not_pass_for_an_empty_project(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text(
        f'#!/bin/sh\ncase "$*" in *--others*) kill -9 $$ ;; esac\nexec {shutil.which("git")} "$@"\n'
    )
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(UsageError, match="git ls-files ended with status -9; repair it, or use --dirty live"):
        take(run, "train.py")


def test_one_copy_for_all_runs_of_a_sweep(run: Run) -> None:
    take(run, "train.py")
    other = Run.create(run.path.parent, name="other")
    adopt(other, run)
    assert load(other).directory == run.snapshot_dir
    assert runs(other) == "v1 1\n"


def test_a_copy_that_is_gone(run: Run) -> None:
    take(run, "train.py")
    shutil.rmtree(run.snapshot_dir)
    with pytest.raises(UsageError, match=f"the code of {run.id} is gone"):
        load(run)


@pytest.mark.parametrize("name", ["nope.py", "$(id).py"])
def test_no_such_script(run: Run, name: str) -> None:
    with pytest.raises(UsageError, match="there is no script"):
        take(run, name)


def test_odd_names(project: Path, run: Run) -> None:
    odd = project / "a b;$(id)\n-'\"é%20"
    odd.mkdir()
    shutil.copy(project / "model.py", odd)
    (odd / "train.py").write_text("import model\nprint(model.size)\n")
    os.chdir(odd)
    git(odd, "init", "-q")
    git(odd, "add", ".")
    git(odd, "commit", "-qm", "odd")
    take(run, "train.py")
    assert runs(run) == "1\n"
    assert git(run.snapshot_dir, "log", "--format=%s") == "odd"
