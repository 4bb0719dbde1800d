"""A new run that begins with a checkpoint of another: its record names the parent, which stays as it was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from toys import Batches, Classify, make_net, make_pipe

import headway as hw
from headway.errors import NoValidCheckpoint, UsageError
from headway.testing import ranks
from headway.testing.verify import compare_runs


class Ends(Classify):
    """Ends like a process that was killed, before one of its steps."""

    ends_before: int | None = None

    def train_step(self, batch: Any) -> Any:
        if self.pipe.steps_done == self.ends_before:
            raise KeyboardInterrupt
        return super().train_step(batch)


def train(
    folder: Path, *, ends_before: int | None = None, parallel: Any = "ddp", **settings: Any
) -> tuple[hw.Pipeline, hw.Run]:
    net = make_net(norm=parallel == "ddp")
    pipe, stage = make_pipe(folder, net=net, parallel=parallel), Ends(log_every=1)
    stage.ends_before = ends_before
    pipe.register_dataset("train", Batches(5))
    pipe.append_stage(stage, max_epochs=2)
    pipe.enable_checkpointing(every=2, keep_last=10, background=False, **settings)
    return pipe, pipe.run()


def test_a_run_from_a_chosen_step(tmp_path: Path) -> None:
    first, parent = train(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in parent.path.rglob("*")}
    chosen = parent.checkpoint_dir(4)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, resume=chosen, ends_before=4)  # before it has a checkpoint of its own
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, resume=chosen, ends_before=9)
    second, child = train(tmp_path, resume=chosen)
    runs = list(hw.run.runs_under(tmp_path))
    assert len(runs) == 2 and child != parent  # the same command has resumed the new run
    assert child.info()["parent"] == {"run": parent.id, "step": 4, "checkpoint": str(chosen)}
    assert [attempt.get("step_started") for attempt in child.info()["attempts"]] == [4, 4, 8]
    expected = first.registered_models["net"].bare.state_dict()
    for name, tensor in second.registered_models["net"].bare.state_dict().items():
        assert tensor.equal(expected[name])  # to the last bit, as the parent trained
    assert {path: path.stat().st_mtime_ns for path in parent.path.rglob("*")} == before
    with pytest.raises(UsageError, match="there is no such checkpoint"):
        train(tmp_path, resume=parent.checkpoint_dir(5))


def test_a_run_goes_on_without_the_checkpoint_that_it_began_with(tmp_path: Path) -> None:
    """The parent may still train, and removes it; later its owner removes the whole run."""
    _, parent = train(tmp_path)
    chosen = parent.checkpoint_dir(4)
    # The run saves after its first step, not only when a save is due.
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, resume=chosen, ends_before=5)
    shutil.rmtree(chosen)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, resume=chosen, ends_before=9)
    shutil.rmtree(parent.path)
    _, child = train(tmp_path, resume=chosen)
    assert [attempt.get("step_started") for attempt in child.info()["attempts"]] == [4, 5, 8]
    with pytest.raises(UsageError, match="there is no such checkpoint"):
        train(tmp_path, resume=parent.checkpoint_dir(6))  # no run began with that one


def test_it_is_compared_with_its_parent_after_the_step_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_LEDGER", "1")
    _, parent = train(tmp_path)
    _, child = train(tmp_path, resume=parent.checkpoint_dir(4))
    words = "losses, samples and random numbers of all steps after step 4, and the last checkpoint"
    assert compare_runs(parent, child) == compare_runs(child, parent) == (True, words)
    _, other = train(tmp_path, resume=parent.checkpoint_dir(6))
    assert compare_runs(child, other)[0] is False, "they have different steps"


@ranks(2, leaks=False)
@pytest.mark.parametrize("file", ["manifest.json", "index.json"])
def test_a_damaged_checkpoint_is_refused_in_words_for_sharded_models_too(file: str, tmp_path: Path) -> None:
    """Each rank looks up its shards in the index, which must be checked before."""
    _, parent = train(tmp_path, parallel="fsdp")
    chosen = parent.checkpoint_dir(4)
    if hw.rank() == 0:
        (chosen / file).write_bytes(b"{}")
    hw.barrier()
    with pytest.raises(NoValidCheckpoint, match=rf"step-000000000004 is damaged: {file}"):
        train(tmp_path, parallel="fsdp", resume=chosen)
