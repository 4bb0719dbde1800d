"""Our reader of the first host of a list against SLURM's own reader of all."""

from __future__ import annotations

import random

import pytest

from headway.dist.environment import first_host

from .bench import Cluster

pytestmark = pytest.mark.cluster


def random_list(rng: random.Random) -> str:
    words = []
    for _ in range(rng.randint(1, 4)):
        word = rng.choice(["n", "cn-l", "gpu", "rack1-", "a.b"])
        for _ in range(rng.randint(0, 2)):
            width = rng.randint(1, 3)
            first = rng.randint(0, 120)
            parts = [
                f"{first:0{width}d}-{first + rng.randint(0, 5):0{width}d}",
                f"{rng.randint(200, 300):0{width}d}",
            ]
            word += (
                f"[{','.join(parts[: rng.randint(1, 2)])}]"  # scontrol wants nothing behind the last bracket
            )
        words.append(word)
    return ",".join(words)


def test_as_scontrol_reads_them(cluster: Cluster) -> None:
    rng = random.Random(7)
    lists = ["n[1-4]", "cn-l[084-085,090],gpu[1-3]", "n[098-101]", *(random_list(rng) for _ in range(60))]
    script = "while read -r list; do scontrol show hostnames \"$list\" | paste -sd' '; done"
    done = cluster.run(["bash", "-c", script], stdin="\n".join(lists) + "\n", check=True)
    for ours, theirs in zip(lists, done.stdout.splitlines(), strict=True):
        assert first_host(ours) == theirs.split()[0], ours
