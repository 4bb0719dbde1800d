"""A permission walk over every file and directory that headway reads before it acts on it: each is made writable by
others, and given to `nobody` where the tests run as root. Whoever reads it refuses, before anything runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.data.cache.directory import NotCached, _open_directory
from headway.data.cache.staging import stage
from headway.dist.rendezvous import FileRendezvous, HubAddress
from headway.errors import UnreadableRun, UsageError
from headway.launcher import enqueue, epilogue, prologue, submit_script
from headway.launcher.agent import node
from headway.launcher.agent.environment import private_directory
from headway.launcher.agent.team import Team
from headway.launcher.functions import background, pickled, worker
from headway.launcher.functions.worker import Call
from headway.launcher.job_start import restart
from headway.launcher.program import JobFile, Program
from headway.launcher.submit_script import Script, check_script
from headway.launcher.targets import Local, Slurm
from headway.run import Run
from headway.run.choice import choose
from headway.system import files, ownership

NOBODY = 65534
IS_ROOT = os.geteuid() == 0


class Ran(BaseException):
    """What was read is about to run."""


def ran(*_: Any, **__: Any) -> Any:
    raise Ran


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(node, "Agent", ran)
    monkeypatch.setattr(background, "Agent", ran)
    monkeypatch.setattr(prologue, "stage", ran)
    monkeypatch.setattr(epilogue, "read_outcome", ran)
    monkeypatch.setattr(worker, "_prepare_process", ran)
    monkeypatch.setattr(ownership, "_CONTAINER_MARKS", ())  # root in a container is trusting


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.create(tmp_path / "runs", name="x", command=["train"])
    JobFile(program=Program(command=["train"]), target=Slurm(pre=("/data",), pre_to="/nowhere")).write(run)
    run.job_script.write_text("#!/bin/bash\n")
    run.snapshot_dir.mkdir()
    run.work_dir.mkdir()
    run.record_snapshot({"tree": "code/tree", "directory": ".", "script": None, "python_path": []})
    run.call_dir.mkdir()
    Call(function="f", target=Local().to_dict(), world_size=1, groups=None, sys_path=[]).write(run)
    (run.call_dir / "call.pickle").write_bytes(pickled.pack((max, (1, 2), {}, None), what="it"))
    for directory in (run.metrics_dir, run.log_dir, run.lock_dir):
        directory.mkdir(exist_ok=True)
    for path in run.path.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return run


READERS: dict[str, Callable[[Run], object]] = {
    "agent": lambda run: node.run_submitted(str(run.path)),
    "prologue": lambda run: prologue.main(str(run.path)),
    "epilogue": lambda run: epilogue.main(str(run.path), "0"),
    "background": lambda run: background.main([str(run.path)]),
    "worker": lambda run: worker.main([str(run.path)]),
    "submission": lambda run: enqueue.submit_runs([run], [Program(command=["train"])], Slurm()),
    "restart": restart,
}
WALK = (
    "..",
    ".",
    "run.json",
    "job.json",
    "job.sh",
    "code",
    "code/tree",
    "work",
    "call",
    "metrics",
    "log",
    "lock",
)


def spoilt(path: Path) -> Iterator[str]:
    """Makes a file or directory one that others could have written, in each way; yields what is said about it."""
    mode = path.stat().st_mode & 0o7777
    path.chmod(mode | 0o002)
    yield "can be written by others"
    path.chmod(mode)
    if IS_ROOT:
        os.chown(path, NOBODY, NOBODY)
        yield "belongs to another user, nobody"
        os.chown(path, 0, 0)


def refusal(reader: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        code = reader()
    except UsageError as error:
        return str(error)
    return capsys.readouterr().err if code == UsageError.exit_code else ""  # the epilogue prints it


@pytest.mark.parametrize("name", READERS)
def test_what_others_could_have_written_is_not_acted_on(
    name: str, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in ("submission", "restart"):
        monkeypatch.setattr(enqueue, "_submit", ran)
    with pytest.raises(Ran):
        READERS[name](run)
    for part in WALK:
        path = (run.path / part).resolve()
        if name == "submission" and part in ("job.json", "job.sh"):
            continue  # it writes them
        for said in spoilt(path):
            found = refusal(lambda: READERS[name](run), capsys)
            assert said in found and str(path) in found, (part, found)
            if "written" in said:
                assert f"chmod {'+t' if part == '..' else 'go-w'} {path}" in found
    run.path.parent.chmod(0o1777)
    with pytest.raises(Ran):  # the sticky bit is enough
        READERS[name](run)


def test_a_run_whose_job_another_user_has_replaced_does_not_run() -> None:
    """The whole attack, as another user: rename the run, make one of that name, wait for the queued job."""
    if not IS_ROOT:
        pytest.skip("only root can act as another user; the walk checks the modes")
    top = Path(tempfile.mkdtemp(prefix="headway-walk-"))
    try:
        top.chmod(0o755)
        run = Run.create(top / "runs", name="x", command=["train"])
        JobFile(program=Program(command=["train"]), target=Slurm()).write(run)
        forged = json.loads(run.job_file.read_text()), json.loads(run.info_file.read_text())
        run.path.parent.chmod(0o777)
        commands = f"mv {run.path} {run.path}.old && mkdir -m 755 {run.path} && cd {run.path} && "
        commands += f"echo '{json.dumps(forged[0])}' > job.json && echo '{json.dumps(forged[1])}' > run.json"
        subprocess.run(["sh", "-c", commands], check=True, user=NOBODY, group=NOBODY, extra_groups=[])
        for mode in (0o777, 0o1777, 0o700):  # also when the victim has mended the root meanwhile
            run.path.parent.chmod(mode)
            with pytest.raises(UsageError, match=r"can be written by others|belongs to another user, nobody"):
                node.run_submitted(str(run.path))
    finally:
        shutil.rmtree(top)


def test_a_link_of_a_job_array_is_ours(run: Run) -> None:
    with enqueue._linked([run]) as links:
        with pytest.raises(Ran):
            node.run_submitted(str(links / "0"))
        for said in spoilt(links):
            with pytest.raises(UsageError, match=said):
                node.run_submitted(str(links / "0"))


def test_the_copy_of_the_code_that_a_sweep_shares_is_ours(run: Run) -> None:
    other = Run.create(run.path.parent, name="first")
    other.snapshot_dir.mkdir(mode=0o700)
    link = run.path.parent.with_name("link")
    link.symlink_to(run.path.parent)
    tree = other.snapshot_dir.relative_to(link.parent / "runs")
    for root in (run.path.parent, link):  # the runs may have been made through a link
        run.record_snapshot({"tree": str(root / tree), "directory": ".", "python_path": []})
        with pytest.raises(Ran):
            node.run_submitted(str(root / run.id))
        for path in (other.path, other.code_dir, other.snapshot_dir):
            for said in spoilt(path):
                with pytest.raises(UsageError, match=said):
                    node.run_submitted(str(root / run.id))
    other.snapshot_dir.rename(link.parent / "elsewhere")
    other.snapshot_dir.symlink_to(link.parent / "elsewhere")
    with pytest.raises(UsageError, match="is a symbolic link"):
        node.run_submitted(str(link / run.id))


def meet(path: Path) -> object:
    if not path.exists():
        FileRendezvous(path).publish(HubAddress(hosts=("127.0.0.1",), port=1, key=b"k" * 32))
    return FileRendezvous(path).find()


def gather(directory: Path) -> None:
    Team(directory, number=0, size=1).begin_round(0)


def open_cache(directory: Path) -> None:
    try:
        os.close(_open_directory(directory))
    except NotCached as error:
        raise UsageError(f"can be written by others, belongs to another user, nobody: {error}") from error


def keep_kernels(parent: Path) -> None:
    if private_directory(parent) is None:
        raise UsageError("can be written by others, belongs to another user, nobody")


PLACES: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "meeting file": ("meeting", "meeting", meet),
    "agents": (".agents/a/b", ".agents/a/b/round-0", gather),
    "what an agent wrote": (
        "agent.json",
        "agent.json",
        lambda path: Team(path.parent, number=0, size=2)._read(path),
    ),
    "staged data": ("staged", "staged", lambda path: stage([Path(__file__).parent / "conftest.py"], path)),
    "node cache": ("cache", "cache", open_cache),
    "compiled kernels": (".", f"headway-{os.geteuid()}", keep_kernels),
    "call.json": ("call.json", "call.json", ownership.read_private),
    "pickles": ("p", "p", lambda path: pickled.unpack(path, what="it")),
    "code to submit": ("root", "root", lambda root: check_script(Script(name=__file__), root=root)),
}


@pytest.mark.parametrize("name", PLACES)
def test_every_other_place_that_is_acted_on(name: str, tmp_path: Path) -> None:
    start, place, use = PLACES[name]
    made = tmp_path / start
    made.parent.mkdir(parents=True, exist_ok=True)
    if name in ("what an agent wrote", "call.json", "pickles"):
        made.write_bytes(pickled.pack(1, what="it") if name == "pickles" else b"{}")
        made.chmod(0o600)
    if name == "code to submit":
        made.mkdir(mode=0o700)
    use(made)
    for said in spoilt(tmp_path / place):
        with pytest.raises(UsageError, match=said):
            use(made)


def test_a_run_of_another_user_is_not_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if not IS_ROOT:
        pytest.skip("only root can give a run to another user")
    facts: dict[str, Any] = {"name": "x", "config": {}, "world": {}, "environ": {}}
    theirs = Run.create(tmp_path, name="x", config={})
    theirs.begin_attempt(world={})
    assert choose(tmp_path, resume="auto", **facts).run == theirs
    os.chown(theirs.path, NOBODY, NOBODY)
    theirs.checkpoint_dir(7).mkdir(parents=True)
    assert choose(tmp_path, resume="auto", **facts).run != theirs, "one of our own is made"
    assert (
        f"{theirs.path} has checkpoints up to step 7, and is not resumed: it belongs to nobody" in caplog.text
    )
    with pytest.raises(UsageError, match="belongs to another user, nobody"):
        choose(tmp_path, resume=theirs.path, **facts)
    with pytest.raises(UsageError, match="belongs to another user, nobody"):
        choose(tmp_path, resume="auto", **facts | {"environ": {"HEADWAY_RUN": str(theirs.path)}})


@pytest.fixture
def mapped_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount that gives what this user writes to another one, as an NFS export with all_squash does."""
    open_private, make_dir = files.open_private, files.make_dir

    def open_mapped(path: Path, flags: int) -> int:
        fd = open_private(path, flags)
        if flags & os.O_CREAT and IS_ROOT:
            os.fchown(fd, NOBODY, NOBODY)
        return fd

    def make_mapped(path: Path) -> None:
        make_dir(path)
        if IS_ROOT:
            os.chown(path, NOBODY, NOBODY)

    monkeypatch.setattr(files, "open_private", open_mapped)
    monkeypatch.setattr(files, "make_dir", make_mapped)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 4242)


@pytest.mark.usefixtures("mapped_users")
def test_where_a_mount_maps_users_what_this_one_wrote_is_its_own(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"name": "x", "config": {}, "world": {}, "environ": {}}
    ours = Run.create(tmp_path, name="x", config={})
    ours.begin_attempt(world={})
    for resume in ("auto", ours.path):
        assert choose(tmp_path, resume=resume, **facts).run == ours
    assert meet(tmp_path / "meeting") is not None
    files.write_atomic(tmp_path / "agent.json", b"{}")
    assert Team(tmp_path, number=0, size=2)._read(tmp_path / "agent.json") == {}
    ours.info_file.write_text("{")
    ours.checkpoint_dir(3).mkdir(parents=True)
    with pytest.raises(UnreadableRun, match="up to step 3"):
        choose(tmp_path, resume="auto", **facts)
    assert not list(tmp_path.rglob(".*.tmp"))


def test_a_group_of_this_user_alone_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems give each user a group and a umask of 002."""
    path = tmp_path / "runs"
    path.mkdir()
    path.chmod(0o770)
    monkeypatch.setattr(ownership, "_is_private_group", lambda gid: gid == path.stat().st_gid)
    ownership.check_private(path)
    monkeypatch.setattr(ownership, "_is_private_group", lambda _: False)
    with pytest.raises(UsageError, match="can be written by others"):
        ownership.check_root(path)
    path.chmod(0o1770)
    ownership.check_root(path)


def test_a_root_that_is_yet_to_be_made_is_refused_like_one_that_exists(tmp_path: Path) -> None:
    """Before anything is trained: the next start would refuse to resume it."""
    facts: dict[str, Any] = {"name": "x", "config": {}, "world": {}, "environ": {}}
    shared = tmp_path / "shared"
    shared.mkdir()
    for mode, refused in ((0o777, True), (0o1777, False), (0o755, False)):
        root = shared / f"runs-{mode:o}"
        shared.chmod(mode)
        if refused:
            with pytest.raises(UsageError, match=f": chmod \\+t {shared}$"):
                choose(root, resume="auto", **facts)
            with pytest.raises(UsageError, match=f": chmod \\+t {shared}$"):
                submit_script._check_root(root)
            assert not root.exists()
            continue
        submit_script._check_root(root)
        run = choose(root, resume="auto", **facts).run
        run.begin_attempt(world={})
        assert choose(root, resume="auto", **facts).run == run


def test_refusals_give_advice_that_this_user_can_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UsageError, match=r"by others .*: give a directory of your own, like /tmp/\$USER$"):
        stage([Path(__file__)], shared)
    with pytest.raises(UsageError, match=f": chmod \\+t {shared}$"):
        ownership.check_root(shared)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 4242)
    monkeypatch.setattr(ownership, "uid_in", lambda _: me)  # also where the tests do not run as root
    with pytest.raises(
        UsageError, match=rf"by others .*: use a directory of your own, or ask \S+ to chmod \+t {shared}$"
    ):
        ownership.check_root(shared)


def test_a_user_without_an_entry_has_a_group_of_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 424242)
    monkeypatch.setattr(os, "getegid", lambda: 424242)
    assert ownership._is_private_group(424242) and not ownership._is_private_group(424243)
    monkeypatch.setattr(os, "getegid", lambda: 0)
    assert not ownership._is_private_group(0) and not ownership._is_private_group(424242)


def parents_of_others(par: Path) -> Iterator[tuple[str, str]]:
    """Makes a directory above a root one in which another user can rename it; yields what is said, and the remedy."""
    for mode in (0o2775, 0o770):
        os.chown(par, 0, NOBODY)
        par.chmod(mode)
        yield "can be written by others", f": chmod +t {par}"
    for mode in (0o755, 0o1777):  # the sticky bit keeps out everybody but its owner
        os.chown(par, NOBODY, NOBODY)
        par.chmod(mode)
        yield "belongs to another user, nobody", ": use a directory of your own, or run as nobody"
    os.chown(par, 0, 0)
    par.chmod(0o755)


@pytest.mark.skipif(not IS_ROOT, reason="only root can give directories away")
def test_directories_above_the_root_belong_to_nobody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever can rename the root puts one of his own in its place, after all checks."""
    facts: dict[str, Any] = {"name": "x", "config": {}, "world": {}, "environ": {}}
    par = tmp_path / "par"
    (par / "deep").mkdir(parents=True)
    run = Run.create(par / "deep" / "runs", name="x", command=["train"])
    JobFile(program=Program(command=["train"]), target=Slurm()).write(run)
    run.begin_attempt(world={})
    (tmp_path / "link").symlink_to(run.path.parent)
    uses: dict[str, Callable[[], object]] = {
        "job": lambda: node.run_submitted(str(run.path)),
        "submission": lambda: submit_script._check_root(run.path.parent),
        "choice": lambda: choose(run.path.parent, resume="auto", **facts),
        "a root to make": lambda: choose(par / "new", resume="auto", **facts),
        "by a link": lambda: choose(tmp_path / "link", resume="auto", **facts),
        "resume": lambda: choose(tmp_path, resume=run.path, **facts),
        "staging": lambda: stage([Path(__file__)], par / "deep" / "staged"),
    }
    for said, remedy in parents_of_others(par):
        for name, use in uses.items():
            with pytest.raises(UsageError, match=said) as refused:
                use()
            assert str(refused.value).endswith(remedy), (name, str(refused.value))
        assert private_directory(par / "deep") is None and said in caplog.text
        assert not (par / "new").exists()
    assert choose(run.path.parent, resume="auto", **facts).run == run
    os.chown(par, 0, NOBODY)
    par.chmod(0o1775)
    assert choose(run.path.parent, resume="auto", **facts).run == run, (
        "a project directory with the sticky bit"
    )


@pytest.mark.skipif(not IS_ROOT, reason="only root can give directories away")
def test_root_in_a_container_uses_the_mounted_directory_of_the_user_who_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = tmp_path / "workspace"
    mount.mkdir()
    os.chown(mount, NOBODY, NOBODY)
    mount.chmod(0o775)
    with pytest.raises(UsageError, match="belongs to another user"):
        ownership.check_root(mount / "runs")
    monkeypatch.setattr(ownership, "_CONTAINER_MARKS", (tmp_path,))
    ownership.check_root(mount / "runs")
    mount.chmod(0o777)
    with pytest.raises(UsageError, match="can be written by others"):
        ownership.check_root(mount / "runs")


@pytest.mark.skipif(not IS_ROOT, reason="only root can give directories away")
def test_links_to_the_root_are_where_nobody_else_can_change_them(tmp_path: Path) -> None:
    shared, mine = tmp_path / "shared", tmp_path / "mine"
    for directory in (shared, mine):
        directory.mkdir(mode=0o755)
    (shared / "link").symlink_to("../mine/../mine")
    (mine / "again").symlink_to(shared / "link")
    for path in (shared / "link", mine / "again", mine / "again" / "new"):
        ownership.check_root(path)
        shared.chmod(0o777)
        with pytest.raises(UsageError, match=f"{shared} can be written"):
            ownership.check_root(path)
        shared.chmod(0o1777)
        ownership.check_root(path)
        os.lchown(shared / "link", NOBODY, NOBODY)
        with pytest.raises(UsageError, match=f"{shared}/link belongs to another user, nobody"):
            ownership.check_root(path)
        os.lchown(shared / "link", 0, 0)


def test_in_a_container_without_root_the_directories_of_the_machine_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Apptainer maps one user: whatever belongs to root is shown as nobody's. The map is imitated."""
    nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
    read = Path.read_text
    for mapped, unmapped in (("0 0 4294967295", False), ("1000 1000 1", True)):
        monkeypatch.setattr(
            Path, "read_text", lambda path, text=mapped: text if path.name == "uid_map" else read(path)
        )
        assert ownership._is_unmapped(nobody) is unmapped
        assert not ownership._is_unmapped(1000)
