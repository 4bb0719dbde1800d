"""The part of a checkpoint that differs between ranks: random numbers, and the positions of loaders.

Some positions count all ranks together; a pass of a loader without shuffle starts at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast, final

from headway import data, dist
from headway.checkpoint import LoadedCheckpoint
from headway.dist import seeding
from headway.dist.seeding import derive_seed
from headway.system.log import logger
from headway.train.resume import rng
from headway.train.resume.replay import LoaderStates, pass_states, restore_pass_states
from headway.train.resume.state import StatefulObject

if TYPE_CHECKING:
    from headway.train.loop_state import LoopState
    from headway.train.run_state import RunState


@final
class RankState:
    """Captures and restores the positions of a rank in its data and its random numbers."""

    def __init__(self, run: RunState) -> None:
        self._run, self._pipe = run, run.pipe
        self.loaders = LoaderStates(run.pipe)
        self._rng: Callable[[], None] | None = None  # restores the generators where training resumes

    def capture(self) -> dict[str, Any]:
        """Returns random state and loader positions; "shared" has the positions that count all ranks together."""
        loop_state, datasets = self._run.current_state, self._pipe.datasets
        passes = loop_state.passes if loop_state else []
        active = [each.loader for each in passes if not each.done]
        positions = {
            name: position(loader, active=any(loader is each for each in active))
            for name, loader in datasets.items()
            if isinstance(loader, StatefulObject)
        }
        shared = {name: state for name, state in positions.items() if is_global(datasets[name])}
        local = {
            "random": rng.random_state(self._pipe.device),
            "datasets": {name: state for name, state in positions.items() if name not in shared},
            "passes": pass_states(passes),
            "loaders": self.loaders.state_dict(),
            "since_log_point": _since_log_point(loop_state),
        }
        return {"shared": shared, "local": local}

    def restore(self, loaded: LoadedCheckpoint) -> None:
        """Restores the positions at once, and the random numbers where `restore_rng` is called."""
        shared, local, datasets = loaded.state["run"], loaded.local, self._pipe.datasets
        before, now = loaded.world_size, self._pipe.world.world_size
        positions = shared["datasets"] | (local["datasets"] if before == now else {})
        for name, loader in datasets.items():
            if name in positions and isinstance(loader, StatefulObject):
                loader.load_state_dict(positions[name])
        if before == now:
            self._rng = partial(self._restore_random, local)
            for stage in self._run.stage_states:
                if stage.status.in_epoch:
                    restore_pass_states(stage.passes, local["passes"])
                    # older checkpoints have none
                    _restore_since_log_point(stage, local.get("since_log_point"))
            return
        for stage in self._run.stage_states:
            for each in stage.passes:
                each.ranks_changed = True
        seed = derive_seed(shared["seed"] % 2**64, f"resume at step {loaded.step}")
        self._rng = partial(dist.seed, seed, scope=seeding.current_scope())
        if self._pipe.world.is_root:
            changes = [*find_changes(datasets, before, now, local["datasets"] if local else {})]
            same = "" if changes else "the samples are the same; "
            logger.info(
                f"saved by {before} ranks, now {now}: {same}training draws other random numbers from here on"
            )
            for message in changes:
                logger.warning(message)

    def restore_rng(self) -> None:
        """Restores the random number generators, after everything that may draw from them."""
        assert self._rng is not None, "no checkpoint was restored"
        self._rng()

    def _restore_random(self, local: Mapping[str, Any]) -> None:
        rng.restore_random_state(local["random"], self._pipe.device)
        self.loaders.load_state_dict(local.get("loaders", {}))  # older checkpoints have none


def _since_log_point(stage: LoopState | None) -> dict[str, Any] | None:
    """Returns what this rank has logged and requested since the last log point, as a callback or a `val_step` may."""
    if stage is None:
        return None
    return {"logged": stage.meter.rank_state_dict(), "stop_requested": stage.stop_requested}


def _restore_since_log_point(stage: LoopState, state: Mapping[str, Any] | None) -> None:
    if state is not None:
        stage.meter.load_rank_state_dict(state["logged"])
        stage.stop_requested = state["stop_requested"]


def is_global(loader: object) -> bool:
    """Whether a loader has one position for all ranks together."""
    return isinstance(loader, data.DataLoader | data.ShardLoader) and not loader.per_rank


def splits_evenly(loader: object) -> bool:
    """Whether all ranks have equally many batches left at any position: in a shuffled order no rank has fewer."""
    return is_global(loader) and bool(cast("StatefulObject", loader).state_dict().get("shuffle"))


def per_rank_batch_size(loader: object) -> int | None:
    """Returns the batch size of a training loader whose global batch grows with the number of ranks; None otherwise."""
    if not isinstance(loader, data.DataLoader | data.ShardLoader) or loader.per_rank:
        return None
    return loader.batch_size if loader.state_dict()["shuffle"] else None


def position(loader: StatefulObject, *, active: bool) -> dict[str, Any]:
    """Returns the position of a loader: 0 for one without shuffle between passes, since each pass starts at 0."""
    found = loader.state_dict()
    if active or not isinstance(loader, data.DataLoader | data.ShardLoader) or found.get("shuffle"):
        return found
    if isinstance(loader, data.DataLoader):
        return found | ({"next": 0, "places": {}} if loader.per_rank else {"samples": 0})
    return found | {"position": loader.samples * found["epoch"]}


def find_changes(
    datasets: Mapping[str, Iterable[Any]], before: int, now: int, positions: Mapping[str, Any]
) -> Iterator[str]:
    """Yields warnings about datasets whose samples differ from the earlier attempt's, due to the number of ranks.

    `positions` are those of loaders on one of the ranks that saved them.
    """
    for name, loader in datasets.items():
        if size := per_rank_batch_size(loader):
            yield (
                f"dataset {name!r}: batch_size={size} is per rank, so a step has {size * now} samples instead of "
                f"{size * before}: pass global_batch_size to keep it constant"
            )
        elif not isinstance(loader, StatefulObject):
            yield (
                f"dataset {name!r}: its batches are counted, not its samples, since it has no state_dict(): some "
                "samples of this epoch may come twice or not at all; use hw.data.DataLoader"
            )
        elif not is_global(loader) and positions.get(name, {}).get("places") != {}:  # else no batch was taken
            yield (
                f"dataset {name!r}: its position was saved per rank, by {before} ranks, so it restarts its epoch: the "
                f"samples that were trained on in this epoch come again; to continue exactly, resume on {before} ranks"
            )
