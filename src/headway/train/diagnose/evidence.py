"""What is known when training goes wrong: out of memory, or a loss that is not finite. Looked for only then.

Nothing of this costs a step anything: the batch is still there, the loader knows what it gave, and the model can be
asked again, with all ranks taking part.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from headway.data.order import SampleLookup, TraceableLoader
from headway.errors import HeadwayError

if TYPE_CHECKING:
    from headway.run import Run
    from headway.train.stage import Stage
    from headway.train.train_val import TrainValStage

_GIB = 2**30
_PHASES = {"backward": "backward pass", "apply_update": "optimizer's step", "validate": "validation"}
_SAMPLES_SHOWN = 16


@contextmanager
def explained(stage: Stage) -> Iterator[None]:
    """Running out of memory in here is told with all that is known about it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise HeadwayError(_out_of_memory(error, stage)) from error


def _out_of_memory(error: torch.OutOfMemoryError, stage: Stage) -> str:
    pipe = stage.pipe
    calls = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    phase = next((words for name, words in _PHASES.items() if name in calls), "forward pass")
    known = [
        f"rank {pipe.world.rank} ran out of memory on {pipe.device} in the {phase} of step {pipe.steps_done + 1}",
        f"the batch has {shapes(stage._loop.batch)}",
    ]
    if pipe.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(pipe.device)
        whole = torch.cuda.get_device_properties(pipe.device).total_memory
        known.append(f"at most {peak / _GIB:.1f} of {whole / _GIB:.1f} GiB were in use")
        file = pipe.directory.memory_file(pipe.world.rank)
        file.write_text(torch.cuda.memory_summary(pipe.device))
        known.append(f"the allocator's own summary is in {file}")
    known += _planned(pipe.directory)
    advice = "lower the batch size and raise accumulate, pass activation_checkpointing, or shard the model with fsdp"
    return f"{'; '.join(known)}: {advice} ({str(error).splitlines()[0]})"


def _planned(run: Run) -> list[str]:
    """What `headway plan --save plan.json` said, if there is such a plan."""
    try:
        plan = json.loads(run.plan_file.read_text())
    except FileNotFoundError:
        return []
    needed, there = (plan["answers"].get(key, {}).get("value") for key in ("memory.needed", "device.memory"))
    of = f" of {there / _GIB:.1f}" if there else ""
    return [f"the plan said {needed / _GIB:.1f}{of} GiB"] if needed else []


def shapes(batch: Any) -> str:
    """The shapes of a batch's tensors.

    >>> shapes((torch.zeros(8, 3), {"y": torch.zeros(8)}))
    'shapes (8, 3) and (8,)'
    """
    found = [str(tuple(leaf.shape)) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if not found:
        return "no tensors"
    return f"shape {found[0]}" if len(found) == 1 else f"shapes {', '.join(found[:-1])} and {found[-1]}"


def of_a_loss(stage: TrainValStage, first: float, norm: Any) -> str:
    """What can be found out about a loss that is not finite since step `first`. Call it on all ranks."""
    known = [_replay(stage)]
    if isinstance(norm, float) and math.isfinite(norm):
        known.append(f"the norm of the gradients was {norm:.3g}")
    if samples := _samples(stage, first):
        known.append(f"step {first:g} saw the samples {samples}")
    return "".join(f"; {fact}" for fact in known if fact)


def _replay(stage: TrainValStage) -> str:
    """Where the first number that is not finite comes from, when the last batch is put in again."""
    for name, model in stage.pipe.registered_models.items():
        for key, parameter in model.bare.named_parameters():
            if not _finite(parameter.detach()):
                return f"the weights {key!r} of model {name!r} are no longer finite"
    found: list[str] = []
    with ExitStack() as stack:
        for name, model in stage.pipe.registered_models.items():
            for key, part in model.bare.named_modules():
                hook = part.register_forward_hook(
                    _look(f"{key or type(part).__name__!s} of model {name!r}", found)
                )
                stack.callback(hook.remove)
        stage._loop.logging_off = True
        stack.callback(setattr, stage._loop, "logging_off", False)
        with torch.no_grad(), stage._loop.precision.autocast or nullcontext():
            stage.train_step(stage._loop.batch)
    if found:
        return f"the first module whose output is not finite is {found[0]}"
    return "" if _finite(*tree_leaves(stage._loop.batch)) else "the last batch itself is not finite"


def _look(name: str, found: list[str]) -> Callable[[Any, Any, Any], None]:
    def look(_: Any, inputs: Any, output: Any) -> None:
        if not found and not _finite(*tree_leaves(output)):
            fault = "" if _finite(*tree_leaves(inputs)) else ", whose input is not finite either"
            found.append(name + fault)

    return look


def _finite(*values: Any) -> bool:
    """Of tensors; a sharded one is looked at as a whole, the same on all ranks."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            every = value.isfinite().all()
            if not (every.full_tensor() if isinstance(every, DTensor) else every):
                return False
    return True


def _samples(stage: TrainValStage, first: float) -> str:
    """The samples of that step, on all ranks together, if the loader knows which it gives."""
    loader = stage.train_dataset()
    if not isinstance(loader, TraceableLoader) or not math.isfinite(first):
        return ""
    span, order = loader.last_span(), loader.order()
    if span is None or order is None:
        return ""
    width = (span[1] - span[0]) * stage._loop.settings.accumulate
    stop = span[1] - (stage.pipe.steps_done - int(first)) * width
    if stop < width:
        return ""  # in an epoch before this one
    words = SampleLookup(order).labels(stop - width, stop)
    rest = f" and {len(words) - _SAMPLES_SHOWN} more" if len(words) > _SAMPLES_SHOWN else ""
    return ", ".join(words[:_SAMPLES_SHOWN]) + rest
