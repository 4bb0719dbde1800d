"""Saves of one run beside its training: the step waits for a copy in memory, and for nothing else.

    agree with the other ranks, copy         the training thread, in `save`
    begin, write, commit                     the helper process; a thread speaks for it with the other ranks

The thread speaks to the other ranks through a connection to the store of its own: no collective of the training, no
lock that the training needs, and no byte of a tensor in the training's interpreter.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

import torch.distributed as c10d

from headway.checkpoint.format import manifest as layout
from headway.checkpoint.format.manifest import FileFact, Manifest, Place
from headway.checkpoint.write import disk, planner
from headway.checkpoint.write.commit import Direct, Pen, write_out
from headway.checkpoint.write.disk import Target
from headway.checkpoint.write.host_memory import Memory
from headway.checkpoint.write.planner import Agreed, Contents, Share
from headway.checkpoint.write.writer_process import Helper
from headway.dist.collective.exchange import TIMEOUT_S, RankExchange, rank_and_size
from headway.dist.group import current
from headway.errors import StorageError
from headway.run.lock import RunLock
from headway.system import files
from headway.system.failpoints import failpoint

_TIDY_UP = 10.0  # seconds for removing what a failed save has made; the next one removes the rest


@final
@dataclass(frozen=True, kw_only=True)
class Saved:
    """A save that is whole: how long training stood still for it, how long it took, how many bytes it has.

    `stall_s` is the time in `save`, waiting for the save before it included, plus the time for which a CUDA device
    copied and did nothing else; the two may overlap.
    """

    path: Path
    step: int
    stall_s: float
    total_s: float
    bytes: int


@final
class Saver:
    """Saves states of a run, one after the other. All ranks make one, and call `save`, `wait` and `close` alike.

    In the background, `save` returns when the state is copied, into host memory that holds one copy of what this rank
    writes. At most one save is in flight: the next one waits for it. If it failed, on whichever rank and even if its
    helper process was killed, that is raised by the next `save` or `wait` on all ranks; nothing of it stays, and
    earlier checkpoints are as they were. `background=False` returns when the checkpoint is whole, and copies nothing.

    `lock` is the run's lock, on rank 0: nothing is committed after somebody took the run over. A save that is not whole
    after `patience` seconds is given up.

    >>> with Saver(run, lock=lock) as saver:  # doctest: +SKIP
    ...     saver.save({"net": net.state_dict()}, step=1000)
    """

    def __init__(
        self,
        where: Place,
        *,
        lock: RunLock | None = None,
        background: bool = True,
        patience: float = TIMEOUT_S,
    ) -> None:
        self._parent, self._owner = layout.home(where)
        self._lock, self._patience = lock, patience
        self._planner = planner.Planner()
        self._aside = _Aside(patience) if background else None
        self._flying: Future[Saved] | None = None
        self._whole: list[Saved] = []

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        local: object = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Saves a state; takes what `checkpoint.save` takes. On all ranks; raises what made the save before it fail."""
        begun = time.monotonic()
        self.wait()
        failpoint("checkpoint.begin")
        exchange = RankExchange(f"save step {step}", timeout_s=self._patience)
        contents, agreed = self._planner.agree(
            exchange,
            lambda: planner.contents(state, step=step, local=local, metrics=metrics),
            lambda step: disk.hidden_name(self._owner, step),
        )
        target = Target(
            parent=str(self._parent),
            owner=self._owner,
            step=step,
            save=agreed.save,
            fence=self._lock and self._lock.fence,
        )
        if self._aside is not None:
            self._flying = self._aside.start(target, contents, agreed, begun)
            return
        size = write_out(exchange, target, contents, agreed, Direct())
        taken = time.monotonic() - begun
        self._whole.append(Saved(path=target.final, step=step, stall_s=taken, total_s=taken, bytes=size))

    def wait(self) -> None:
        """Returns when no save is in flight; raises, on all ranks, what made the last one fail."""
        if self._flying is not None:
            futures.wait([self._flying])
            flown, self._flying = self._flying, None
            self._whole.append(flown.result())

    def finished(self) -> list[Saved]:
        """The saves that became whole since this was asked last, as far as this rank knows. Waits for nothing."""
        if self._flying is not None and self._flying.done() and self._flying.exception() is None:
            self.wait()
        whole, self._whole = self._whole, []
        return whole

    def close(self) -> None:
        """Waits as `wait` does, and gives everything back."""
        try:
            self.wait()
        finally:
            if self._aside is not None:
                self._aside.close()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._aside is None:
            self.close()
        else:  # the error must get out now: what is in flight is given up
            self._aside.abandon()


@final
class _Aside:
    """All that works beside the training: shared memory, the helper process, and a thread that speaks for it."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._memory = Memory()
        self._helper = Helper(self._memory.fd)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headway-saver")
        self._store: c10d.Store | None = None
        self._closed = False

    def start(self, target: Target, contents: Contents, agreed: Agreed, begun: float) -> Future[Saved]:
        """Copies what this rank writes, and leaves the rest to the helper. A copy that fails is a save that fails."""
        if self._store is None and rank_and_size()[1] > 1:
            self._store = current().store.clone()  # type: ignore[attr-defined]
        # each rank gives its own helper up before the others give up the rank
        exchange = RankExchange(
            f"write step {target.step}", store=self._store, timeout_s=self._patience + 6 * _TIDY_UP
        )
        pen = _ByHelper(self._helper, self._copy(agreed.share), self._patience)
        agreed.share.release()
        contents = dataclasses.replace(contents, tensors={})
        stalled = time.monotonic() - begun
        failpoint("checkpoint.staged")

        def fly() -> Saved:
            size = write_out(exchange, target, contents, agreed, pen)
            return Saved(
                path=target.final,
                step=target.step,
                stall_s=stalled + pen.copied_s,
                total_s=time.monotonic() - begun,
                bytes=size,
            )

        return self._thread.submit(fly)

    def _copy(self, share: Share) -> Callable[[], float]:
        """Begins the copy. What is returned waits for it, or raises why there is none: where all ranks will hear it."""
        try:
            with files.storage("copy the state into memory, to save it"):
                return self._memory.stage(share).wait
        except Exception as error:  # noqa: BLE001  it is raised on all ranks, once they know
            reason = error

        def fail() -> float:
            raise reason

        return fail

    def abandon(self) -> None:
        """Gives up what is in flight, without waiting."""
        self._closed = True
        self._helper.interrupt()
        self._thread.submit(self._release)
        self._thread.shutdown(wait=False)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._thread.submit(self._release).result()
            self._thread.shutdown()

    def _release(self) -> None:
        self._helper.close()  # in the thread that started it
        self._memory.close()


@final
class _ByHelper(Pen):
    """One save by the helper process. `copied_s` is known when it has begun to write: see `Staged.wait`."""

    def __init__(self, helper: Helper, copied: Callable[[], float], patience: float) -> None:
        self._helper, self._copied, self._patience = helper, copied, patience
        self._deadline = time.monotonic() + patience
        self.copied_s = 0.0

    def begin(self, target: Target) -> None:
        self._do("begin", target)

    def write(
        self, target: Target, file: str, share: Share, texts: Mapping[str, bytes]
    ) -> dict[str, FileFact]:
        self.copied_s = self._copied()
        own = {name: text.decode() for name, text in texts.items()}
        facts = self._do("write", target, file=file, size=share.size, texts=own)
        return {name: FileFact(**fact) for name, fact in facts.items()}

    def commit(self, target: Target, documents: Mapping[str, bytes], manifest: Manifest) -> int:
        texts = {name: document.decode() for name, document in documents.items()}
        size: int = self._do("commit", target, documents=texts, manifest=dataclasses.asdict(manifest))
        return size

    def discard(self, target: Target) -> None:
        # the disk may be what failed; the next save removes the rest
        with suppress(StorageError, TimeoutError):
            self._helper.do("discard", target, deadline=time.monotonic() + _TIDY_UP)

    def _do(self, command: str, target: Target, **details: object) -> Any:
        try:
            return self._helper.do(command, target, deadline=self._deadline, **details)
        except TimeoutError:
            raise StorageError(
                f"step {target.step} was not written to {target.parent} within {self._patience:g} s (stuck in "
                f"{command}): the disk hangs or is too slow; the save was given up, and earlier checkpoints are as "
                "they were. Check that file system"
            ) from None
