"""Validation of several sets, before the first step, and outside of training: the same numbers on any ranks."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
import warm
from safetensors.torch import load_file
from toys import FEATURES, Batches, Classify, Net, make_net, make_pipe, sgd

import headway as hw
from headway.checkpoint.weights.readers import read_stamps
from headway.errors import UsageError
from headway.system import jsonlines
from headway.testing import ranks
from headway.train import Callback, Pipeline, Stage
from headway.train.evaluate import output, session
from headway.train.evaluate.predictor import _gather_bytes

SAMPLES, CLASSES = 23, 3


class TwoSets(Classify):
    def val_dataset(self) -> Any:
        return {"val": self.datasets["val"], "ood": self.datasets["ood"]}


def by_hand(net: torch.nn.Module, batches: Batches) -> tuple[float, float]:
    """Loss and accuracy over all samples."""
    net.eval()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with torch.no_grad():
        logits = net(x)
    return F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()


def test_several_sets_and_a_validation_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(4))
    pipe.register_dataset("val", Batches(3, rank=1, sizes=lambda number: 16 - 5 * number))
    pipe.register_dataset("ood", Batches(2, rank=2))
    pipe.append_stage(TwoSets(val_at_start=True, val_every="2 epochs"), max_epochs=2)
    run = pipe.run()
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("twosets:")]
    assert shown[0].startswith("twosets: epoch 1/2, step 0, val/loss "), "it is on the screen, too"
    rows = list(jsonlines.read(run.metrics_file(0)))
    first, last = (row for row in rows if row["kind"] == "validation")
    assert (first["step"], last["step"]) == (0, 8)
    for row, net in ((first, make_net()), (last, pipe.registered_models["net"].bare)):
        for name, batches in (("val", pipe.datasets["val"]), ("ood", pipe.datasets["ood"])):
            loss, accuracy = by_hand(net, batches)  # type: ignore[arg-type]
            torch.testing.assert_close(row["metrics"][f"{name}/loss"], loss, rtol=1e-6, atol=0)
            torch.testing.assert_close(row["metrics"][f"{name}/accuracy"], accuracy, rtol=1e-6, atol=0)
    one, two = pipe.history.epochs
    assert "val/loss" not in one.values  # the validation before the first step is not the epoch's
    assert two.values["ood/loss"] == last["metrics"]["ood/loss"]


class Counting(TwoSets):
    """Accuracy by a metric object, which the step updates in all sets."""

    def pre_stage(self) -> None:
        self.metric = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
        self.add_metric("val/metric", self.metric)
        self.add_metric("ood/only", self.metric)

    def val_step(self, batch: Any) -> Any:
        self.metric.update(self.models["net"](batch[0]), batch[1])
        return super().val_step(batch)


def test_a_metric_object_has_a_value_for_each_set(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(4))
    pipe.register_dataset("val", Batches(3, rank=1))
    pipe.register_dataset("ood", Batches(2, rank=2))
    pipe.append_stage(Counting(), max_epochs=2)
    pipe.run()
    last = pipe.history.epochs[-1].values
    assert last["val/metric"] == pytest.approx(last["val/accuracy"])
    assert last["ood/metric"] == last["ood/only"] == pytest.approx(last["ood/accuracy"])
    assert last["val/metric"] != last["ood/metric"] and "val/only" not in last
    found = pipe.test(Counting(), Batches(2, rank=3), weights="current")
    assert sorted(found) == ["test/accuracy", "test/loss", "test/metric"]
    assert found["test/metric"] == pytest.approx(found["test/accuracy"])


# --- evaluations of their own


class Samples(torch.utils.data.Dataset[Any]):
    """Few samples, so that the last batch is short on every number of ranks, and empty on some rank."""

    def __init__(self, seed: int = 5, count: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, FEATURES, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.x[index, :CLASSES].argmax()


class OwnSets(Classify):
    """As many sets as are registered under these names, and a name that is logged in some of them only."""

    def val_dataset(self) -> Any:
        return {name: loader for name, loader in self.datasets.items() if name != "train"}

    def val_step(self, batch: Any) -> Any:
        if (self._loop.val_prefix or "").startswith("o"):
            self.log("most", batch[0].max(), reduce="max")
        return super().val_step(batch)


@ranks(4)
def test_a_rank_may_have_no_batch_in_some_of_the_sets(tmp_path: Path) -> None:
    """Sets of fewer samples than ranks: first, last and several, within a run and by themselves, as if on one rank."""

    def check(found: Any, net: torch.nn.Module, counts: dict[str, int]) -> None:
        for name, count in counts.items():
            whole = Samples(count, count)
            loss, accuracy = by_hand(net, [(whole.x, whole.x[:, :CLASSES].argmax(1))])  # type: ignore[arg-type]
            assert found[f"{name}/loss"] == pytest.approx(loss, rel=1e-6)
            assert found[f"{name}/accuracy"] == pytest.approx(accuracy, rel=1e-6)
            assert found.get(f"{name}/most") == (whole.x.max().item() if name[0] == "o" else None)

    def loaders(counts: dict[str, int]) -> dict[str, Any]:
        return {
            name: hw.data.DataLoader(Samples(count, count), batch_size=8) for name, count in counts.items()
        }

    for number, counts in enumerate(
        [{"val": 23, "ood": 3}, {"first": 2, "val": 23, "ood": 1, "other": 40}, {"ood": 1, "val": 3}]
    ):
        where = Path(hw.broadcast_object(str(tmp_path))) / str(number)
        pipe, stage = make_pipe(where), OwnSets(val_every="2 steps")
        pipe.register_dataset("train", Batches(4, rank=hw.rank()))
        for name, loader in loaders(counts).items():
            pipe.register_dataset(name, loader)
        pipe.append_stage(stage, max_epochs=1)
        pipe.run()
        net = pipe.registered_models["net"].bare
        check(pipe.history.epochs[-1].values, net, counts)
        check(pipe.validate(stage, weights="current"), net, counts)
        renamed = {f"o{name}": count for name, count in counts.items()}
        check(pipe.test(stage, loaders(renamed), weights="current"), net, renamed)


class Predicting(Classify):
    kind = "tensor"
    fails_at = -1

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.calls = 0

    def predict(self, batch: Any) -> Any:
        self.calls += 1
        if self.calls == self.fails_at:
            raise KeyboardInterrupt
        logits = self.models["net"](batch[0])
        if self.kind == "dict":
            return {"logits": logits, "label": logits.argmax(1)}
        return [{"label": int(n)} for n in logits.argmax(1)] if self.kind == "list" else logits


def loader(**settings: Any) -> hw.data.DataLoader:
    return hw.data.DataLoader(Samples(), batch_size=2, **settings)


def fresh(folder: Path, **model: Any) -> Pipeline:
    """A pipeline in a process that trains nothing, with other weights than the run."""
    torch.manual_seed(99)
    pipe = Pipeline(name="toy", root=folder)
    pipe.register_model("net", Net(norm=False), **model)
    return pipe


def train_run(folder: Path) -> hw.Run:
    """A run whose best checkpoint is not its last."""
    pipe = make_pipe(folder, net=make_net(norm=False), ema=0.5)
    pipe.register_dataset("train", Batches(4))
    pipe.register_dataset("val", loader())
    pipe.append_stage(Predicting(val_every="1 steps", log_every=1), max_epochs=1)
    pipe.enable_checkpointing(every=1, keep_last=10, keep_best="max:val/loss", background=False)
    return pipe.run()


def saved_net(run: hw.Run, step: int, part: str = "averages") -> Net:
    net = make_net(norm=False)
    net.load_state_dict(hw.checkpoint.load(run.checkpoint_dir(step)).state[part]["net"])
    return net.eval()


def logits_of(net: Net) -> torch.Tensor:
    with torch.no_grad():
        return net(Samples().x)


def shared_run(folder: Path) -> hw.Run:
    """A run that one rank has trained, in a group of any size."""
    found = hw.find_latest(folder, name="toy")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train_run(folder)
    return folder


def check_evaluations(runs: Path, folder: Path, **model: Any) -> None:
    """Validates, tests and predicts on this group, and compares with the models by hand, on all samples at once."""
    run = shared_run(runs)
    best = hw.checkpoint.load_best(run).step
    assert best != 4
    rows_before = run.metrics_file(0).read_bytes()
    pipe, stage = fresh(runs, ema=0.9, **model), Predicting()
    labels = torch.stack([y for _, y in Samples()])  # type: ignore[misc]
    for weights, step, part in (("best", best, "averages"), ("last", 4, "averages"), (2, 2, "averages")):
        logits = logits_of(saved_net(run, step, part))
        found = pipe.test(stage, loader(), weights=weights)  # type: ignore[arg-type]
        assert found["test/loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
        right = (logits.argmax(1) == labels).float().mean().item()
        assert found["test/accuracy"] == pytest.approx(right, rel=1e-6)
    several = pipe.validate(stage, {"val": loader(), "ood": loader()}, weights="current", name="both")
    assert several["val/loss"] == several["ood/loss"] == found["test/loss"]
    path = pipe.predict(stage, loader(), folder / "logits.npy", weights="best")
    expected = logits_of(saved_net(run, best)).numpy()
    np.testing.assert_allclose(np.load(path), expected, rtol=1e-5, atol=1e-6)
    hw.barrier()
    if pipe.world.is_root:
        rows = list(jsonlines.read(run.eval_file("test")))[-3:]
        assert [row["step"] for row in rows] == [best, 4, 2]
        assert rows[-1]["metrics"] == found and rows[-1]["world_size"] == pipe.world.world_size
        assert run.metrics_file(0).read_bytes() == rows_before  # no row of training
    hw.barrier()


def test_evaluations_in_a_process_that_trains_nothing(runs: Path, tmp_path: Path) -> None:
    check_evaluations(runs, tmp_path)


def test_weights_that_a_run_removes_meanwhile_are_chosen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that trains has a better checkpoint by now."""
    run, removed = train_run(tmp_path), list[int]()

    def remove(path: Path) -> Any:
        stamps = read_stamps(path)
        if not removed:
            removed.append(int(path.name.removeprefix("step-")))
            shutil.rmtree(path)
        return stamps

    monkeypatch.setattr(session, "read_stamps", remove)
    fresh(tmp_path).test(Predicting(), loader(), weights="best")
    (row,) = jsonlines.read(run.eval_file("test"))
    assert row["step"] == hw.checkpoint.load_best(run).step and removed not in ([], [row["step"]])


@ranks(2)
def test_evaluations_are_the_same_on_two_ranks(runs: Path, tmp_path: Path) -> None:
    check_evaluations(runs, tmp_path)


@ranks(3)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_evaluations_are_the_same_on_three_ranks(parallel: str, runs: Path, tmp_path: Path) -> None:
    check_evaluations(runs, tmp_path, parallel=parallel)


def test_the_weights_are_those_that_the_run_validated_with(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether this pipeline averages weights or not; the word "raw" and ema=False are for those that were trained."""
    run = shared_run(runs)
    labels = torch.stack([y for _, y in Samples()])  # type: ignore[misc]
    losses = {
        part: F.cross_entropy(logits_of(saved_net(run, 4, part)), labels).item()
        for part in ("averages", "models")
    }
    assert losses["averages"] != pytest.approx(losses["models"], rel=1e-3)
    short = run.id.rpartition("-")[2]
    raw = hw.checkpoint.Weights(run, ema=False)
    for model in ({}, {"ema": 0.9}):
        for weights, part in (("last", "averages"), (short, "averages"), ("raw", "models"), (raw, "models")):
            pipe = fresh(runs, **model)
            found = pipe.test(Predicting(), loader(), weights=weights, run=short)  # type: ignore[arg-type]
            assert found["test/loss"] == pytest.approx(losses[part], rel=1e-6), (model, weights)
            said = capsys.readouterr().out
            word = " (averaged)" if part == "averages" else ""
            assert said.startswith(f"test, weights {run.checkpoint_dir(4)}{word}: test/accuracy"), said
            row = list(jsonlines.read(run.eval_file("test")))[-1]
            assert row["averaged"] == (["net"] if part == "averages" else [])
    began = fresh(runs, init_from=short).registered_models["net"].bare
    assert all(
        map(torch.equal, began.state_dict().values(), saved_net(run, 4, "models").state_dict().values())
    )


@pytest.mark.parametrize("kind", ["tensor", "dict", "list"])
def test_a_prediction_that_was_cut_off_continues(
    kind: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "COMMIT_S", 0.0)
    monkeypatch.setattr(Predicting, "kind", kind)
    name = {"tensor": "x.npy", "dict": "x.safetensors", "list": "x.jsonl"}[kind]
    whole = fresh(runs).predict(Predicting(), loader(), tmp_path / f"whole-{name}")
    stage = Predicting()
    stage.fails_at = 6
    with pytest.raises(KeyboardInterrupt):
        fresh(runs).predict(stage, loader(), tmp_path / name)
    assert not (tmp_path / name).exists()
    with (tmp_path / f".{name}.part").open("ab") as part:
        part.write(b"what a crash has left behind the position")
    stage = Predicting()
    path = fresh(runs).predict(stage, loader(), tmp_path / name)
    assert stage.calls == 12 - 5  # five batches were kept
    assert path.read_bytes() == whole.read_bytes()
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([name, whole.name])
    assert fresh(runs).predict(stage, loader(), tmp_path / name) == path  # a job that runs again goes on
    assert stage.calls == 7
    if kind == "dict":
        found = load_file(path)
        assert found["label"].equal(found["logits"].argmax(1)) and len(found["label"]) == SAMPLES
    if kind == "list":
        rows = list(jsonlines.read(path))
        labels = logits_of(saved_net(shared_run(runs), 4)).argmax(1)
        assert rows == [{"index": n, "label": int(label)} for n, label in enumerate(labels)]


@ranks(2)
def test_a_sharded_prediction_that_was_cut_off_continues(runs: Path, tmp_path: Path) -> None:
    """One sample is left, and with it a rank that has none, but must take part in the forward."""
    data = hw.data.DataLoader(Samples(), batch_size=11)
    stage = Predicting()
    stage.fails_at = 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "COMMIT_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            fresh(runs, parallel="fsdp").predict(stage, data, tmp_path / "logits.npy")
    hw.barrier()
    stage = Predicting()
    path = fresh(runs, parallel="fsdp").predict(stage, data, tmp_path / "logits.npy")
    assert stage.calls == 1
    expected = logits_of(saved_net(shared_run(runs), 4)).numpy()
    np.testing.assert_allclose(np.load(path), expected, rtol=1e-5, atol=1e-6)


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {tests!r}
from headway.train.evaluate import output
from test_evaluate import Predicting, fresh, loader
output.COMMIT_S = 0.0
stage = Predicting()
fresh(Path({runs!r})).predict(stage, loader(), sys.argv[1])
print("predicted", stage.calls, "batches")
"""


def test_a_prediction_that_was_killed_continues_on_other_ranks(runs: Path, tmp_path: Path) -> None:
    script, here = tmp_path / "predict.py", Path(__file__).parent
    script.write_text(SCRIPT.format(tests=[str(here), str(here.parent / "helpers")], runs=str(runs)))
    command = [
        sys.executable,
        "-m",
        "headway",
        "run",
        "--nproc",
        "2",
        str(script),
        str(tmp_path / "logits.npy"),
    ]
    environ = {**os.environ, "HEADWAY_FAILPOINT": "predict.batch:rank=0:nth=3:kill9"}
    killed = warm.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ, timeout=100)
    assert "killed by SIGKILL" in killed.stderr, killed.stderr
    assert not (tmp_path / "logits.npy").exists()
    position = json.loads((tmp_path / ".logits.npy.part.json").read_text())["position"]
    assert position["rows"] == 12
    stage = Predicting()
    path = fresh(runs).predict(stage, loader(), tmp_path / "logits.npy")
    assert stage.calls == 6  # 11 samples are left, for one rank
    expected = logits_of(saved_net(shared_run(runs), 4)).numpy()
    np.testing.assert_allclose(np.load(path), expected, rtol=1e-5, atol=1e-6)


def test_a_stage_is_not_training_while_it_predicts(runs: Path, tmp_path: Path) -> None:
    modes = []

    class Noting(Predicting):
        def predict(self, batch: Any) -> Any:
            modes.append(self.training)
            return super().predict(batch)

    stage = Noting()
    fresh(runs).predict(stage, loader(), tmp_path / "a.npy")
    assert set(modes) == {False} and stage.training


class Listing(Predicting):
    row: Any = None

    def predict(self, batch: Any) -> Any:
        return [self.row] * len(batch[0])


def test_lines_of_a_prediction_are_json_with_the_index_of_their_sample(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Listing, "row", {"score": [math.nan, -math.inf, 0.5]})
    path = fresh(runs).predict(Listing(), loader(), tmp_path / "a.jsonl")
    lines = path.read_text().splitlines()
    assert lines[1] == '{"index": 1, "score": ["nan", "-inf", 0.5]}' and len(lines) == SAMPLES
    monkeypatch.setattr(Listing, "row", {"index": 7})
    with pytest.raises(UsageError, match="a row with an 'index', which each line has for its sample"):
        fresh(runs).predict(Listing(), loader(), tmp_path / "b.jsonl")


def test_a_row_of_results_names_the_dataset(runs: Path) -> None:
    pipe = fresh(runs)
    pipe.register_dataset("holdout", loader())
    pipe.test(Predicting(), "holdout", weights="current")
    pipe.validate(Predicting(), "holdout", weights="current")
    run = shared_run(runs)
    for name, prefix in (("test", "test"), ("holdout", "holdout")):
        row = list(jsonlines.read(run.eval_file(name)))[-1]
        assert row["datasets"] == ["holdout"] and f"{prefix}/loss" in row["metrics"]


class Registers(Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def pre_run(self, pipe: Pipeline) -> None:
        self.calls.append("run")
        pipe.register_model("net", Net(norm=False))

    def pre_stage(self, stage: Stage) -> None:
        self.calls.append(stage.name)


def test_callbacks_may_register_models_of_an_evaluation(runs: Path) -> None:
    expected = fresh(runs).test(Predicting(), loader())
    pipe, callback, stage = Pipeline(name="toy", root=runs), Registers(), Predicting()
    pipe.add_callback(callback)
    pipe.enable_plan()  # nothing is planned without training
    assert pipe.test(stage, loader()) == pipe.test(stage, loader()) == expected
    assert callback.calls == ["run", "predicting"]


def test_a_run_does_not_repeat_the_hooks_that_an_evaluation_has_called(tmp_path: Path) -> None:
    pipe, callback = Pipeline(name="toy", root=tmp_path), Registers()
    pipe.add_callback(callback)
    pipe.test(Predicting(), loader(), weights="current")
    pipe.register_dataset("train", Batches(2))
    pipe.register_optimizer("sgd", sgd, model="net")
    pipe.append_stage(Classify(), max_epochs=1)
    pipe.run()
    assert callback.calls == ["run", "predicting", "classify"]


def test_callbacks_do_not_take_an_evaluation_within_training_for_a_stage(tmp_path: Path) -> None:
    class Tests(Classify):
        def post_epoch(self) -> None:
            self.pipe.test(Predicting(), loader(), weights="current")

    pipe, callback = make_pipe(tmp_path, net=Net(norm=False)), Registers()
    callback.pre_run = lambda _: callback.calls.append("run")  # type: ignore[method-assign]
    pipe.add_callback(callback)
    pipe.register_dataset("train", Batches(2))
    pipe.append_stage(Tests(), max_epochs=2)
    pipe.run()
    assert callback.calls == ["run", "tests"]


def trained(folder: Path) -> Pipeline:
    pipe = make_pipe(folder, net=Net(norm=False))
    pipe.register_dataset("train", Batches(2))
    pipe.append_stage(Classify(), max_epochs=1)
    pipe.test(Predicting(), loader(), weights="current")
    pipe.run()
    return pipe


def test_an_evaluation_before_the_first_training_belongs_to_its_run(tmp_path: Path) -> None:
    (run,) = hw.run.runs_under(tmp_path) if trained(tmp_path) else ()
    assert run.eval_file("test").exists() and [each["status"] for each in run.info()["attempts"]] == ["done"]


def test_settings_that_follow_an_evaluation_decide_where_the_run_is(tmp_path: Path) -> None:
    for _ in range(2):
        pipe = make_pipe(tmp_path / "first", net=Net(norm=False))
        pipe.register_dataset("train", Batches(2))
        pipe.append_stage(Classify(), max_epochs=1)
        pipe.test(Predicting(), loader(), weights="current")
        pipe.enable_checkpointing(tmp_path / "runs", resume="auto")
        pipe.run()
        assert pipe.directory.path.parent == tmp_path / "runs"


def test_weights_of_a_pipeline_are_not_those_of_another_that_the_job_trains(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is queued again: its run has checkpoints by then."""
    student = make_pipe(runs, net=Net(norm=False))
    student.name = "student"
    student.register_dataset("train", Batches(2))
    student.append_stage(Classify(), max_epochs=1)
    student.enable_checkpointing(runs)
    monkeypatch.setenv("HEADWAY_RUN", str(student.run().path))
    hw.dist.leave()  # another process
    expected = shared_run(runs).checkpoints_dir
    pipe = fresh(runs)
    pipe.test(Predicting(), loader())
    (row,) = list(jsonlines.read(shared_run(runs).eval_file("test")))[-1:]
    assert Path(row["weights"]).parent == expected


def test_a_job_that_evaluates_before_it_trains_trains_in_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path)  # an earlier run of the same name
    job = hw.Run.create(tmp_path, name="toy")
    monkeypatch.setenv("HEADWAY_RUN", str(job.path))
    assert trained(tmp_path).directory.path == job.path and job.eval_file("test").exists()
    assert len(list(hw.run.runs_under(tmp_path))) == 2


def test_a_loop_over_a_registered_loader_goes_on_after_an_evaluation(runs: Path) -> None:
    pipe, own = fresh(runs), hw.data.DataLoader(Samples(), batch_size=8)
    pipe.register_dataset("train", own)
    batches = 0
    for _ in own:
        pipe.test(Predicting(), loader(), weights="current")
        batches += 1
    assert batches == len(own)


class Growing(Predicting):
    """Rows of the second batch have another shape, another type, or their columns in another order."""

    other: Any = staticmethod(lambda logits: logits[:, :2])

    def predict(self, batch: Any) -> Any:
        self.calls += 1
        logits = self.models["net"](batch[0])
        first = {"a": logits, "b": logits + 1}
        return first if self.calls == 1 else {"b": first["b"], "a": self.other(logits)}


def test_rows_of_another_shape_or_type_are_refused(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in (lambda logits: logits[:, :2], lambda logits: logits.double()):
        monkeypatch.setattr(Growing, "other", staticmethod(other))
        with pytest.raises(UsageError, match="rows of one shape and type"):
            fresh(runs).predict(Growing(), loader(), tmp_path / "x.safetensors")
    monkeypatch.setattr(Growing, "other", staticmethod(lambda logits: logits))
    found = load_file(fresh(runs).predict(Growing(), loader(), tmp_path / "x.safetensors"))
    assert found["b"].equal(found["a"] + 1)


@ranks(2)
def test_many_bytes_of_a_batch_arrive_whole() -> None:
    sizes = (5, 2**24 + 3)  # more than float32 can count
    parts = _gather_bytes(b"x" * sizes[hw.rank()], torch.device("cpu"))
    if hw.rank() == 0:
        assert [len(part) for part in parts] == [*sizes] and parts[1].endswith(b"xx")


def test_a_prediction_with_other_weights_is_not_taken_for_this_one(runs: Path, tmp_path: Path) -> None:
    pipe, stage, file = fresh(runs), Predicting(), tmp_path / "net.pt"
    net = pipe.registered_models["net"].bare
    for weights in ("current", file, hw.checkpoint.Weights(shared_run(runs).checkpoint_dir(4), ema=True)):
        out = tmp_path / f"{type(weights).__name__}.npy"
        torch.save(net.state_dict(), file)
        pipe.predict(stage, loader(), out, weights=weights)
        if weights != "current":
            assert pipe.predict(stage, loader(), out, weights=weights) == out  # these are the same
        with torch.no_grad():
            net.first.weight.mul_(3)  # type: ignore[union-attr,operator]
        torch.save({"state_dict": net.state_dict(), "epoch": 3}, file)
        other = (
            hw.checkpoint.Weights(weights.source, ema=False)
            if isinstance(weights, hw.checkpoint.Weights)
            else weights
        )
        with pytest.raises(UsageError, match="exists already"):
            pipe.predict(stage, loader(), out, weights=other)


def test_a_prediction_of_an_edited_stage_is_not_taken_for_this_one(runs: Path, tmp_path: Path) -> None:
    class Before(Predicting):
        pass

    class After(Predicting):
        def predict(self, batch: Any) -> Any:
            return super().predict(batch)

    After.__name__ = "Before"  # the name of the stage, whose code was edited
    pipe, out = fresh(runs), tmp_path / "a.npy"
    pipe.predict(Before(), loader(), out)
    assert pipe.predict(Before(), loader(), out) == out
    with pytest.raises(UsageError, match="exists already"):
        pipe.predict(After(), loader(), out)


class Noisy(Samples):
    """Draws from a generator of its own: no two loads of a sample are the same."""

    generator = torch.Generator().manual_seed(1)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(index)
        return x + torch.rand((), generator=self.generator), y


def test_a_prediction_of_other_samples_is_not_taken_for_this_one(runs: Path, tmp_path: Path) -> None:
    """An own dataset of the same length; of the samples that may be looked at, the first, middle and last differ."""
    for workers in (0, 1):
        pipe, out = fresh(runs), tmp_path / f"{workers}.npy"

        def load(dataset: Any, workers: int = workers) -> Any:
            return hw.data.DataLoader(dataset, batch_size=8, num_workers=workers)

        before = torch.get_rng_state()
        assert pipe.predict(Predicting(), load(Samples()), out) == out
        assert torch.equal(before, torch.get_rng_state()), "looking at samples draws no numbers of the model"
        assert pipe.predict(Predicting(), load(Samples()), out) == out
        for index in (0, SAMPLES // 2, SAMPLES - 1):
            changed = Samples()
            changed.x[index, 0] += 1
            with pytest.raises(UsageError, match="exists already"):
                pipe.predict(Predicting(), load(changed), out)
    noisy = pipe.predict(Predicting(), load(Noisy(), workers=0), tmp_path / "noisy.npy")
    assert pipe.predict(Predicting(), load(Noisy(), workers=0), noisy) == noisy, (
        "what is never the same says nothing"
    )


def packed(folder: Path) -> Path:
    """The samples in shards of a few."""
    if hw.rank() == 0:
        samples = [{"__key__": f"{n:03d}", "npy": Samples().x[n].numpy()} for n in range(SAMPLES)]
        hw.data.pack(samples, folder, shard_size=10240)
    hw.barrier()
    assert len(list(folder.glob("*.tar"))) > 2
    return folder


class OfShards(Predicting):
    def predict(self, batch: Any) -> Any:
        return super().predict([batch["npy"]])


@ranks(2)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_shards_are_predicted_in_their_order_on_several_ranks(
    parallel: str, runs: Path, tmp_path: Path
) -> None:
    where = Path(hw.broadcast_object(str(tmp_path)))
    folder = packed(where / "shards")

    def load(**settings: Any) -> hw.data.ShardLoader:
        return hw.data.ShardLoader(folder, batch_size=4, **settings)

    stage, out = OfShards(), where / "logits.npy"
    stage.fails_at = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "COMMIT_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            fresh(runs, parallel=parallel).predict(stage, load(shuffle=False), out)
    hw.barrier()
    stage = OfShards()
    fresh(runs, parallel=parallel).predict(stage, load(shuffle=False), out)
    assert stage.calls == 1, "16 samples were there, and 7 are left for both"
    expected = logits_of(saved_net(shared_run(runs), 4)).numpy()
    np.testing.assert_allclose(np.load(out), expected, rtol=1e-5, atol=1e-6)
    for settings in ({}, {"shuffle": False, "tail": "pad"}):
        with pytest.raises(UsageError, match="make the ShardLoader with shuffle=False"):
            fresh(runs, parallel=parallel).predict(OfShards(), load(**settings), where / "b.npy")


class ValidatingInHooks(Predicting):
    weights: Any = None

    def post_epoch(self) -> None:
        if self.weights:
            self.pipe.validate(self, "val", weights=self.weights)


def test_a_validation_within_training_does_not_change_the_training(tmp_path: Path) -> None:
    states = []
    for weights in (None, "current", "last"):
        pipe, stage = make_pipe(tmp_path, net=make_net(norm=False)), ValidatingInHooks()
        stage.weights = weights
        pipe.register_dataset("train", Batches(4))
        pipe.register_dataset("val", loader())
        pipe.append_stage(stage, max_epochs=3)
        pipe.enable_checkpointing(every="1 epoch", resume="never", background=False)
        if weights == "last":
            with pytest.raises(UsageError, match='trains: pass weights="current"'):
                pipe.run()
            assert pipe.validate(stage, loader(), weights=0)  # the training has ended
        else:
            pipe.run()
            states.append(pipe.registered_models["net"].bare.state_dict())
    for name, tensor in states[0].items():
        assert tensor.equal(states[1][name])


def test_every_stage_gets_its_hooks(runs: Path) -> None:
    calls = []

    class Hooked(Predicting):
        def pre_stage(self) -> None:
            calls.append(1)

    pipe = fresh(runs)
    for number in range(1, 11):
        pipe.validate(Hooked(), loader(), weights="current")
        gc.collect()  # so that the next one may get the same id
        assert len(calls) == number


class Summing(Predicting):
    def predict(self, batch: Any) -> Any:
        return super().predict(batch).sum()


def test_what_cannot_be_evaluated_is_said(runs: Path, tmp_path: Path) -> None:
    pipe, stage = fresh(runs), Predicting()
    for call, message in (
        (lambda: pipe.test(stage), "there is no dataset 'test' to evaluate"),
        (lambda: pipe.test(stage, "tset"), "tset"),
        (lambda: pipe.test(stage, loader(), weights="bset"), "weights='bset' is not known: give \"last\""),
        (lambda: pipe.validate(stage, []), "dataset 'val' has no batch to evaluate"),
        (lambda: pipe.validate(stage, {"val": loader(), "ood": []}), "dataset 'ood' has no batch"),
        (lambda: pipe.validate(stage, {}), "there is no dataset to evaluate"),
        (lambda: pipe.validate(stage, [loader(), loader()]), "a list of 2 loaders: pass a dict"),
        (lambda: pipe.test(Predicting, loader()), "test got the class Predicting: pass an instance"),
        (lambda: pipe.test(loader(), stage), "test got .*: pass an instance of a subclass"),
        (lambda: pipe.predict(Predicting, loader(), "a.npy"), "predict got the class Predicting"),
        (lambda: fresh(tmp_path).validate(stage, loader()), "has no run 'toy' with checkpoints"),
        (lambda: pipe.predict(stage, loader(shuffle=True), tmp_path / "a.npy"), "shuffle=False"),
        (
            lambda: pipe.predict(stage, loader(), tmp_path / "a.csv"),
            "use one that ends with .npy, .safetensors, .jsonl",
        ),
        (lambda: pipe.predict(Classify(), loader(), tmp_path / "a.npy"), "define predict"),
        (lambda: pipe.predict(stage, loader(), tmp_path / "no" / "a.npy"), "no directory .* mkdir -p"),
        (
            lambda: pipe.predict(Summing(), loader(), tmp_path / "a.npy"),
            r"of shape \(\): return a row for each",
        ),
        (
            lambda: pipe.predict(Summing(), loader(), tmp_path / "a.safetensors"),
            r"'summing' returned tensors of shape \(\)",
        ),
        (lambda: pipe.predict(stage, iter([1]), tmp_path / "a.npy"), "number of samples is not known"),
    ):
        with pytest.raises(UsageError, match=message):
            call()  # type: ignore[no-untyped-call]
    (tmp_path / "taken.npy").write_bytes(b"")
    with pytest.raises(UsageError, match="exists already"):
        pipe.predict(stage, loader(), tmp_path / "taken.npy")
