"""The messages between pytest's process and its ranks.

A rank gets one `WorkerSetup`; for each test it gets a `RankTask` and sends a `RankReport`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

WarningFilter = tuple[Any, re.Pattern[str] | str | None, type[Warning], re.Pattern[str] | str | None, int]
CallOutcome = Literal["passed", "failed", "skip", "xfail", "exit"]


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """The settings with which a new process becomes a rank that imports tests as pytest does."""

    environ: Mapping[str, str]
    variables: Mapping[str, str]
    """those that the node agent sets for a rank"""
    pytest_args: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """One test: where its function is, what it is called with, and the environment that pytest made for it."""

    module_file: str
    module_name: str
    qualname: str
    arguments: Mapping[str, bytes]
    attributes: Mapping[str, bytes] | None
    """what fixtures and setup methods set on the instance of a test class; None for a plain function"""
    conftests: Mapping[str, str]
    """module name -> file, for arguments whose class is defined in a conftest.py"""
    environ: Mapping[str, str]
    cwd: str
    path: Sequence[str]
    rewrite: frozenset[str]
    warnings: bytes
    """pickled filters: a category may be a class of the test module"""
    leaks: bool


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """How a test ended on one rank."""

    outcome: CallOutcome
    reason: str
    """in a line"""
    text: str
    """the same with traceback"""
    collectives: int
    """number in which this rank took part; if it differs between ranks, they may still wait for each other"""
    reusable: bool
    """False if the rank left the group or something leaked"""
