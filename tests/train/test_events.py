"""Events of a run: what happened, as rows that people and programs read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from toys import Batches, Classify, make_pipe

import headway as hw
from headway.run import Run
from headway.system.log import logger
from headway.testing import ranks

pytestmark = pytest.mark.usefixtures("alone")


def events_of(run: Run, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.events_file(rank).read_text().splitlines()]


class Mixed(Batches):
    """A loader whose weights change in the middle, as `ShardLoader.set_weights` does."""

    taken = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in super().__iter__():
            self.taken += 1
            yield batch

    def counters(self) -> dict[str, float]:
        web = 0.5 if self.taken <= 4 else 0.25
        return {"samples": self.taken, "target/web": web, "target/books": 1 - web}


class Failing(Classify):
    at = -1

    def step(self, batch: Any) -> Tensor:
        if self.pipe.steps_done == 2:
            logger.warning("the \x1b[31mloss\x1b[0m is high; token=abc123secret")
        if self.pipe.steps_done == self.at:
            raise ValueError("too hot")
        return super().step(batch)


def test_a_run_writes_what_happened(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Mixed(8))
    stage = Failing(log_every=2)
    pipe.append_stage(stage, max_epochs=3)
    pipe.enable_checkpointing(every=8, background=False)
    stage.at = 10
    with pytest.raises(ValueError, match="too hot"):
        pipe.run()
    events = events_of(pipe.directory)
    kinds = [event["kind"] for event in events]
    assert kinds == ["start", "checkpoint", "stage", "warning", "weights", "warning", "checkpoint", "failed"]
    assert "train.taken" in events[5]["text"], "of the loader, which no checkpoint has"
    found = dict(zip(kinds, events, strict=True)) | {"warning": events[3]}
    assert found["stage"] | {"total_steps": 24, "first_step": 0, "max_epochs": 3} == found["stage"]
    assert found["weights"]["weights"] == {"web": 0.25, "books": 0.75} and found["weights"]["step"] == 6
    assert found["checkpoint"]["step"] == 8 and found["checkpoint"]["bytes"] > 0
    said = "the \\x1b[31mloss\\x1b[0m is high; token=[redacted]"
    assert found["warning"]["text"] == said, "neither colors nor secrets"
    assert found["failed"]["exit_code"] == 1 and "ValueError('too hot')" in found["failed"]["text"]
    hw.dist.leave()
    again = make_pipe(tmp_path)
    again.register_dataset("train", Mixed(8))
    again.append_stage(Failing(log_every=2), max_epochs=3)
    again.enable_checkpointing(every="1h", background=False)
    assert again.run().path == pipe.directory.path
    rest = events_of(pipe.directory)[len(events) :]
    assert [event["kind"] for event in rest] == [
        "restart",
        "stage",
        "weights",
        "warning",
        "checkpoint",
        "done",
    ]
    assert {event["attempt"] for event in rest} == {2}
    assert rest[1]["first_step"] == 0 and rest[1]["step"] > 8, "the stage began before the restart"


@ranks(2)
def test_another_rank_writes_only_what_it_warns_of(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(4, rank=hw.rank()))

    class Warned(Classify):
        def step(self, batch: Any) -> Tensor:
            if hw.rank() == 1 and self.pipe.steps_done == 1:
                logger.warning("a slow disk", extra={"event": "straggler"})
            return super().step(batch)

    pipe.append_stage(Warned(log_every=2), max_epochs=1)
    run = pipe.run()
    hw.barrier()
    assert [event["kind"] for event in events_of(run)] == ["start", "stage", "done"]
    (event,) = events_of(run, rank=1)
    assert (event["kind"], event["rank"], event["text"]) == ("straggler", 1, "a slow disk")
    row = json.loads(run.metrics_file(hw.rank()).read_text().splitlines()[0])
    assert row["host"] == hw.dist.world().host
