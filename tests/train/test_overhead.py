"""What a step costs beyond a loop by hand, counted and not timed: calls of headway's own, and operations of torch."""

from __future__ import annotations

import math
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Batches, make_net, make_pipe, sgd

import headway
from headway.train import Pipeline, TrainValStage, run_state
from headway.train.metrics import timing

pytestmark = pytest.mark.usefixtures("alone")

HOME = str(Path(headway.__file__).parent)
FIRST, LAST = 65, 69  # between two log points, two steps whose time is measured, and two checksums of batches


class Quiet(TrainValStage):
    measured: ClassVar[list[int]] = []

    def pre_stage(self) -> None:
        self.measured.clear()

    def step(self, batch: Any) -> Tensor:
        x, y = batch
        if self.pipe._state.timer.measuring:
            self.measured.append(self.pipe.steps_done)
        return F.cross_entropy(self.models["net"](x), y)


class Watched(Batches):
    """Batches of which some are watched: from the moment when the first is asked for to the end of the last."""

    def __init__(self, watch: Callable[[], Any]) -> None:
        super().__init__(100)
        self.watch = watch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        every = list(super().__iter__())
        yield from every[:FIRST]
        with self.watch():
            yield from every[FIRST:LAST]
        yield from every[LAST:]


def run(folder: Path, watch: Callable[[], Any], **settings: Any) -> Pipeline:
    pipe = make_pipe(folder)
    pipe.register_dataset("train", Watched(watch))
    pipe.append_stage(Quiet(**settings), max_epochs=1)
    pipe.run()
    return pipe


class Calls:
    """Python functions of headway's that are called, and built-in ones that they call."""

    def __init__(self) -> None:
        self.python: Counter[str] = Counter()
        self.built_in: Counter[str] = Counter()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, what: Any) -> None:
        if frame.f_code.co_filename.startswith(HOME):
            if event == "call":
                self.python[frame.f_code.co_name] += 1
            elif event == "c_call":
                self.built_in[what.__name__] += 1


@pytest.mark.parametrize("window", [None, "20-25", "80-85"])
def test_a_step_makes_few_calls(window: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between operations that empty the caches, each function costs about half a microsecond: so each is listed.

    A profiler calls nothing outside of its window.
    """
    monkeypatch.setattr(timing, "SHORT_STEP_S", math.inf)
    calls, steps = Calls(), LAST - FIRST
    if window is not None:
        monkeypatch.setenv("HEADWAY_PROFILE", window)
    kept = run(tmp_path, calls).directory
    assert len(list(kept.traces_dir.iterdir())) == (0 if window is None else 2)
    within_a_step = [
        "_device_batches",
        "to_device",
        "train_step",
        "models",
        "count_samples",
        "apply_update",
        "zero_grad",
    ]
    assert calls.python == dict.fromkeys([*within_a_step, "finish_step", "move"], steps)
    assert calls.built_in.total() <= 14 * steps, calls.built_in


def test_a_kept_run_makes_few_calls_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SHORT_STEP_S", math.inf)
    calls, steps = Calls(), LAST - FIRST
    pipe = make_pipe(tmp_path)
    pipe.enable_checkpointing(every="1h")
    pipe.register_dataset("train", Watched(calls))
    pipe.append_stage(Quiet(), max_epochs=1)
    pipe.run()
    expected = {
        "after_step": 1,
        "step": 1,
        "_pass_point": 1,
        "pass_point": 2,
    }  # to stop, and to repeat a save
    assert {name: calls.python[name] / steps for name in expected} == expected
    assert calls.python.total() == 14 * steps


class AllCalls(Calls):
    """Every function that the training thread calls, locks and files included, and the threads of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def _see(self, frame: FrameType, event: str, what: Any) -> None:
        if event == "call":
            self.python[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            self.built_in[getattr(what, "__qualname__", repr(what))] += 1
            self.threads |= {thread.name for thread in threading.enumerate()}


def test_a_tracker_behind_a_black_hole_costs_a_step_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that accepts and never answers: not one call, lock or file operation more than without a tracker."""
    monkeypatch.setattr(timing, "SHORT_STEP_S", math.inf)
    monkeypatch.setattr(run_state, "feeding", partial(run_state.feeding, finish_s=0.0))
    monkeypatch.setenv("HEADWAY_SAMPLE_EVERY", "0")  # its thread ends after some seconds
    counted = []
    with socket.create_server(("127.0.0.1", 0)) as black_hole:
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        for number, uri in enumerate((None, f"http://127.0.0.1:{black_hole.getsockname()[1]}")):
            calls = AllCalls()
            pipe = make_pipe(tmp_path / str(number))
            if uri is not None:
                pipe.enable_mlflow(tracking_uri=uri)
            pipe.register_dataset("train", Watched(calls))
            pipe.append_stage(Quiet(), max_epochs=1)
            pipe.run()
            counted.append(calls)
    without, behind = counted
    assert without.python.total() > 0 and without.built_in.total() > 0
    assert behind.python - without.python == Counter() == behind.built_in - without.built_in
    assert behind.threads <= without.threads


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


def test_a_step_has_the_operations_of_a_loop_by_hand_and_keeps_its_loss(tmp_path: Path) -> None:
    mine, by_hand = Operations(), Operations()
    run(tmp_path, lambda: mine)
    net = make_net()
    optimizer = sgd(net.parameters())
    for x, y in Watched(lambda: by_hand):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    steps = LAST - FIRST
    assert mine.seen - by_hand.seen == {"aten.detach.default": steps}
    # what zero_grad() tells a profiler of itself
    entered, left = (
        "profiler._record_function_enter_new.default",
        "profiler._record_function_exit._RecordFunction",
    )
    assert by_hand.seen - mine.seen == {entered: steps, left: steps}


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("where", ["class", "instance"])
def test_an_optimizer_that_forgets_in_its_own_way_does_so(
    where: str, clip: float | None, tmp_path: Path
) -> None:
    forgotten: list[int] = []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            forgotten.append(1)
            super().zero_grad(set_to_none)

    pipe = Pipeline(name="own", root=tmp_path)
    net = make_net()
    pipe.register_model("net", net)
    optimizer = (Own if where == "class" else torch.optim.SGD)(net.parameters(), lr=0.1)
    if where == "instance":
        optimizer.zero_grad = lambda: forgotten.append(1)  # type: ignore[method-assign]
    pipe.register_optimizer("own", optimizer)
    pipe.register_dataset("train", Batches(5))
    pipe.append_stage(Quiet(gradient_clip=clip), max_epochs=1)
    pipe.run()
    assert len(forgotten) == 6, "before the first step, and after each"


@pytest.mark.parametrize("name", ["optimizers", "zero_grad", "optimize", "gradient_clip", "clip_gradients"])
def test_what_a_stage_decides_itself_is_asked_for_in_each_step(name: str, tmp_path: Path) -> None:
    asked: list[int] = []

    def own(stage: TrainValStage, *arguments: Any) -> Any:
        asked.append(stage.pipe.steps_done)
        return getattr(TrainValStage, name)(stage, *arguments)

    stage = type("Own", (Quiet,), {name: own})(gradient_clip=1.0 if name == "clip_gradients" else None)
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(5))
    pipe.append_stage(stage, max_epochs=1)
    pipe.run()
    assert {0, 1, 2, 3, 4} <= set(asked)


@pytest.mark.parametrize("brief", [math.inf, 0.0])
@pytest.mark.parametrize("log_every", [50, 10, 1])
def test_of_brief_steps_one_between_log_points_is_measured(
    brief: float, log_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "SHORT_STEP_S", brief)
    weights: list[int] = []
    turn = timing.PhaseTimer._switch

    def turned(timer: timing.PhaseTimer, phase: timing.Phase, weight: int) -> None:
        if phase == "compute" and sys._getframe(1).f_code.co_name != "take":
            weights.append(weight)
        turn(timer, phase, weight)

    monkeypatch.setattr(timing.PhaseTimer, "_switch", turned)
    run(tmp_path, Calls(), log_every=log_every)
    assert weights[:log_every] == [1] * log_every, "all of them, until it is known how long they take"
    rest = 100 - log_every
    assert weights[log_every:] == ([log_every] * (rest // log_every) if brief else [1] * rest)
    later = range(log_every, 100)
    assert Quiet.measured[log_every:] == list(later[log_every // 5 :: log_every] if brief else later)


def test_what_is_measured_stands_for_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    timer = timing.PhaseTimer(torch.device("cpu"), alone=False)
    for step in range(50):
        timer.begin_step(10 if step % 10 == 2 else 0)
        pass_time(0.001)
        timer.mark_step("compute")
        pass_time(0.004)
    timer.begin_step(0)
    timer.mark("wait")
    pass_time(0.5)
    timer.stop()
    pass_time(7.0)
    assert timer.take() == pytest.approx({"data": 0.05, "compute": 0.2, "wait": 0.5})
    assert timer.every == timing.SAMPLE_STEPS
    for _ in range(50):
        timer.mark("compute")
        pass_time(0.06)
    assert timer.take() == pytest.approx({"compute": 3.0})
    assert timer.every == 1, "steps that take long are all measured"


@pytest.mark.parametrize("alone", [True, False])
def test_alone_nobody_is_waited_for(alone: bool) -> None:
    timer = timing.PhaseTimer(torch.device("cpu"), alone=alone)
    timer.mark("wait")
    timer.mark("other")
    assert bool(timer.take()) != alone
    timer.mark("compute")
    timer.mark("wait")
    timer.mark("other")
    assert timer.take().keys() >= {"compute", "wait", "other"}, "what was under way has to end"


class Event:
    """A CUDA event by a clock that a test moves."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.now += 1.0
        self.at = Event.now

    def query(self) -> bool:
        return self.at < Event.now  # the last one is under way

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


def test_a_validation_of_any_length_keeps_few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = timing.PhaseTimer(torch.device("cuda"))
    for _ in range(10_000):
        timer.mark("validation")
        timer.mark("data")
    assert len(timer._events) + len(timer._spare) <= timing._MAX_EVENTS_KEPT
    timer.mark("other")
    timer.mark("other")
    assert timer.take() == {"validation": 10_000.0, "data": 10_000.0}
