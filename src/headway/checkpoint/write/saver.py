"""`Saver`: saves the states of one run, in the background or not.

    agree with the other ranks, copy         the training thread, in `Saver.save`
    begin, write, commit                     a writer process; a thread exchanges messages with the other ranks for it

The thread has its own connection to the store: it uses no collective and no lock of the training, and no byte of a
tensor passes through the training interpreter, except when a tensor is first saved and read back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, final

from headway.checkpoint.format.directory import CheckpointRoot, resolve_root
from headway.checkpoint.write import disk, planner
from headway.checkpoint.write.background import CLEAN_UP_S, BackgroundSave
from headway.checkpoint.write.disk import SaveTarget
from headway.checkpoint.write.read_back import ReadBack, TensorProof
from headway.checkpoint.write.writer import InProcessWriter, SavedCheckpoint, write_checkpoint
from headway.dist.collective.exchange import TIMEOUT_S, RankExchange
from headway.run.lock import RunLock
from headway.system.failpoints import failpoint


@final
class Saver:
    """Saves states of a run, one after the other. All ranks create one, and call `save`, `wait` and `close` in order.

    In the background, `save` returns when this rank's share of the state is copied to host memory. At most one save is
    pending: the next one waits for it. If it failed on any rank, the next `save` or `wait` raises the cause on all
    ranks; nothing of it is left, and earlier checkpoints are unchanged. With `background=False`, `save` returns when
    the checkpoint is complete, and copies nothing.

    `lock` is the run's lock, on rank 0: nothing is committed after another process took over the run. A save that is
    not complete after `timeout_s` seconds is given up; removing its files may take `clean_up_s` more. With `read_back`,
    each tensor is read and compared when it is first saved (`read_back.py`). `on_failure` is called with the step of a
    background save that failed, from another thread.

    >>> with Saver(run, lock=lock) as saver:  # doctest: +SKIP
    ...     saver.save({"net": net.state_dict()}, step=1000)
    """

    def __init__(
        self,
        where: CheckpointRoot,
        *,
        lock: RunLock | None = None,
        background: bool = True,
        timeout_s: float = TIMEOUT_S,
        clean_up_s: float = CLEAN_UP_S,
        read_back: bool = True,
        on_failure: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._on_failure = on_failure
        self._parent, self._owner = resolve_root(where)
        self._lock, self._timeout_s = lock, timeout_s
        self._planner = planner.WritePlanner()
        self._read_back = ReadBack() if read_back else None
        self._proof = TensorProof({})
        self._background = BackgroundSave(timeout_s, clean_up_s) if background else None
        self._pending: Future[SavedCheckpoint] | None = None
        self._complete: list[SavedCheckpoint] = []

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        local: object = None,
        metrics: Mapping[str, float] | None = None,
        before_write: Callable[[], object] | None = None,
        replaces: bool = False,
    ) -> None:
        """Saves a state, on all ranks, as `checkpoint.save` does. Raises the error of the previous save if it failed.

        `before_write` is called before anything is written, in the background if the save is. With `replaces`, an
        earlier checkpoint of the step is replaced; a kill at any time leaves one of the two.
        """
        start = time.monotonic()
        self.wait()
        failpoint("checkpoint.begin")
        exchange = RankExchange(f"save step {step}", timeout_s=self._timeout_s)

        def collect() -> planner.RankContents:
            contents = planner.collect(state, step=step, local=local, metrics=metrics)
            if self._read_back is not None:
                self._read_back.check_tree(state, contents)
            return contents

        contents, agreed = self._planner.agree(
            exchange, collect, lambda step: disk.hidden_name(self._owner, step)
        )
        if self._read_back is not None:
            self._proof = self._read_back.begin(state, contents, agreed.share)
        target = SaveTarget(
            parent=str(self._parent),
            owner=self._owner,
            step=step,
            save=agreed.save,
            fence=self._lock and self._lock.fence,
            replaces=replaces,
        )
        if self._background is not None:
            self._pending = self._background.start(target, contents, agreed, self._proof, start, before_write)
            self._pending.add_done_callback(partial(self._observe, step))
            return
        try:
            if before_write is not None:
                before_write()
            size = write_checkpoint(exchange, target, contents, agreed, InProcessWriter(), self._proof)
        finally:
            agreed.share.release()
        taken = time.monotonic() - start
        self._note_complete(
            SavedCheckpoint(path=target.final, step=step, stall_s=taken, total_s=taken, bytes=size)
        )

    def _note_complete(self, saved: SavedCheckpoint) -> None:
        self._complete.append(saved)
        if self._read_back is not None:
            self._read_back.complete(self._proof)

    def _observe(self, step: int, save: Future[SavedCheckpoint]) -> None:
        if not save.cancelled() and save.exception() is not None:
            self._on_failure(step)

    def wait(self) -> None:
        """Waits until no save is pending; raises the error of the last one, on all ranks, if it failed."""
        if self._pending is not None:
            futures.wait([self._pending])
            pending, self._pending = self._pending, None
            self._note_complete(pending.result())

    def finished(self) -> list[SavedCheckpoint]:
        """Returns the saves that this rank has seen complete since the last call. Does not wait."""
        if self._pending is not None and self._pending.done() and self._pending.exception() is None:
            self.wait()
        complete, self._complete = self._complete, []
        return complete

    def close(self) -> None:
        """Waits as `wait` does, and frees the memory and the writer process."""
        try:
            self.wait()
        finally:
            if self._background is not None:
                self._background.close()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._background is None:
            self.close()
        else:  # the error must not wait for a disk: the pending save is canceled
            self._background.cancel()
