"""`predict`: the results of a stage's `predict(batch)` for every sample, in the order of the dataset.

Each rank predicts its part of a global batch; rank 0 gathers the rows of all ranks, which are then in order, and writes
them. So the file does not depend on the number of ranks, and its length is the position to resume at.
"""

from __future__ import annotations

import hashlib
import inspect
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as c10d
from torch import Tensor

from headway import dist
from headway.checkpoint.format import dtypes
from headway.dist.collective.exchange import RankExchange, gather_rows
from headway.dist.collective.guard import from_root
from headway.dist.objects import report_root
from headway.errors import UsageError
from headway.run import Run, check_name
from headway.system import jsonlines
from headway.system.failpoints import failpoint
from headway.train.batches import count_batches
from headway.train.evaluate.mode import evaluating, shares_batches, stand_in, until_all_end
from headway.train.evaluate.output import Columns, PredictionFile, kind_of
from headway.train.evaluate.pause import reading_from_start
from headway.train.evaluate.sample_order import count_samples, describe_samples, seek
from headway.train.evaluate.session import (
    EvalProgress,
    EvalSession,
    EvalWeights,
    find_dataset,
    session,
)
from headway.train.loop_state import LoopState
from headway.train.train_val_state import TrainValState

if TYPE_CHECKING:
    from headway.train.pipeline import Pipeline
    from headway.train.stage import Stage


def predict(
    pipe: Pipeline,
    stage: Stage,
    dataset: str | Iterable[Any],
    out: Path,
    *,
    weights: EvalWeights,
    run: Run | str | Path | None,
    name: str,
) -> Path:
    """Predicts all samples of a dataset into a file, or resumes a prediction; returns the path on all ranks."""
    kind, name = kind_of(out), check_name(name)
    state = stage._loop
    with session(pipe, stage, weights=weights, run=run) as opened:
        loader = find_dataset(pipe, dataset)
        total = count_samples(loader, pipe.world.world_size)
        content = from_root(lambda: describe_samples(loader))
        request = {
            "out": str(out), "stage": stage.name, "weights": opened.identity, "samples": total,
            "fingerprints": content, "code": _code_of(stage),
        }  # fmt: skip
        if from_root(lambda: _is_done(out, opened, name, request)):
            report_root(f"{out} is already there, with the same weights and data")
            return out
        began = time.monotonic()
        file = kind(out, request, total) if pipe.world.is_root else None
        try:
            position = from_root(lambda: file.begin() if file else {})
            with (
                state.computing(),
                reading_from_start(pipe._state, [loader]),
                evaluating(state),
                state.not_counted(),
            ):
                _write_rows(state, loader, file, position)
            from_root(lambda: file.finish() if file else None)
        finally:
            if file:
                file.close()
        row = {"kind": "predict", "request": request, "seconds": round(time.monotonic() - began, 3)}
        opened.write(pipe.world, name, row)
        report_root(f"predictions of {stage.name}, weights {opened}, are in {out}")
    return out


def _code_of(stage: Stage) -> str:
    """Returns a hash of the source of the stage's classes: an edited `predict` makes it another request."""
    own = [
        each
        for each in type(stage).__mro__
        if each.__module__.partition(".")[0] not in ("headway", "abc", "builtins")
    ]
    try:
        text = "".join(map(inspect.getsource, own))
    except (OSError, TypeError):  # typed into an interpreter, which keeps no source
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_done(out: Path, opened: EvalSession, name: str, request: Mapping[str, Any]) -> bool:
    """Whether the file exists and is the result of the same request; raises `UsageError` if it is another file."""
    if not out.parent.is_dir():
        raise UsageError(
            f"there is no directory for {out}; make it with: mkdir -p {shlex.quote(str(out.parent))}"
        )
    if not out.exists():
        return False
    rows = [row for row in jsonlines.read(opened.run.eval_file(name)) if row.get("kind") == "predict"]
    if any(row.get("request") == request for row in rows):
        return True
    raise UsageError(f"{out} exists already: choose another name, or remove it")


def _write_rows(
    state: LoopState, loader: Iterable[Any], file: PredictionFile | None, position: Mapping[str, Any]
) -> None:
    stage, rows, columns = state.stage, int(position["rows"]), position["columns"]
    autocast = state.precision.autocast if isinstance(state, TrainValState) else None
    progress = EvalProgress(f"predict {stage.name}", count_batches(loader, None), position["batches"])
    as_lines = file is not None and file.path.suffix == ".jsonl"
    as_lines, sharded = bool(from_root(lambda: as_lines)), shares_batches(state.pipe)
    for batch, counts in _batches(state, loader, position):
        dist.set_phase("predict", state.run.steps_done)
        mine: Any = {}
        if counts or sharded:
            with autocast or nullcontext():
                returned = stage.predict(batch)
            mine = _to_rows(stage, returned) if counts else {}
        lengths = [int(n) for n in gather_rows(torch.tensor([_length(mine)], device=state.device))[:, 0]]
        first = rows + sum(lengths[: state.pipe.world.rank])
        if columns is None:
            found = RankExchange("describe predictions").all_gather(lambda: _describe(mine))  # noqa: B023
            columns = next((each for each in found if each is not None), {})
        data = _lines(mine, first) if as_lines else _bytes(mine, columns)
        parts = _gather_bytes(data, state.device)
        from_root(lambda: file.write(columns, list(zip(lengths, parts, strict=True))) if file else None)  # noqa: B023
        rows += sum(lengths)
        progress.step()
        failpoint("predict.batch")


def _batches(
    state: LoopState, loader: Iterable[Any], position: Mapping[str, Any]
) -> Iterator[tuple[Any, bool]]:
    """Yields the remaining batches, and whether their rows count: a rank without data repeats its last batch."""
    batches = islice(state.device_batches(loader), seek(loader, position), None)
    last = None
    for batch in until_all_end(batches, state.device):
        if batch is None and last is None and shares_batches(state.pipe):
            last = stand_in(state, loader)
        last = last if batch is None else batch
        yield last, batch is not None


def _to_rows(stage: Stage, returned: Any) -> Any:
    """Returns tensors by name on the host, or a list with an entry for each sample."""
    named = {"": returned} if isinstance(returned, Tensor) else returned
    if isinstance(named, Mapping) and named and all(isinstance(v, Tensor) for v in named.values()):
        lengths = {name: len(tensor) if tensor.ndim else None for name, tensor in named.items()}
        if len({*lengths.values()}) == 1 and None not in lengths.values():
            return {str(name): _on_host(tensor) for name, tensor in named.items()}
        shapes = ", ".join(f"{name} {tuple(each.shape)}".strip() for name, each in named.items())
        raise UsageError(
            f"predict() of stage {stage.name!r} returned tensors of shape {shapes}: return a row for each sample, in "
            "the first dimension"
        )
    if isinstance(returned, list | tuple):
        return list(returned)
    raise UsageError(
        f"predict() of stage {stage.name!r} returned a {type(returned).__name__}: return a tensor or a dict of tensors "
        "with a row for each sample, or a list with an entry for each"
    )


def _on_host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = tensor.float() if tensor.dtype is torch.bfloat16 else tensor  # numpy and JSON do not have it
    return tensor.cpu().contiguous()


def _length(rows: Any) -> int:
    return len(rows) if isinstance(rows, list) else len(next(iter(rows.values()), ()))


def _describe(rows: Any) -> Columns | None:
    if isinstance(rows, list) or not rows:
        return {} if rows else None
    return {
        name: {"dtype": dtypes.NAMES[tensor.dtype], "shape": list(tensor.shape[1:])}
        for name, tensor in rows.items()
    }


def _bytes(rows: Any, columns: Columns) -> bytes:
    """Returns the rows in the order of the columns; raises `UsageError` if they do not fit a file of tensors."""
    if isinstance(rows, list):
        raise UsageError(
            "predict() returned a list, which only a .jsonl file can hold: return tensors, or write to one"
        )
    if rows and (found := _describe(rows)) != columns:
        raise UsageError(
            f"predict() returned rows of {found}, and those before are of {columns}: return rows of one shape and type "
            "for all batches, such as padded to one length, or write to a .jsonl file"
        )
    tensors = (rows[name] for name in columns) if rows else ()
    return b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)


def _lines(rows: Any, first: int) -> bytes:
    if not isinstance(rows, list):
        columns = {name or "prediction": tensor.tolist() for name, tensor in rows.items()}
        rows = [dict(zip(columns, each, strict=True)) for each in zip(*columns.values(), strict=True)]
    lines = []
    for n, row in enumerate(rows):
        named = row if isinstance(row, Mapping) else {"prediction": row}
        if "index" in named:
            raise UsageError(
                "predict() returned a row with an 'index', which each line has for its sample: choose another name"
            )
        lines.append(jsonlines.to_line({"index": first + n, **named}))
    return "".join(lines).encode()


def _gather_bytes(data: bytes, device: torch.device) -> list[bytes]:
    """Returns the bytes of all ranks, in their order, on rank 0."""
    sizes = [int(n) for n in gather_rows(torch.tensor([len(data)], device=device))[:, 0]]
    if len(sizes) == 1:
        return [data]
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    padded = padded.to(device)
    parts = [torch.empty_like(padded) for _ in sizes] if c10d.get_rank() == 0 else None
    c10d.gather(padded, parts, dst=0)
    if parts is None:
        return [b""] * len(sizes)
    return [part[:size].cpu().numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]
