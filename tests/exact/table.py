"""Trains a variant whole, and once more with two kills, and says what became of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import warm
from variants.base import Variant

TRIAL = Path(__file__).with_name("trial.py")
_EXPECTED = ("headway: launched by:", "headway: resuming ")
"""what headway says of every run"""


@dataclass(frozen=True)
class Verdict:
    """What became of a variant: "exact", "named", "named late" or "refused"; any other word is a fault.

    "silent": a resumed run differs, and the first saves did not say so. "late": the training was saved, but a resumed
    run ends with an error. "alarm": the first saves name what makes no difference. "broken": the training fails.
    """

    word: str
    why: str = ""

    def fits(self, variant: Variant) -> bool:
        """Whether this is what the table says."""
        expected = {"refused": variant.refused, "named": variant.named, "named late": variant.named_late}
        if pattern := expected.get(self.word):
            return re.search(pattern, self.why) is not None
        return self.word == "exact" and not any(expected.values())


def judge(name: str, variant: Variant, directory: Path) -> Verdict:
    """Trains a variant as often as it takes to know."""
    whole = _start(name, directory / "whole")
    if whole.code:
        return Verdict("refused" if whole.code == 2 else "broken", whole.error)
    starts = [_start(name, directory / "killed", kill=step) for step in variant.kills]
    if any(start.code != -signal.SIGKILL for start in starts[:1]):
        return Verdict("broken", f"exit {starts[0].code} instead of a kill: {starts[0].error}")
    if starts[-1].code == -signal.SIGKILL:
        starts.append(_start(name, directory / "killed"))
    if starts[-1].code:
        return Verdict("late", starts[-1].error)
    said = "; ".join(starts[0].said)
    if difference := next(_differences(whole, starts), ""):
        late = "; ".join(line for start in starts[1:] for line in start.said)
        word = "named" if said else "named late" if late else "silent"
        return Verdict(word, said or late or difference)
    return Verdict("alarm", said) if said else Verdict("exact")


@dataclass(frozen=True, kw_only=True)
class _Start:
    code: int
    output: str
    losses: Mapping[int, list[str]]
    end: str

    @property
    def said(self) -> list[str]:
        lines = [line for line in self.output.splitlines() if line.startswith("headway: ")]
        return [line for line in lines if not line.startswith(_EXPECTED)]

    @property
    def error(self) -> str:
        return (self.said or self.output.splitlines() or [""])[-1]


def _start(name: str, directory: Path, *, kill: int | None = None) -> _Start:
    directory.mkdir(exist_ok=True, parents=True)
    trace = directory / f"{len(list(directory.glob('*.jsonl')))}.jsonl"
    trace.touch()
    done = warm.run(
        [sys.executable, str(TRIAL), name, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        env={**os.environ, "EXACT_TRACE": str(trace), "EXACT_KILL": str(kill or 0)},
        fork=True,
    )
    losses: dict[int, list[str]] = {}
    for line in trace.read_text().splitlines():
        step, loss = json.loads(line)
        losses.setdefault(step, []).append(loss)
    end = trace.with_suffix(".end")
    return _Start(
        code=done.returncode,
        output=done.stdout,
        losses=losses,
        end=end.read_text() if end.exists() else "",
    )


def _differences(whole: _Start, starts: list[_Start]) -> Iterator[str]:
    for number, start in enumerate(starts, 1):
        for step, losses in start.losses.items():
            if losses != whole.losses.get(step):
                yield f"the loss of step {step} differs in start {number}"
    last = starts[-1]
    if max(last.losses) != max(whole.losses):
        yield f"it ends at step {max(last.losses)} instead of {max(whole.losses)}"
    for ours, theirs in zip(last.end.splitlines(), whole.end.splitlines(), strict=False):
        if ours != theirs:
            yield f"after training, {ours} instead of {theirs}"
    if len(last.end.splitlines()) != len(whole.end.splitlines()):
        yield "after training, one has more state than the other"
