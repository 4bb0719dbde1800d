"""What is kept, what is removed, and what is left alone."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from headway import checkpoint
from headway.checkpoint import Retention
from headway.checkpoint.format.manifest import Manifest
from headway.errors import UsageError


def manifest(step: int, **metrics: float) -> Manifest:
    return Manifest(
        step=step, save="s", world_size=1, created="", versions={}, metrics=metrics, files={}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({"keep_last": 2}, {50, 60}),
        ({"keep_last": 3}, {40, 50, 60}),
        ({"keep_last": 99}, {10, 20, 30, 40, 50, 60}),
        ({"keep_last": 2, "keep_every": 20}, {20, 40, 50, 60}),
        ({"keep_last": 2, "keep_best": "loss"}, {30, 50, 60}),
        ({"keep_last": 2, "keep_best": "loss", "best": "max"}, {20, 50, 60}),
        ({"keep_last": 2, "keep_best": "unknown"}, {50, 60}),
    ],
)
def test_the_rules(rule: dict[str, Any], kept: set[int]) -> None:
    losses = {10: 2.0, 20: 3.0, 30: 1.0, 40: 2.5, 50: 2.0}
    manifests = {
        step: manifest(step, **({"loss": losses[step]} if step in losses else {}))
        for step in range(10, 70, 10)
    }
    assert Retention(**rule).kept(manifests) == kept


@pytest.mark.parametrize("last", [2, 3])
def test_the_one_resumed_from_stays_until_two_newer_exist(last: int) -> None:
    resumed_from = {4: manifest(4)}
    assert 4 in Retention(keep_last=last).kept(resumed_from | {5: manifest(5)})
    assert Retention(keep_last=2).kept(resumed_from | {5: manifest(5), 6: manifest(6)}) == {5, 6}


def test_of_equal_values_the_newest_is_the_best() -> None:
    manifests = {step: manifest(step, loss=1.0) for step in (1, 2, 3, 4, 5)}
    assert Retention(keep_last=2, keep_best="loss").kept(manifests) == {4, 5}
    manifests = {step: manifest(step, loss=float(step > 2)) for step in (1, 2, 3, 4, 5)}
    assert Retention(keep_last=2, keep_best="loss").kept(manifests) == {2, 4, 5}


@given(st.sets(st.integers(0, 200), max_size=30), st.integers(2, 6), st.none() | st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_the_newest_are_always_kept_and_pruning_twice_changes_nothing(
    steps: set[int], last: int, every: int | None
) -> None:
    rule = Retention(keep_last=last, keep_every=every)
    kept = rule.kept({step: manifest(step) for step in steps})
    assert set(sorted(steps)[-last:]) <= kept <= steps
    assert rule.kept({step: manifest(step) for step in kept}) == kept


LOSSES = st.none() | st.sampled_from([0.0, 1.0, 2.0])


@given(
    st.dictionaries(st.integers(0, 40), LOSSES, max_size=12),
    st.integers(2, 4),
    st.none() | st.integers(1, 9),
    st.sampled_from([None, "min", "max"]),
)
@settings(max_examples=200, deadline=None)
def test_the_rules_agree_with_their_words(
    losses: dict[int, float | None], last: int, every: int | None, best: Any
) -> None:
    """Each step by itself: is it one of the newest, a multiple, or is none better, and none that is as good newer?"""

    def is_kept(step: int) -> bool:
        newer = [other for other in losses if other > step]
        mine, sign = losses[step], -1 if best == "max" else 1
        rivals = {other: loss for other, loss in losses.items() if loss is not None and other != step}
        beaten = mine is None or any(
            sign * loss < sign * mine or (loss == mine and other > step) for other, loss in rivals.items()
        )
        return len(newer) < last or (every is not None and step % every == 0) or (bool(best) and not beaten)

    rule = Retention(keep_last=last, keep_every=every, keep_best="loss" if best else None, best=best or "min")
    manifests = {
        step: manifest(step, **({} if loss is None else {"loss": loss})) for step, loss in losses.items()
    }
    assert rule.kept(manifests) == {step for step in losses if is_kept(step)}


@pytest.mark.parametrize("bad", [{"keep_last": 1}, {"keep_last": True}, {"keep_every": 0}, {"best": "least"}])
def test_bad_rules_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        Retention(**bad)


def test_prune_removes_the_rest_and_leaves_what_is_not_sound(tmp_path: Path) -> None:
    for step in range(1, 7):
        checkpoint.save(tmp_path, {"x": step}, step=step, metrics={"loss": abs(step - 2)})
    shutil.rmtree(tmp_path / "step-000000000003")
    (tmp_path / "step-000000000003").mkdir()  # no checkpoint
    (tmp_path / "step-000000000006" / "manifest.json").write_bytes(b"{}")  # does not count as one of the last
    removed = checkpoint.prune(tmp_path, Retention(keep_last=2, keep_best="loss"))
    assert [path.name for path in removed] == ["step-000000000001"]
    left = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert left == [f"step-{step:012d}" for step in (2, 3, 4, 5, 6)]


def test_what_cannot_be_removed_is_a_warning(tmp_path: Path) -> None:
    from headway.testing import faults

    for step in range(1, 5):
        checkpoint.save(tmp_path, {"x": step}, step=step)
    with (
        faults.at("retention.before_rename", action="errno=EROFS"),
        pytest.warns(RuntimeWarning, match="Read-only"),
    ):
        removed = checkpoint.prune(tmp_path, Retention(keep_last=2))
    assert [path.name for path in removed] == ["step-000000000002"]


def test_files_that_a_reader_has_open_on_nfs_are_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is not empty then: a file that is open gets a hidden name (.nfs...), until it is closed."""
    for step in range(1, 4):
        checkpoint.save(tmp_path, {"x": step}, step=step)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(os, "rmdir", refuse)
        removed = checkpoint.prune(tmp_path, Retention(keep_last=2))
    assert [path.name for path in removed] == ["step-000000000001"]
    assert len(list(tmp_path.glob(".del-path-1-*"))) == 1
    checkpoint.save(tmp_path, {"x": 4}, step=4)
    assert not list(tmp_path.glob(".*"))


def test_nothing_to_prune(tmp_path: Path) -> None:
    assert checkpoint.prune(tmp_path / "none", Retention()) == []


def test_a_disk_that_fails_while_files_are_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 4):
        checkpoint.save(tmp_path, {"x": step}, step=step)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match=r"\.del-path-1-.*Input/output"):
        patch.setattr(os, "rmdir", fail)
        removed = checkpoint.prune(tmp_path, Retention(keep_last=2))
    assert [path.name for path in removed] == ["step-000000000001"]
