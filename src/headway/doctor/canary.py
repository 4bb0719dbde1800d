"""A small job that tests the links between ranks on this machine: `headway run -m headway.doctor.canary FILE DEVICE`.

Rank 0 writes the result of `check_interconnect` to FILE, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(file: str, device: str) -> None:
    """Joins the other ranks on `device`, tests every link, and writes the result."""
    from headway import dist
    from headway.dist.topology.interconnect import check_interconnect

    world = dist.init(device=device, setup_timeout=60.0, step_timeout=60.0)
    result = check_interconnect(megabytes=16 if device == "cuda" else 4)
    if world.is_root:
        Path(file).write_text(json.dumps(result.to_dict()))
    dist.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
