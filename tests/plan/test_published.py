"""Step times against published ones on Hopper and Blackwell: errors by family, and honest intervals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from fitting import FAMILIES, GOAL_BIAS, GOAL_INSIDE, GOAL_MAPE, fit_family, score
from published import NOT_FITTED, Row, apart, gave_a_constant, groups, rows, split

from headway.plan import Layout, Node, Workload, estimate, preset
from headway.plan.cost.collectives import expert_shard_group
from headway.plan.cost.compute import (
    Gemm,
    attention_gemms,
    attention_seconds,
    gemm_seconds,
    stream_bytes_per_s,
)
from headway.plan.cost.memory import peak
from headway.plan.cost.states import on_rank
from headway.plan.cost.steptime import step_time
from headway.plan.machine.calibration import Calibration, load_calibration, save_calibration
from headway.plan.machine.efficiency import default_calibration
from headway.plan.machine.hardware import find_device
from headway.plan.report.bounds import time_bounds

LLAMA = preset("llama-3.1-8b")


MAIN, NEVER = rows(), rows(held_out=True)


def of(family: str, chosen: Iterable[Row], kind: str | None = None) -> list[Row]:
    return [row for row in chosen if row.family == family and kind in (None, row.kind)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_constants_are_those_of_the_fit(family: str) -> None:
    """Every second row of each kind is fitted, with two constants on Hopper and one on Blackwell."""
    fitted, aside = split(of(family, MAIN))
    assert len(fitted) + len(aside) == len(of(family, MAIN))
    found, used = fit_family(family, fitted), default_calibration(fitted[0].node.device)
    assert f"fitted on {len(fitted)} published" in used.source
    for names in FAMILIES[family][1]:
        for name in names:
            assert getattr(used, name) == pytest.approx(getattr(found, name), rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mean_error_reaches_the_goal(family: str) -> None:
    """15 % for rows fitted, set aside and never fitted: 5.9, 7.1 and 8.0 % on Hopper, 6.7, 13.3 and 11.0 on Blackwell.

    Blackwell missed it by 15.7 and 16.1 % before dispatchers and CUDA graphs were settings that a row names.
    """
    own = groups(family)
    for chosen in (own.fitted, own.aside, own.never):
        assert score(chosen).mape <= GOAL_MAPE


MISSED_BIASES = {
    # gpt-oss: Megatron's steps take longer on Blackwell than its products, attention and traffic explain; not on H100
    ("blackwell", "aside", "experts with biases"): -0.28,
    ("blackwell", "never", "experts with biases"): -0.28,
    ("blackwell", "aside", "all"): -0.11,  # five of its thirteen rows are gpt-oss
    # DeepSpeed's ZeRO 3 of 2021 exchanged its weights at a sixth to a tenth of the network's bandwidth
    ("ampere", "never", "sharded"): -0.56,
}
"""Groups whose median bias misses the goal of 10 %, why, and how far at most; a goal that is reached leaves it."""


@pytest.mark.parametrize("family", ["hopper", "blackwell", "ampere"])
def test_biases_reach_the_goal_or_are_known_to_miss_it(family: str) -> None:
    missed = {}
    for column, chosen in groups(family)._asdict().items():
        for kind in ("all", *{row.kind for row in chosen}):
            found = score([row for row in chosen if kind in ("all", row.kind)])
            if found.is_biased:
                missed[family, column, kind] = found.bias
    known = {key: most for key, most in MISSED_BIASES.items() if key[0] == family}
    assert missed.keys() == known.keys(), missed
    assert all(known[key] <= bias < -GOAL_BIAS for key, bias in missed.items())


@pytest.mark.parametrize(("family", "repeated"), [("hopper", 0), ("blackwell", 17), ("ampere", 0)])
def test_what_was_fitted_is_not_tested(family: str, repeated: int) -> None:
    """Other releases publish steps of the same model, layout and node: they are in a group of their own."""
    own = groups(family)
    fitted = {row.plan for row in own.fitted}
    assert not fitted & {row.plan for row in (*own.aside, *own.never)}
    assert {row.plan for row in own.repeated} <= fitted and len(own.repeated) == repeated
    assert sum(map(len, own)) == len(of(family, (*MAIN, *NEVER)))


@pytest.mark.parametrize(
    ("family", "source", "most"),
    [("hopper", "torchtitan", 0.08), ("hopper", "llm-foundry", 0.07), ("hopper", "Megatron-Core", 0.10),
     ("hopper", "Megatron-Bridge", 0.20), ("blackwell", "25.11", 0.06), ("blackwell", "26.02.01", 0.13)],
)  # fmt: skip
def test_a_source_that_was_left_out_of_the_fit(family: str, source: str, most: float) -> None:
    """Without it, torchtitan was 17 % off when attention had the power limit of products, and its own constant."""
    chosen = [row for row in of(family, MAIN) if row.model.name not in NOT_FITTED]
    others = [row for row in chosen if source not in (row.source, row.release)]
    whole = [row for row in of(family, MAIN) if source in (row.source, row.release)]
    own = [row for row in apart(whole, others)[0] if not gave_a_constant(row)]
    found = score(own, fit_family(family, others))
    assert found.rows >= 4 and found.mape < most and abs(found.bias) < 0.10


def test_steps_on_ampere_that_were_never_fitted() -> None:
    """Megatron in 2021, fourteen steps of 1.7B to 1T: within 5 %. DeepSpeed's ZeRO 3 of that year is not modeled."""
    megatron = [row for row in NEVER if row.source == "SC21" and row.layout.zero == 0]
    assert score(megatron).rows == 14 and score(megatron).mape < 0.03
    foundry = of("ampere", MAIN)
    assert abs(score(foundry).bias) < 0.10


def test_a_power_limit_slows_products_and_not_attention() -> None:
    """An H100 of 500 W: attention, at half of the peak, takes as long as with 700 W; products take longer."""
    layout = Layout(microbatch=1, sequence=32768, precision="amp")
    low, high = find_device("h100-sxm-96"), find_device("h100-sxm-80")
    constants = default_calibration(high)
    assert attention_seconds(LLAMA, layout, low, constants) == attention_seconds(
        LLAMA, layout, high, constants
    )
    assert low.matrix_flops("bf16") == pytest.approx(0.874 * high.matrix_flops("bf16"))


def test_torch_copies_what_fsdp_gathers_and_reduces() -> None:
    """8B in amp: 2 x 4 bytes of weights and 6 of gradients per parameter and microbatch, which nothing hides."""
    node = Node("dgx-h100")
    used = default_calibration(node.device)
    stream = node.device.hbm_GBps * 1e9 * node.device.hbm_achievable * used.memory
    torch = Layout(dp=8, zero=3, microbatch=1, global_batch=32, sequence=8192, precision="amp", overlap=False)
    megatron = replace(torch, precision="bf16")
    spent = [step_time(LLAMA, one, node, used).parts["data parallel"] for one in (torch, megatron)]
    assert spent[0] - spent[1] == pytest.approx(4 * 14 * LLAMA.parameters / stream, rel=1e-6)


def test_small_microbatches_of_many_experts_wait_for_the_host() -> None:
    """Qwen3 30B on 8 B200: with one sequence at once a layer takes 9.2 ms, of which its kernels need a third."""
    row = next(
        row
        for row in NEVER
        if row.node.name == "dgx-b200" and row.name.startswith("qwen3-30b-a3b") and row.release == "25.11"
    )
    assert row.layout.microbatch == 1
    used = default_calibration(row.node.device)
    step = step_time(row.model, row.layout, row.node, used)
    assert step.parts["launches"] > 0.5 * step.total and step.total == pytest.approx(row.seconds, rel=0.15)
    graph = step_time(row.model, replace(row.layout, graphs="step"), row.node, used)
    assert "launches" not in graph.parts
    larger = step_time(row.model, replace(row.layout, microbatch=8), row.node, used)
    assert larger.parts["launches"] < 0.25 * step.parts["launches"]
    assert "launches" not in step_time(LLAMA, Layout(), row.node, used).parts


def test_cuda_graphs_of_a_layer_leave_the_launches_of_its_experts() -> None:
    """Qwen3 235B on GB200: without graphs the plan was 16 to 18 % too slow for 26.02 and 26.04."""
    row = next(
        row
        for row in NEVER
        if row.release == "26.04" and row.name.startswith("qwen3-235b-a22b dp32 pp8 vpp3")
    )
    assert row.layout.graphs == "layers"
    used = default_calibration(row.node.device)
    took = {
        graphs: step_time(row.model, replace(row.layout, graphs=graphs), row.node, used)  # type: ignore[arg-type]
        for graphs in ("none", "layers", "step")
    }
    assert took["none"].total > took["layers"].total > took["step"].total
    assert took["layers"].parts["launches"] == pytest.approx(0.2 * took["none"].parts["launches"])
    assert abs(took["layers"].total / row.seconds - 1) < 0.1 < took["none"].total / row.seconds - 1
    notes = [
        estimate(row.model, replace(row.layout, graphs=graphs), row.node).notes  # type: ignore[arg-type]
        for graphs in ("none", "step")
    ]
    assert [sum("waits for the host" in note for note in each) for each in notes] == [1, 0]
    assert any(note.endswith("layout.graphs: layers") for note in notes[0])


def test_a_fused_dispatcher_sends_a_token_once_to_each_rank_and_node() -> None:
    """Top 8 over 8 ranks of a node: 5.25 different ones are expected; over 4 nodes 3.6 different ones."""
    model, used = preset("qwen3-30b-a3b"), default_calibration(Node("dgx-h100").device)
    for ep, copies, cost in ((8, 8 * (1 - (7 / 8) ** 8), 1.4), (32, 4 * (1 - (3 / 4) ** 8), 1.0)):
        layout = Layout(dp=ep, ep=ep, zero=1, microbatch=1, global_batch=ep, sequence=4096)
        sent = {}
        for dispatcher in ("fused", "all-to-all"):
            step = step_time(model, replace(layout, dispatcher=dispatcher), Node("dgx-h100"), used)  # type: ignore[arg-type]
            sent[dispatcher] = step.parts["expert parallel"]
        assert sent["fused"] / sent["all-to-all"] == pytest.approx(cost * copies / 8, rel=0.02)


def test_products_of_experts_with_few_tokens_are_slow() -> None:
    """Mixtral's experts have 8,192 tokens each on 64 H100: 438 and 468 TFLOP/s are published, and never fitted.

    One constant for all experts, fitted on those of Qwen3 with a fourth of the tokens, gave 227 to 301.
    """
    device = find_device("h100-sxm-80")
    used, layout = replace(default_calibration(device), kernel_s=1e-12, serial=0), Layout()
    per_row = [gemm_seconds(Gemm("expert up", m, 8192, 8192), layout, device, used) / m for m in (1000, 1e6)]
    assert per_row[0] / per_row[1] == pytest.approx(2, rel=0.01)
    chosen = [row for row in NEVER if row.model.name == "mixtral-8x7b"]
    assert len(chosen) == 2 and score(chosen).mape < 0.1


def test_experts_with_biases_add_them_in_eager_fp32() -> None:
    """gpt-oss: 68 bytes for each element that experts return; a captured step with fused kernels has none of it."""
    row = next(row for row in MAIN if row.node.name == "dgx-b200" and "gpt-oss" in row.name)
    assert row.model.moe is not None
    used, plain = default_calibration(row.node.device), replace(row.model, bias="none")
    both = [step_time(model, row.layout, row.node, used).parts["elementwise"] for model in (row.model, plain)]
    routed = row.layout.global_batch / row.layout.dp * 4096 * row.model.moe.top_k * row.model.hidden * 36
    assert both[0] - both[1] == pytest.approx(68 * routed / stream_bytes_per_s(row.node.device, used))
    captured = replace(row.layout, graphs="step")
    both = [step_time(model, captured, row.node, used).parts["elementwise"] for model in (row.model, plain)]
    assert both[0] == both[1]


def test_gradients_of_experts_use_the_network_of_their_own_gpu() -> None:
    """gpt-oss 120B, EP 8 on 8 nodes of 8: the ranks that share an expert are on different nodes, one NIC each."""
    row = next(row for row in MAIN if row.node.name == "dgx-b200" and "gpt-oss" in row.name)
    used = default_calibration(row.node.device)
    group = expert_shard_group(row.layout, row.node, used)
    assert (group.size, group.per_node) == (8, 1)
    own = row.node.inter_bytes_per_s / 8 * used.network
    reduced = on_rank(row.model, row.layout, 0).experts * 4 * 7 / 8 / own
    step = step_time(row.model, replace(row.layout, overlap=False), row.node, used)
    assert step.parts["data parallel"] > 1.4 * reduced
    whole = replace(row.layout, ep=64)  # nobody else has these experts
    assert expert_shard_group(whole, row.node, used).size == 1


def test_attention_on_blackwell_waits_for_exponentials() -> None:
    """cuDNN 9.13 reaches 1235 TFLOP/s on a B200 with heads of 128; a B300 has twice the units for exponentials."""
    layout = Layout(microbatch=1, sequence=32768)
    flops = sum(gemm.flops for gemm in attention_gemms(LLAMA, layout)) / 2
    reached = {}
    for name in ("b200-sxm-180", "b300-sxm-288"):
        device = find_device(name)
        best = replace(device, achievable=1.0)  # a kernel alone, before its power is limited
        reached[name] = flops / attention_seconds(LLAMA, layout, best, default_calibration(device)) / 1e12
    assert reached["b200-sxm-180"] == pytest.approx(1235, rel=0.05)
    assert reached["b300-sxm-288"] > 1.25 * reached["b200-sxm-180"]


def test_tokens_that_are_sent_while_another_microbatch_is_computed_cost_a_fifth() -> None:
    row = next(row for row in rows() if row.layout.ep_overlap)
    used = default_calibration(row.node.device)
    hidden, exposed = (
        step_time(row.model, replace(row.layout, ep_overlap=overlap), row.node, used).parts["expert parallel"]
        for overlap in (True, False)
    )
    beside = 1 - 1 / row.layout.microbatches  # the first forward and the last backward have no other
    assert hidden == pytest.approx((1 - 0.8 * beside) * exposed)


@pytest.mark.parametrize("family", FAMILIES)
def test_intervals_hold_what_they_promise(family: str) -> None:
    """80 to 95 % of the steps are inside: neither too narrow nor so wide that they say nothing."""
    own = groups(family)
    for chosen in (of(family, MAIN), [*own.aside, *own.never], of(family, (*MAIN, *NEVER))):
        assert GOAL_INSIDE[0] <= score(chosen).inside <= GOAL_INSIDE[1]
    dense = [row for row in of(family, MAIN) if not row.model.moe]
    widths = []
    for row in dense:
        constants = default_calibration(row.node.device)
        step = step_time(row.model, row.layout, row.node, constants)
        bounds = time_bounds(row.model, row.layout, row.node, constants, step)
        widths.append(bounds.high / bounds.low)
    assert median(widths) < 1.35


def test_intervals_on_ampere_hold_all_but_the_steps_of_deepspeed() -> None:
    """70 % of 30 steps are inside, which misses the goal: six of ZeRO 3 in 2021 and three of MT-NLG took longer."""
    own = groups("ampere")
    chosen = [*own.aside, *own.never]
    assert len(chosen) == 30 and score(chosen).inside == pytest.approx(0.70)
    others = [
        row for row in chosen if row.source != "MT-NLG" and (row.source != "SC21" or not row.layout.zero)
    ]
    assert len(others) == 21 and score(others).inside == 1.0


def test_two_publications_of_one_plan_differ() -> None:
    """MT-NLG's 530B on 2,240 GPUs and Megatron's, with the same layout: 60.1 s for 1,920 samples, 55.5 s for 2,240."""
    pair = [row for row in NEVER if row.family == "ampere" and row.layout.pp == 35 and row.layout.dp == 8]
    slow, fast = sorted(pair, key=lambda row: row.layout.global_batch)
    assert replace(slow.layout, global_batch=2240) == fast.layout
    assert slow.model.parameters == pytest.approx(fast.model.parameters, rel=0.01)
    assert slow.seconds > 1.08 * fast.seconds and fast.layout.global_batch > 1.16 * slow.layout.global_batch


# the benchmark, and what the documentation says of it

ROOT = Path(__file__).parents[2]


def test_the_documentation_has_the_numbers_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import plan as benchmark

    goals = map(benchmark.goals_of, benchmark.FAMILY_NAMES)
    lines = [f"| {' | '.join(line)} |" for line in (*benchmark.steps_by_kind(), *goals)]
    results = (ROOT / "benchmarks" / "results" / "README.md").read_text()
    assert [line for line in lines if line not in results] == []
    page = (ROOT / "docs" / "plan.md").read_text()
    for family, own in zip(
        ("Hopper", "Blackwell", "Ampere"), map(groups, benchmark.FAMILY_NAMES), strict=True
    ):
        for name, chosen in own._asdict().items():
            if chosen:
                assert f"| {family}: {WORDS[name]}" in page and _cells(chosen) in page, (family, name)
    memory = page[page.index("### Memory, closed forms") : page.index("### Time")]
    cells = [line.split("|")[3] for line in memory.splitlines() if "GiB |" in line]
    errors = [line[3].strip("%").replace("+0.0", "0.0") for line in benchmark.memory_of_torchtitan()]
    assert [error.strip(" %") for cell in cells for error in cell.split(", ")] == errors


WORDS = {"fitted": "fitted", "aside": "set aside", "never": "never fitted", "repeated": "a fitted plan again"}


def _cells(chosen: list[Row]) -> str:
    own = score(chosen)
    bias = f"{100 * own.bias:+.1f}".replace("+0.0", "0.0").replace("-0.0", "0.0")
    return f"| {own.rows} | {100 * own.mape:.1f} % | {bias} % | {100 * own.inside:.0f} % |"


def test_the_benchmark_traces_without_the_path_of_the_tests() -> None:
    """`python benchmarks/plan.py --trace` in a process that knows only its own directory; the traces are faked here."""
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); import plan; from types import SimpleNamespace as S;"
        "from headway.plan.tracer import request; rows = plan.h200_rows();"
        "request.trace_modules = lambda every: [S(allocated=r['peak_bytes'], reserved=r['reserved_bytes'])"
        " for r, _ in zip(rows, every, strict=True)]; plan.traced_peaks()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| +0.00% | +0.00% |") == 8


# what was measured, and where


def test_a_calibration_of_another_device_is_not_used() -> None:
    """Constants of a laptop do not narrow the interval of 405B on 16,384 H100s."""
    laptop = Calibration(
        matrix=0.3, source="measured on a laptop", device="laptop", measured=("matrix", "memory")
    )
    layout = Layout(tp=8, pp=16, dp=128, zero=1, global_batch=2048, sequence=8192, sequence_parallel=True)
    plain = estimate(preset("llama-3.1-405b"), layout, Node("dgx-h100"))
    given = estimate(preset("llama-3.1-405b"), layout, Node("dgx-h100"), calibration=laptop)
    assert given.answers["time.step"] == plain.answers["time.step"]
    assert any("calibration of laptop is not used for h100-sxm-80" in note for note in given.notes)


def test_only_what_was_measured_is_certain() -> None:
    """Products measured in 16 bits on this device: links, and products in fp8, keep the interval of the family."""
    own = Calibration(
        matrix=0.7,
        memory=0.9,
        source="measured on H200",
        device="h200-sxm-141",
        measured=("matrix", "memory"),
    )
    layout = Layout(dp=16, zero=3, microbatch=1, global_batch=16, sequence=8192, recompute="full")
    found = estimate(LLAMA, layout, Node("h200-sxm8"), calibration=own).answers
    assert found["time.part.matrix products"].source == "measured"
    assert found["time.part.matrix products"].high == pytest.approx(
        1.08 * found["time.part.matrix products"].value
    )
    assert found["time.part.data parallel"].source == "formula"
    assert found["time.part.data parallel"].high > 1.3 * found["time.part.data parallel"].value
    eight = estimate(LLAMA, replace(layout, precision="fp8"), Node("h200-sxm8"), calibration=own).answers
    assert eight["time.part.matrix products"].source == "formula"


def test_a_device_without_published_steps_says_so() -> None:
    plan = estimate(LLAMA, Layout(dp=8, zero=3, global_batch=8, recompute="full"), Node("mi300x-8"))
    step = plan.answers["time.step"]
    assert step.high / step.low > 2.5
    assert any("no published step on mi300x-192 is known" in note for note in plan.notes)


def test_calibration_files_keep_their_device(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    own = Calibration(matrix=0.7, source="measured on H200", device="h200-sxm-141", measured=("matrix",))
    save_calibration(file, own, node={"device": "h200-sxm-141"}, facts={})
    assert load_calibration(file) == own


# context parallelism and scale cost something


def test_context_parallelism_is_not_free() -> None:
    """Eight GPUs, sequences of 128k: each doubling of cp halves the sequences at once, and costs time and buffers."""
    node, previous = Node("dgx-h100"), None
    for cp in (1, 2, 4, 8):
        layout = Layout(
            dp=8 // cp, cp=cp, zero=3, microbatch=1, global_batch=8, sequence=131072, precision="amp", recompute="full"
        )  # fmt: skip
        step = step_time(LLAMA, layout, node, default_calibration(node.device))
        assert ("context parallel" in step.parts) == (cp > 1)
        assert ("exchanged keys and values" in peak(LLAMA, layout).parts) == (cp > 1)
        if previous is not None:
            assert step.total > 1.02 * previous
        previous = step.total


def test_weak_scaling_degrades_from_a_layout_that_fits() -> None:
    """MosaicML's 7B: 10,643 tokens/s a GPU on 8 H100, 9,670 on 512."""
    chosen = {row.layout.dp: row for row in rows() if row.family == "hopper" and row.model.name == "7b"}
    few, many = (chosen[gpus] for gpus in (8, 512))
    took = [
        step_time(r.model, r.layout, r.node, default_calibration(r.node.device)).total for r in (few, many)
    ]
    assert 1.03 < took[1] / took[0] < 1.12
    layout = Layout(
        dp=4096, zero=3, microbatch=2, global_batch=8192, sequence=8192, precision="amp", recompute="sac"
    )
    table = estimate(LLAMA, layout, Node("dgx-h100")).scaling
    assert table[0]["weak_efficiency"] == 1.0
    assert all(row["weak_efficiency"] <= 1.0 for row in table)
    assert table[-1]["gpus"] == 16384 and table[-1]["weak_efficiency"] < 0.97


def test_goodput_and_steps_reach_the_totals() -> None:
    plan = estimate(
        LLAMA, Layout(dp=8, zero=3, global_batch=8), Node("dgx-h100"), workload=Workload(tokens=1e9)
    )
    hours = (
        plan.answers["run.steps"].value
        * plan.answers["time.step"].value
        / plan.answers["goodput"].value
        / 3600
    )
    assert plan.answers["run.wall_clock"].value == pytest.approx(hours)
