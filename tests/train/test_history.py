"""The history of a run, asked as people ask a mapping."""

from __future__ import annotations

from headway.train.metrics.history import History, MetricRow


def test_membership_and_iteration_end() -> None:
    history = History()
    assert "val/loss" not in history and list(history) == []
    history.epochs.append(
        MetricRow(stage="fit", epoch=0, step=2, values={"val/loss": 0.5, "train/loss": 0.7})
    )
    assert "val/loss" in history and "val/accuracy" not in history
    assert list(history) == ["train/loss", "val/loss"]
