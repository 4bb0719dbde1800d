"""What is told to which tracker: settings that travel to its process as JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, final

from headway.errors import MissingExtra, UsageError


@dataclass(frozen=True, kw_only=True)
class Sink(ABC):
    """A tracker to feed."""

    kind: ClassVar[Literal["wandb", "tensorboard", "mlflow"]]

    def __post_init__(self) -> None:
        if find_spec(self.kind) is None:
            raise MissingExtra(self.kind, extra=self.kind, purpose=f"to feed {self.title}")

    @property
    @abstractmethod
    def title(self) -> str:
        """What people call it."""

    def request(self) -> dict[str, Any]:
        """What the process is given."""
        return {"kind": self.kind, "settings": asdict(self)}


@final
@dataclass(frozen=True, kw_only=True)
class Wandb(Sink):
    """Weights & Biases; the run there has the name of the run directory, and goes on when the run is resumed."""

    kind = "wandb"
    project: str | None = None
    """None: what WANDB_PROJECT says"""
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] | None = None
    """None: what WANDB_MODE says. Offline runs lie in the run directory, for `wandb sync`"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in ("online", "offline", None):
            raise UsageError(f'mode={self.mode!r} is unknown to enable_wandb: use "online" or "offline"')

    @property
    def title(self) -> str:
        return "Weights & Biases"


@final
@dataclass(frozen=True, kw_only=True)
class TensorBoard(Sink):
    """Event files for TensorBoard."""

    kind = "tensorboard"
    folder: str | None = None
    """None: `tensorboard/` in the run directory"""

    @property
    def title(self) -> str:
        return "TensorBoard"


@final
@dataclass(frozen=True, kw_only=True)
class Mlflow(Sink):
    """An MLflow server or store; the run there is found again by its tag `headway.run` when the run is resumed."""

    kind = "mlflow"
    tracking_uri: str | None = None
    """None: what MLFLOW_TRACKING_URI says"""
    experiment: str | None = None
    """None: the name of the run"""

    @property
    def title(self) -> str:
        return "MLflow"


def folder_of(given: str | Path | None) -> str | None:
    """A folder as the other process will see it."""
    return None if given is None else str(Path(given).absolute())
