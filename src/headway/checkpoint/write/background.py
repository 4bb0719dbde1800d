"""Saves in the background: host memory, a writer process, and a thread that exchanges messages with other ranks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, final

import torch.distributed as c10d

from headway.checkpoint.format.manifest import FileChecksum, Manifest
from headway.checkpoint.write.disk import SaveTarget
from headway.checkpoint.write.host_memory import HostMemory
from headway.checkpoint.write.planner import AgreedSave, RankContents, RankShare
from headway.checkpoint.write.read_back import TensorProof
from headway.checkpoint.write.writer import CheckpointWriter, SavedCheckpoint, write_checkpoint
from headway.checkpoint.write.writer_process import WriterProcess
from headway.dist.collective.exchange import RankExchange, rank_and_size
from headway.dist.group import current
from headway.errors import StorageError
from headway.system import files
from headway.system.failpoints import failpoint

CLEAN_UP_S = 10.0
"""how long removing the files of a failed save may take; the next save removes the rest"""


@final
class BackgroundSave:
    """The shared memory, the writer process and the thread of saves in the background, reused by every save."""

    def __init__(self, timeout_s: float, clean_up_s: float) -> None:
        self._timeout_s, self._clean_up_s = timeout_s, clean_up_s
        self._memory = HostMemory()
        self._process = WriterProcess(self._memory.fd)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headway-saver")
        self._store: c10d.Store | None = None
        self._closed = False

    def start(
        self,
        target: SaveTarget,
        contents: RankContents,
        agreed: AgreedSave,
        proof: TensorProof,
        start: float,
        before_write: Callable[[], object] | None = None,
    ) -> Future[SavedCheckpoint]:
        """Copies this rank's share, and leaves the rest to the writer process. A failed copy fails the save."""
        if self._store is None and rank_and_size()[1] > 1:
            self._store = current().store.clone()  # type: ignore[attr-defined]
        exchange = RankExchange(
            f"write step {target.step}",
            store=self._store,
            # each rank gives up on its own writer process before the other ranks give up on the rank
            timeout_s=self._timeout_s + 6 * self._clean_up_s,
        )
        wait_for_copy = self._start_copy(agreed.share)
        writer = BackgroundWriter(self._process, wait_for_copy, self._timeout_s, self._clean_up_s)
        agreed.share.release()
        contents = dataclasses.replace(contents, tensors={})
        stalled = time.monotonic() - start
        failpoint("checkpoint.staged")

        def run() -> SavedCheckpoint:
            if before_write is not None:
                before_write()
            size = write_checkpoint(exchange, target, contents, agreed, writer, proof)
            return SavedCheckpoint(
                path=target.final,
                step=target.step,
                stall_s=stalled + writer.copy_s,
                total_s=time.monotonic() - start,
                bytes=size,
            )

        return self._thread.submit(run)

    def _start_copy(self, share: RankShare) -> Callable[[], float]:
        """Starts the copy; returns a function that waits for it, or raises the reason if it could not start."""
        try:
            with files.storage("copy the state into memory, to save it"):
                return self._memory.copy(share).wait
        except Exception as error:  # noqa: BLE001  the thread raises it on all ranks
            reason = error

        def fail() -> float:
            raise reason

        return fail

    def cancel(self) -> None:
        """Cancels the pending save, without waiting."""
        self._closed = True
        self._process.interrupt()
        self._thread.submit(self._release)
        self._thread.shutdown(wait=False)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._thread.submit(self._release).result()
            self._thread.shutdown()

    def _release(self) -> None:
        self._process.close()  # in the thread that started it
        self._memory.close()


@final
class BackgroundWriter(CheckpointWriter):
    """Writes one checkpoint through the writer process. `copy_s` is the result of `HostCopy.wait`, set by `write`."""

    def __init__(
        self,
        process: WriterProcess,
        wait_for_copy: Callable[[], float],
        timeout_s: float,
        clean_up_s: float,
    ) -> None:
        self._process, self._wait_for_copy = process, wait_for_copy
        self._timeout_s, self._clean_up_s = timeout_s, clean_up_s
        self._deadline = time.monotonic() + timeout_s
        self.copy_s = 0.0

    def begin(self, target: SaveTarget) -> None:
        self._call("begin", target)

    def write(
        self, target: SaveTarget, file: str, share: RankShare, documents: Mapping[str, bytes]
    ) -> dict[str, FileChecksum]:
        self.copy_s = self._wait_for_copy()
        texts = {name: data.decode() for name, data in documents.items()}
        checksums = self._call("write", target, file=file, size=share.size, documents=texts)
        return {name: FileChecksum(**checksum) for name, checksum in checksums.items()}

    def commit(self, target: SaveTarget, documents: Mapping[str, bytes], manifest: Manifest) -> int:
        texts = {name: data.decode() for name, data in documents.items()}
        size: int = self._call("commit", target, documents=texts, manifest=dataclasses.asdict(manifest))
        return size

    def discard(self, target: SaveTarget) -> None:
        # the disk may be what failed; the next save removes the rest
        with suppress(StorageError, TimeoutError):
            self._process.call("discard", target, deadline=time.monotonic() + self._clean_up_s)

    def _call(self, command: str, target: SaveTarget, **details: object) -> Any:
        try:
            return self._process.call(command, target, deadline=self._deadline, **details)
        except TimeoutError:
            raise StorageError(
                f"step {target.step} was not written to {target.parent} within {self._timeout_s:g} s (stuck in "
                f"{command}): the disk hangs or is too slow; the save was given up, and earlier checkpoints are "
                "unchanged. Check that file system"
            ) from None
