"""A plan of the step that is about to be trained: it is traced without data, in a forked process.

The process is forked before the first step and waits for the shapes of a batch; training continues while it traces. Its
changes, such as tensors without data in place of weights, stay in its own copy of this process. It uses neither CUDA
nor autograd's engine, which do not work after a fork.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from headway.errors import HeadwayError
from headway.plan.report.saved_plan import SavedPlan
from headway.plan.tracer.measurement import machine_here
from headway.plan.tracer.process import cuda_emulation
from headway.plan.tracer.process.backward import run_backward
from headway.plan.tracer.process.outcome import trace_step
from headway.plan.tracer.process.step import StepTracer, TrainingSetup
from headway.plan.tracer.result import TraceResult, make_estimate
from headway.plan.tracer.settings import TraceSettings

if TYPE_CHECKING:
    from headway.train.train_val_state import TrainValState


class _TensorShape(NamedTuple):
    """A tensor of a batch, without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@final
class ForkedTrace:
    """Traces the step of a stage in a forked process: as it is, with smaller batches, and with checkpointed blocks."""

    def __init__(self, state: TrainValState) -> None:
        self._state, self.asked = state, False
        self._settings = TraceSettings(
            factory=f"stage:{state.name}",
            precision="amp" if state.precision.autocast is not None else "fp32",
            accumulate=state.settings.accumulate,
        )
        context = multiprocessing.get_context("fork")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=self._serve, args=(other,), daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns of each fork of a process with threads; torch's data workers are forked in the same way
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        other.close()

    def ask(self, batch: Any) -> None:
        """Sends the shapes of a batch, once; raises `HeadwayError` if the batch holds anything that cannot be sent."""
        if self.asked:
            return
        self.asked = True
        try:
            self._connection.send(tree_map(_describe, batch))
        except OSError:
            raise HeadwayError("the tracing process ended before the first batch") from None
        except (AttributeError, PicklingError, TypeError) as error:
            self.close()
            raise HeadwayError(f"a batch cannot be sent to the tracing process: {error}") from error

    def answer(self, *, wait_s: float = 0.0) -> SavedPlan | None:
        """Returns the plan if the process has traced it; None if it is still tracing."""
        if not self._connection.poll(wait_s):
            return None
        try:
            found = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise HeadwayError(f"the tracing process ended with code {self._process.exitcode}") from None
        finally:
            self.close()
        results = {name: TraceResult.of(result) for name, result in found}
        return self._plan(results)

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.terminate()
        self._process.join()

    def _plan(self, results: dict[str, TraceResult]) -> SavedPlan:
        (_, own), *others = results.items()
        if own.error is not None:
            raise HeadwayError(own.error)
        device = self._state.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        node, constants = machine_here(name)
        title = f"{self._state.pipe.name}, stage {self._state.name}, traced at its start"
        plan = make_estimate(title, own, self._settings, node, constants, others)
        return SavedPlan(title=title, content=json.loads(json.dumps(plan.to_dict())))

    # --- in the forked process

    def _serve(self, connection: Connection) -> None:
        self._connection.close()  # so that `recv` ends when the other process does
        torch.set_num_threads(1)
        torch.cuda.is_available = lambda: False  # CUDA cannot be used after a fork
        _discard_output()
        try:
            batch = connection.recv()
        except EOFError:
            return  # the run ended without a batch
        rules = cuda_emulation.install()
        found = []
        for name, settings, shapes in _variants(self._settings, batch):
            make = partial(_setup, self._state, shapes)
            found.append((name, trace_step(StepTracer(settings, make, run_backward))))
        connection.send_bytes(json.dumps(found).encode())
        del rules


def _discard_output() -> None:
    """Discards all that the step prints; the user sees it when the step really runs."""
    warnings.simplefilter("ignore")
    logging.disable()
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - as long as the process lives


def _describe(leaf: Any) -> Any:
    return _TensorShape(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _variants(settings: TraceSettings, batch: Any) -> Iterator[tuple[str, TraceSettings, Any]]:
    """Yields the step as it is, and variants that need less memory; the last one checkpoints blocks permanently."""
    yield "as it is", settings, batch
    rows = _rows(batch)
    for parts in (2, 4):
        if rows >= parts and rows % parts == 0:
            yield (
                f"batches of {rows // parts} with accumulate={parts * settings.accumulate}",
                replace(settings, accumulate=parts * settings.accumulate),
                tree_map(lambda leaf, parts=parts: _cut(leaf, rows, parts), batch, is_leaf=_is_shape),
            )
    yield "activation_checkpointing", replace(settings, checkpoint=True), batch


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, _TensorShape)


def _rows(batch: Any) -> int:
    """Returns the samples of a batch: the length of its first tensor."""
    shapes = [leaf.shape for leaf in tree_leaves(batch, is_leaf=_is_shape) if _is_shape(leaf) and leaf.shape]
    return shapes[0][0] if shapes else 1


def _cut(leaf: Any, rows: int, parts: int) -> Any:
    if not _is_shape(leaf) or not leaf.shape or leaf.shape[0] != rows:
        return leaf
    return leaf._replace(shape=(rows // parts, *leaf.shape[1:]))


def _setup(state: TrainValState, shapes: Any) -> TrainingSetup:
    """Replaces all tensors of the step by tensors without data, on the CPU."""
    stage, pipe = state.stage, state.pipe
    own = {key: value for key, value in vars(stage).items() if isinstance(value, nn.Module)}
    models = nn.ModuleDict({name: model.bare for name, model in pipe.registered_models.items()})
    empty: _Replaced = {}
    for module in (*models.values(), *own.values()):
        _empty(module, empty)
    for name, model in pipe.registered_models.items():
        pipe.models[name] = model.bare
    averaged = [m.bare for m in pipe.registered_models.values() if m.ema is not None]
    batch = tree_map(
        lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype) if _is_shape(leaf) else leaf,
        shapes,
        is_leaf=_is_shape,
    )
    vars(pipe)["device"] = torch.device("cpu")

    def forward() -> Any:
        with state.not_counted():
            loss = stage.train_step(batch)
        return loss[0] if isinstance(loss, tuple) else loss

    return TrainingSetup(
        model=models,
        batch=batch,
        forward=forward,
        optimizers=lambda _: [_with_parameters(each, empty) for each in stage.optimizers()],
        keeps_gradients=any(
            isinstance(model.wrapped, DistributedDataParallel) for model in pipe.registered_models.values()
        ),
        others=[torch.empty_like(weight) for bare in averaged for weight in bare.parameters()],
    )


_Replaced = dict[int, tuple[Tensor, Tensor]]
"""by the id of a tensor: the tensor, kept so that its id is not reused, and the one without data in its place"""


def _empty(module: nn.Module, replaced: _Replaced) -> None:
    """Replaces parameters and buffers; those that are shared stay shared."""
    for part in module.modules():
        part._compiled_call_impl = None  # the code as it was written
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = _without_data(tensor, replaced)


def _without_data(tensor: Tensor, replaced: _Replaced) -> Any:
    if id(tensor) not in replaced:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, tensor.requires_grad)
        replaced[id(tensor)] = tensor, empty
    return replaced[id(tensor)][1]


def _with_parameters(optimizer: Optimizer, replaced: _Replaced) -> Optimizer:
    """Replaces the parameters of an optimizer by those without data, and clears its state."""
    for group in optimizer.param_groups:
        group["params"] = [_without_data(parameter, replaced) for parameter in group["params"]]
    optimizer.state.clear()
    return optimizer
