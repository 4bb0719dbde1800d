"""Tracing: peaks measured on an H200, and what happens when a module cannot be traced."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import strangers
import torch
import warm
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter
from truth import h200_rows, h200_settings

import headway as hw
from headway.errors import UsageError
from headway.plan.tracer import request
from headway.plan.tracer.kernels import Kernel
from headway.plan.tracer.process import memory_meter, recurrent
from headway.plan.tracer.process.user_code import UserCodeError, load_function
from headway.plan.tracer.request import trace_module, trace_modules
from headway.plan.tracer.result import TraceResult, extrapolate_depth
from headway.plan.tracer.settings import TraceSettings

pytestmark = pytest.mark.timeout(900)  # the first tests wait until all models are traced
ZOO = str(Path(__file__).parent / "zoo.py")
FULL = os.environ.get("HEADWAY_FAULTS") == "full"
STRANGERS = str(Path(__file__).parent / "strangers.py")
ROWS = h200_rows()
# Deep models take as long to trace as all others together, and their layers are alike: every run of the suite traces
# four layers of one with checkpoints, and compares with what was traced when the whole agreed with its measurement.
DEEP = ("gpt2-1.5b mb4", "gpt2-355m mb8 ckpt")
LARGE = [index for index, row in enumerate(ROWS) if FULL or row["name"] not in DEEP]


class TraceCache:
    """Traces each settings once for all tests of this file, in forks of a process that has imported torch."""

    def __init__(self) -> None:
        self._trace = request._trace_in_process
        self.processes = 0
        self._results: dict[str, dict[str, Any]] = {}

    def __call__(self, every: Sequence[TraceSettings], timeout: float = 600.0) -> list[dict[str, Any]]:
        keys = [json.dumps(one.to_dict(), sort_keys=True) for one in every]
        missing = [one for one, key in zip(every, keys, strict=True) if key not in self._results]
        if missing:
            self.processes += 1
            for one, result in zip(missing, self.trace(missing, timeout), strict=False):
                self._results[json.dumps(one.to_dict(), sort_keys=True)] = result
        return [self._results[key] for key in takewhile(self._results.__contains__, keys)]

    def trace(self, every: Sequence[TraceSettings], timeout: float) -> list[dict[str, Any]]:
        with mock.patch("subprocess.Popen", warm.Popen):
            return self._trace(every, timeout)


@pytest.fixture(scope="module", autouse=True)
def cache() -> Iterator[TraceCache]:
    cache = TraceCache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request, "_trace_in_process", cache)
        yield cache


@pytest.fixture(scope="module")
def large(cache: TraceCache) -> None:
    """Traces the large models in one process."""
    cache(
        [
            *map(h200_settings, LARGE),
            SHORT_CHECKPOINTED,
            SHORT_TITAN,
            *([TITAN] if FULL else []),
            *UNKNOWN.values(),
        ]
    )


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("index", LARGE, ids=[ROWS[index]["name"] for index in LARGE])
def test_peaks_measured_on_an_h200(index: int) -> None:
    row, found = ROWS[index], trace_module(h200_settings(index))
    assert found.error is None
    assert found.parameters == row["params"]
    assert found.allocated == pytest.approx(row["peak_bytes"], rel=0.01)
    assert found.reserved == pytest.approx(row["reserved_bytes"], rel=0.025)
    if "flops_per_step" in row:
        assert found.flops == pytest.approx(row["flops_per_step"], rel=1e-9)


TITAN = TraceSettings(factory=f"{Path(__file__).parent / 'titan.py'}:make", batch_size=2, fsdp=8)
SHORT_TITAN = replace(TITAN, arguments={"layers": 4})
SHORT_CHECKPOINTED = h200_settings([row["name"] for row in ROWS].index("gpt2-355m mb8 ckpt"), layers=4)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("short", "allocated", "reserved"),
    [(SHORT_TITAN, 35147647488, 39873150976), (SHORT_CHECKPOINTED, 6530843648, 6889144320)],
    ids=["fsdp and selective checkpoints", "checkpoints"],
)
def test_four_layers_of_a_deep_model_are_traced_as_when_the_whole_agreed(
    short: TraceSettings, allocated: int, reserved: int
) -> None:
    """Where these change, HEADWAY_FAULTS=full says whether the whole still agrees with what was measured."""
    found = trace_module(short)
    assert found.error is None
    assert (found.allocated, found.reserved) == pytest.approx((allocated, reserved), rel=1e-3)
    shards = 8 if short.fsdp == 8 else 1
    assert found.by_label["parameters"] == pytest.approx(4 * found.parameters / shards, rel=1e-3)


@pytest.mark.usefixtures("large")
@pytest.mark.skipif(not FULL, reason="traces 32 layers; runs with HEADWAY_FAULTS=full")
def test_torchtitan_traced_with_fsdp() -> None:
    """Llama 3.1 8B on 8 H100, eager, selective checkpointing: 82.4 GiB reserved on the fullest rank."""
    found = trace_module(TITAN)
    assert found.parameters == 8_030_261_248
    assert found.by_label["parameters"] == pytest.approx(4 * found.parameters / 8, rel=1e-3)
    assert found.reserved / 2**30 == pytest.approx(82.4, rel=0.10)


def test_an_extrapolated_fsdp_trace_is_not_smaller_than_the_whole() -> None:
    """Traces of 2 and 4 layers of that model; all 32 have 68.4 GiB allocated and 76.7 reserved, and 82.4 in truth."""
    gib = 2**30
    two = TraceResult(allocated=30.183 * gib, reserved=35.182 * gib)
    four = TraceResult(allocated=32.734 * gib, reserved=37.135 * gib)
    found = extrapolate_depth(two, four, 32, sharded=True)
    assert found.allocated / gib == pytest.approx(68.446, rel=1e-3)
    assert 76.682 <= found.reserved / gib <= 82.4


TINY = TraceSettings(factory=f"{ZOO}:tiny_language_model", inputs="tiny_batch", batch_size=4)
LINEAR = TraceSettings(factory=f"{ZOO}:plain", inputs="float_batch", batch_size=1, precision="fp32")
VARIANTS = {
    "plain": TINY,
    "6 layers": replace(TINY, arguments={"layers": 6}),
    "6 layers, checkpointed": replace(TINY, arguments={"layers": 6}, checkpoint=True),
    "fsdp": replace(TINY, fsdp=8),
    "pure": replace(TINY, precision="pure-bf16"),
    "sgd": replace(TINY, optimizer="sgd"),
    "accumulate": replace(TINY, accumulate=2),
    "foreach": replace(LINEAR, optimizer="adamw-foreach"),
    "fused": replace(LINEAR, optimizer="adamw-fused"),
    "converted": TraceSettings(factory=f"{ZOO}:converted", inputs="half_batch", precision="fp32"),
    "experts": TraceSettings(
        factory=f"{ZOO}:experts", inputs="float_batch", batch_size=512, arguments={"loop": 0}
    ),
    "experts one by one": TraceSettings(
        factory=f"{ZOO}:experts",
        inputs="float_batch",
        batch_size=512,
        precision="fp32",
        arguments={"loop": 1},
    ),
    "layer drop": TraceSettings(factory=f"{ZOO}:layer_drop", inputs="float_batch", batch_size=8),
    "dropout": TraceSettings(factory=f"{ZOO}:plain", inputs="float_batch", batch_size=4096, precision="fp32"),
}


TIGHT = replace(TINY, batch_size=64)
SMALL = [
    *VARIANTS.values(),
    *(replace(TINY, arguments={"layers": layers}) for layers in (2, 4)),
    *(replace(TIGHT, **change) for change in ({}, {"checkpoint": True}, {"fsdp": 2})),
    *(replace(TIGHT, batch_size=size) for size in (32, 1)),
    *(TraceSettings(factory=f"{ZOO}:{name}", inputs=f"{ZOO}:float_batch") for name in ("choosy", "broken")),
    *(TraceSettings(factory=f"{ZOO}:{name}") for name in ("pair", "mkae", "wrong")),
    TraceSettings(factory="no_such_package.model:make"),
]


@pytest.fixture(scope="module")
def small(cache: TraceCache) -> None:
    """Traces the small models in one process."""
    cache(SMALL)


@pytest.fixture(scope="module")
def tiny(small: None) -> dict[str, TraceResult]:  # noqa: ARG001
    return dict(zip(VARIANTS, trace_modules(list(VARIANTS.values())), strict=True))


def test_two_depths_tell_the_third(tiny: dict[str, TraceResult]) -> None:
    whole, extended = tiny["6 layers"], trace_module(TINY, extrapolate=("layers", 6))
    assert extended.parameters == whole.parameters
    assert sum(extended.by_label.values()) == pytest.approx(sum(whole.by_label.values()), rel=0.01)
    assert extended.flops == pytest.approx(whole.flops, rel=1e-9)
    assert extended.reserved >= extended.allocated


def test_fsdp_shards_the_states(tiny: dict[str, TraceResult]) -> None:
    one, eight = tiny["plain"], tiny["fsdp"]
    assert eight.error is None
    assert eight.parameters == one.parameters
    for part in ("parameters", "optimizer"):  # an eighth of each, but for rounding to 512 bytes
        assert eight.by_label[part] < one.by_label[part] / 4


def test_checkpointed_blocks_keep_less_and_compute_more(tiny: dict[str, TraceResult]) -> None:
    plain, again = tiny["6 layers"], tiny["6 layers, checkpointed"]
    assert again.by_label["activations"] < plain.by_label["activations"]
    assert again.flops > 1.2 * plain.flops


def test_precisions_and_optimizers_differ_as_they_should(tiny: dict[str, TraceResult]) -> None:
    amp, pure, sgd = tiny["plain"], tiny["pure"], tiny["sgd"]
    assert pure.by_label["parameters"] < 0.6 * amp.by_label["parameters"]
    assert sgd.by_label.get("optimizer", 0) < 0.1 * amp.by_label["optimizer"]


def test_a_fused_optimizer_has_no_temporary_copies(tiny: dict[str, TraceResult]) -> None:
    foreach, fused = tiny["foreach"], tiny["fused"]
    assert fused.error is None and fused.by_label["optimizer"] == pytest.approx(
        foreach.by_label["optimizer"], rel=0.01
    )
    assert (
        foreach.by_label["temporaries"]
        > fused.by_label.get("temporaries", 0) + 0.9 * foreach.by_label["parameters"]
    )
    assert fused.allocated < foreach.allocated


def test_accumulated_gradients_are_there_at_the_peak(tiny: dict[str, TraceResult]) -> None:
    assert tiny["accumulate"].by_label["gradients"] > tiny["plain"].by_label.get("gradients", 0)


def test_dropout_keeps_one_byte_per_element_as_cuda_does(tiny: dict[str, TraceResult]) -> None:
    kept = tiny["dropout"].by_label["activations"]
    # the input of the second linear (4 bytes) and the mask (1 byte), not a second copy in fp32
    assert 4096 * 256 * 5 <= kept < 4096 * 256 * 6 + 4096 * 64 * 8


def test_experts_with_grouped_products_are_traced_under_amp(tiny: dict[str, TraceResult]) -> None:
    """Their products stay in fp32, as autocast has no rule for them, and count as those of a loop do."""
    grouped, loop = tiny["experts"], tiny["experts one by one"]
    assert grouped.error is None and loop.error is None
    assert grouped.flops == loop.flops == 2 * 512 * 64 * 128 * (2 + 3)  # the input needs no gradient
    assert grouped.by_label["parameters"] == loop.by_label["parameters"] == 2 * 4 * 64 * 128 * 4


def test_products_in_fp32_are_planned_without_16_bits(tiny: dict[str, TraceResult]) -> None:
    """Also the grouped products of experts under amp, for which autocast has no rule."""
    precisions = {
        name: {kernel.precision for kernel in found.kernel_counts if kernel.flops}
        for name, found in tiny.items()
    }
    assert (
        precisions["plain"] == precisions["fsdp"] == precisions["pure"] == precisions["converted"] == {"bf16"}
    )
    assert precisions["experts"] == precisions["experts one by one"] == precisions["dropout"] == {"fp32"}


def test_a_layer_that_chance_may_drop_is_kept(tiny: dict[str, TraceResult]) -> None:
    found = tiny["layer drop"]
    assert found.error is None and found.flops == 2 * 8 * 64 * 64 * (2 + 3)


def test_modules_may_be_cast_moved_and_built_from_values(tiny: dict[str, TraceResult]) -> None:
    found = tiny["converted"]
    assert found.error is None
    assert found.parameters == 3 * (64 * 64 + 64)
    assert found.by_label["parameters"] == 3 * (64 * 64 * 2 + 512)  # bf16, biases rounded up to a block


def test_a_trace_that_ends_its_process_does_not_end_the_others(
    cache: TraceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "_trace_in_process", cache.trace)
    dies = TraceSettings(factory=f"{ZOO}:dies", inputs="float_batch")
    first, killed, last = trace_modules([VARIANTS["dropout"], dies, VARIANTS["dropout"]])
    assert killed.error is not None and "SIGABRT" in killed.error
    assert first.error is None and first.allocated == last.allocated


@pytest.mark.usefixtures("small")
def test_a_module_that_looks_at_its_data_falls_back_to_states() -> None:
    plan = hw.plan.trace(f"{ZOO}:choosy", f"{ZOO}:float_batch")
    assert "_local_scalar_dense" in plan.verdict and "could not be traced" in plan.verdict
    assert plan.answers["parameters"].value == 64 * 64 + 64
    assert plan.answers["memory.needed"].low == pytest.approx(16 * (64 * 64 + 64) + 767 * 2**20)
    assert str(plan.answers["memory.needed"]) == "at least 767 MiB"


@pytest.mark.usefixtures("small")
def test_a_factory_that_raises_is_quoted() -> None:
    with pytest.raises(
        UsageError, match=r"could not be traced or built: RuntimeError: no such weights \(zoo.py:"
    ):
        hw.plan.trace(f"{ZOO}:broken", f"{ZOO}:float_batch")


@pytest.mark.usefixtures("small")
def test_a_module_without_a_loss_is_noted() -> None:
    plan = hw.plan.trace(f"{ZOO}:pair")
    assert plan.fits and any("returns no loss" in note for note in plan.notes)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        ("zoo", "does not name a function; expected FILE.py:function"),
        ("missing.py:make", "there is no file missing.py"),
        (f"{ZOO}:mkae", "has no function 'mkae'; it has make"),
        (f"{ZOO}:wrong", "returned int; expected a module"),
        ("no_such_package.model:make", "cannot import no_such_package"),
    ],
)
def test_references_that_lead_nowhere(factory: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        hw.plan.trace(factory)


def test_a_script_that_ends_while_it_is_loaded_needs_a_main_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args(['/tmp/trace'])\n")
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.modules", {**sys.modules})
    with pytest.raises(
        UserCodeError, match=r"ended with code 2 before its function 'make_model' could be called.*__main__"
    ):
        load_function(f"{script}:make_model")


def test_a_trace_imports_what_the_process_that_asked_for_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m project.train` imports from the current directory, where the tracing process does not search."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "train.py").write_text("from own_layers_of_a_test import batch, make_model\n")
    layers = "from torch import nn, ones\ndef make_model(): return nn.Linear(4, 4)\ndef batch(): return ones(2, 4)\n"
    (tmp_path / "own_layers_of_a_test.py").write_text(layers)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    assert trace_module(TraceSettings(factory="parts/train.py:make_model")).error is None


def test_functions_must_be_found_again() -> None:
    with pytest.raises(UsageError, match="outside other functions"):
        hw.plan.trace(lambda: None)
    with pytest.raises(UsageError, match=r"'fp7' is not a valid value of precision.*valid: amp"):
        hw.plan.trace(f"{ZOO}:plain", precision="fp7")


@pytest.mark.usefixtures("small")
def test_what_would_fit_is_traced_too(cache: TraceCache) -> None:
    before = cache.processes
    small = hw.plan.Node.of(device={"memory_GB": 0.8415, "hbm_GBps": 900, "bf16": 100}, gpus=2)
    plan = hw.plan.trace(f"{ZOO}:tiny_language_model", f"{ZOO}:tiny_batch", batch_size=64, node=small)
    assert cache.processes == before, "the settings that `trace` tries are among SMALL"
    assert plan.tight and plan.exit_code == 0 and plan.verdict.startswith("tight: ")
    assert {way.change for way in plan.remedies} >= {"half the batch", "batch 1"}
    assert plan.remedies[0].fits


def test_without_a_change_to_try_the_plan_is_still_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU, blocks checkpointed already, and no batch size to halve."""
    product = Kernel("mm", 1e12, 1)
    huge = TraceResult(parameters=1, allocated=1e12, reserved=1e12, kernel_counts={product: 1.0})
    monkeypatch.setattr(request, "trace_modules", lambda every, **_: [huge for _ in every])
    plan = request.estimate_module(TraceSettings(factory="train:make", checkpoint=True))
    assert not plan.fits and not plan.remedies


def test_a_rate_needs_a_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--sps` of a module that was traced without one."""
    small = TraceResult(parameters=1, allocated=1e9, reserved=1e9, kernel_counts={Kernel("mm", 1e12, 1): 1.0})
    monkeypatch.setattr(request, "trace_modules", lambda every, **_: [small for _ in every])
    plan = request.estimate_module(TraceSettings(factory="train:make"))
    with pytest.raises(UsageError, match=r"has no samples per second.*batch size"):
        plan.at_rate(12.5)


def test_a_module_may_print_bytes_that_are_not_text(
    cache: TraceCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf 'caf\\351\\n' >&2\nexit 7\n")
    python.chmod(0o755)
    monkeypatch.setattr(request, "module_command", lambda *_: [str(python)])
    (found,) = cache._trace([TraceSettings(factory="train:make")], 60)
    assert "ended with exit code 7: caf" in found["error"]


def test_files_of_one_name_are_different_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the name is that of a module which torch has imported."""
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.modules", {**sys.modules})
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
        for name in ("train_here", "random"):
            (tmp_path / directory / f"{name}.py").write_text(f"def place():\n    return {directory!r}\n")
    for name in ("train_here", "random"):
        found = [load_function(f"{tmp_path / directory}/{name}.py:place")() for directory in ("a", "b", "a")]
        assert found == ["a", "b", "a"]
    assert "place" not in vars(sys.modules["random"])


def test_attention_counts_as_torch_counts_it() -> None:
    """Grouped queries included, which torch 2.11 cannot count."""
    q, k, v, grad = (
        torch.empty(shape) for shape in ((2, 8, 16, 4), (2, 2, 32, 4), (2, 2, 32, 6), (2, 8, 16, 6))
    )
    assert memory_meter._attention(q, k, v) == flop_counter.sdpa_flop(q.shape, k.shape, v.shape)
    expected = flop_counter.sdpa_backward_flop(grad.shape, q.shape, k.shape, v.shape)
    assert memory_meter._attention_backward(grad, q, k, v) == expected


# measured on an H200 (benchmarks/peaks.py); no constant was fitted to them, but they showed two rules to be missing:
# cuBLAS's workspaces, and the precision of a loss
MEASURED = {
    "group_resnet": 3076807680,
    "unet": 10379473408,
    "plain_gpt": 6797698048,
    "moe_gpt": 6692845056,
    "lstm": 6867 * 2**20,
}


UNKNOWN = {
    name: TraceSettings(
        factory=f"{STRANGERS}:make",
        inputs=strangers.MODELS[name].batch.__name__,
        loss=strangers.MODELS[name].loss,
        batch_size=strangers.MODELS[name].size,
        arguments={"which": strangers.NAMES.index(name)},
    )
    for name in MEASURED
    if FULL or name != "group_resnet"  # the convolutions and norms of the U-Net
}


@pytest.mark.usefixtures("large")
def test_peaks_of_models_that_were_not_known_before() -> None:
    for name, found in zip(UNKNOWN, trace_modules([*UNKNOWN.values()]), strict=True):
        assert found.error is None, name
        assert found.allocated == pytest.approx(MEASURED[name], rel=0.005), name
        assert ("workspaces" in found.by_label) == (
            name != "unet"
        )  # the only one that multiplies no matrices


@pytest.mark.parametrize(
    ("kind", "cells", "reserved"), [("lstm", nn.LSTM, 736_000_000), ("gru", nn.GRU, 864_000_000)]
)
def test_recurrent_layers_keep_what_cudnn_said(
    kind: str, cells: type[nn.RNNBase], reserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of cuDNN's reserve as pytorch issue 2895 prints them; parameters tell four layers of 320 cells."""
    monkeypatch.setattr(torch._VF, kind, recurrent._as_cudnn(kind, getattr(torch._VF, kind)))
    with FakeTensorMode():
        layers = cells(123, 320, 4)
        output, last = layers(torch.empty(250, 100, 123))
        states = last if isinstance(last, tuple) else (last,)
        _, kept_output, kept, *_ = output.grad_fn.saved_tensors
        assert kept_output.shape == output.shape == (250, 100, 320)
        assert kept.numel() * kept.element_size() == reserved
        states[0].sum().backward()  # the last state leads back, too
    assert all(p.grad is not None and p.grad.shape == p.shape for p in layers.parameters())
