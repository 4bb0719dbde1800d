"""The history of a run, asked as people ask a mapping."""

from __future__ import annotations

from headway.train.metrics.history import History, HistoryRow


def test_membership_and_iteration_end() -> None:
    history = History()
    assert "val/loss" not in history and list(history) == []
    history.epochs.append(
        HistoryRow(stage="fit", epoch=0, step=2, values={"val/loss": 0.5, "train/loss": 0.7})
    )
    assert "val/loss" in history and "val/accuracy" not in history
    assert list(history) == ["train/loss", "val/loss"]


def test_a_metric_of_log_points_alone_has_its_last_value_of_each_epoch() -> None:
    """What is measured against a plan is never reduced over an epoch."""
    history = History()
    for epoch, values in enumerate(([1.5, 1.2], [1.1, 0.9])):
        for step, value in enumerate(values):
            row = HistoryRow(stage="fit", epoch=epoch, step=2 * epoch + step, values={"plan/step": value})
            history.log_points.append(row)
        if epoch == 0:
            history.epochs.append(HistoryRow(stage="fit", epoch=0, step=2, values={"train/loss": 0.5}))
    assert history["plan/step"] == [1.2], "the second epoch has not ended"
    assert history["train/loss"] == [0.5] and history["val/loss"] == []
