"""The options of `pipe.enable_wandb` and similar methods: the fields of the sinks, with `name` for `run_name`.

A test compares them with the sinks, and those of Weights & Biases with `wandb.init`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from headway.errors import unknown_name


class WandbOptions(TypedDict, total=False):
    """The settings of `Wandb`."""

    project: str | None
    entity: str | None
    name: str | None
    notes: str | None
    group: str | None
    job_type: str | None
    tags: Sequence[str]
    mode: Literal["online", "offline"] | None
    save_code: bool | None
    settings: Mapping[str, Any]
    artifacts: Sequence[str]
    shared: bool


class MlflowOptions(TypedDict, total=False):
    """The settings of `Mlflow`."""

    tracking_uri: str | None
    experiment: str | None
    name: str | None
    notes: str | None
    tags: Mapping[str, str]
    artifact_location: str | None
    artifacts: Sequence[str]


class TensorBoardOptions(TypedDict, total=False):
    """The settings of `TensorBoard`, besides its directory."""

    max_queue: int
    flush_secs: float
    filename_suffix: str


def check_options(known: type, tracker: str, options: Mapping[str, object]) -> dict[str, Any]:
    """Returns the settings of a sink; `UsageError` for an unknown name, with the closest known one."""
    for name in options:
        if name not in known.__annotations__:
            raise unknown_name(f"setting of {tracker}", name, known.__annotations__)
    # the `name` of a sink is part of its file names
    return {"run_name" if name == "name" else name: value for name, value in options.items()}
