"""Asked to stop, all ranks stop at one point, with a checkpoint; and go on as if nothing had been."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d
import warm
from test_resume import BATCH, SCRIPT, Cut, Traced, assert_same, dataset, make, seeded, weights
from torch import Tensor
from torch.utils.data import DataLoader as TorchLoader
from waiting import exit_in_time, wait_until

import headway as hw
from headway.checkpoint.format.directory import list_steps
from headway.dist.collective.exchange import FOREVER, RankExchange
from headway.dist.control import stop
from headway.dist.control.signals import STOP_SIGNALS
from headway.dist.group import current
from headway.errors import Stopped
from headway.run import Run
from headway.system import files
from headway.testing import ranks
from headway.train import Callback, Pipeline, Stage
from headway.train.resume import end_of_run
from headway.train.resume.lead_time import LeadTime
from headway.train.run_state import RunState

alone = pytest.mark.usefixtures("alone")


def wait_for_the_word() -> None:
    """Threads talk about a signal; this machine may be busy."""
    while not current().agreement.decided:
        time.sleep(0.001)


class Signalled(Traced):
    """Some ranks get a signal in some step of training or validation."""

    def __init__(self, *, number: int, who: tuple[int, ...], at: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self.number, self.who, self.at = number, who, at

    def step(self, batch: Any) -> Tensor:
        here = self.pipe.steps_done + 1 if self.training else ("val", self.pipe.steps_done)
        if here == self.at and hw.rank() in self.who:
            os.kill(os.getpid(), self.number)
            wait_for_the_word()
        return super().step(batch)


def stop_and_go_on(folder: Path, number: int, who: tuple[int, ...], at: Any, **settings: Any) -> int:
    """Returns the step at which all ranks stopped."""
    settings |= {"log_every": 1000}
    whole = Traced(**settings)
    golden = seeded(make(folder / "golden", whole, every="1h"))
    golden.run()
    first = Signalled(number=number, who=who, at=at, **settings)
    pipe = seeded(make(folder / "cut", first, every="1h"))
    with pytest.raises(Stopped, match="with a checkpoint: the same command resumes"):
        pipe.run()
    stopped = hw.all_gather_object(pipe.steps_done)
    assert len(set(stopped)) == 1, "all at the same step"
    assert (pipe.directory.checkpoint_dir(pipe.steps_done) / "manifest.json").exists()
    second = Traced(**settings)
    again = make(folder / "cut", second, every="1h")
    again.run()
    assert first.by_step | second.by_step == whole.by_step
    assert not set(first.by_step) & set(second.by_step), "no step twice"
    assert_same(weights(again), weights(golden))
    assert again.history["val/loss"] == golden.history["val/loss"]
    assert again.history.points("val/loss") == golden.history.points("val/loss"), "none twice, none left out"
    logged = [step for step, _ in again.history.points("lr/sgd")]
    assert len(logged) == len(set(logged)), "a log point before the stop is not held again"
    hw.barrier()
    attempts = again.directory.info()["attempts"]
    assert [(each["status"], each["exit_code"]) for each in attempts] == [("stopped", 75), ("done", 0)]
    assert [(each["step_started"], each["step_ended"]) for each in attempts] == [
        (0, pipe.steps_done),
        (pipe.steps_done, 33),
    ]
    return stopped[0]


@alone
@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
)
def test_a_signal_stops_after_the_step(number: int, tmp_path: Path) -> None:
    assert stop_and_go_on(tmp_path, number, (0,), 5) == 5  # log points are a thousand steps apart


@ranks(2)
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
def test_all_ranks_stop_at_the_same_step(who: tuple[int, ...], tmp_path: Path) -> None:
    assert stop_and_go_on(tmp_path, signal.SIGUSR1, who, 5) in (5, 6)


class EndsAt(Callback):
    """Ends the stage at a log point, of which other ranks hear at the next one."""

    def log_point(self, stage: Stage, kind: str, point: Any) -> None:  # noqa: ARG002
        if stage.pipe.steps_done == 6 and kind == "train":
            stage.stop_stage()


@alone
def test_a_stage_that_was_to_end_ends_after_a_resume(tmp_path: Path) -> None:
    """The checkpoint of the step at which a callback ended it comes before all ranks agree."""
    for cut in (8, None):
        pipe = make(tmp_path, Traced(cut=cut, log_every=3), every=3)
        pipe.add_callback(EndsAt())
        with pytest.raises(Cut) if cut else nullcontext():
            pipe.run()
    assert pipe.steps_done == 9


class OneEndsAt(EndsAt):
    """The same, on rank 1 alone."""

    def log_point(self, stage: Stage, kind: str, point: Any) -> None:
        if hw.rank() == 1:
            super().log_point(stage, kind, point)


@ranks(2)
def test_a_stage_that_one_rank_was_to_end_ends_after_a_resume(tmp_path: Path) -> None:
    for cut in (8, None):
        pipe = make(tmp_path, Traced(cut=cut, log_every=3), every=3)
        pipe.add_callback(OneEndsAt())
        with pytest.raises(Cut) if cut else nullcontext():
            pipe.run()
    assert pipe.steps_done == 9


@alone
def test_in_a_validation(tmp_path: Path) -> None:
    assert stop_and_go_on(tmp_path, signal.SIGTERM, (0,), ("val", 11)) == 11


@alone
@pytest.mark.parametrize("at", [8, ("val", 8), 11, ("val", 20)])
def test_where_a_validation_between_steps_is_due(at: Any, tmp_path: Path) -> None:
    """A stop does not wait for it; it is made first thing afterwards."""
    stopped = stop_and_go_on(tmp_path, signal.SIGTERM, (0,), at, val_every="4 steps")
    assert stopped == (at[1] if isinstance(at, tuple) else at)


class Scored(Signalled):
    """A metric that is the best in the validation after step 8."""

    def val_step(self, batch: Any) -> None:
        self.step(batch)
        self.log("score", abs(self.pipe.steps_done - 8), weight=len(batch[0]))


@alone
@pytest.mark.parametrize("at", [8, ("val", 8)])
def test_the_best_of_a_validation_that_came_after_the_stop_is_kept(at: Any, tmp_path: Path) -> None:
    """The checkpoint of the stop has no metrics; one with those of the validation takes its place."""
    for number in (1, 2):
        stage = Scored(number=signal.SIGTERM, who=(0,), at=at if number == 1 else None, val_every="4 steps")
        pipe = make(tmp_path, stage, every=3, keep_best="val/score", max_epochs=2)
        with pytest.raises(Stopped, match="after step 8") if number == 1 else nullcontext():
            pipe.run()
    kept = hw.checkpoint.load_best(pipe.directory)
    assert (kept.step, kept.metrics["val/score"]) == (8, 0.0)
    assert list_steps(pipe.directory.checkpoints_dir) == [8, 18, 21, 22]


@ranks(2)
def test_in_a_validation_of_one_rank(tmp_path: Path) -> None:
    """Rank 1 hears it in its validation, rank 0 may be through with its own and wait in the reduction."""
    assert stop_and_go_on(tmp_path, signal.SIGTERM, (1,), ("val", 11)) in (11, 12)


class Ending(Callback):
    """Signals when the last step is done: in the last save, or in `post_run`."""

    def __init__(self, where: str, who: tuple[int, ...]) -> None:
        self.where, self.who = where, who

    def post_stage(self, stage: Stage) -> None:  # noqa: ARG002
        if self.where == "save":
            self._signal()

    def post_run(self, pipe: Pipeline) -> None:  # noqa: ARG002
        if self.where == "post_run":
            self._signal()

    def _signal(self) -> None:
        if hw.rank() in self.who:
            os.kill(os.getpid(), signal.SIGTERM)
        wait_for_the_word()


def stop_at_the_end(folder: Path, where: str, who: tuple[int, ...]) -> None:
    """What is stopped is resumed, what is done is restored, and nothing is repeated."""
    first = make(folder, Traced(), every="1h")
    first.add_callback(Ending(where, who))
    said = "after the last step, 33, with a checkpoint" if where == "save" else "when .* was finished"
    with pytest.raises(Stopped, match=said):
        first.run()
    current().raised = True  # as the exception hook notes it
    hw.barrier()
    (attempt,) = first.directory.info()["attempts"]
    recorded = (attempt["status"], attempt["exit_code"], attempt.get("script_ended"))
    assert recorded == (("stopped", 75, None) if where == "save" else ("done", 0, False))
    hw.barrier()
    current().opened_runs.clear()  # as another process
    if hw.rank() == 0:
        forget_owner(first.directory)
    stage = Traced()
    again = make(folder, stage, every="1h")
    again.run()
    assert again.directory == first.directory
    assert stage.by_step == {}, "nothing is trained"
    assert_same(weights(again), weights(first))
    hw.barrier()
    statuses = [each["status"] for each in again.directory.info()["attempts"]]
    assert statuses == (["stopped", "done"] if where == "save" else ["done"])
    current().raised = False
    current().call_at_clean_exit()
    assert again.directory.info()["attempts"][-1]["script_ended"] or hw.rank()
    hw.barrier()
    current().opened_runs.clear()
    third = make(folder, Traced(), every="1h", max_epochs=1)
    third.run()
    assert third.directory != first.directory, "the script had ended: this is a new run"


def forget_owner(run: Run) -> None:
    """Lets the last owner of a run look like a process that is gone."""
    file = max(run.lock_dir.glob("owner-*.json"))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pid": 2**22 + 7}))


@alone
def test_a_process_of_a_script_is_not_that_script(tmp_path: Path) -> None:
    """A forked process ends without the hooks of `atexit`: each of two alike trains a run of its own."""

    def train() -> None:
        pipe = make(tmp_path, Traced(), every="1h", max_epochs=1)
        pipe.run()

    for _ in range(2):
        process = multiprocessing.get_context("fork").Process(target=train)
        process.start()
        process.join()
        assert process.exitcode == 0
    assert len(list(hw.run.runs_under(tmp_path))) == 2


LEAVES = """
import os, sys
import torch
import headway as hw

class Fit(hw.TrainValStage):
    def step(self, batch):
        return self.models["net"](batch[0]).square().mean()

pipe = hw.Pipeline(name="leaves", root=sys.argv[1])
pipe.register_model("net", torch.nn.Linear(2, 1))
pipe.register_optimizer("sgd", lambda params: torch.optim.SGD(params, lr=0.1))
pipe.register_dataset("train", hw.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=2))
pipe.append_stage(Fit(), max_epochs=1)
pipe.enable_checkpointing(sys.argv[1], background=False)
pipe.run()
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    os._exit(0)
"""


def test_a_script_may_fork_and_leave_by_os_exit(tmp_path: Path) -> None:
    """A real process: the child ends by itself, though it has no thread of the group; and the script has ended."""
    command = [sys.executable, "-c", LEAVES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = hw.run.runs_under(tmp_path)
    (attempt,) = run.info()["attempts"]
    assert (attempt["status"], attempt["script_ended"]) == ("done", True), "the same command trains a new run"


@alone
@pytest.mark.parametrize("where", ["save", "post_run"])
def test_a_signal_after_the_last_step(where: str, tmp_path: Path) -> None:
    stop_at_the_end(tmp_path, where, (0,))


@ranks(2)
@pytest.mark.parametrize("where", ["save", "post_run"])
def test_a_signal_to_one_rank_after_the_last_step(where: str, tmp_path: Path) -> None:
    stop_at_the_end(tmp_path, where, (1,))


@ranks(2)
def test_a_rank_may_be_busy_after_the_last_step_for_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for longer than a rank may make no progress; the run is done when it is through."""
    seen: list[str] = []
    limits: list[float] = []
    arrive = RankExchange.arrive

    class Busy(Callback):
        def post_run(self, pipe: Pipeline) -> None:
            if hw.rank():
                time.sleep(0.3)
                seen.append(pipe.directory.info()["attempts"][0]["status"])

    def note_limit(exchange: RankExchange) -> None:
        limits.append(exchange.timeout_s)
        arrive(exchange)

    monkeypatch.setattr(RankExchange, "arrive", note_limit)
    pipe = make(tmp_path, Traced(), every="1h", max_epochs=1)
    pipe.add_callback(Busy())
    pipe.run()
    assert seen == ["running"] * hw.rank()
    assert limits[0] == FOREVER.total_seconds(), "only then are ranks to leave in bounded time"


class Alone(Stage):
    """Ranks that have nothing to do with each other, at different paces: no collective for a thousand steps."""

    def __init__(self) -> None:
        super().__init__(log_every=1000)

    def run_epoch(self) -> None:
        for _ in self.batches("train"):
            time.sleep(0.0002 + 0.002 * hw.rank())
            if self.pipe.steps_done == 20 and hw.rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR2)


@ranks(3)
def test_ranks_that_are_far_apart(tmp_path: Path) -> None:
    pipe = make(tmp_path, Alone(), every="1h", parallel="none", loader=[torch.zeros(1)] * 2000)
    del pipe.datasets["val"]
    with pytest.raises(Stopped, match="stopped by SIGUSR2"):
        pipe.run()
    steps = hw.all_gather_object(pipe.steps_done)
    assert len(set(steps)) == 1 and 20 < steps[0] <= 2000, steps


@alone
def test_many_signals_are_one_stop(tmp_path: Path) -> None:
    class Many(Traced):
        def step(self, batch: Any) -> Tensor:
            if self.pipe.steps_done == 4:
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, *[signal.SIGTERM] * 17):
                    os.kill(os.getpid(), number)
                wait_for_the_word()
            return super().step(batch)

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    pipe = make(tmp_path, Many(), every="1h")
    with pytest.raises(Stopped, match="stopped by SIGTERM after step 5"):
        pipe.run()
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
    assert sorted(path.name for path in pipe.directory.checkpoints_dir.glob("step-*")) == [
        "step-000000000000",
        "step-000000000005",
    ]


def test_ctrl_c_stays_ignored_where_a_shell_has_it_ignored() -> None:
    """As in what a script starts with `&`: Ctrl-C is for others."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop.handle_stop_signals(lambda _: None):
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@alone
def test_a_stop_whose_end_cannot_be_recorded_is_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is there, and the file system fails for a moment just when run.json is read."""
    usual = files.read_regular

    def fail(path: Path) -> bytes:
        if path.name == "run.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return usual(path)

    class Unreadable(Signalled):
        def step(self, batch: Any) -> Tensor:
            if self.pipe.steps_done == 4:
                monkeypatch.setattr(files, "read_regular", fail)
            return super().step(batch)

    pipe = make(tmp_path, Unreadable(number=signal.SIGTERM, who=(0,), at=5), every="1h")
    with pytest.raises(Stopped, match="stopped by SIGTERM after step 5, with a checkpoint"):
        pipe.run()
    assert list_steps(pipe.directory.checkpoints_dir) == [0, 5]


@alone
def test_a_second_ctrl_c_leaves_now(tmp_path: Path) -> None:
    class Twice(Traced):
        def step(self, batch: Any) -> Tensor:
            if self.pipe.steps_done == 4:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            return super().step(batch)

    pipe = make(tmp_path, Twice(), every="1h")
    with pytest.raises(KeyboardInterrupt):
        pipe.run()
    assert pipe.steps_done == 4
    (attempt,) = pipe.directory.info()["attempts"]
    assert (attempt["status"], attempt["exit_code"]) == ("interrupted", 130)


@alone
def test_handlers_of_the_users_own_are_called_too(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        pipe = make(tmp_path, Signalled(number=signal.SIGUSR1, who=(0,), at=5), every="1h")
        with pytest.raises(Stopped):
            pipe.run()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]


@alone
def test_a_signal_that_is_repeated_while_the_run_is_closed_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows may take half a minute to reach a server, and a scheduler repeats its signal meanwhile."""
    heard: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in numbers}
    close = RunState._end_recording  # after the sinks, the events and the lock

    def repeat(state: RunState) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
        close(state)

    monkeypatch.setattr(RunState, "_end_recording", repeat)
    try:
        pipe = make(tmp_path, Signalled(number=signal.SIGTERM, who=(0,), at=5), every="1h")
        with pytest.raises(Stopped):
            pipe.run()
        assert heard == [signal.SIGTERM], "the request itself, which the script's own handler gets, too"
        for number in numbers:
            os.kill(os.getpid(), number)
        assert heard == [signal.SIGTERM, *numbers], "the handlers of before are back"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@alone
@pytest.mark.parametrize("kind", [TorchLoader, hw.data.DataLoader])
def test_a_signal_to_all_processes_does_not_end_data_workers(kind: Any, tmp_path: Path) -> None:
    """SLURM sends SIGTERM to every process of a step: a worker that dies of it takes along its rank before it saves."""

    class Flooded(Traced):
        def step(self, batch: Any) -> Tensor:
            if self.pipe.steps_done == 4:
                workers = [each.pid for each in multiprocessing.active_children() if each not in others]
                assert len(workers) == 1
                subprocess.run(["kill", "-TERM", *map(str, workers), str(os.getpid())], check=True)
                wait_for_the_word()
            return super().step(batch)

    others = multiprocessing.active_children()
    loader = kind(dataset(), batch_size=BATCH, shuffle=True, num_workers=1, prefetch_factor=2)
    pipe = make(tmp_path, Flooded(), every="1h", loader=loader)
    with pytest.raises(Stopped, match="stopped by SIGTERM after step 5"):
        pipe.run()
    assert set(multiprocessing.active_children()) <= set(others), "the worker is gone when run() is left"


@alone
def test_without_checkpoints_signals_are_as_ever(tmp_path: Path) -> None:
    pipe = make(tmp_path, Signalled(number=signal.SIGINT, who=(0,), at=5))
    pipe._state.checkpointer = None
    with pytest.raises(KeyboardInterrupt):
        pipe.run()


@alone
def test_the_end_of_the_jobs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute is left, and that is what a save, two steps and the margin would take, for all we know."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 30))
    often = partial(stop.handle_stop_signals, clock_check_s=0.01)
    monkeypatch.setattr(stop, "handle_stop_signals", often)

    class Slow(Traced):
        def step(self, batch: Any) -> Tensor:
            if self.pipe.steps_done == 4:
                assert not current().agreement.decided
                self.pipe._state.checkpointer._lead_time.save_s = 20.0  # type: ignore[union-attr]  # twice
                wait_for_the_word()
            return super().step(batch)

    pipe = make(tmp_path, Slow(), every="1h")
    with pytest.raises(Stopped, match="stopped by the end of the job's time after step 5"):
        pipe.run()

    class Later(Traced):
        def step(self, batch: Any) -> Tensor:
            if self.pipe.steps_done == 6:
                wait_for_the_word()
            return super().step(batch)

    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 30))
    pipe.directory.ended_file.write_text('{"exit_code": 75, "time": "2026", "exit_s": 30.0}')
    with pytest.raises(Stopped, match="stopped by the end of the job's time"):
        make(tmp_path, Later(), every="1h").run()  # the last job took so long to queue itself again


def test_the_lead_covers_what_saves_steps_and_the_last_exit_took() -> None:
    lead = LeadTime()
    assert lead.seconds() == stop.MARGIN_S
    lead.save_s = 2.0
    assert lead.seconds() == stop.MARGIN_S + 4.0
    lead.exit_s = 30.0  # the last start needed so long to queue the job again
    assert lead.seconds() == 45.0 + 4.0


@ranks(2)
def test_between_log_points_nothing_is_sent_for_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No collective, no word through the store, no file: steps without a save cost nothing but a count."""
    calls: list[str] = []
    for where, name in (
        (c10d, "all_gather"),
        (c10d, "all_reduce"),
        (c10d, "broadcast"),
        (c10d.TCPStore, "set"),
        (c10d.TCPStore, "get"),
        (c10d.TCPStore, "wait"),
        (os, "open"),
        (os, "write"),
    ):
        original = getattr(where, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **options: Any) -> Any:
            calls.append(_name)
            return _original(*args, **options)

        monkeypatch.setattr(where, name, counted)

    class Watched(Traced):
        def step(self, batch: Any) -> Tensor:
            if self.pipe.steps_done == 2:
                calls.clear()
            if self.pipe.steps_done == 9:
                seen.extend(calls)
            return super().step(batch)

    seen: list[str] = []
    make(tmp_path, Watched(log_every=10), every=20, max_epochs=1).run()
    assert seen == []


# --- real processes: signals from outside, exit codes to the outside


def start(
    folder: Path, *command: str, popen: type[subprocess.Popen[Any]] = subprocess.Popen
) -> subprocess.Popen[str]:
    process = popen(
        [*command, str(SCRIPT), str(folder), "slow", "workers"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    steps = folder / "steps-0.jsonl"
    wait_until(
        lambda: process.poll() is not None or (steps.exists() and len(steps.read_text().splitlines()) >= 3),
        "three steps are trained",
        timeout_s=100,
    )
    assert process.poll() is None, process.communicate()[0]
    return process


def finish(folder: Path, *command: str) -> None:
    done = warm.run([*command, str(SCRIPT), str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "done at step 15" in done.stdout, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "steps-0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 16)), "no step twice"


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ((sys.executable, "-m", "headway", "run", "--nproc", "2"), signal.SIGTERM, 75),
        ((sys.executable, "-m", "headway", "run", "--nproc", "2"), signal.SIGINT, 130),
        ((sys.executable,), signal.SIGKILL, -signal.SIGKILL),
    ],
    ids=["agent-TERM", "agent-INT", "python-KILL"],
)
def test_a_signal_in_the_rest_of_the_script(
    command: tuple[str, ...], number: int, code: int, tmp_path: Path
) -> None:
    """The run is done, and the script is not: started again, it gets the run, and ends; then the next run is new."""
    line = [*command, str(SCRIPT), str(tmp_path), "tail"]
    first = warm.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(
        lambda: first.poll() is not None or (tmp_path / "tail").exists(), "it is trained", timeout_s=100
    )
    first.send_signal(number)
    said = first.communicate(timeout=100)[0]
    assert first.returncode == code, said
    (run,) = (tmp_path / "runs").iterdir()
    if code == 75:
        assert f"stopped by SIGTERM when {run.name} was finished: the same command restores it" in said
    assert json.loads((run / "run.json").read_text())["attempts"][-1]["status"] == "done"
    for runs in (1, 2):
        done = warm.run(line, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and "done at step 15" in done.stdout, done.stdout + done.stderr
        restored = (
            f"{run.name} is already finished (its script had not ended): models, history" in done.stderr
        )
        assert restored == (runs == 1), done.stderr
        assert len(list((tmp_path / "runs").iterdir())) == runs


@pytest.mark.timeout(600)
def test_a_script_alone_exits_with_75(tmp_path: Path) -> None:
    process = start(tmp_path, sys.executable)
    process.send_signal(signal.SIGTERM)
    text = exit_in_time(process)
    assert process.returncode == 75, text
    assert text.rstrip().endswith("with a checkpoint: the same command resumes"), text
    assert "Traceback" not in text
    finish(tmp_path, sys.executable)


@pytest.mark.timeout(600)
def test_ranks_under_headway_run_exit_with_75(tmp_path: Path) -> None:
    process = start(tmp_path, sys.executable, "-m", "headway", "run", "--nproc", "2", popen=warm.Popen)
    process.send_signal(signal.SIGUSR1)
    text = exit_in_time(process)
    assert process.returncode == 75, text
    assert "stopped by SIGUSR1" in text and "Traceback" not in text and "failed" not in text, text
    (run,) = (tmp_path / "runs").iterdir()
    assert not (run / "failure.json").exists()


def test_a_run_that_was_submitted_is_not_resumed_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create(tmp_path, name="digits", command=[])
    monkeypatch.delenv("HEADWAY_RUN", raising=False)
    assert end_of_run.resume_advice(run) == "the same command resumes"
    monkeypatch.setenv("HEADWAY_RUN", str(run.path))
    assert end_of_run.resume_advice(run).endswith(f"or by: headway resume {run.path}")
