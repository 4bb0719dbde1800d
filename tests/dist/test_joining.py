"""Rendezvous without fixed ports, among strangers and leftovers, and leaving nothing behind."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import warm
from waiting import wait_until

import headway as hw
from headway.dist.control.hub import Hub
from headway.dist.control.peer import connect_to_hub
from headway.dist.device import choose_device
from headway.dist.environment import LaunchEnvironment
from headway.dist.failure.capture import is_echo_error
from headway.dist.failure.record import FailureRecord, format_cause
from headway.dist.rendezvous import FileRendezvous, HubAddress, StoreRendezvous, listen
from headway.dist.roster import RankInfo, RankPlacement
from headway.errors import RankFailure, UsageError
from headway.launcher.agent.outcome import first_failure
from headway.testing import ranks

FULL = os.environ.get("HEADWAY_FAULTS") == "full"
SCRIPTS = Path(__file__).parents[1] / "scripts"
KEY = b"k" * 32


def member(rank: int) -> RankInfo:
    return RankInfo(rank=rank, host="here", node="here", pid=1, local_rank=None, visible_gpus=None)


def unexpected(record: FailureRecord) -> None:
    raise AssertionError(record)


@pytest.fixture
def meeting(tmp_path: Path) -> FileRendezvous:
    return FileRendezvous(tmp_path / "meeting")


def open_hub(
    meeting: FileRendezvous, world_size: int, on_failure: Callable[[FailureRecord], object] = unexpected
) -> Hub:
    listener, hosts = listen(
        LaunchEnvironment(launcher="mpi", rank=0, world_size=2, local_world_size=2, node="here")
    )
    hub = Hub(
        listener,
        KEY,
        world_size,
        welcome={"store_port": 1},
        on_first_failure=on_failure,
        on_all_down=unexpected,
    )
    hub.start()
    meeting.publish(HubAddress(hosts=hosts, port=listener.getsockname()[1], key=KEY))
    return hub


def come(meeting: FileRendezvous, rank: int, timeout: float = 60) -> list[int]:
    """Joins, leaves again, and returns whom it met."""
    peer, welcome, _ = connect_to_hub(meeting, member(rank), timeout)
    peer.leave(0)
    peer.close()
    met: list[int] = welcome["placement"]["ranks_on_node"]
    return met


def test_ranks_meet_in_any_order(meeting: FileRendezvous) -> None:
    met: dict[int, list[int]] = {}
    early = threading.Thread(target=lambda: met.update({1: come(meeting, 1)}))
    early.start()  # before rank 0 has said where it is
    time.sleep(0.1)
    hub = open_hub(meeting, 2)
    met[0] = come(meeting, 0)
    early.join(60)
    hub.join(60)
    assert met == {0: [0, 1], 1: [0, 1]}
    assert (meeting.path.stat().st_mode & 0o777) == 0o600


def test_an_address_left_over_from_a_dead_launch_is_passed_over(meeting: FileRendezvous) -> None:
    """First nobody answers there, then somebody with another key does."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    meeting.publish(HubAddress(hosts=("127.0.0.1",), port=port, key=b"x" * 32))
    found: list[list[int]] = []
    late = threading.Thread(target=lambda: found.append(come(meeting, 0)))
    late.start()
    time.sleep(0.2)
    other = FileRendezvous(meeting.path.with_name("other"))
    stranger = open_hub(other, 1)
    address = other.find()
    assert address is not None
    meeting.publish(HubAddress(hosts=address.hosts, port=address.port, key=b"y" * 32))
    time.sleep(0.2)
    hub = open_hub(meeting, 1)
    late.join(60)
    hub.join(60)
    assert found == [[0]]
    assert come(other, 0) == [0], "the stranger was not disturbed"
    stranger.join(60)


def test_strangers_cannot_join_or_stop_anything(meeting: FileRendezvous) -> None:
    hub = open_hub(meeting, 1)
    address = meeting.find()
    assert address is not None
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b'{"type":"failed","record":{}}\n' * 9):
        with socket.create_connection((address.hosts[0], address.port)) as stranger:
            stranger.sendall(garbage)
    assert come(meeting, 0) == [0]
    hub.join(60)
    assert not hub.is_alive()


def test_the_port_closes_when_all_have_come(meeting: FileRendezvous) -> None:
    hub = open_hub(meeting, 1)
    address = meeting.find()
    assert address is not None
    peer, _, _ = connect_to_hub(meeting, member(0), 60)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.hosts[0], address.port), 30)
    peer.leave(0)
    peer.close()
    hub.join(60)


def test_two_processes_with_one_number_are_told(meeting: FileRendezvous) -> None:
    hub = open_hub(meeting, 2)
    first = threading.Thread(target=come, args=(meeting, 0))
    first.start()
    wait_until(lambda: 0 not in hub.missing(), "rank 0 has joined", interval_s=0.01)
    with pytest.raises(UsageError, match="two processes claim to be rank 0"):
        connect_to_hub(meeting, member(0), 60)
    assert come(meeting, 1) == [0, 1]
    first.join(60)
    hub.join(60)


def test_who_does_not_come_is_waited_for_only_so_long(meeting: FileRendezvous) -> None:
    with pytest.raises(RankFailure, match="waited 0 s for rank 0 and the others: it has not published"):
        connect_to_hub(meeting, member(1), 0.2)


def test_a_rank_that_gives_up_is_not_the_cause_those_that_did_not_come_are(
    meeting: FileRendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank counts from its own start, so any of them may be the first whose time is up."""
    records: list[FailureRecord] = []
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # rank 0 would exit in `on_all_down`
    hub = open_hub(meeting, 3, records.append)
    with pytest.raises(RankFailure, match=r"did not accept this rank \(some ranks never joined\)"):
        connect_to_hub(meeting, member(1), 0.5)
    wait_until(lambda: records, "the hub has noticed")
    hub.join(10)
    hub.close()
    sentence = records[0]["sentence"]
    cause = meeting.path.with_name("failure.json")
    cause.write_text(json.dumps(records[0]))
    assert first_failure(cause, {1: 1}, {1: 1})["error"] == sentence, "an exit code explains no more"
    assert re.match(
        r"2 of 3 ranks did not join within \d s: 0, 2; look at the start of their output", sentence
    )
    assert (
        format_cause(records[0], 3, None) == f"headway: {sentence}\n  raised by rank 1 of 3 on here (pid 1)\n"
    )


class EmptyStore:
    """torchrun's store while rank 0 has not come: `get` waits, and then raises."""

    def get(self, key: str) -> bytes:
        raise torch.distributed.DistStoreError(f"wait timeout after 300000ms, keys: /{key}")


def test_a_store_in_which_rank_0_has_written_nothing_is_one_sentence() -> None:
    store: Any = EmptyStore()
    with pytest.raises(RankFailure, match="waited 0 s for rank 0 and the others: it has not published"):
        connect_to_hub(StoreRendezvous(store, one_node=False), member(1), 0.2)


def test_a_meeting_point_that_others_could_have_written_is_refused(meeting: FileRendezvous) -> None:
    meeting.publish(HubAddress(hosts=("127.0.0.1",), port=1, key=KEY))
    meeting.path.chmod(0o602)
    with pytest.raises(UsageError, match="can be written by others"):
        meeting.find()
    if os.geteuid() == 0:
        meeting.path.chmod(0o600)
        os.chown(meeting.path, 65534, 65534)
        with pytest.raises(UsageError, match="belongs to another user"):
            meeting.find()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")
def test_a_meeting_point_behind_a_closed_door_is_named() -> None:
    with tempfile.TemporaryDirectory() as closed:  # root's alone
        os.seteuid(65534)
        try:
            with pytest.raises(
                UsageError, match=r"cannot be written \(Permission denied\); set HEADWAY_RUNS"
            ):
                FileRendezvous(Path(closed, "runs", "address")).check()
        finally:
            os.seteuid(os.getuid())


def test_many_launches_at_once() -> None:
    """A hundred of them with HEADWAY_FAULTS=full."""
    launches = 100 if FULL else 25
    command = [sys.executable, str(SCRIPTS / "many.py"), str(launches)]
    done = warm.run(command, capture_output=True, text=True, timeout=110, check=True)
    assert done.stdout == f"{2 * launches} of {2 * launches} ranks joined their own launch\n"


def run(code: str, cwd: Path, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return warm.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=180,
    )


BAD = {
    "unknown device": (
        "hw.init(device='gpu')",
        {},
        "device='gpu' is not a valid device; use one of auto, cpu, cuda, mps",
    ),
    "no such device": ("hw.init(device='cuda')", {}, "torch sees no GPU; use device='auto' or 'cpu'"),
    "name with a newline": (
        "hw.init(); hw.dist.open_run(name='a\\nb')",
        {},
        "'a\\nb' is not a valid run name",
    ),
    "name that climbs": ("hw.init(); hw.dist.open_run(name='../x')", {}, "'../x' is not a valid run name"),
    "name with a space": ("hw.Pipeline(name='my run')", {}, "'my run' is not a valid run name"),
    "root that is a file": ("hw.init(); hw.dist.open_run('file')", {}, "file"),
    "no store": ("hw.init()", {"RANK": "0", "WORLD_SIZE": "2"}, "start the script with torchrun"),
    "time of torch": (
        "import datetime; hw.init(step_timeout=datetime.timedelta(hours=1))",
        {},
        "step_timeout=datetime.timedelta(seconds=3600) is not a valid time: give seconds, such as 600",
    ),
    "no time": ("hw.init(setup_timeout=-1)", {}, "setup_timeout=-1 is not a valid time"),
    "two ranks and nowhere to meet": (
        "hw.init()",
        {
            "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_COMM_WORLD_SIZE": "2",
            "PMIX_NAMESPACE": "x",
            "HEADWAY_RUNS": "no/where",
        },
        "set HEADWAY_RUNS to a directory that all ranks can write",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_exit_2_and_nothing_made(case: str, tmp_path: Path) -> None:
    code, environ, sentence = BAD[case]
    (tmp_path / "file").touch()
    done = run(f"import headway as hw; {code}", tmp_path, environ)
    lines = [line for line in done.stderr.splitlines() if "launched by" not in line]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("headway: ")
    assert sentence in lines[0]
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208


def test_leaving_puts_everything_back(tmp_path: Path) -> None:
    code = """
import os, signal, sys, threading
import torch.distributed
import headway as hw
import headway.dist
sys.excepthook = lambda *_: print("the hook of the script")
before = dict(os.environ), sys.excepthook, signal.getsignal(signal.SIGUSR1), threading.active_count()
for _ in range(3):
    assert hw.init(device="cpu") is hw.init()
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == "0" and os.environ["WORLD_SIZE"] == "1"
    hw.dist.leave()
    hw.dist.leave()
    assert not torch.distributed.is_initialized()
after = dict(os.environ), sys.excepthook, signal.getsignal(signal.SIGUSR1), threading.active_count()
assert before == after, (before, after)
"""
    done = run(code, tmp_path, {})
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "join", ["hw.init(device='cpu'); 1 / 0", "hw.init(device='cpu'); hw.dist.leave(); 1 / 0"]
)
def test_the_hook_of_the_script_is_called(join: str, tmp_path: Path) -> None:
    hook = "sys.excepthook = lambda kind, *_: print(kind.__name__)"
    done = run(f"import sys, headway as hw; {hook}; {join}", tmp_path, {})
    assert (done.returncode, done.stdout) == (1, "ZeroDivisionError\n"), done.stderr


def test_a_prompt_goes_on_after_a_mistake(tmp_path: Path) -> None:
    code = """
import sys, headway as hw
sys.ps1 = ">>> "
def mistake(line):
    try:
        exec(line)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
mistake("hw.init(device='gpu')")
hw.init(device="cpu")
mistake("missing")
print("still here")
"""
    done = run(code, tmp_path, {})
    assert (done.returncode, done.stdout) == (0, "still here\n"), done.stderr
    assert "NameError: name 'missing' is not defined" in done.stderr


def test_without_a_check_for_hangs_collectives_have_a_timeout(tmp_path: Path) -> None:
    """Of 0 seconds, NCCL would end the run at its first collective."""
    code = """
import torch.distributed as d, headway as hw
real, seen = d.init_process_group, []
d.init_process_group = lambda *args, **given: (seen.append(given["timeout"]), real(*args, **given))
hw.init(device="cpu", step_timeout=0)
print(seen[0].total_seconds())
"""
    assert run(code, tmp_path, {}).stdout == "1800.0\n"


RESTARTED = """
import os, signal, sys, torch, torch.distributed as d, headway as hw, headway.dist.group
hw.dist.is_initialized()  # imports the package before the forks
torch.set_num_threads(1)

def rank(number, start):
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    hw.init(device="cpu", setup_timeout=60)
    store = hw.dist.store()
    if start == 0:
        store.set(f"left by {number}", "x")
        hw.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    left = store.check(["left by 0"]) or store.check(["left by 1"])
    copy = hw.dist.group.current().store.clone()  # as a save in the background has one
    copy.set(f"copy {number}", "x")
    copy.wait([f"copy {number}"])
    total = torch.tensor([number + 1])
    d.all_reduce(total)
    hw.dist.leave()
    os._exit(1 if left or total.item() != 3 else 0)

def torchrun(pipe):
    store = d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(pipe, str(store.port).encode())
    signal.pause()

readable, writable = os.pipe()
if not (agent := os.fork()):
    torchrun(writable)
os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
os.environ |= {"MASTER_PORT": os.read(readable, 9).decode(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
for start in range(2):
    children = {}
    for number in range(2):
        if not (child := os.fork()):
            rank(number, start)
        children[child] = number
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
os.kill(agent, signal.SIGKILL)
os.waitpid(agent, 0)
print(ended)
"""


def test_ranks_that_torchrun_restarts_find_nothing_of_the_last_ones(tmp_path: Path) -> None:
    """torchrun keeps its store, in which the last ranks have left values that are signed with another key."""
    done = run(RESTARTED, tmp_path, {})
    assert done.stdout == "[0, 0]\n", done.stderr


@ranks(2)
def test_the_world_under_ranks() -> None:
    world = hw.init()
    assert (world.world_size, world.nodes, world.node_rank) == (2, 1, 0)
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert int(os.environ["MASTER_PORT"]) > 0
    total = torch.tensor([world.rank])
    torch.distributed.all_reduce(total)
    assert total.item() == 1


def test_a_user_who_has_a_group_already_is_told(tmp_path: Path) -> None:
    code = """
import torch.distributed as d, headway as hw
d.init_process_group("gloo", store=d.HashStore(), rank=0, world_size=1)
hw.init()
"""
    done = run(code, tmp_path, {})
    assert "call headway.init() instead of init_process_group()" in done.stderr


def placement(local_rank: int, assigned: bool = False) -> RankPlacement:
    return RankPlacement(
        node_rank=0,
        nodes=1,
        local_rank=local_rank,
        local_world_size=4,
        ranks_on_node=(0, 1, 2, 3),
        gpus_assigned=assigned,
        layout="1 node x 4",
    )


def test_which_gpu_is_mine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is here, so torch is told what to say; the rules are what is tested."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device("auto", placement(3), 4) == torch.device("cuda:3")
    assert choose_device("cuda", placement(3, assigned=True), 4) == torch.device("cuda:0"), (
        "several each, dealt out"
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("cuda", placement(3), 4) == torch.device("cuda:0"), "one visible GPU per task"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="4 ranks run on this node, but only 2 GPUs are visible"):
        choose_device("cuda", placement(3), 4)
    with pytest.raises(UsageError, match="device='mps' works for one process, but there are 4 ranks"):
        choose_device("mps", placement(0), 4)


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (
            RuntimeError("[/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:47"),
            True,
        ),
        (
            torch.distributed.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
            True,
        ),
        (torch.distributed.DistNetworkError("Broken pipe"), True),
        (torch.distributed.DistStoreError("wrong key"), False),
        (RuntimeError("the upload failed: Connection reset by peer"), False),
        (ConnectionRefusedError(111, "Connection refused"), False),
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
        (KeyboardInterrupt(), False),
        (RankFailure("waited for a connection that was closed"), False),
    ],
)
def test_what_is_only_an_echo(error: BaseException, echo: bool) -> None:
    assert is_echo_error(error) is echo
