"""`Quarantine`: samples that could not be used, listed in a file per rank in the run directory; too many stop the run.

runs/NAME/log/quarantine-00003.jsonl       {"dataset": "web", "shard": "/data/7.tar", "key": "a", "reason": "..."}
"""

from __future__ import annotations

import math
import shlex
import zlib
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, final

from headway import dist
from headway.dist.collective.exchange import RankExchange
from headway.errors import HeadwayError, StorageError

_MIN_BAD = 10  # fewer may be chance, or the dataset is so small that their share says little
_MIN_SHARDS = 3
_NAMED_SHARDS = 5  # in the error, those with the most bad samples
_SIGNIFICANCE = -math.log(1e-4)  # of an excess: chance stops fewer than one run in 10,000
_MAX_SHARDS = 10_000  # that a rank sends to the others


class QuarantinedSample(NamedTuple):
    """A sample that could not be used."""

    dataset: str
    shard: str
    key: str
    reason: str


@final
class Quarantine:
    """The bad samples of a loader: each is written once to the run directory, and too many stop the run.

    `max_bad` is a share of all samples, on all ranks. A damaged shard may come early in an epoch that is good
    otherwise, so one rule compares bad samples with a whole epoch, and the other counts shards with bad samples.
    """

    def __init__(self, max_bad: float, epoch_samples: int) -> None:
        self.samples: list[QuarantinedSample] = []
        """those of this rank"""
        self._max_bad, self._epoch_samples = max_bad, epoch_samples
        self._written: set[tuple[str, str]] = set()
        self._shards: set[int] = set()
        self._taken = self._on_all_ranks = 0

    def add(self, samples: Iterable[QuarantinedSample]) -> None:
        """Adds bad samples of this rank."""
        samples = list(samples)
        self.samples += samples
        self._shards |= {zlib.crc32(bad.shard.encode("utf-8", "surrogateescape")) for bad in samples}
        new = {(bad.shard, bad.key): bad for bad in samples if (bad.shard, bad.key) not in self._written}
        self._written |= new.keys()
        from headway.dist.shared_run import current_run  # needs torch

        run = current_run()
        if new and run is not None:
            path = run.quarantine_file(dist.rank())
            # a full disk, or a run that another process has taken over, must not stop this one: they are still counted
            with suppress(StorageError), run.open_rows(path, content="bad samples") as rows:
                rows.write_all(bad._asdict() for bad in new.values())

    def check(self, seen: int, seen_by_all: int) -> None:
        """Raises `HeadwayError` if this rank alone has too many, given the samples that it and all ranks have seen."""
        bad = len(self.samples)
        if bad and self._too_many(bad, len(self._shards), seen, seen_by_all):
            counts = Counter(sample.shard for sample in self.samples)
            raise self._error(bad, seen, self.samples[-1], counts)

    def take(self) -> int:
        """Returns how many bad samples were added since the last call."""
        new, self._taken = len(self.samples) - self._taken, len(self.samples)
        return new

    def check_all_ranks(self, new: int, seen: int, part: int) -> None:
        """Raises `HeadwayError` on all ranks if they have too many together; `new` were added since the last call.

        Ranks exchange the shards of their bad samples only if there may be too many. All ranks must make this decision
        alike, so it depends on `new` alone: `seen`, the samples of all ranks, may differ if a rank reached its limit of
        batches sooner. Ranks with the same `part` of the data have the same bad samples, which count once.
        """
        self._on_all_ranks += new
        if not new or (self._max_bad and self._on_all_ranks < _MIN_BAD):
            return
        worst = Counter(bad.shard for bad in self.samples).most_common(_NAMED_SHARDS)
        shards = sorted(self._shards)[:_MAX_SHARDS]
        mine: list[Any] = [part, len(self.samples), shards, worst, self.samples[-1:], seen]
        rows = RankExchange("count their bad samples").all_gather(lambda: mine)
        by_part = {part: (count, shards, worst) for part, count, shards, worst, _, _ in rows}
        bad = sum(count for count, _, _ in by_part.values())
        all_shards = {shard for _, shards, _ in by_part.values() for shard in shards}
        seen_by_all = max(seen for *_, seen in rows)
        if self._too_many(bad, len(all_shards), seen_by_all, seen_by_all):
            last = next(samples[0] for *_, samples, _ in rows if samples)
            counts = Counter[str]()
            for _, _, worst in by_part.values():
                counts.update(dict(worst))
            raise self._error(bad, seen_by_all, QuarantinedSample(*last), counts)

    def _too_many(self, bad: int, shards: int, seen: int, seen_by_all: int) -> bool:
        """Whether there are more than a whole epoch may have, or too many shards with bad samples for chance.

        The second rule is a bound on the tail of the Poisson distribution, which also bounds the binomial one.
        """
        if not self._max_bad:
            return bad > 0
        if bad < _MIN_BAD:
            return False
        if bad > self._max_bad * max(seen_by_all, self._epoch_samples):
            return True
        expected = self._max_bad * seen
        if shards < _MIN_SHARDS or shards <= expected:
            return False
        return shards * math.log(shards / expected) - shards + expected > _SIGNIFICANCE

    def _error(self, bad: int, seen: int, last: QuarantinedSample, counts: Counter[str]) -> HeadwayError:
        worst = counts.most_common(_NAMED_SHARDS)
        named = ", ".join(f"{count} in {shard}" for shard, count in worst)
        others = bad - sum(count for _, count in worst)
        return HeadwayError(
            f"{bad} of {seen} samples could not be used, more than max_bad={self._max_bad:g}; "
            f"{named}{f', {others} in others' if others > 0 else ''}; "
            f"the last is {last.key!r} in {last.shard}: {last.reason}; find all with: headway data check "
            f"{shlex.quote(str(Path(last.shard).parent))}"
        )
