"""What a small sample costs: function calls of Python per sample, which are the same on any machine."""

from __future__ import annotations

import cProfile
from itertools import islice
from pathlib import Path

import numpy as np
import simplejpeg

from headway.data import ShardLoader, pack

MAX_CALLS = 85  # per sample, to read and decode it; each takes a tenth of a microsecond or more


def test_calls_per_thumbnail(tmp_path: Path) -> None:
    image = simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))
    pack(({"__key__": f"{n:04d}", "jpg": image, "cls": n % 10} for n in range(640)), tmp_path)
    loader = ShardLoader(tmp_path, batch_size=64, threads=1)
    assert len(next(iter(loader))["jpg"]) == 64  # shards are open
    batches = list(islice(loader._rank_batches(loader._weights_over_time(), 0), 4))
    profile = cProfile.Profile()
    for batch in batches:
        profile.runcall(loader._reader.read, batch.locations)
    calls = sum(entry.callcount for entry in profile.getstats())
    per_sample = calls / 256
    assert per_sample <= MAX_CALLS
