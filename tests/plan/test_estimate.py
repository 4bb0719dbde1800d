"""Answers, verdicts, remedies and the search."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

import headway.plan as plan_room
from headway.errors import UsageError
from headway.plan import Layout, Node, Workload, estimate, preset, search
from headway.plan.cost.economy import goodput, young_daly
from headway.plan.cost.memory import peak, reserved_bytes
from headway.plan.cost.steptime import step_time
from headway.plan.machine.calibration import Calibration
from headway.plan.machine.efficiency import default_calibration
from headway.plan.machine.hardware import find_device
from headway.plan.model.transformer import Moe, StateSpace, Transformer
from headway.plan.report.quantity import Quantity, format_value
from headway.plan.report.saved_plan import read_saved_plan
from headway.plan.searcher.layouts import layouts

LLAMA = preset("llama-3.1-8b")
FSDP = Layout(dp=8, zero=3, microbatch=1, global_batch=8, sequence=8192, precision="amp")
H200 = Node("h200-sxm8")


def test_every_answer_has_an_interval_a_formula_and_a_source() -> None:
    plan = estimate(LLAMA, FSDP, Node("h200-sxm8", price_per_hour=30), workload=Workload(tokens=1e9))
    assert len(plan.answers) > 40
    for key, answer in plan.answers.items():
        assert answer.low <= answer.value <= answer.high, key
        assert answer.formula and answer.source, key
        assert key in plan.explain(key) and answer.formula in plan.explain(key)
    assert {"parameters", "memory.needed", "time.step", "mfu.full", "mfu.causal", "hfu", "run.cost"} <= set(
        plan.answers
    )


def test_parts_add_up_to_the_totals() -> None:
    plan = estimate(LLAMA, replace(FSDP, tp=2, pp=2, global_batch=32), H200)
    for total, prefix in (("memory.allocated", "memory.part."), ("time.step", "time.part.")):
        parts = sum(answer.value for key, answer in plan.answers.items() if key.startswith(prefix))
        assert parts == pytest.approx(plan.answers[total].value)


def test_a_plan_that_fits() -> None:
    plan = estimate(LLAMA, FSDP, H200)
    assert plan.fits and plan.exit_code == 0 and all(way.fits for way in plan.remedies)
    assert plan.verdict.startswith("fits: needs ") and plan.verdict.endswith(" of 139.8")


def test_a_plan_that_does_not_fit_names_what_would() -> None:
    plan = estimate(LLAMA, replace(FSDP, microbatch=2, global_batch=16), Node("dgx-h100"))
    assert not plan.fits and plan.exit_code == 3
    assert plan.verdict.startswith("does not fit: needs ") and " -> " in plan.verdict
    fitting = [way for way in plan.remedies if way.fits]
    assert (
        fitting and plan.remedies[: len(fitting)] == fitting
    )  # those that fit come first, the cheapest at the front
    assert [way.slowdown for way in fitting] == sorted(way.slowdown for way in fitting)
    for way in fitting:
        assert estimate(LLAMA, way.layout, Node("dgx-h100")).fits, way.change


def test_two_changes_when_one_is_not_enough() -> None:
    plan = estimate(
        LLAMA, Layout(dp=8, microbatch=2, global_batch=16, sequence=8192, precision="amp"), Node("dgx-h100")
    )
    first = plan.remedies[0]
    assert first.fits and " and " in first.change


def test_little_room_is_said() -> None:
    layout = replace(FSDP, microbatch=2, global_batch=16, recompute="sac")
    tight = Node.of(device={"memory_GB": 88, "hbm_GBps": 3350, "bf16": 989}, gpus=8)
    plan = estimate(LLAMA, layout, tight)
    assert plan.fits and plan.tight and ", and may run out of memory" in plan.verdict


def test_unknown_answer_offers_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"'time.stop' is not a valid answer \(did you mean 'time.step'"):
        estimate(LLAMA, FSDP, H200).explain("time.stop")


def test_plan_json_reads_back() -> None:
    plain = json.loads(json.dumps(estimate(LLAMA, FSDP, H200).to_dict()))
    assert plain["fits"] is True
    assert plain["answers"]["parameters"]["value"] == LLAMA.parameters


def test_calibration_moves_the_step_and_narrows_the_interval() -> None:
    measured = replace(default_calibration(H200.device), scale=1.3, source="measured on this machine")
    before, after = estimate(LLAMA, FSDP, H200), estimate(LLAMA, FSDP, H200, calibration=measured)
    old, new = before.answers["time.step"], after.answers["time.step"]
    assert new.value == pytest.approx(1.3 * old.value)
    assert new.high / new.value < old.high / old.value
    assert any(note.startswith("100 % of the step time is uncalibrated") for note in before.notes)
    (links,) = after.notes  # no link was measured
    assert 5 <= int(links.split(" % of the step time is uncalibrated")[0]) <= 15


def test_loader_and_node_notes() -> None:
    model = preset("vit-b-16")
    layout = Layout(dp=12, microbatch=64, global_batch=768, precision="amp")
    plan = estimate(model, layout, H200, workload=Workload(sample_bytes=110e3, loader_MBps=50))
    assert any("wait for data" in note for note in plan.notes)
    assert any("whole nodes" in note for note in plan.notes)
    assert plan.answers["loader.needed_per_node"].value == pytest.approx(
        plan.answers["rate.samples"].value * 110e3 / 2
    )


def test_a_loader_of_images_reads_images() -> None:
    """A ViT-B/16 at 32,000 images/s reads 3.5 GB/s of JPEG, not 2 bytes for each of its tokens."""
    layout = Layout(dp=8, microbatch=64, global_batch=512, precision="amp")
    found = estimate(preset("vit-b-16"), layout, H200).answers
    assert found["loader.needed_per_node"].value == pytest.approx(found["rate.samples"].value * 110e3)


@pytest.mark.parametrize(
    ("device", "gib"),
    [("mi300x-192", 192), ("rtx-4090-24", 24), ("v100-sxm2-32", 32), ("a100-sxm-40", 40), ("h100-pcie-80", 80),
     ("b200-sxm-180", 180), ("gb200-186", 186)],
)  # fmt: skip
def test_vendors_count_gib(device: str, gib: float) -> None:
    """The driver reports what the vendor calls GB in GiB, less a few hundred MiB: 79.3 of an A100's 80."""
    assert 0.975 * gib < find_device(device).memory_bytes / 2**30 <= gib
    own = Node.of(device={"memory_GB": gib, "hbm_GBps": 900, "bf16": 180})
    assert own.device.memory_bytes / 2**30 == pytest.approx(0.985 * gib)


def test_utilization_in_fp8_is_of_the_fp8_peak() -> None:
    layout = Layout(
        dp=8, zero=3, microbatch=1, global_batch=8, sequence=8192, precision="fp8", recompute="full"
    )
    found = estimate(LLAMA, layout, Node("dgx-h100")).answers
    expected = found["flops.full"].value * found["rate.tokens_per_gpu"].value / 1979e12
    assert found["mfu.full"].value == pytest.approx(expected) and found["mfu.full"].value < 0.7
    assert "1979 TFLOP/s (fp8, dense)" in found["mfu.full"].formula


def test_goodput_of_a_thousand_gpus() -> None:
    """1,024 GPUs, 30 s of blocking: checkpoint every 54 minutes, 1.8 % lost besides restarts."""
    mtbf = 50_700 * 3600 / 1024
    interval = young_daly(30, mtbf)
    assert interval / 60 == pytest.approx(54, abs=0.5)
    assert 1 - goodput(30, interval, 0, mtbf) == pytest.approx(0.018, abs=0.0005)


def test_young_daly_is_the_best_interval() -> None:
    for blocking in (1.0, 30.0, 600.0):
        best = young_daly(blocking, 1e5)
        at = goodput(blocking, best, 300, 1e5)
        assert at >= goodput(blocking, best * 1.5, 300, 1e5)
        assert at >= goodput(blocking, best / 1.5, 300, 1e5)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_checkpoints_are_not_more_frequent_than_they_are_written(asynchronous: bool) -> None:
    """405B on 16,384 GPUs at 10 GB/s: a write takes 9.5 minutes, and a failure comes every 3 hours."""
    layout = Layout(tp=8, pp=16, dp=128, zero=1, global_batch=2048, sequence=8192, sequence_parallel=True)
    workload = Workload(tokens=1e12, async_checkpoint=asynchronous)
    plan = estimate(preset("llama-3.1-405b"), layout, Node("dgx-h100"), workload=workload)
    written = plan.answers["checkpoint.write"].value
    assert written == pytest.approx(405.85e9 * 14 / 10e9, rel=0.01)
    kind = "async" if asynchronous else "sync"
    assert plan.answers["checkpoint.interval"] == plan.answers[f"checkpoint.interval.{kind}"]
    assert plan.answers["checkpoint.interval"].value >= written
    assert plan.answers["goodput.sync"].value < plan.answers["goodput.async"].value < 0.9
    assert plan.answers["failure.restart"].value == pytest.approx(300 + written)


@pytest.mark.parametrize(
    ("blocking", "interval", "restart", "mtbf"), [(30, 3240, 300, 178e3), (570, 3500, 900, 11e3)]
)
def test_goodput_equals_a_simulated_run(
    blocking: float, interval: float, restart: float, mtbf: float
) -> None:
    """Failures at random, work since the last save is lost: counted event by event."""
    chance, done, wall = random.Random(1), 0.0, 0.0
    for _ in range(20_000):
        left = chance.expovariate(1 / mtbf)
        wall += left
        if left > restart:  # a failure while restarting starts the restart over
            done += (left - restart) // (interval + blocking) * interval
    assert goodput(blocking, interval, restart, mtbf) == pytest.approx(done / wall, rel=0.02)


def test_units_do_not_mix() -> None:
    assert format_value(80e9, "bytes") == "74.51 GiB"
    assert format_value(80e9, "bytes/s") == "80.00 GB/s"
    assert format_value(0.02795, "s") == "27.95 ms"
    assert format_value(124_439_808, "") == "124.44 M"
    assert str(Quantity(value=0.5, low=0.4, high=0.7, unit="share")) == "50.0 % (40.0 to 70.0)"


def test_search_counts_its_work_and_ranks_by_time() -> None:
    node = Node("dgx-h100")
    found = search(LLAMA, node, gpus=16, global_batch=128, base=Layout(sequence=8192))
    assert found.tried == len(list(layouts(LLAMA, node, 16, 128, Layout(sequence=8192)))) > 500
    assert 0 < found.fitting < found.tried
    assert [row.seconds for row in found.ranked] == sorted(row.seconds for row in found.ranked)
    assert all(row.needed <= node.device.memory_bytes and row.layout.gpus == 16 for row in found.ranked)
    for row in found.ranked[:3]:
        assert row.needed == pytest.approx(
            reserved_bytes(peak(LLAMA, row.layout).allocated, row.layout, Node("dgx-h100").device)
        )


def test_no_layout_beats_the_pareto_set() -> None:
    node = Node("dgx-a100")
    model = preset("gpt2-xl")
    found = search(model, node, gpus=8, global_batch=32)
    assert len(found.pareto) > 2
    memories = [row.needed for row in found.pareto]
    assert memories == sorted(memories, reverse=True)
    for layout in layouts(model, node, 8, 32, Layout()):
        needed = reserved_bytes(peak(model, layout).allocated, layout, Node("dgx-h100").device)
        seconds = step_time(model, layout, node, Calibration()).total
        assert not any(
            needed < 0.97 * row.needed and seconds < 0.999 * row.seconds for row in found.pareto[:1]
        )
    best = found.best
    assert best is not None and best.seconds == min(row.seconds for row in found.ranked)


def test_search_says_why() -> None:
    found = search(
        preset("llama-3.1-70b"), Node("dgx-h100"), gpus=64, global_batch=512, base=Layout(sequence=8192)
    )
    assert "is the fastest of" in found.reasons[0]
    assert any(reason.startswith("plain data parallel (DDP): needs ") for reason in found.reasons)
    assert any(reason.startswith("fully sharded (FSDP)") for reason in found.reasons)


def test_search_when_nothing_fits() -> None:
    found = search(preset("llama-3.1-405b"), Node("rtx-4090-1"), gpus=2, global_batch=8)
    assert found.best is None and not found.ranked
    assert found.smallest > found.capacity


def test_search_covers_ten_thousand_layouts() -> None:
    node = Node("dgx-a100")
    many = layouts(preset("gpt3-175b"), node, 1536, 9216, Layout(flash=False))
    assert sum(1 for _ in many) > 10_000


def test_public_names_are_sorted_and_complete() -> None:
    names = plan_room.__all__
    assert names == sorted(names)
    for name in names:
        assert getattr(plan_room, name).__name__.lower().endswith(name.lower())


def test_a_saved_plan_has_its_layout_and_emits_its_job(tmp_path: Path) -> None:
    file, layout = tmp_path / "plan.json", replace(FSDP, dp=16, global_batch=16)
    plan = estimate(LLAMA, layout, H200, workload=Workload(tokens=1e9))
    plan.save(file)
    kept = json.loads(file.read_text())
    assert Layout(**kept["layout"]) == layout
    assert kept["model"]["hidden"] == 4096 and Node.of(**kept["hardware"]).gpus == 8
    assert plan.submit_line() == "headway submit --nodes 2 --gpus-per-node 8 train.py"
    saved = read_saved_plan(file).planned("step")
    assert saved is not None and saved.value == plan.answers["time.step"].value
    assert saved.outside(10 * saved.value) and not saved.outside(saved.value)
    assert plan.answers["rate.tokens_per_day"].value == pytest.approx(
        86400 * plan.answers["rate.tokens"].value
    )
    assert plan.answers["time.microbatches"].value == 1


@pytest.mark.parametrize(
    ("keys", "nodes", "each"),
    [
        ({"dp": 12}, 2, 6),
        ({"dp": 20}, 4, 5),
        ({"dp": 3, "tp": 4}, 3, 4),
        ({"dp": 4}, 1, 4),
        (
            {"dp": 11},
            0,
            "11 GPUs in groups of tp 1 cannot be spread evenly over nodes of 8 GPUs; plan .*, such as 16",
        ),
        ({"dp": 3, "tp": 6}, 3, 6),
    ],
)
def test_a_job_has_as_many_ranks_as_its_plan(keys: dict[str, int], nodes: int, each: int | str) -> None:
    model = preset("gpt2")
    plan = estimate(model, Layout(global_batch=keys["dp"], **keys), H200)  # type: ignore[arg-type]
    if isinstance(each, str):
        with pytest.raises(UsageError, match=each):
            plan.submit_line()
    else:
        assert plan.submit_line() == f"headway submit --nodes {nodes} --gpus-per-node {each} train.py"


def test_samples_per_second_of_a_run_become_its_utilization() -> None:
    """torchtitan's 5,762 tokens/s a GPU of Llama 3.1 8B are 33.7 % of an H100, attention counted in full."""
    plan = estimate(LLAMA, replace(FSDP, microbatch=2, global_batch=16), Node("dgx-h100"))
    reached = plan.at_rate(5762 * 8 / 8192)
    assert reached["mfu.full"] == pytest.approx(0.337, abs=0.001)
    assert reached["rate.tokens_per_gpu"] == pytest.approx(5762)
    assert reached["rate.tokens_per_day"] == pytest.approx(5762 * 8 * 86400)


def test_scaling_begins_where_replicas_share_their_experts() -> None:
    """Experts over two of every three ranks: one replica of three ranks cannot hold them, two can."""
    model = Transformer(layers=4, hidden=768, heads=12, vocab=1000, moe=Moe(experts=6, top_k=2, ffn=512))
    layout = Layout(dp=2, tp=3, ep=2, expert_tp=1, global_batch=4, precision="amp")
    assert [row["gpus"] for row in estimate(model, layout, H200).scaling][:2] == [6, 12]


def test_scaling_ends_at_the_largest_plan() -> None:
    gpus = 2**22
    table = estimate(preset("gpt2"), Layout(dp=gpus, global_batch=gpus), H200).scaling
    assert table[-1]["gpus"] == 2 * gpus


def test_products_of_a_few_layers_are_a_fraction_not_none() -> None:
    """One of eight layers has attention: a product in each eighth layer, as its FLOPs say."""
    net = StateSpace(layers=7, projected=4096, inner=2048, channels=2048, state=16)
    model = Transformer(layers=8, hidden=1024, heads=8, vocab=32000, context=2048, state_space=net)
    rows = {row["name"]: row for row in estimate(model, Layout(), H200).products}
    assert (rows["qkv"]["batch"], rows["state in"]["batch"], rows["head"]["batch"]) == (0.125, 0.875, 1)
    qkv = rows["qkv"]
    assert qkv["flops"] == pytest.approx(2 * qkv["m"] * qkv["k"] * qkv["n"] * qkv["batch"])


def test_a_value_below_a_wide_interval_is_no_lower_bound() -> None:
    tiny = Quantity(
        value=1e-4, low=0.0, high=0.67, unit="share", formula="goodput of a machine that always fails"
    )
    assert str(tiny) == "0.01 % (0.00 to 67.00)"
