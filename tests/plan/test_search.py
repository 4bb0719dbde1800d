"""The search: it reaches published layouts, and finds what brute force finds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product

import pytest

from headway.errors import UsageError
from headway.plan import Layout, Node, preset, search
from headway.plan.cost.flops import hardware_flops_per_token
from headway.plan.cost.memory import peak, rank_memory, reserved_bytes, reserved_range
from headway.plan.cost.steptime import step_time
from headway.plan.machine.efficiency import default_calibration
from headway.plan.model.transformer import Moe, Transformer
from headway.plan.report.search_page import render_search
from headway.plan.searcher.layouts import _compared, _divisors, layouts

DGX = Node("dgx-h100")


def test_the_layout_of_llama_3_is_reached() -> None:
    """405B on 16,384 H100: TP 8, PP 16 with 126 layers in 128 chunks, gradients sharded, nothing recomputed.

    It fits, with little margin, as Meta reports; the search tries it, and prefers one that surely fits.
    """
    meta = Layout(
        tp=8, pp=16, dp=128, vpp=8, zero=2, global_batch=2048, sequence=8192, sequence_parallel=True
    )  # fmt: skip
    model, base = preset("llama-3.1-405b"), Layout(sequence=8192)
    found = search(model, DGX, gpus=16384, global_batch=2048, base=base, against=meta, keep=10_000)
    theirs = next(row for row in found.ranked if row.layout == replace(meta, reshard=False))
    assert not theirs.safe and 0.9 * found.capacity < theirs.needed < found.capacity
    assert found.best is not None and found.best.safe and found.best.seconds < 1.03 * theirs.seconds
    assert sum(row.seconds < theirs.seconds for row in found.ranked) <= 3
    near = next(row for row in found.ranked if row.layout.tp == 8 and row.layout.pp == 16 and row.safe)
    assert near.seconds < 1.03 * theirs.seconds
    reason = next(reason for reason in found.reasons if "which was given, takes" in reason)
    assert "it may not fit: it needs 78 to 91 GiB of 79" in reason and "most of the difference is " in reason


@pytest.mark.parametrize("microbatches", [[1], None], ids=["small", "all"])
def test_the_layout_of_deepseek_v3_is_reached(
    monkeypatch: pytest.MonkeyPatch, microbatches: list[int] | None
) -> None:
    """2,048 H800, PP 16 over 61 layers, EP 64, ZeRO 1, no TP, hardly a bubble, norms and up-projections recomputed,
    moments in 16 bits.

    It fits, as it did; the search tries it and ranks it among the first. Its 180,000 GPU hours for 10^12 tokens are
    19.9 s for a step of 15,360 sequences.
    """
    if microbatches is None and os.environ.get("HEADWAY_FAULTS") != "full":
        pytest.skip("61,800 layouts take 8 s; `make faults` tries them all")
    if microbatches:
        few = lambda samples: [each for each in microbatches if samples % each == 0]  # noqa: E731
        monkeypatch.setattr("headway.plan.searcher.layouts._microbatches", few)
    node, model = Node("h800-sxm8"), preset("deepseek-v3")
    base = Layout(sequence=4096, precision="fp8", ep_overlap=True, optimizer="adamw-bf16")
    theirs = replace(
        base, pp=16, dp=128, ep=64, zero=1, global_batch=15360, schedule="zero-bubble", recompute="modules"
    )
    found = search(model, node, gpus=2048, global_batch=15360, base=base, against=theirs, keep=100_000)
    own = next(row for row in found.ranked if row.layout == replace(theirs, reshard=False))
    assert own.safe and found.ranked.index(own) < 10
    assert found.best is not None and own.seconds < 1.03 * found.best.seconds
    assert own.seconds == pytest.approx(180e3 * 3600 / 1e12 * 15360 * 4096 / 2048, rel=0.15)
    other = replace(theirs, ep=32)
    sentences = [
        _compared(model, node, default_calibration(node.device), found.best, each) for each in (theirs, other)
    ]
    assert sentences[0] in found.reasons and all("which was given, " in each for each in sentences)
    assert "it may not fit" in sentences[1] and "most of the difference is " in sentences[1]
    folded = [row.layout for row in found.ranked if row.layout.expert_tp == 1 and row.layout.tp > 1]
    assert folded  # experts over tensor-parallel ranks


def test_nothing_that_fits_is_left_out() -> None:
    """Where whole layers are recomputed and a layout does not fit, no other way to recompute is tried: none would."""
    node, count = Node("dgx-h100"), 0
    for model, base, gpus in (
        (preset("llama-3.1-70b"), Layout(sequence=8192), 16),
        (preset("mixtral-8x7b"), Layout(sequence=8192, precision="amp"), 8),
        (preset("llama-3.1-8b"), Layout(sequence=8192, precision="amp", compiled=True), 4),
        (preset("gpt3-175b"), Layout(flash=False), 32),
    ):
        found = search(model, node, gpus=gpus, global_batch=gpus, base=base, keep=100_000)
        every = [
            layout
            for layout in layouts(model, node, gpus, gpus, base)
            if reserved_bytes(peak(model, layout).allocated, layout, node.device) <= node.device.memory_bytes
        ]
        whole = [row.layout for row in found.ranked if row.layout.recompute_layers is None]
        assert len(whole) == len(every) < found.tried and set(whole) == set(every)
        count += len(every)
    assert count > 100


SMALL = Transformer(layers=12, hidden=512, heads=8, vocab=32000, moe=Moe(experts=4, top_k=2, ffn=1024))


@pytest.mark.parametrize("model", [SMALL, preset("gpt2")], ids=["experts", "dense"])
def test_brute_force_finds_nothing_faster(model: Transformer) -> None:
    node, gpus, batch = DGX, 4, 8
    constants, best, capacity = default_calibration(node.device), float("inf"), node.device.memory_bytes
    numbers = (1, 2, 4)
    for dp, tp, pp, vpp, ep, expert_tp in product(numbers, numbers, numbers, (1, 2, 3), numbers, (None, 1)):
        if dp * tp * pp != gpus:
            continue
        for zero, micro, recompute, schedule in product(
            range(4), (1, 2, 4, 8), ("none", "modules", "full"), ("1f1b", "zero-bubble")
        ):
            try:
                layout = Layout(
                    dp=dp, tp=tp, pp=pp, vpp=vpp, ep=ep, expert_tp=expert_tp, zero=zero, microbatch=micro,
                    global_batch=batch, recompute=recompute, sequence_parallel=tp > 1, reshard=pp == 1,
                    schedule=schedule,
                )  # type: ignore[arg-type]  # fmt: skip
                layout.check_model(model)
            except UsageError:
                continue
            if reserved_range(peak(model, layout).allocated, layout, DGX.device)[1] <= capacity:
                best = min(best, step_time(model, layout, node, constants).total)
    found = search(model, node, gpus=gpus, global_batch=batch)
    assert found.best is not None and found.best.seconds == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("layers", [5, 6, 7, 9])
def test_uneven_stages_are_found_by_brute_force_too(layers: int) -> None:
    """An odd batch and one head leave only pipelines: five, six or seven layers in four stages. With little memory and
    with much, nothing is faster that surely fits."""
    model = Transformer(layers=layers, hidden=1024, heads=1, vocab=1000, context=2048)
    constants, uneven = default_calibration(DGX.device), 0
    for gpus in (3, 4, 6):
        every = [
            (
                step_time(model, one, DGX, constants).total,
                reserved_range(peak(model, one).allocated, one, DGX.device)[1],
            )
            for one in _pipelines(model, gpus, batch=gpus + 1 + gpus % 2)
        ]
        uneven += bool(layers % gpus and every)
        for most in sorted({most for _, most in every})[:: max(1, len(every) // 6)] if every else []:
            tight = _with_memory(most * 1.0001)
            found = search(model, tight, gpus=gpus, global_batch=gpus + 1 + gpus % 2)
            fastest = min(seconds for seconds, needed in every if needed <= most * 1.0001)
            assert found.best is not None and found.best.safe
            assert found.best.seconds <= fastest * (1 + 1e-9)
    assert uneven


def _pipelines(model: Transformer, gpus: int, batch: int) -> Iterator[Layout]:
    for pp, vpp, zero, micro, recompute, schedule in product(
        (1, 2, 3, 4, 6), (1, 2), range(4), (1, 5, 7), ("none", "modules", "full"), ("1f1b", "zero-bubble")
    ):
        try:
            layout = Layout(
                dp=gpus // pp, pp=pp, vpp=vpp, zero=zero, microbatch=micro, global_batch=batch, reshard=pp == 1,
                recompute=recompute, schedule=schedule,
            )  # type: ignore[arg-type]  # fmt: skip
            layout.check_model(model)
        except UsageError:
            continue
        if layout.gpus == gpus and (pp > 1 or schedule == "1f1b") and (layout.dp > 1 or not zero):
            yield layout


def _with_memory(size: float) -> Node:
    device = {**asdict(DGX.device), "memory_GB": size / 2**30, "usable_GiB": size / 2**30}
    return Node.of(name="tight", device=device, gpus=8, inter_Gbps=3200)


TIGHT = _with_memory(7 * 2**30)


def test_only_as_many_layers_recompute_as_must() -> None:
    """GPT-2 on GPUs of 7 GiB: with any number of recomputed layers, brute force finds nothing faster that is safe."""
    model, base = replace(preset("gpt2"), context=2048), Layout(sequence=2048, optimizer="adamw-fused")
    constants, capacity = default_calibration(TIGHT.device), TIGHT.device.memory_bytes
    found = search(model, TIGHT, gpus=2, global_batch=16, base=base, keep=5000)
    best = found.best
    assert best is not None and best.safe and best.layout.recompute_layers
    assert f":{best.layout.recompute_layers} " in best.layout.describe() + " "
    fastest = float("inf")
    for dp, micro, zero, recompute, layers in product(
        (1, 2), (1, 2, 4, 8, 16), (0, 1, 3), ("modules", "full"), (None, *range(1, 13))
    ):
        if 16 % (dp * micro) or (dp == 1 and zero):
            continue
        layout = replace(
            base, dp=dp, tp=2 // dp, sequence_parallel=dp == 1, microbatch=micro, zero=zero, global_batch=16,
            recompute=recompute, recompute_layers=layers,
        )  # type: ignore[arg-type]  # fmt: skip
        if reserved_range(peak(model, layout).allocated, layout, DGX.device)[1] <= capacity:
            fastest = min(fastest, step_time(model, layout, TIGHT, constants).total)
    assert best.seconds <= fastest * (1 + 1e-9)
    whole = replace(best.layout, recompute_layers=None)
    assert step_time(model, whole, TIGHT, constants).total > best.seconds
    fewer = replace(best.layout, recompute_layers=max(1, best.layout.recompute_layers - 1))
    if best.layout.recompute_layers > 1:
        assert reserved_range(peak(model, fewer).allocated, fewer, DGX.device)[1] > capacity
    assert not best.layout.trainable


def test_recomputed_layers_interpolate_between_none_and_all() -> None:
    model, constants = preset("llama-3.1-8b"), default_calibration(DGX.device)
    base = Layout(
        dp=2, tp=4, pp=3, microbatch=16, global_batch=96, recompute="full", optimizer="adamw-fused"
    )  # 11, 11, 10 layers
    none, some, every = (
        replace(base, recompute="none"), replace(base, recompute_layers=5), replace(base, recompute_layers=11)
    )  # fmt: skip
    for stage, layers in enumerate((11, 11, 10)):
        low, middle, high = (
            rank_memory(model, layout, stage).parts["activations"] for layout in (every, some, none)
        )
        assert middle == pytest.approx(low + (high - low) * (1 - 5 / layers))
    assert rank_memory(model, every, 0).parts == rank_memory(model, base, 0).parts
    times = [
        step_time(model, layout, DGX, constants).parts.get("recompute", 0.0) for layout in (none, some, base)
    ]
    assert (
        times[0] == 0 < times[1] == pytest.approx(times[2] * 5 / 10)
    )  # the last stage, with the head, is slowest
    hfu = [hardware_flops_per_token(model, 8192, layout, "full") for layout in (none, some, base)]
    assert hfu[1] - hfu[0] == pytest.approx((hfu[2] - hfu[0]) * 15 / 32)


def test_a_layout_is_estimated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes 10,000 layouts take under 2 s: memory is estimated of fewer than are tried, time only if they fit."""
    counts = {"peak": 0, "step_time": 0}

    def counted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            counts[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr("headway.plan.searcher.layouts.memory.peak", counted("peak", peak))
    monkeypatch.setattr("headway.plan.searcher.layouts.step_time", counted("step_time", step_time))
    found = search(preset("llama-3.1-70b"), DGX, gpus=64, global_batch=128, base=Layout(sequence=8192))
    assert found.tried > 1_000
    bisected, compared = 8 * 200, 10  # layouts that recompute in fewer layers, and those of the reasons
    assert found.fitting <= counts["step_time"] <= found.fitting + compared
    assert counts["peak"] < 0.7 * found.tried + bisected


def test_a_search_marks_what_train_can_run_and_makes_a_page() -> None:
    found = search(preset("gpt2"), DGX, gpus=8, global_batch=64, keep=1000)
    assert found.best is not None
    marks = {row.layout.trainable for row in found.ranked}
    assert marks == {True, False}
    assert all(row.layout.pp == 1 for row in found.ranked if row.layout.trainable)
    both = [row.layout for row in found.ranked if row.layout.tp > 1 and row.layout.dp > 1]
    assert {row.zero for row in both if row.trainable} == {
        3
    }  # train shards replicas of tensor-parallel groups
    page = render_search("gpt2", found)
    assert page.count("r=4.5") == len(found.pareto) and "<polyline" in page
    drawn = re.findall(r"<title>(.*?): ", page)
    assert len(drawn) > 50 and set(drawn) <= {row.layout.describe() for row in found.every}
    assert "class=name x" in page and page.count(found.best.layout.describe()) >= 2


def test_a_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of GPUs has its divisors in no time, and one with too many layouts is refused before the search."""
    assert _divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36] and _divisors(9_999_991) == [1, 9_999_991]
    found = search(preset("gpt2"), DGX, gpus=9_999_991, global_batch=9_999_991)
    assert found.best is not None and found.best.layout.dp == 9_999_991
    monkeypatch.setattr("headway.plan.searcher.layouts._MOST_LAYOUTS", 1000)
    with pytest.raises(UsageError, match="more than 1,000 layouts; choose numbers with fewer divisors"):
        search(preset("llama-3.1-70b"), DGX, gpus=720, global_batch=720)


def test_reasons_are_about_layouts_of_all_gpus_and_say_what_may_not_fit() -> None:
    found = search(preset("gpt2"), DGX, gpus=12, global_batch=12)
    assert any(reason.startswith("tensor parallel 4 in the node") for reason in found.reasons)
    base, model = Layout(sequence=8192, precision="amp"), preset("llama-3.1-8b")
    found = search(model, DGX, gpus=16, global_batch=16, base=base, keep=10_000)
    layout = Layout(dp=16, zero=3, global_batch=16, sequence=8192, precision="amp")
    assert not next(row for row in found.ranked if row.layout == layout).safe
    assert any(reason.startswith("fully sharded (FSDP): may not fit: needs ") for reason in found.reasons)
