"""Training continues while another process writes; a failure there is raised on all ranks and leaves nothing."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import warm
from checker import judge
from waiting import wait_until

import headway
from headway import checkpoint
from headway.checkpoint import Saver
from headway.checkpoint.write import writer_process
from headway.dist.collective.guard import from_root
from headway.errors import BarrierTimeout, RunLocked, StorageError, UsageError
from headway.run import Run
from headway.system import retries
from headway.testing import faults, ranks


def helpers(of: int | None = None) -> list[psutil.Process]:
    return [child for child in psutil.Process(of).children() if _is_helper(child)]


def _is_helper(child: psutil.Process) -> bool:
    with suppress(psutil.ZombieProcess, psutil.NoSuchProcess):  # it may end while we look
        return "headway.checkpoint.write.writer_process" in " ".join(child.cmdline())
    return False


def until(condition: Callable[[], Any]) -> Any:
    """Waits for a state that must come."""
    return wait_until(condition, "the condition holds", timeout_s=100, interval_s=0.01)


def stopped_helper() -> psutil.Process:
    """The helper, once a failpoint has stopped it."""
    return until(lambda: [h for h in helpers() if h.status() == psutil.STATUS_STOPPED])[0]


def assert_only(folder: Path, *steps: int) -> dict[int, Any]:
    """These steps are whole, and there is nothing else."""
    whole, problems = judge(str(folder))
    assert not problems and sorted(whole) == list(steps)
    assert {path.name for path in folder.iterdir()} - {"latest"} == {f"step-{step:012d}" for step in steps}
    return whole


def values(folder: Path, step: int) -> Any:
    return checkpoint.load(folder / f"step-{step:012d}").state


def test_what_changes_after_save_returned_is_not_in_it(tmp_path: Path) -> None:
    x, odd = torch.arange(1000.0), torch.arange(6.0).reshape(2, 3).t()
    with Saver(tmp_path) as saver:
        for step in range(3):
            with faults.at("checkpoint.before_file", action="sleep=0.2"):  # the bytes are not written yet
                saver.save({"x": x, "odd": odd, "step": step}, step=step)
            x.fill_(step)
            odd.fill_(step)
    assert_only(tmp_path, 0, 1, 2)
    assert torch.equal(values(tmp_path, 0)["x"], torch.arange(1000.0))
    assert torch.equal(values(tmp_path, 0)["odd"], torch.arange(6.0).reshape(2, 3).t())
    for step in (1, 2):
        assert values(tmp_path, step)["x"].eq(step - 1).all() and values(tmp_path, step)["step"] == step


def test_save_returns_before_anything_is_written(tmp_path: Path) -> None:
    with Saver(tmp_path) as saver:
        with faults.at("checkpoint.before_directory", action="stop"):
            saver.save({"x": torch.ones(9)}, step=1)
            helper = stopped_helper()
        assert list(tmp_path.iterdir()) == [] and saver.finished() == []
        helper.send_signal(signal.SIGCONT)
        saver.wait()
        (saved,) = saver.finished()
        assert saver.finished() == []
    size = sum(path.stat().st_size for path in saved.path.iterdir())
    assert (saved.path, saved.step, saved.bytes) == (tmp_path / "step-000000000001", 1, size)
    assert 0 < saved.stall_s < saved.total_s
    assert_only(tmp_path, 1)


def test_only_one_save_is_in_flight_and_one_copy_in_memory(tmp_path: Path) -> None:
    def shared_bytes() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        ranges = [line.split()[0].split("-") for line in lines if "memfd:headway-checkpoint" in line]
        return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)

    state = {"x": torch.zeros(1_000_000)}  # 4 MB
    whole: list[int] = []
    with Saver(tmp_path) as saver:
        for step in range(4):
            with faults.at("checkpoint.before_fsync", action="sleep=0.1"):
                saver.save(state, step=step)
            whole += [saved.step for saved in saver.finished()]
            assert whole[:step] == list(range(step))  # all before this one
            assert 4_000_000 < shared_bytes() <= 6 << 20
        assert len(helpers()) == 1
    assert shared_bytes() == 0 and helpers() == []


def test_every_kind_of_value_returns_to_the_bit(tmp_path: Path) -> None:
    from test_save_load import STATE, assert_equal

    with Saver(tmp_path) as saver:
        saver.save(STATE, step=7, local={"rng": "00ff"}, metrics={"val/loss": 0.25})
        saver.save({}, step=8)  # nothing at all
        saver.save({"only": 1}, step=9)
    loaded = checkpoint.load(tmp_path / "step-000000000007")
    assert_equal(STATE, loaded.state)
    assert (loaded.local, loaded.metrics) == ({"rng": "00ff"}, {"val/loss": 0.25})
    assert values(tmp_path, 8) == {} and values(tmp_path, 9) == {"only": 1}


def test_a_saver_in_the_foreground_needs_no_helper(tmp_path: Path) -> None:
    with Saver(tmp_path, background=False) as saver:
        saver.save({"x": torch.ones(3)}, step=1)
        assert helpers() == []
        (saved,) = saver.finished()
    assert saved.stall_s == saved.total_s and saved.bytes > 12
    assert_only(tmp_path, 1)


def test_the_helper_has_no_torch() -> None:
    code = "import sys, headway.checkpoint.write.writer_process; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- what fails


ERRORS = ["ENOSPC", "EIO", "EROFS", "EACCES", "EDQUOT"]
POINTS = [
    "before_directory", "after_directory", "before_file", "mid_file", "before_fsync", "rank_written", "before_manifest",
    "after_manifest", "before_rename",
]  # fmt: skip


@pytest.mark.parametrize(("number", "point"), list(enumerate(POINTS)))
def test_an_error_of_the_disk_is_raised_by_the_next_call(tmp_path: Path, number: int, point: str) -> None:
    with Saver(tmp_path) as saver:
        saver.save({"x": torch.ones(9)}, step=1)
        saver.wait()
        with faults.at(f"checkpoint.{point}", action=f"errno={ERRORS[number % len(ERRORS)]}"):
            saver.save({"x": torch.ones(9)}, step=2)  # returns
            with pytest.raises(StorageError, match=r"could not .* step 2") as caught:
                saver.wait() if number % 2 else saver.save({"x": torch.ones(9)}, step=3)
        assert caught.value.exit_code == 74
        assert_only(tmp_path, 1)
        saver.wait()  # said once
        saver.save({"x": torch.ones(9)}, step=2)
    assert_only(tmp_path, 1, 2)


def open_files() -> dict[str, str]:
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of this list itself
            found[link.name] = str(link.readlink())
    return found


def test_a_save_that_fails_in_the_foreground_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file and no tensor, also where garbage is seldom collected."""

    def refuse(_fd: int, _mode: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before, saver = open_files(), Saver(tmp_path, background=False)
    gc.disable()
    try:
        for number, point in enumerate([*POINTS, None]):
            state = {"x": torch.ones(9)}
            tensor = weakref.ref(state["x"])
            fault = f"errno={ERRORS[number % len(ERRORS)]}"
            with monkeypatch.context() as patch, faults.at(f"checkpoint.{point}", action=fault):
                if point is None:
                    patch.setattr(os, "fchmod", refuse)
                with pytest.raises(StorageError):
                    saver.save(state, step=1)
            del state
            assert tensor() is None, point
            assert open_files() == before, point
        kept = torch.ones(9)
        tensor = weakref.ref(kept)
        saver.save({"x": kept}, step=1)
        del kept
        assert tensor() is None, "nor does one that succeeds"
    finally:
        gc.enable()


FAILING_HELPERS = [
    ("before_file", "kill9", 0), ("before_file", "errno=ENOSPC", 1), ("rank_written", "raise", 0),
    ("rank_written", "kill9", 1),
]  # fmt: skip
if os.environ.get("HEADWAY_FAULTS") == "full":
    FAILING_HELPERS = list(
        product(("before_file", "rank_written"), ("kill9", "errno=ENOSPC", "raise"), (0, 1))
    )


@ranks(2)
@pytest.mark.parametrize(("point", "action", "rank"), FAILING_HELPERS)
def test_a_helper_that_fails_or_dies_on_one_rank_fails_the_save_on_all(
    tmp_path: Path, point: str, action: str, rank: int
) -> None:
    state = {"a": torch.ones(8), "b": torch.ones(8)}
    killed = f"killed by SIGKILL.* Check the log of rank {rank}, "
    said = {"kill9": killed, "raise": "exit code 1", "errno=ENOSPC": "No space left"}[action]
    with Saver(tmp_path) as saver:
        saver.save(state, step=1)
        saver.wait()
        with faults.at(f"checkpoint.{point}", rank=rank, action=action):
            saver.save(state, step=2)
            with pytest.raises(StorageError, match=said):
                saver.wait()
        headway.barrier()
        assert_only(tmp_path, 1)
        headway.barrier()
        saver.save(state, step=2)
    assert_only(tmp_path, 1, 2)


def test_a_full_memory_is_not_called_a_full_disk(tmp_path: Path) -> None:
    remedy = "check the memory of this machine, and the limit of this job"
    saver = Saver(tmp_path, background=False)
    with (
        faults.at("checkpoint.before_file", action="errno=ENOMEM"),
        pytest.raises(StorageError, match=remedy),
    ):
        saver.save({"x": torch.ones(2)}, step=1)
    saver.close()


def test_a_helper_that_is_killed_from_outside(tmp_path: Path) -> None:
    with Saver(tmp_path) as saver:
        saver.save({"x": 1}, step=1)
        saver.wait()
        helpers()[0].kill()
        saver.save({"x": 2}, step=2)
        with pytest.raises(StorageError, match=r"process that was writing step .* killed by SIGKILL"):
            saver.wait()
        saver.save({"x": 2}, step=2)
    assert_only(tmp_path, 1, 2)


def test_a_helper_that_is_killed_between_two_names_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """The save that replaces a checkpoint has hidden it, and has not given its name to the new one."""
    with Saver(tmp_path) as saver:
        saver.save({"x": 1}, step=1)
        saver.wait()
        with faults.at("checkpoint.replacing", action="kill9"):
            saver.save({"x": 2}, step=1, replaces=True)
            with pytest.raises(StorageError, match="killed by SIGKILL"):
                saver.wait()
        names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
        assert names == ["step-000000000001"], "there is no time without a checkpoint"
        assert checkpoint.load(tmp_path / names[0]).state["x"] == 1


def test_a_replaced_checkpoint_that_is_removed_in_part_never_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_in_part(path: Path, *, ignore_errors: bool) -> None:
        assert ignore_errors
        (path / "manifest.json").unlink()

    saver = Saver(tmp_path, background=False)
    saver.save({"x": 1}, step=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove_in_part)
        saver.save({"x": 2}, step=1, replaces=True)
    shutil.rmtree(tmp_path / "step-000000000001")  # as the retention of checkpoints does
    saver.save({"x": 3}, step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000000000002"]


def test_a_helper_that_is_stopped_is_named_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rank waited for half an hour without a word, also when it was asked to stop."""
    monkeypatch.setattr(writer_process, "_CHECK_S", 0.01)
    monkeypatch.setattr(writer_process, "_STOPPING_CHECKS", 5)
    with Saver(tmp_path) as saver:
        saver.save({"x": 1}, step=1)
        saver.wait()
        with faults.at("checkpoint.before_rename", action="stop"):
            saver.save({"x": 2}, step=2)
            retries.stop_requested.set()
            (helper,) = helpers()
            with pytest.raises(
                StorageError, match=rf"writes step 2 to .* \(pid {helper.pid}\) was stopped"
            ) as caught:
                saver.wait()
        retries.stop_requested.clear()
        assert caught.value.exit_code == 74
        assert f"the run stops when process {helper.pid} has written step 2 to {tmp_path}" in caplog.text
        saver.save({"x": 2}, step=2)
    assert_only(tmp_path, 1, 2)


def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    with Saver(tmp_path) as saver:
        with pytest.raises(UsageError, match=r"'a' is a builtins\.object"):
            saver.save({"a": object()}, step=1)
        saver.save({"a": 1}, step=1)
        saver.save({"a": 1}, step=1)
        with pytest.raises(UsageError, match="never overwritten"):
            saver.wait()
    assert_only(tmp_path, 1)


def test_a_run_that_was_taken_over_commits_nothing(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    with run.lock() as lock, Saver(run, lock=lock) as saver:
        saver.save({"x": 1}, step=1)
        saver.wait()
        with faults.at("checkpoint.before_rename", action="stop"):
            saver.save({"x": 2}, step=2)
            helper = stopped_helper()
        newer = run.path / "lock" / "owner-00002.json"
        newer.write_bytes((run.path / "lock" / "owner-00001.json").read_bytes())
        helper.send_signal(signal.SIGCONT)
        with pytest.raises(RunLocked, match="taken over"):
            saver.wait()
        newer.unlink()
    assert_only(run.checkpoints_dir, 1)


@ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_copy_that_fails_on_one_rank_fails_the_save_on_all(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    with Saver(tmp_path) as saver:
        with monkeypatch.context() as patch:
            if headway.rank() == rank:
                patch.setattr(os, "ftruncate", no_memory)
            saver.save({"a": torch.ones(8), "b": torch.ones(8)}, step=1)
            with pytest.raises(StorageError, match=r"could not copy the state into memory.*Cannot allocate"):
                saver.wait()
        headway.barrier()
        assert list(tmp_path.iterdir()) == []
        headway.barrier()
        saver.save({"a": torch.ones(8), "b": torch.ones(8)}, step=1)
    assert_only(tmp_path, 1)


@ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_does_not_answer_is_given_up(tmp_path: Path, rank: int) -> None:
    state = {"a": torch.ones(8), "b": torch.ones(8)}
    with (
        Saver(tmp_path, timeout_s=3.0) as saver,
        faults.at("checkpoint.before_fsync", rank=rank, action="stop"),
    ):
        saver.save(state, step=1)
        with pytest.raises(
            StorageError, match=r"not written to .* within 3 s \(stuck in .*\): the disk hangs"
        ):
            saver.wait()
    headway.barrier()
    assert list(tmp_path.iterdir()) == []
    headway.barrier()
    with Saver(tmp_path) as saver:
        saver.save(state, step=1)
    assert_only(tmp_path, 1)


@ranks(2)
def test_training_talks_while_a_save_waits(tmp_path: Path) -> None:
    """The saver's thread waits at the store; barriers and words of the training go past it."""
    with Saver(tmp_path) as saver:
        with faults.at("checkpoint.before_file", rank=1, action="stop"):
            saver.save({"a": torch.ones(8), "b": torch.ones(8)}, step=1)
            stopped = [stopped_helper()] if headway.rank() == 1 else []
        for number in range(20):
            headway.barrier()
            assert from_root(lambda number=number: number) == number
        checkpoint.save(tmp_path / "other", {"x": 1}, step=1)
        assert saver.finished() == []
        for helper in stopped:
            helper.send_signal(signal.SIGCONT)
    assert_only(tmp_path / "other", 1)
    assert [saved.step for saved in saver.finished()] == [1]


@ranks(2)
def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    saver = Saver(tmp_path, timeout_s=1.0)
    if headway.rank() == 0:
        with pytest.raises(
            BarrierTimeout, match="rank 1 did not respond within 1 s while the ranks tried to save step 5"
        ):
            saver.save({"x": 1}, step=5)
        headway.barrier()
    else:
        headway.barrier()
        with pytest.raises(BarrierTimeout, match="rank 1 did not respond"):
            saver.save({"x": 1}, step=5)
    saver.close()
    with Saver(tmp_path) as saver:
        saver.save({"x": 1}, step=6)
    assert_only(tmp_path, 6)


# --- the life of the helper


def test_an_error_in_the_block_gives_up_what_is_in_flight(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Saver(tmp_path) as saver:
        saver.save({"x": 1}, step=1)
        saver.wait()
        with faults.at("checkpoint.before_fsync", action="stop"):
            saver.save({"x": 2}, step=2)
            stopped_helper()
            raise ZeroDivisionError
    until(lambda: not helpers())
    with Saver(tmp_path) as saver:
        saver.save({"x": 3}, step=3)
    assert_only(tmp_path, 1, 3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_the_helper_is_deaf_to_signals_that_mean_the_run(tmp_path: Path, number: signal.Signals) -> None:
    with Saver(tmp_path) as saver:
        with faults.at("checkpoint.before_file", action="stop"):
            saver.save({"x": torch.ones(9)}, step=1)
            helper = stopped_helper()
        helper.send_signal(number)
        helper.send_signal(signal.SIGCONT)
    assert_only(tmp_path, 1)


RANK = """
import sys, threading, torch
from headway.checkpoint import Saver
def train():
    saver = Saver(sys.argv[1])
    saver.save({"x": torch.ones(9)}, step=1)
    print("saved", flush=True)
thread = threading.Thread(target=train)   # whichever thread saves
thread.start()
thread.join()
if sys.argv[2] == "wait": sys.stdin.read()
"""


def start_rank(
    folder: Path, then: str, start: type[subprocess.Popen[Any]] = subprocess.Popen, **environ: str
) -> subprocess.Popen[str]:
    process = start(
        [sys.executable, "-c", RANK, str(folder), then],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "saved\n"
    return process


def test_the_helper_dies_with_its_rank(tmp_path: Path) -> None:
    fault = faults.at("checkpoint.before_fsync", action="stop").environ
    with start_rank(tmp_path, "wait", warm.Popen, **fault) as rank:
        (helper,) = until(lambda: helpers(rank.pid))
        until(lambda: helper.status() == psutil.STATUS_STOPPED)
        rank.kill()
        helper.wait(30)
    assert checkpoint.load_latest(tmp_path) is None
    checkpoint.save(tmp_path, {"x": 1}, step=1)
    assert_only(tmp_path, 1)


def test_a_script_that_ends_without_closing_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    with start_rank(
        tmp_path, "end", **faults.at("checkpoint.before_fsync", action="sleep=0.3").environ
    ) as rank:
        assert rank.wait() == 0
    assert_only(tmp_path, 1)


# --- several ranks


@ranks(3)
def test_shards_of_three_ranks(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,))
    whole = torch.arange(35.0).reshape(7, 5)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    with Saver(tmp_path) as saver:
        saver.save({"w": sharded, "r": torch.arange(4.0)}, step=1, local={"rank": headway.rank()})
        sharded.to_local().fill_(-1)
        saver.wait()
        (saved,) = saver.finished()
    assert_only(tmp_path, 1)
    loaded = checkpoint.load(saved.path)
    assert torch.equal(loaded.state["w"], whole) and loaded.local == {"rank": headway.rank()}
    assert saved.bytes == sum(path.stat().st_size for path in saved.path.iterdir())


@ranks(2)
def test_a_plan_is_made_anew_when_tensors_change_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.checkpoint.write import planner

    made: list[int] = []
    real = planner._make_plan
    monkeypatch.setattr(planner, "_make_plan", lambda *args: made.append(args[-1]) or real(*args))
    one, two = {"w": torch.ones(3), "n": 1}, {"w": torch.ones(3), "n": 2}
    larger, other = {"w": torch.ones(4)}, {"w": torch.ones(4).double()}
    own = {
        "w": torch.ones(4).double(),
        **({"mine": torch.ones(2)} if headway.rank() else {}),
    }  # on one rank only
    with Saver(tmp_path) as saver:
        for step, state in enumerate((one, two, larger, larger, other, own, other)):
            saver.save(state, step=step)
            state["w"].mul_(-1)
    assert len(made) == 5
    for step, (state, sign) in enumerate(
        [(one, 1), (two, 1), (larger, 1), (larger, -1), (other, 1), (own, 1), (other, -1)]
    ):
        loaded = values(tmp_path, step)
        assert torch.equal(loaded["w"], torch.full_like(state["w"], sign)), step
        assert loaded.get("n") == state.get("n") and ("mine" in loaded) == (step == 5)


def test_old_checkpoints_are_removed_while_a_new_one_is_written(tmp_path: Path) -> None:
    with Saver(tmp_path) as saver:
        for step in range(1, 5):
            saver.save({"x": step}, step=step)
        saver.wait()
        with faults.at("checkpoint.before_file", action="stop"):
            saver.save({"x": 5}, step=5)
            helper = stopped_helper()
        checkpoint.prune(tmp_path, checkpoint.Retention(keep_last=2))
        helper.send_signal(signal.SIGCONT)
    assert_only(tmp_path, 3, 4, 5)
