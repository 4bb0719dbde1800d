"""Evidence for error messages when a rank runs out of memory or a loss becomes non-finite.

It is collected after the failure, so it costs steps nothing: the batch is still in memory, the loader can name the
samples that it yielded, and all ranks together can run the model on the batch again.
"""

from __future__ import annotations

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
from headway.dist.collective.exchange import RankExchange
from headway.errors import HeadwayError
from headway.plan.report.saved_plan import SavedPlan
from headway.system import files
from headway.system.jsonlines import parse_json
from headway.system.text import shorten_list
from headway.train.diagnose.plan_check import PlanCheck

if TYPE_CHECKING:
    from headway.run import Run
    from headway.train.loop_state import LoopState
    from headway.train.train_val_state import TrainValState

_GIB = 2**30
UNKNOWN_STEP = 2**62
"""stands for the first step with a non-finite loss if no rank has kept it"""
_PHASES = {"backward": "backward pass", "apply_update": "optimizer's step", "validate": "validation"}


@contextmanager
def explain_out_of_memory(state: LoopState) -> Iterator[None]:
    """Adds the evidence to an out-of-memory error that is raised in the context."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise HeadwayError(_out_of_memory(error, state)) from error


def _out_of_memory(error: torch.OutOfMemoryError, state: LoopState) -> str:
    pipe, step = state.pipe, state.run.steps_done + 1
    calls = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    phase = next((words for name, words in _PHASES.items() if name in calls), "forward pass")
    known = [
        f"rank {pipe.world.rank} ran out of memory on {pipe.device} in the {phase} of step {step}",
        f"the batch has {shapes(state.batch)}",
    ]
    if pipe.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(pipe.device)
        whole = torch.cuda.get_device_properties(pipe.device).total_memory
        known.append(f"at most {peak / _GIB:.1f} of {whole / _GIB:.1f} GiB were in use")
        if pipe.directory.is_ours():
            file = pipe.directory.memory_file(pipe.world.rank)
            file.write_text(torch.cuda.memory_summary(pipe.device))
            known.append(f"the allocator's own summary is in {file}")
    for callback in state.run.callbacks:
        if isinstance(callback, PlanCheck):
            callback.await_plan(state)
    known += _planned_memory(pipe.directory)
    advice = "lower the batch size and raise accumulate, pass activation_checkpointing, or shard the model with fsdp"
    return f"{'; '.join(known)}: {advice} ({str(error).splitlines()[0]})"


def _planned_memory(run: Run) -> list[str]:
    """Returns the prediction of the run's plan.json, which `headway plan --save` writes; empty without a plan."""
    try:
        plan = parse_json(files.read_regular(run.plan_file))
    except FileNotFoundError:
        return []
    needed, available = (
        plan["answers"].get(key, {}).get("value") for key in ("memory.needed", "device.memory")
    )
    if not needed:
        return []
    of = f" of {available / _GIB:.1f}" if available else ""
    fixes = SavedPlan(title=run.path.name, content=plan).fixes[:2]
    words = "this needs less" if plan.get("fits") else "this would fit"
    fit = f", and that {words}: {' or '.join(fixes)}" if fixes else ""
    return [f"the plan predicted {needed / _GIB:.1f}{of} GiB{fit}"]


def shapes(batch: Any) -> str:
    """Describes the shapes of a batch's tensors.

    >>> shapes((torch.zeros(8, 3), {"y": torch.zeros(8)}))
    'shapes (8, 3) and (8,)'
    """
    found = [str(tuple(leaf.shape)) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if not found:
        return "no tensors"
    return f"shape {found[0]}" if len(found) == 1 else f"shapes {', '.join(found[:-1])} and {found[-1]}"


def explain_non_finite_loss(state: TrainValState, first: int, rank: int, norm: Any) -> str:
    """Returns the evidence for a loss that became non-finite at step `first`, first on `rank`.

    Call it on all ranks; it returns the same on all.
    """
    exchange = RankExchange("explain a non-finite loss")
    facts = exchange.all_gather(lambda: (_replay(state), _samples(state, first)))
    (cause, _), samples = facts[rank], facts[0][1]
    known = [cause]
    if isinstance(norm, float) and math.isfinite(norm):
        known.append(f"the norm of the gradients was {norm:.3g}")
    if samples:
        known.append(f"step {first:,} used the samples {samples}")
    return "".join(f"; {fact}" for fact in known if fact)


def _replay(state: TrainValState) -> str:
    """Runs the last batch again and returns where the first non-finite value appears."""
    for name, model in state.pipe.registered_models.items():
        for key, parameter in model.bare.named_parameters():
            if not _finite(parameter.detach()):
                return f"the weights {key!r} of model {name!r} are non-finite"
    found: list[str] = []
    with ExitStack() as stack:
        for name, model in state.pipe.registered_models.items():
            for key, part in model.bare.named_modules():
                label = f"{key or type(part).__name__} of model {name!r}"
                hook = part.register_forward_hook(_output_check(label, found))
                stack.callback(hook.remove)
        with torch.no_grad(), state.not_counted(), state.precision.autocast or nullcontext():
            returned = state.stage.train_step(state.batch)
    if found:
        return f"the first module with a non-finite output is {found[0]}"
    if not _finite(*tree_leaves(state.batch)):
        return "the last batch itself is non-finite"
    if _finite(*tree_leaves(returned)):
        return ""
    return (
        f"all modules have finite outputs for the last batch, of {shapes(state.batch)}, but its loss is "
        "non-finite, like a mean over nothing (0/0): return (loss, weight) from step(), with weight 0 for such a batch"
    )


def _output_check(name: str, found: list[str]) -> Callable[[Any, Any, Any], None]:
    """Returns a forward hook that adds the first module with a non-finite output to `found`."""

    def check(_: Any, inputs: Any, output: Any) -> None:
        if not found and not _finite(*tree_leaves(output)):
            found.append(
                name if _finite(*tree_leaves(inputs)) else f"{name}, whose input is non-finite as well"
            )

    return check


def _finite(*values: Any) -> bool:
    """Whether all tensors are finite; a sharded one is checked as a whole, with the same result on all ranks."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            finite = value.isfinite().all()
            if not (finite.full_tensor() if isinstance(finite, DTensor) else finite):
                return False
    return True


def _samples(state: TrainValState, first: int) -> str:
    """Returns the samples of that step on all ranks; empty if the loader cannot name them, or their number is unknown.

    Call it on all ranks and use the result of rank 0, which has the smallest part of a short batch.
    """
    loader = state.stage.train_dataset()
    if not isinstance(loader, TraceableLoader) or first == UNKNOWN_STEP:
        return ""
    span, order = loader.last_span(), loader.order()
    if span is None or order is None or not _have_equal_sizes(state, first, span[1] - span[0]):
        return ""
    width = (span[1] - span[0]) * state.settings.accumulate
    stop = span[1] - (state.run.steps_done - first) * width
    if stop < width:
        return ""  # the step was in an earlier epoch
    return shorten_list(SampleLookup(order).labels(stop - width, stop))


def _have_equal_sizes(state: TrainValState, first: int, width: int) -> bool:
    """Whether all batches from step `first` on have as many samples as the latest, which has `width` over all ranks.

    Only the last batch of an epoch may be shorter than the others, and only the last step may have fewer batches.
    """
    latest = state.passes[-1]
    if not (latest.done or latest.ends_here or latest.total_batches is None):
        return True
    counts = [count for step, _, count, _ in state.recent_losses if step >= first]
    whole = len(counts) == (state.run.steps_done - first + 1) * state.settings.accumulate
    return whole and len(set(counts)) == 1 and counts[0] * state.pipe.world.world_size <= width
