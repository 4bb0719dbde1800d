"""`Weights`: which weights to load, and how to find them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, final

from headway.checkpoint.api import verify_on_all_ranks
from headway.checkpoint.format.directory import checkpoints_at, list_steps, step_dir
from headway.checkpoint.format.manifest import MANIFEST
from headway.checkpoint.inspect.listing import find_best
from headway.dist.collective.exchange import RankExchange
from headway.errors import NoValidCheckpoint, UsageError
from headway.run import Run, has_info
from headway.system.log import logger

At: TypeAlias = Literal["last", "best"] | int


@final
@dataclass(frozen=True, kw_only=False)
class Weights:
    """Weights to start from: of a run, a checkpoint, a safetensors file, a Hugging Face directory or a torch file.

    >>> Weights("runs/digits-2026.11.15-14.30-x7k2", at="best", ema=True)  # doctest: +ELLIPSIS
    Weights(source='runs/digits-2026.11.15-14.30-x7k2', at='best', model=None, ema=True, metric=None)
    """

    source: str | os.PathLike[str] | Run
    """a run directory, a checkpoint (step-000000001000), a .safetensors or .pt file, or a Hugging Face directory"""
    at: At = "last"
    """for a run: "last" for the newest checkpoint, "best" for the best, or a step"""
    model: str | None = None
    """for a checkpoint: the name that the model was registered under; by default the name of the model to fill"""
    ema: bool | None = None
    """for a checkpoint: True for the averaged weights, False for the trained ones; by default a model starts from the
    trained ones, and an evaluation uses the same as the validations of the run"""
    metric: str | None = None
    """the metric of "best", such as "max:val/accuracy"; by default the run's own `keep_best`"""

    def __post_init__(self) -> None:
        source: object = self.source
        if not isinstance(source, str | os.PathLike | Run):
            raise UsageError(
                f"weights cannot be read from a value of type {type(source).__name__}: give the path of a "
                "file, a checkpoint or a run; to load a state dict, call load_state_dict() of the model"
            )
        given: object = self.at  # a caller without a type checker may pass anything
        if given not in ("last", "best") and not (type(given) is int and given >= 0):
            raise UsageError(f'at={given!r} is not valid: give "last", "best" or a step')

    @property
    def path(self) -> Path:
        """The path of the source, as it was given."""
        return (self.source.path if isinstance(self.source, Run) else Path(self.source)).absolute()

    def locate(self) -> Path:
        """Returns the checkpoint, file or directory to read, the same on all ranks; checkpoints are verified."""
        exchange = RankExchange(f"find the weights in {self.path}")
        kind, where = exchange.from_root(self._kind)
        if kind == "other":
            return Path(where)
        if kind == "checkpoint":
            candidates = [where]
        elif self.at == "last":
            candidates = exchange.from_root(
                lambda: [str(step_dir(Path(where), s)) for s in list_steps(Path(where))[::-1]]
            )
        else:
            candidates = [exchange.from_root(lambda: str(self._chosen(Path(where))))]
        problems: list[str] = []
        for candidate in map(Path, candidates):
            _, found = verify_on_all_ranks(exchange, candidate)
            if not found:
                return candidate
            if not exchange.from_root(partial(os.path.lexists, candidate)):
                return self.locate()  # a run that trains has removed it: choose again
            problems.append(f"{candidate.name}: {found[0]}")
            if exchange.rank == 0:
                logger.warning(f"{candidate} is damaged and is not read: {found[0]}")
        raise NoValidCheckpoint(
            f"{where} has no valid checkpoint to read weights from: {'; '.join(problems[:5])}"
            if problems
            else f"{where} has no checkpoints: train the run first, or give another one"
        )

    def _kind(self) -> tuple[str, str]:
        """Returns the kind and the path: "checkpoint", "run" with the directory of its checkpoints, or "other"."""
        path = self.path
        if not path.exists():
            raise UsageError(
                f"there are no weights at {path}: give a run, a checkpoint, a .safetensors or .pt file, or a "
                "Hugging Face directory"
            )
        if (path / MANIFEST).exists():
            return "checkpoint", str(path)
        if has_info(path):
            return "run", str(checkpoints_at(path))
        if path.is_dir() and list_steps(path):
            return "run", str(path)
        if self.at != "last":
            raise UsageError(f"at={self.at!r} chooses a checkpoint of a run, but {path} is not a run")
        return "other", str(path)

    def _chosen(self, parent: Path) -> Path:
        if self.at == "best":
            return find_best(parent, metric=self.metric)
        steps = list_steps(parent)
        if self.at not in steps:
            known = ", ".join(f"{step:,}" for step in steps[-10:]) or "none"
            raise UsageError(
                f"{parent} has no checkpoint of step {self.at:,}: its checkpoints are of steps {known}"
            )
        assert isinstance(self.at, int)
        return step_dir(parent, self.at)
