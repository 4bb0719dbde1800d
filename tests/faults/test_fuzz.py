"""Files that were changed at random: no hang, no traceback, no escape, no memory, nothing "valid" that does not load.

25 changes of each kind of file here, 3000 with `HEADWAY_FAULTS=full`, or as many as `HEADWAY_FAULTS_EXAMPLES` says.
`tests/fixtures/fuzz` keeps what was once found, by kind.
"""

from __future__ import annotations

import io
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from fuzzing import CHANGES, Violation, changed, judged, scratch, sealed, tar_of
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from safetensors.torch import save_file
from synthetic_run import events, make_run, node_sample, row, write_rows

from headway import checkpoint
from headway.checkpoint.format.dtypes import BY_NAME
from headway.checkpoint.inspect import overview
from headway.checkpoint.weights.readers import open_weights
from headway.cli import main
from headway.data import Shard, pack
from headway.data.catalog.catalog import _from_pyproject
from headway.data.shards import checksums
from headway.data.shards.decode import decode
from headway.data.shards.shard import count_samples
from headway.errors import HeadwayError
from headway.launcher.sweep import grid
from headway.launcher.targets import read_target
from headway.plan.input.plan_file import read_plan_file
from headway.plan.model.hugging_face import from_hf_config
from headway.plan.report.saved_plan import read_saved_plan
from headway.run import Run, find_latest, find_runs
from headway.watch.report import render
from headway.watch.runs import summary_of
from headway.watch.terminal import layout
from headway.watch.terminal.lines import describe
from headway.watch.view import RunView

FULL = os.environ.get("HEADWAY_FAULTS") == "full"
EXAMPLES = int(os.environ.get("HEADWAY_FAULTS_EXAMPLES", "3000" if FULL else "25"))
FOUND = Path(__file__).parents[1] / "fixtures" / "fuzz"

pytestmark = [pytest.mark.timeout(4000), pytest.mark.filterwarnings("ignore")]

Files = dict[str, bytes]
STATE: dict[str, Any] = {
    "net": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)},
    "pair": (1, [None, 2.5]),
    "epoch": 3,
}


def files_of(directory: Path) -> Files:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def written(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


# --- genuine files


def a_checkpoint(place: Path) -> Files:
    return files_of(checkpoint.save(place, STATE, step=2, local={"rng": [1, "x"]}, metrics={"val/loss": 0.5}))


def weights(place: Path) -> Files:
    net: dict[str, torch.Tensor] = dict(STATE["net"])
    save_file(net, place / "model-1.safetensors", metadata={"format": "pt"})
    where = {"metadata": {"total_size": 28}, "weight_map": dict.fromkeys(net, "model-1.safetensors")}
    (place / "model.safetensors.index.json").write_text(json.dumps(where))
    return files_of(place)


def torch_files(place: Path) -> Files:
    old = io.BytesIO()
    torch.save({"state_dict": STATE["net"], "epoch": 1}, old, _use_new_zipfile_serialization=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"net": STATE["net"]}, checkpoint_id=place)
    return {
        "net.pt": written(STATE), "module.pt": written({"model": torch.nn.Linear(2, 2).state_dict(), "n": {"m": 1}}),
        "old.pt": old.getvalue(), "dcp/.metadata": (place / ".metadata").read_bytes(),
    }  # fmt: skip


def a_run(place: Path) -> Files:
    run, now = make_run(place, ranks=2, log_points=5), time.time()
    run.end_attempt(1, status="failed", exit_code=1)
    write_rows(run.events_file(0), list(events(now, 10)))
    write_rows(run.node_file("cn000"), [node_sample("cn000", 2)])
    write_rows(run.metrics_file(0), [row(10 * n, 0, now) for n in range(1, 5)])
    run.failure_file.write_text(
        json.dumps({"rank": 1, "host": "cn7", "step": 4, "error": "x", "traceback": "a\n b"})
    )
    run.plan_file.write_text(json.dumps({"answers": {"time.step": {"value": 0.1, "low": 0.05, "high": 0.2}}}))
    run.sweep_file.write_text(json.dumps({"sweep": run.id, "index": 0, "size": 2, "settings": {"lr": "1"}}))
    (run.path / "submitted.json").write_text(
        json.dumps({"job": "12_3", "cluster": None, "time": now, "kind": "slurm"})
    )
    (run.path / "ended.json").write_text(
        json.dumps({"attempt": 1, "status": "failed", "exit_code": 1, "why": "x"})
    )
    (run.path / "notes.json").write_text(json.dumps({"tags": ["a"], "note": "b"}))
    return files_of(run.path)


def shards(place: Path) -> Files:
    samples = ({"__key__": f"{n:03d}", "txt": f"text {n}", "json": {"n": n}, "cls": n} for n in range(4))
    (path,) = pack(samples, place)
    checksums.write(path, checksums.compute(path))
    pax = tar_of({"a" * 120 + ".txt": b"x", "b.cls": b"1"})
    files = files_of(place)
    return files | {"pax.tar": pax}


def settings_files(_: Path) -> Files:
    plan = {
        "model": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 100},
        "layout": {"dp": 8, "zero": 3, "global_batch": 16, "sequence": 64},
        "node": {"name": "h200-sxm8", "price_per_hour": 30},
        "job": {"tokens": 1e12},
    }
    model = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 100, "intermediate_size": 128,
    }  # fmt: skip
    answers = {"time.step": {"value": 0.1, "low": 0.05, "high": 0.2}}
    return {
        "plan.yaml": yaml.safe_dump(plan).encode(),
        "target.yaml": b"kind: slurm\ntime: 2:00:00\nnodes: 2\npartition: gpu\n",
        "sweep.yaml": b"lr: [1e-3, 3e-4]\nseed: [1, 2]\n",
        "rows.json": b'[{"lr": 1, "seed": 2}, {"lr": 2}]',
        "rows.csv": b"lr,seed\n1e-3,1\n2e-3,2\n",
        "config.json": json.dumps(model).encode(),
        "saved.json": json.dumps({"format": 1, "title": "x", "answers": answers}).encode(),
        "pyproject.toml": b'[tool.headway]\ndata_root = "data"\n',
    }


# --- what headway does with them

refused: list[str] = []


def attempt(action: Callable[[Path], object], path: Path) -> bool:
    """Whether headway accepts a file."""
    try:
        action(path)
    except HeadwayError as error:
        refused.append(f"{path.name}: {error}")
        return False
    return True


def use_checkpoint(place: Path) -> None:
    path = place / "step-000000000002"
    path.mkdir()
    for file in [each for each in place.iterdir() if each.is_file()]:
        file.rename(path / file.name)
    if problems := checkpoint.verify(path):
        refused.extend(problems)
        return
    loaded = checkpoint.load(path)
    assert loaded.step == 2 and isinstance(loaded.state, dict)
    fill_twice(path)
    assert main(["checkpoint", "show", str(place)]) == 0
    try:
        checkpoint.export(path, place / "out.safetensors")
    except HeadwayError as error:
        if "reserves" not in str(error):
            raise Violation("a valid checkpoint is not exported") from error
    else:
        fill_twice(place / "out.safetensors")


def fill_twice(path: Path) -> None:
    """Every element gets its value from the file: it does not depend on what was there before."""
    with open_weights(path) as reader:
        if sum(entry.bytes for entry in reader.entries.values()) > 1 << 20:
            return  # a view of a few bytes may have a large shape
        filled = []
        for start in (0, 1):
            tensors = {
                name: torch.full(entry.shape, start, dtype=BY_NAME[entry.dtype])
                for name, entry in reader.entries.items()
            }
            reader.fill(tensors)
            filled.append(
                {name: tensor.view(-1).view(torch.uint8).tolist() for name, tensor in tensors.items()}
            )
    if filled[0] != filled[1]:
        raise Violation("a tensor has elements without values")


def use_weights(place: Path) -> None:
    for path in (place, *sorted(place.glob("*.safetensors"))):
        if path != place:
            attempt(show, path)
        attempt(fill_twice, path)


def use_torch(place: Path) -> None:
    for path in sorted(place.iterdir()):
        attempt(show, path)
        if path.suffix == ".pt":
            attempt(fill_twice, path)


def show(path: Path) -> None:
    overview.read(path).to_dict()
    assert main(["checkpoint", "show", str(path)]) == 0


def use_run(place: Path) -> None:
    path = place / "synthetic-2026.11.15-14.30-x7k2"
    path.mkdir()
    for file in [each for each in place.iterdir() if each != path]:
        file.rename(path / file.name)
    attempt(lambda root: find_runs("synthetic", root), place)
    attempt(find_latest, place)
    main(["runs", "--root", str(place)])
    attempt(summarized, path)
    attempt(watched, path)
    main(["runs", "rebuild", str(path)])


def summarized(path: Path) -> None:
    run = Run.open(path)
    run.info()
    summary_of(run)


def watched(path: Path) -> None:
    run = Run.open(path)
    snapshot = RunView(run).refresh()
    shown = "".join(line.plain for line in layout(snapshot, 120, 50)) + describe(snapshot)
    if unsafe := [c for c in shown if not c.isprintable()]:
        raise Violation(f"the screen has {unsafe}")
    page = render(run)
    if "\x1b" in page or "<script" in page:
        raise Violation("the page has a command")


def use_shard(place: Path) -> None:
    for path in sorted(place.glob("*.tar")):
        for action in (checksums.read, count_samples, read_all):
            attempt(action, path)
        main(["data", "check", str(path)])


def read_all(path: Path) -> None:
    shard = Shard.open(path)
    for number in range(min(len(shard), 100)):
        decode(shard[number])


def use_settings(place: Path) -> None:
    readers: dict[str, Callable[[Path], object]] = {
        "plan.yaml": read_plan_file, "target.yaml": read_target, "config.json": from_hf_config,
        "saved.json": read_saved_plan, "pyproject.toml": lambda path: _from_pyproject(path.parent),
    }  # fmt: skip
    for path in sorted(place.iterdir()):
        attempt(readers.get(path.name, lambda path: grid([str(path)])), path)


KINDS: dict[str, tuple[Callable[[Path], Files], Callable[[Path], None]]] = {
    "checkpoint": (a_checkpoint, use_checkpoint), "weights": (weights, use_weights), "torch": (torch_files, use_torch),
    "run": (a_run, use_run), "shards": (shards, use_shard), "settings": (settings_files, use_settings),
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    return {kind: make(tmp_path_factory.mktemp(kind)) for kind, (make, _) in KINDS.items()}


def put(place: Path, files: Files) -> None:
    for name, data in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)


def tried(kind: str, files: Files) -> None:
    with scratch() as place:
        put(place, files)
        with judged(place):
            KINDS[kind][1](place)


@pytest.mark.parametrize("kind", KINDS)
def test_files_changed_at_random(
    kind: str, corpus: dict[str, Files], capsys: pytest.CaptureFixture[str]
) -> None:
    genuine = corpus[kind]
    refused.clear()
    tried(kind, genuine)  # imports what it needs
    assert not refused, "only what is accepted reaches the code behind the first check"

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=not FULL,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(seed=st.integers(0, 2**48))
    def change(seed: int) -> None:
        rng, files = Random(seed), dict(genuine)
        for name in rng.sample(sorted(files), 1 if rng.random() < 0.9 else 2):
            files[name] = CHANGES.get(Path(name).suffix, changed)(files[name], rng)
            if kind == "checkpoint" and rng.random() < 0.9:
                facts = {name: files[name]} if name != "manifest.json" else {}
                files["manifest.json"] = sealed(files["manifest.json"], facts)
        tried(kind, files)
        shown = capsys.readouterr()
        for text in (shown.out, shown.err):
            if unsafe := {c for c in text if not c.isprintable() and c not in "\n\t"}:
                raise Violation(f"the terminal gets {unsafe}: {text[:500]!r}")

    change()


@pytest.mark.parametrize(
    "case", sorted(FOUND.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_what_was_once_found(case: Path, corpus: dict[str, Files]) -> None:
    tried(case.parent.name, corpus[case.parent.name] | files_of(case))
