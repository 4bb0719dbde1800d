"""Code from anybody: recording and copying it runs nothing, follows nothing, and writes nothing elsewhere."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from waiting import wait_until

from headway.errors import UsageError
from headway.launcher.code.snapshot import load, take
from headway.run import Run
from headway.run.source import describe

# every variable that `git help config` says names a program, a shell command or a directory of hooks
COMMANDS = """
alias.diff alias.ls-files alias.status browser.evil.cmd browser.evil.path core.alternateRefsCommand core.askPass
core.editor core.fsmonitor core.gitProxy core.pager core.sshCommand credential.helper credential.https://evil.helper
diff.evil.command diff.evil.textconv diff.external difftool.evil.cmd difftool.evil.path filter.evil.clean
filter.evil.process filter.evil.smudge gpg.program gpg.openpgp.program gpg.ssh.defaultKeyCommand gpg.ssh.program
gpg.x509.program guitool.evil.cmd hook.evil.command imap.tunnel instaweb.browser instaweb.httpd interactive.diffFilter
man.evil.cmd man.evil.path merge.evil.driver mergetool.evil.cmd mergetool.evil.path pager.diff pager.ls-files
pager.status remote.origin.receivepack remote.origin.uploadpack sendemail.ccCmd sendemail.headerCmd
sendemail.sendmailCmd sendemail.smtpServer sendemail.toCmd sequence.editor submodule.vendor.update tar.evil.command
trailer.evil.cmd trailer.evil.command uploadpack.packObjectsHook
"""
OTHERS = {
    "browser.browser": "evil",
    "core.gitProxy": "{command}",
    "diff.guitool": "evil",
    "diff.tool": "evil",
    "extensions.partialClone": "origin",
    "filter.evil.required": "true",
    "gpg.format": "ssh",
    "hook.evil.event": "post-index-change",
    "log.showSignature": "true",
    "merge.tool": "evil",
    "protocol.allow": "always",
    "protocol.ext.allow": "always",
    "remote.origin.promisor": "true",
    "remote.origin.url": "ext::sh -c {command}",
    "status.submoduleSummary": "true",
    "diff.submodule": "log",
    "uploadpack.allowFilter": "true",
}
RECORDED = """import headway as hw, model
hw.init()
run = hw.dist.open_run("../recorded")
print("v1", model.size)
"""
HOOKS = ("post-checkout", "post-index-change", "pre-auto-gc", "query-watchman", "reference-transaction")


def git(path: Path, *command: str) -> str:
    return subprocess.run(
        ["git", "-c", "core.fsmonitor=false", *command], cwd=path, check=True, capture_output=True, text=True
    ).stdout.strip()


class Trap:
    """A command that leaves a file, and a configuration that runs it wherever git runs anything."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.marker = directory / "fired"
        self.command = directory / "command"
        self.command.write_text(f'#!/bin/sh\necho "$0 $@" >> {self.marker}\nexec timeout 1 cat\n')
        self.command.chmod(0o755)
        self.hooks = directory / "hooks"
        self.hooks.mkdir()
        for name in HOOKS:
            shutil.copy(self.command, self.hooks / name)

    def write(self, config: Path) -> None:
        """Appends the configuration to a file."""
        settings = dict.fromkeys(COMMANDS.split(), "{command}") | OTHERS
        for name, value in settings.items():
            shell = "!" if name.startswith(("alias.", "submodule.")) else ""
            git(Path("/"), "config", "--file", str(config), name, shell + value.format(command=self.command))
        git(Path("/"), "config", "--file", str(config), "core.hooksPath", str(self.hooks))

    @property
    def fired(self) -> str:
        return self.marker.read_text() if self.marker.exists() else ""


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    return Trap(tmp_path / "trap")


@pytest.fixture
def run(tmp_path: Path, project: Path) -> Run:  # noqa: ARG001  we stand in the project
    return Run.create(tmp_path / "runs", name="digits")


def bait(work_tree: Path) -> None:
    """Makes git want to compare, convert and sign every file of a work tree."""
    (work_tree / ".gitattributes").write_text("* filter=evil diff=evil merge=evil\n")
    git(work_tree, "add", ".")
    git(work_tree, "commit", "-qm", "bait")
    (work_tree / "model.py").write_text("size = 2\n")
    (work_tree / "train.py").touch()


def set_local(project: Path, trap: Trap) -> Path:
    bait(project)
    trap.write(project / ".git" / "config")
    return project


def set_included(project: Path, trap: Trap) -> Path:
    bait(project)
    trap.write(project / "evil.cfg")
    git(project, "config", "include.path", "../evil.cfg")
    return project


def set_in_worktree(project: Path, trap: Trap) -> Path:
    bait(project)
    other = project.parent / "other"
    git(project, "worktree", "add", "-q", str(other))
    git(project, "config", "extensions.worktreeConfig", "true")
    (other / "model.py").write_text("size = 3\n")
    trap.write(project / ".git" / "worktrees" / "other" / "config.worktree")
    return other


def set_in_submodule(project: Path, trap: Trap) -> Path:
    shutil.copytree(project, project.parent / "library")
    git(project, "submodule", "--quiet", "add", str(project.parent / "library"), "vendor")
    git(project, "commit", "-qm", "vendor")
    bait(project / "vendor")
    trap.write(project / ".git" / "modules" / "vendor" / "config")
    return project


def set_in_embedded_bare(project: Path, trap: Trap) -> Path:
    """A clone brings it along: its files are ordinary files of the work tree."""
    bait(project)
    inner = project / "inner"
    shutil.copytree(project / ".git", inner)
    for name in ("train.py", "model.py", ".gitattributes"):
        shutil.copy(project / name, inner)
    git(project, "config", "--file", str(inner / "config"), "core.worktree", "..")
    trap.write(inner / "config")
    git(project, "config", "--file", str(inner / "config"), "core.bare", "false")
    return inner


PLACES = [set_local, set_included, set_in_worktree, set_in_submodule, set_in_embedded_bare]


@pytest.mark.parametrize("place", PLACES)
def test_no_command_that_a_repository_configures_runs(
    place: object, project: Path, trap: Trap, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = place(project, trap)  # type: ignore[operator]
    monkeypatch.chdir(directory)
    describe(directory)
    take(run, "train.py")
    with pytest.raises(UsageError):
        take(Run.create(run.path.parent), "train.py", dirty="refuse")
    assert trap.fired == ""
    copied = run.snapshot_dir / ("vendor" if place is set_in_submodule else "")
    assert (directory / copied.relative_to(run.snapshot_dir) / "model.py").read_text() == (
        next(copied.rglob("model.py")).read_text()
    )
    subprocess.run(["git", "status"], cwd=directory, capture_output=True, check=False)
    subprocess.run(["git", "diff"], cwd=directory, capture_output=True, check=False)
    assert trap.fired, "the trap itself does not work"


@pytest.mark.parametrize(
    "verb", ["run --nproc 1", "submit --on on.yaml", "submit --dirty refuse --on on.yaml"]
)
def test_no_command_runs_from_the_command_line(
    verb: str, project: Path, trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "train.py").write_text(RECORDED)
    set_local(project, trap)
    (project / "on.yaml").write_text("kind: process_scheduler:ProcessCluster\nnodes: 1\n")
    (project.parent / "queue").mkdir()
    monkeypatch.setenv("PROCESS_QUEUE", str(project.parent / "queue"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "schedulers"))
    monkeypatch.setenv("HEADWAY_RUNS", str(project.parent / "runs"))
    start = [sys.executable, "-m", "headway", *verb.split(), "train.py"]
    done = warm.run(start, cwd=project, capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if "refuse" in verb else 0), done.stderr
    if verb.startswith("run"):
        assert "v1 2" in done.stdout and list((project.parent / "recorded").glob("run-*"))
    elif "refuse" in verb:
        assert "changes that are not committed" in done.stderr
    else:
        state = project.parent / "queue" / "1" / "state"
        wait_until(lambda: state.read_text() == "done", "the job is over")
    assert trap.fired == ""


@pytest.mark.parametrize("url", ["ssh://evil/x", "file", "ext::{command}", "git://evil/x"])
def test_a_partial_clone_fetches_nothing(url: str, project: Path, trap: Trap, run: Run) -> None:
    """git fetches what a partial clone lacks with programs that its configuration names."""
    blob = git(project, "rev-parse", "HEAD:model.py")
    (project / "model.py").write_text("size = 2\n")
    (project / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    for name, value in {
        "core.repositoryFormatVersion": "1",
        "core.sshCommand": str(trap.command),
        "core.gitProxy": str(trap.command),
        "extensions.partialClone": "origin",
        "protocol.allow": "always",
        "remote.origin.promisor": "true",
        "remote.origin.uploadpack": str(trap.command),
        "remote.origin.url": project.as_uri() if url == "file" else url.format(command=trap.command),
    }.items():
        git(project, "config", name, value)
    state = describe(project)
    assert state.dirty and state.note
    take(run, "train.py")
    assert "the commit itself could not be kept" in run.info()["code"]["snapshot"]["note"]
    assert (run.snapshot_dir / "model.py").read_text() == "size = 2\n"
    assert trap.fired == ""
    subprocess.run(["git", "diff"], cwd=project, capture_output=True, check=False, timeout=20)
    assert trap.fired, "the trap itself does not work"


def use_lfs(project: Path, *, local: bool) -> str:
    """Adds a file by a filter that does what Git LFS does, and returns its content."""
    content = "weights\n" * 1000
    checksum = hashlib.sha256(content.encode()).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{checksum}\nsize {len(content)}\n"
    (project.parent / "pointer").write_text(pointer)
    where = "--local" if local else "--global"
    git(project, "config", where, "filter.lfs.clean", f"cat > /dev/null; cat {project.parent}/pointer")
    git(project, "config", where, "filter.lfs.required", "true")
    (project / ".gitattributes").write_text("*.bin filter=lfs\n")
    (project / "weights.bin").write_text(content)
    git(project, "add", ".")
    git(project, "commit", "-qm", "weights")
    assert git(project, "show", "HEAD:weights.bin") + "\n" == pointer
    os.utime(project / "weights.bin", (1e9, 1e9))  # git has to compare the content
    return content


@pytest.mark.parametrize("local", [True, False])
def test_a_repository_with_lfs_is_clean(local: bool, project: Path, run: Run) -> None:
    content = use_lfs(project, local=local)
    state = describe(project)
    assert not state.dirty and state.diff == "" and state.note is None
    take(run, "train.py", dirty="refuse")
    assert (run.snapshot_dir / "weights.bin").read_text() == content
    (project / "model.py").write_text("size = 2\n")
    assert describe(project).diff.count("diff --git") == 1


def test_a_changed_file_of_lfs_is_a_change(project: Path, run: Run) -> None:
    content = use_lfs(project, local=True)
    (project / "weights.bin").write_text(content.upper())  # of the same size
    assert describe(project).dirty and "weights.bin" in describe(project).diff
    with pytest.raises(UsageError, match="changes that are not committed"):
        take(run, "train.py", dirty="refuse")


def test_a_filter_of_the_user_runs(project: Path) -> None:
    git(project, "config", "--global", "filter.upper.clean", "tr a-z A-Z")
    (project / ".gitattributes").write_text("*.txt filter=upper\n")
    (project / "words.txt").write_text("words\n")
    git(project, "add", ".")
    git(project, "commit", "-qm", "words")
    (project / "words.txt").write_text("Words\n")
    assert not describe(project).dirty
    (project / "words.txt").write_text("verbs\n")
    assert "+VERBS" in describe(project).diff


def test_settings_that_say_how_files_are_stored_are_kept(project: Path) -> None:
    git(project, "config", "core.autocrlf", "true")
    git(project, "config", "core.fileMode", "false")
    git(project, "config", "core.excludesFile", str(project.parent / 'a "list" of\\names'))
    (project.parent / 'a "list" of\\names').write_text("ignored\n")
    (project / "model.py").write_bytes(b"size = 1\r\n")
    git(project, "add", "model.py")
    os.utime(project / "model.py", (1e9, 1e9))  # git has to compare the content
    (project / "model.py").chmod(0o755)
    (project / "ignored").touch()
    state = describe(project)
    assert not state.dirty and state.untracked == () and state.note is None


def test_changes_in_a_submodule(project: Path) -> None:
    shutil.copytree(project, project.parent / "library")
    git(project, "submodule", "--quiet", "add", str(project.parent / "library"), "vendor/lib")
    git(project, "commit", "-qm", "vendor")
    assert not describe(project).dirty
    (project / "vendor" / "lib" / "model.py").write_text("size = 2\n")
    (project / "vendor" / "lib" / "new.py").touch()
    state = describe(project)
    assert state.dirty and state.untracked == ("vendor/lib/new.py",) and state.note is None
    assert state.diff.startswith("diff --git a/vendor/lib/model.py b/vendor/lib/model.py")


def add_to_index(repository: Path, name: str) -> None:
    """Writes a name into the index that git itself refuses."""
    placeholder = "x" * len(name.encode())
    blob = git(repository, "hash-object", "-w", "train.py")
    git(
        repository,
        "update-index",
        "--add",
        "--index-version",
        "2",
        "--cacheinfo",
        f"100644,{blob},{placeholder}",
    )
    index = repository / ".git" / "index"
    data = index.read_bytes()[:-20].replace(placeholder.encode(), name.encode())
    index.write_bytes(data + hashlib.sha1(data).digest())


@pytest.mark.parametrize(
    "name", ["../victim", "/tmp/headway-victim", "a/../../victim", ".git/hooks/post-commit", "a/.GIT/config"]
)
def test_names_that_leave_the_tree_are_refused(name: str, project: Path, run: Run) -> None:
    (project.parent / "victim").write_text("mine")
    (project / "a").mkdir()
    add_to_index(project, name)
    with pytest.raises(UsageError, match="which git never writes") as caught:
        take(run, "train.py")
    assert repr(name) in str(caught.value) and caught.value.exit_code == 2
    assert list(run.code_dir.iterdir()) == []


def test_a_record_of_the_code_has_nothing_from_outside_the_tree(project: Path, tmp_path: Path) -> None:
    """`git diff` showed a file of the user, named in the index by its absolute path, as an uncommitted change."""
    (tmp_path / "victim").write_text("mine")
    add_to_index(project, str(tmp_path / "victim"))
    state = describe(project)
    assert "mine" not in state.diff and state.dirty is None and "which git never writes" in (state.note or "")


@pytest.mark.parametrize("mark", ["--assume-unchanged", "--skip-worktree"])
def test_a_change_that_git_was_told_to_overlook_is_a_change(mark: str, project: Path, run: Run) -> None:
    (project / "model.py").write_text("size = 2\n")
    git(project, "update-index", mark, "model.py")
    index = (project / ".git" / "index").read_bytes()
    state = describe(project)
    assert state.dirty and "+size = 2" in state.diff and state.note is None
    with pytest.raises(UsageError, match="changes that are not committed"):
        take(run, "train.py", dirty="refuse")
    assert (project / ".git" / "index").read_bytes() == index


def test_a_file_outside_a_sparse_checkout_is_not_a_change(project: Path) -> None:
    (project / "package").mkdir()
    (project / "package" / "inner.py").touch()
    git(project, "add", ".")
    git(project, "commit", "-qm", "package")
    git(project, "sparse-checkout", "set", "--no-cone", "/*.py")
    assert not (project / "package").exists()
    state = describe(project)
    assert state.dirty is False and state.diff == "" and state.note is None


def test_code_of_which_git_cannot_say_whether_it_changed_is_refused(project: Path, run: Run) -> None:
    """It counted as unchanged, such as where `git status` takes longer than its time."""
    tree = git(project, "rev-parse", "HEAD^{tree}")
    (project / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    assert describe(project).dirty is None
    with pytest.raises(UsageError, match=r"git cannot say whether .* has changes"):
        take(run, "train.py", dirty="refuse")


def test_a_submodule_below_a_link_is_left_alone(project: Path, tmp_path: Path, run: Run) -> None:
    """Its index has names with `..`, and its path leads through a link: the copy was written beside the repository."""
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(project, elsewhere / "deep" / "vendor")
    add_to_index(elsewhere / "deep" / "vendor", "../../../victim")
    (tmp_path / "victim").write_text("mine")
    (project / "link").symlink_to(elsewhere / "deep")
    head = git(project, "rev-parse", "HEAD")
    git(project, "update-index", "--add", "--cacheinfo", f"160000,{head},x/vendor")
    index = project / ".git" / "index"
    data = index.read_bytes()[:-20]
    (project / "x").symlink_to(elsewhere / "deep")
    index.write_bytes(data + hashlib.sha1(data).digest())
    take(run, "train.py")
    assert "x/vendor/ (a submodule that is not checked out)" in load(run).left_out
    assert (tmp_path / "victim").read_text() == "mine" and not (run.snapshot_dir / "x").exists()


def test_a_link_that_appears_while_copying_is_not_followed(
    project: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "package").mkdir()
    (project / "package" / "key").write_text("public")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("secret")
    git(project, "add", ".")
    from headway.launcher.code import snapshot

    copy = snapshot._copy_files

    def swap(*given: object) -> None:
        shutil.rmtree(project / "package")
        (project / "package").symlink_to(tmp_path / "secret")
        copy(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(snapshot, "_copy_files", swap)
    with pytest.raises(Exception, match="Not a directory"):
        take(run, "train.py")
    assert list(run.code_dir.iterdir()) == []


@pytest.mark.parametrize("kind", ["pipe", "socket", "directory", "device"])
def test_what_took_the_place_of_a_file_is_not_copied(kind: str, project: Path, run: Run) -> None:
    (project / "model.py").unlink()
    match kind:
        case "pipe":
            os.mkfifo(project / "model.py")
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind("model.py")
        case "directory":
            (project / "model.py").mkdir()
        case "device":
            if os.geteuid() != 0:
                pytest.skip("only root can make a device")
            os.mknod(project / "model.py", 0o20666, os.makedev(1, 5))  # /dev/zero
    take(run, "train.py")
    assert not (run.snapshot_dir / "model.py").exists()
    assert load(run).left_out == (f"model.py{'/' if kind == 'directory' else ''} (not a file)",)
    with pytest.raises(UsageError, match="changes that are not committed"):
        take(Run.create(run.path.parent), "train.py", dirty="refuse")
