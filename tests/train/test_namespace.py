"""A stage belongs to its user: every name that is not documented is free, and a clash with one that is, is refused."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from toys import Batches, Classify, make_pipe

from headway.errors import UsageError
from headway.train import Stage, TrainValStage

alone = pytest.mark.usefixtures("alone")

# what people call things, what the loop called its own state once, and what it calls it now
PLAUSIBLE = re.findall(
    r"\w+",
    """
    weight weights samples sample batch batch_size passes skipped meter meters precision step_count steps loss
    losses_ epoch_metrics columns running check feed wishes begun ended finished recent_losses split stopped
    stop_requested in_epoch epoch_began logged_at muted validated validated_at val_meter settings log_every
    may_fail total_steps check_progress before_log_point examine epoch_values state_dict load_state_dict recall
    shares parameters let_gradients_travel apply_update evaluating shares_batches val_batches validation_due
    check_lengths not_a_loss rests_next begin_epoch begin_pass metrics metric model optimizer scheduler
    criterion loss_fn transform augment ema scaler autocast world rank run state status timer clock seed rng
    data loader dataset lr best patience counter queue memory teacher student head backbone temperature alpha
    beta gamma writer logger logs results outputs predictions targets labels inputs cache buffer mode phase
    verbose debug version kind key keys values items index keeper ledger reporter sinks directory root stages
    callbacks modules stop_agreed not_counted pause_follows log_point_flags apply_update set_gradient_sync
    restore_pass_states device_batches steps_since failpoints window epochs train val validate test fit start
    stop close open read write save load reset update clear call note name_ of done _updates _validated _passes_begun
    _only_optimizer _prefixes _fixed_updates _is_sound _opened _state _check _name _pipe _models _meter
    _settings _epoch _steps _stage _batch _log _history _device _run _metrics _columns
    """,
)


def losses(stage: Classify, folder: Path) -> list[float]:
    pipe = make_pipe(folder)
    pipe.register_dataset("train", Batches(12))
    pipe.register_dataset("val", Batches(3))
    pipe.append_stage(stage, max_epochs=2, name="toy")
    pipe.run()
    return [*stage.losses, *pipe.history["train/loss"], *pipe.history["val/loss"]]  # type: ignore[list-item]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"accumulate": 2, "gradient_clip": 1.0, "precision": "bf16", "log_every": 5},
    {"on_nan": "skip", "precision": "fp16"},
]


@alone
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("how", ["before", "after", "in each step", "as methods"])
def test_every_undocumented_name_is_free(how: str, settings: dict[str, Any], tmp_path: Path) -> None:
    class Before(Classify):
        def __init__(self, **settings: Any) -> None:
            for name in PLAUSIBLE:
                setattr(self, name, "mine")
            super().__init__(**settings)

    class After(Classify):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            for name in PLAUSIBLE:
                setattr(self, name, "mine")

    class InEachStep(Classify):
        def step(self, batch: Any) -> Any:
            for name in PLAUSIBLE:
                setattr(self, name, "mine")
            return super().step(batch)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the loop calls a method that is the user's")

    kinds = {"before": Before, "after": After, "in each step": InEachStep}
    kind = kinds.get(how) or type("Mine", (Classify,), dict.fromkeys(PLAUSIBLE, refuse))
    stage = kind(**settings)
    assert losses(stage, tmp_path / "named") == losses(Classify(**settings), tmp_path / "plain")
    assert how == "as methods" or all(getattr(stage, name) == "mine" for name in PLAUSIBLE)


HOOKS = ["pre_stage", "post_stage", "pre_epoch", "post_epoch"]
USED = [
    *(
        "pipe",
        "models",
        "datasets",
        "device",
        "config",
        "history",
        "log",
        "log_image",
        "log_figure",
        "log_histogram",
        "log_text",
        "enable_profiler",
        "add_metric",
        "add_column",
        "stop_stage",
    ),
    *("batches", "step_optimizer", "name", "epoch", "steps_done", "max_epochs", "max_steps"),
]
WRITTEN = ["run_epoch", "count_samples", "predict", *HOOKS]
USED_IN_TRAINING = [*USED, "training", "run_epoch"]
WRITTEN_IN_TRAINING = [
    *(
        "step",
        "train_step",
        "val_step",
        "train_dataset",
        "val_dataset",
        "optimizers",
        "zero_grad",
        "clip_gradients",
    ),
    *("optimize", "gradient_clip", "loss_metric_name", "train_metric_prefix", "val_metric_prefix"),
    *("count_samples", "predict", *HOOKS),
]


@pytest.mark.parametrize(
    ("kind", "used", "written"),
    [(Stage, USED, WRITTEN), (TrainValStage, USED_IN_TRAINING, WRITTEN_IN_TRAINING)],
)
def test_public_names_are_those_that_are_documented(kind: type, used: list[str], written: list[str]) -> None:
    """One name more is one that users cannot have: if it must be, add it here, to the docstring and docs/train.md."""
    assert {name for name in dir(kind) if not name.startswith("_")} == {*used, *written}
    page = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
    section = page[page.index("## Names in a stage") :].split("\n## ")[0]
    on_the_page = set(re.findall(r"`(\w+)`", section))
    assert {*used, *written} <= on_the_page
    docstrings = " ".join(filter(None, (inspect.getdoc(each) for each in {Stage, kind})))
    assert {*used, *written} - {"run_epoch"} <= set(re.findall(r"`(\w+)`", docstrings))


@pytest.mark.parametrize("kind", [Stage, TrainValStage])
def test_nothing_else_is_the_loops(kind: type) -> None:
    """Privately a stage has one name, too: what users call `_something` is theirs."""
    ours = {name for name in dir(kind) if name.startswith("_") and not name.startswith("__")}
    assert ours | set(kind.__annotations__) <= {"_loop", "_abc_impl"}
    stage = Classify() if kind is TrainValStage else Own()
    assert set(vars(stage)) <= {"_loop", "losses"}


class Own(Stage):
    def run_epoch(self) -> None:
        pass


@pytest.mark.parametrize("name", [*USED_IN_TRAINING, "_loop"])
def test_what_users_use_is_not_replaced_by_accident(name: str) -> None:
    sentence = (
        "pass it to pipe.append_stage"
        if name in ("name", "max_epochs", "max_steps")
        else "choose another name"
    )
    for value in (None, 3, lambda _: None):
        with pytest.raises(UsageError, match=f"Mine sets '{name}'.*: {sentence}"):
            type("Mine", (Classify,), {name: value})
    with pytest.raises(UsageError, match=f"Mine sets '{name}'"):
        type("Mine", (type("Mixin", (), {name: 3}), Classify), {})
    with pytest.raises(UsageError, match=f"Classify sets '{name}'.*: {sentence}"):
        setattr(Classify(), name, 3)


@pytest.mark.parametrize("name", WRITTEN_IN_TRAINING)
def test_a_method_that_the_loop_calls_stays_a_method(name: str) -> None:
    with pytest.raises(
        UsageError, match=rf"Mine sets '{name}' to 3, but the loop calls {name}\(\): define it"
    ):
        type("Mine", (Classify,), {name: 3})
    stage = Classify()
    with pytest.raises(UsageError, match=rf"Classify sets '{name}' to \[\], but the loop calls {name}\(\)"):
        setattr(stage, name, [])
    setattr(stage, name, lambda *_: None)
    type("Mine", (Classify,), {name: lambda *_: None})


def test_names_of_the_managed_loop_are_free_in_a_loop_of_your_own() -> None:
    names = {*USED_IN_TRAINING, *WRITTEN_IN_TRAINING} - {*USED, *WRITTEN}
    stage = type("Mine", (Own,), dict.fromkeys(names, 3))()
    for name in names:
        setattr(stage, name, 4)


@alone
def test_a_stage_that_forgets_super_is_told(tmp_path: Path) -> None:
    class Forgets(Classify):
        def __init__(self) -> None:
            self.losses = []

    with pytest.raises(UsageError, match=r"Forgets.__init__ does not call super\(\).__init__\(\)"):
        make_pipe(tmp_path).append_stage(Forgets(), max_epochs=1)
