"""An independent judge of checkpoints: the format, read with nothing but the standard library.

It shares no code with headway. `python checker.py DIRECTORY` prints the whole steps and the problems, as JSON.
"""

from __future__ import annotations

import binascii
import json
import stat
import struct
import sys
from itertools import pairwise
from pathlib import Path

BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "U8": 8, "BOOL": 8}


def judge(parent: str) -> tuple[dict[int, dict], list[str]]:
    """The steps that are whole, with all their tensors as bytes, and what is wrong with the others."""
    whole, problems = {}, []
    for name in sorted(path.name for path in Path(parent).iterdir()):
        if name.startswith("step-") and ".corrupt-" not in name:
            try:
                whole[int(name[5:])] = read(Path(parent) / name)
            except (AssertionError, OSError, ValueError, KeyError, struct.error) as error:
                problems.append(f"{name}: {error!r}")
    return whole, problems


def read(directory: Path) -> dict:
    assert stat.S_ISDIR(directory.lstat().st_mode), "not a directory"
    raw = _bytes(directory, "manifest.json")
    body, comma, seal = raw.rpartition(b',\n "crc32": ')
    assert comma and seal == b'"%08x"\n}\n' % binascii.crc32(body), "seal"
    manifest = json.loads(raw)
    assert directory.name == f"step-{manifest['step']:012d}", "step"
    blobs = {}
    for name, fact in manifest["files"].items():
        assert "/" not in name
        blobs[name] = _bytes(directory, name)
        assert len(blobs[name]) == fact["bytes"], f"size of {name}"
        assert f"{binascii.crc32(blobs[name]):08x}" == fact["crc32"], f"crc of {name}"
    index, state = json.loads(blobs["index.json"]), json.loads(blobs["state.json"])
    assert (
        index["step"] == state["step"] == manifest["step"]
        and index["save"] == state["save"] == manifest["save"]
    )
    seen = {name: _safetensors(name, blob) for name, blob in blobs.items() if name.endswith(".safetensors")}
    tensors = {}
    for name, entry in index["holds"].items():
        pieces = []
        for chunk in entry["chunks"]:
            begin, end = chunk["bytes"]
            assert (begin, end) in seen[chunk["file"]], f"{name} is not where the safetensors header says"
            assert end - begin == _volume(chunk["shape"]) * BITS[entry["dtype"]] // 8, name
            pieces.append((chunk["offsets"], chunk["shape"], blobs[chunk["file"]][begin:end].hex()))
        assert sum(_volume(shape) for _, shape, _ in pieces) == _volume(entry["shape"]), (
            f"{name} is not covered"
        )
        tensors[name] = (entry["dtype"], entry["shape"], sorted(pieces))
    return {"step": manifest["step"], "state": state["holds"], "tensors": tensors, "world": manifest["world"]}


def _safetensors(name: str, blob: bytes) -> set[tuple[int, int]]:
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + length])
    header.pop("__metadata__")
    ranges = sorted(tuple(8 + length + at for at in entry["data_offsets"]) for entry in header.values())
    assert ranges[0][0] == 8 + length and ranges[-1][1] == len(blob), f"holes in {name}"
    assert all(one[1] == two[0] for one, two in pairwise(ranges)), f"holes in {name}"
    return set(ranges)


def _bytes(directory: Path, name: str) -> bytes:
    about = (directory / name).lstat()
    assert stat.S_ISREG(about.st_mode) and stat.S_IMODE(about.st_mode) == 0o600, name
    return (directory / name).read_bytes()


def _volume(shape: list[int]) -> int:
    volume = 1
    for size in shape:
        volume *= size
    return volume


if __name__ == "__main__":
    found, wrong = judge(sys.argv[1])
    print(json.dumps({"whole": sorted(found), "problems": wrong}))
