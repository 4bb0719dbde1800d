"""In-flight microbatches and the bubble, against a schedule that is played event by event."""

from __future__ import annotations

from itertools import accumulate, groupby, pairwise, product

import pytest

from headway.errors import UsageError
from headway.plan import Layout, Node, Transformer, estimate, preset
from headway.plan.cost.schedule import (
    bubble_fraction,
    chunk_layers,
    chunk_runs,
    in_flight,
    layers_in_flight,
    weights_owed,
)
from headway.plan.cost.timeline import play_schedule
from headway.plan.report.html import render_page
from headway.plan.report.schedule_picture import schedule_passes, schedule_text

StorageEvent = tuple[str, int, int]  # forward or backward, microbatch, chunk on this rank


def one_f_one_b(p: int, m: int, rank: int, v: int) -> list[StorageEvent]:
    """The order in which a rank works: Megatron's schedule, interleaved when v > 1."""
    total = m * v
    warmup = p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * p
    warmup = min(warmup, total)

    def item(kind: str, turn: int) -> StorageEvent:
        group, inside = divmod(turn, p * v)
        chunk = inside // p
        return kind, group * p + inside % p, chunk if kind == "F" else v - 1 - chunk

    if v == 1:
        forwards = [("F", i, 0) for i in range(m)]
        backwards = [("B", i, 0) for i in range(m)]
    else:
        forwards = [item("F", i) for i in range(total)]
        backwards = [item("B", i) for i in range(total)]
    order = forwards[:warmup]
    for i in range(total - warmup):
        order += [forwards[warmup + i], backwards[i]]
    return order + backwards[total - warmup :]


def play(p: int, m: int, v: int, forward: int = 1, backward: int = 2) -> tuple[int, list[int]]:
    """Plays all ranks, each event as soon as what it needs is there: makespan, most alive per rank."""
    orders = [one_f_one_b(p, m, rank, v) for rank in range(p)]
    done: dict[tuple[str, int, int], int] = {}  # kind, microbatch, stage of all p*v -> end
    clock, position, alive, most = [0] * p, [0] * p, [0] * p, [0] * p
    while any(position[rank] < len(orders[rank]) for rank in range(p)):
        moved = False
        for rank in range(p):
            if position[rank] == len(orders[rank]):
                continue
            kind, micro, chunk = orders[rank][position[rank]]
            stage = chunk * p + rank
            needs = _needs(kind, micro, stage, p * v)
            if any(need not in done for need in needs):
                continue
            start = max([clock[rank], *(done[need] for need in needs)])
            clock[rank] = start + (forward if kind == "F" else backward)
            done[kind, micro, stage] = clock[rank]
            alive[rank] += 1 if kind == "F" else 0
            most[rank] = max(most[rank], alive[rank])
            alive[rank] -= 1 if kind == "B" else 0
            position[rank] += 1
            moved = True
        assert moved, "the schedule deadlocks"
    return max(clock), most


def _needs(kind: str, micro: int, stage: int, stages: int) -> list[tuple[str, int, int]]:
    if kind == "F":
        return [("F", micro, stage - 1)] if stage else []
    needs = [("F", micro, stage)]
    return [*needs, ("B", micro, stage + 1)] if stage < stages - 1 else needs


@pytest.mark.parametrize("p", range(1, 9))
def test_1f1b_equals_the_played_schedule(p: int) -> None:
    for m in range(1, 33):
        makespan, most = play(p, m, 1)
        assert makespan == pytest.approx(3 * m * (1 + bubble_fraction(p, m)), rel=1e-12)
        assert most == [in_flight(p, m, stage) for stage in range(p)]


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("p", range(2, 9))
def test_interleaved_equals_the_played_schedule(p: int, v: int) -> None:
    for m in range(p, 33, p):
        makespan, most = play(p, m, v)  # one time unit is a chunk: 1/v of a stage
        assert makespan == pytest.approx(3 * m * v * (1 + bubble_fraction(p, m, v)), rel=1e-12)
        assert most == [in_flight(p, m, stage, v) for stage in range(p)]


@pytest.mark.parametrize("v", [2, 3, 4])
def test_backward_passes_of_a_chunk_come_in_runs(v: int) -> None:
    """So often ZeRO 2 reduces the sum of a chunk's gradients, whatever forward passes are between them."""
    for p, groups in product(range(2, 6), range(1, 4)):
        for rank in range(p):
            order = [chunk for kind, _, chunk in one_f_one_b(p, groups * p, rank, v) if kind == "B"]
            runs = [chunk for chunk, _ in groupby(order)]
            assert all(runs.count(chunk) == chunk_runs(p, groups * p, v) == groups for chunk in range(v))


def test_in_flight_is_the_minimum_not_the_maximum() -> None:
    """dlcalc 0.1.3 took max(m, p): its Llama 70B example then needed 16 times the activations."""
    assert in_flight(2, 32, 0) == 2
    assert in_flight(32, 2, 0) == 2


def test_korthikanti_interleaving_factor() -> None:
    """Section 4.2.3: stage 0 holds L(1 + (p-1)/(pv)) layers."""
    for layers, p, v in [(96, 8, 3), (105, 35, 3)]:
        assert layers_in_flight(layers, p, v, 0, 10 * p) == pytest.approx(layers * (1 + (p - 1) / (p * v)))


def test_layers_are_all_placed() -> None:
    for layers in range(1, 130, 7):
        for p in range(1, 9):
            for v in range(1, 4):
                if p * v <= layers:
                    chunks = chunk_layers(layers, p, v)
                    assert sum(map(sum, chunks)) == layers
                    assert max(map(max, chunks)) - min(map(min, chunks)) <= 1


def test_the_ends_may_have_chunks_of_their_own() -> None:
    """Llama 3 405B: 126 layers in 128 chunks, of which the first has the embedding alone and the last the head."""
    chunks = chunk_layers(126, 16, 8)
    assert chunks[0][0] == chunks[15][7] == 0 and sum(map(sum, chunks)) == 126
    assert {layers for stage in chunks for layers in stage} == {0, 1}
    model = Transformer(layers=6, hidden=64, heads=4, vocab=100)
    Layout(pp=4, vpp=2, global_batch=4).check_model(model)
    with pytest.raises(
        UsageError, match=r"pp x vpp is 12, more than model.layers \(6, and two for embedding and"
    ):
        Layout(pp=4, vpp=3, global_batch=4).check_model(model)
    with pytest.raises(UsageError, match=r"pp x vpp is 8, more than model.layers \(6\); valid: at most 6"):
        Layout(pp=8, global_batch=8).check_model(model)


def test_no_bubble_without_a_pipeline() -> None:
    assert bubble_fraction(1, 5) == 0


def test_the_bubble_that_is_told_is_the_one_that_is_timed() -> None:
    """Equal stages: the part of the step over the busy time is `time.bubble`, also of a zero-bubble schedule."""
    model, node = Transformer(layers=16, hidden=1024, heads=8, vocab=1, context=1024), Node("dgx-h100")
    for schedule, vpp, bubble in (("1f1b", 1, 3 / 8), ("1f1b", 2, 3 / 16), ("zero-bubble", 1, 1 / 8)):
        layout = Layout(pp=4, vpp=vpp, global_batch=8, schedule=schedule)  # type: ignore[arg-type]
        found = estimate(model, layout, node).answers
        assert found["time.bubble"].value == pytest.approx(bubble)
        busy = [
            answer.value
            for name, answer in found.items()
            if name.startswith("time.part.") and name.split(".")[2] not in BESIDE_THE_BUBBLE
        ]
        assert found["time.part.pipeline bubble"].value / sum(busy) == pytest.approx(bubble, rel=0.02)


BESIDE_THE_BUBBLE = ("pipeline bubble", "optimizer", "data parallel", "stragglers")


@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 1), (2, 1, 1), (4, 8, 1), (4, 2, 1), (4, 8, 2), (3, 9, 4)])
def test_the_schedule_that_is_drawn_is_the_one_above(p: int, m: int, v: int) -> None:
    """Every pass once, no rank does two things at once, and the end is that of the independent player."""
    passes = play_schedule([(v, 2 * v)] * p, m, v)
    assert len(passes) == len({each[:4] for each in passes}) == 2 * p * m * v
    for rank in range(p):
        mine = sorted((each for each in passes if each.rank == rank), key=lambda each: each.start_s)
        assert all(before.end_s <= after.start_s for before, after in pairwise(mine))
        order = [(each.direction[0].upper(), each.microbatch, each.chunk) for each in mine]
        assert order == one_f_one_b(p, m, rank, v)
    assert max(each.end_s for each in passes) == play(p, m, v)[0]


@pytest.mark.parametrize("p", range(2, 7))
def test_zero_bubble_equals_the_played_schedule(p: int) -> None:
    """ZB-H1 with passes of equal length: every pass once, in order; end and memory are those of the closed forms."""
    for m in range(1, 3 * p + 1):
        passes = play_schedule([(1, 2)] * p, m, schedule="zero-bubble")
        assert len(passes) == len({each[:4] for each in passes}) == 3 * p * m
        assert max(each.end_s for each in passes) == pytest.approx(
            3 * m * (1 + bubble_fraction(p, m, schedule="zero-bubble"))
        )
        ended = {each[:3]: each.end_s for each in passes}
        for rank in range(p):
            mine = sorted((each for each in passes if each.rank == rank), key=lambda each: each.start_s)
            assert all(before.end_s <= after.start_s for before, after in pairwise(mine))
            held = [{"forward": 1, "backward": 0, "weights": -1}[each.direction] for each in mine]
            assert max(accumulate(held)) == in_flight(p, m, rank, schedule="zero-bubble")
            for each in mine:
                needs = _needs_zero_bubble(rank, each.direction, each.microbatch, p)
                assert all(ended[need] <= each.start_s for need in needs)


@pytest.mark.parametrize("p", [2, 5, 8])
def test_what_is_recomputed_must_be_kept_for_gradients_of_weights_that_are_delayed(p: int) -> None:
    """A microbatch takes the share `kept` of its memory until its backward pass, and all of it until the gradients of
    its weights: played with what `weights_owed` allows, no rank holds more than it is planned to."""
    for m, kept in product(range(1, 3 * p + 1), (1.0, 0.9, 2 / 3, 0.5, 0.4, 0.25, 0.1)):
        owed = [weights_owed(p, m, rank, kept) for rank in range(p)]
        passes = play_schedule([(1, 2)] * p, m, schedule="zero-bubble", owed=owed)
        assert max(each.end_s for each in passes) == pytest.approx(
            3 * m * (1 + bubble_fraction(p, m, schedule="zero-bubble", kept=kept))
        )
        for rank in range(p):
            mine = sorted((each for each in passes if each.rank == rank), key=lambda each: each.start_s)
            after_backward = 1 - kept if owed[rank] else -kept  # a rank that owes nothing splits no pass
            change = {"forward": kept, "backward": after_backward, "weights": -1}
            held = max(accumulate(change[each.direction] for each in mine))
            assert held <= kept * in_flight(p, m, rank, schedule="zero-bubble") + 1e-9


def test_zero_bubble_gains_nothing_where_everything_is_recomputed() -> None:
    """The input of a layer is a sixteenth of what its weight gradients need: eight ranks have no memory to delay
    even one."""
    model, node = preset("llama-3.1-70b"), Node("dgx-h100")
    bubble = {}
    for schedule, recompute in product(("1f1b", "zero-bubble"), ("none", "modules", "full")):
        layout = Layout(
            tp=8, pp=8, dp=2, sequence_parallel=True, zero=1, global_batch=64, schedule=schedule, recompute=recompute
        )  # type: ignore[arg-type]  # fmt: skip
        plan = estimate(model, layout, node)
        bubble[schedule, recompute] = plan.answers["time.bubble"].value
        split = any(each.direction == "weights" for each in schedule_passes(plan)[0])
        assert split == (schedule == "zero-bubble" and recompute != "full")
    once = bubble["1f1b", "none"]
    assert bubble["zero-bubble", "none"] == pytest.approx(once / 3)
    assert once / 3 < bubble["zero-bubble", "modules"] < once * 2 / 3
    assert bubble["zero-bubble", "full"] == pytest.approx(once)


def _needs_zero_bubble(rank: int, direction: str, microbatch: int, p: int) -> list[tuple[int, str, int]]:
    if direction == "weights":
        return [(rank, "backward", microbatch)]
    if direction == "forward":
        return [(rank - 1, "forward", microbatch)] if rank else []
    return [(rank, "forward", microbatch)] + ([(rank + 1, "backward", microbatch)] if rank < p - 1 else [])


@pytest.mark.parametrize(("schedule", "vpp"), [("1f1b", 2), ("zero-bubble", 1)])
def test_the_picture_ends_when_the_plan_says(schedule: str, vpp: int) -> None:
    """Equal stages: passes and bubble of `step_time` are the length of the schedule."""
    model = Transformer(layers=16, hidden=1024, heads=8, vocab=1, context=1024)
    layout, node = Layout(pp=4, vpp=vpp, schedule=schedule, global_batch=8), Node("dgx-h100")  # type: ignore[arg-type]
    plan = estimate(model, layout, node)
    parts = {key: answer.value for key, answer in plan.answers.items() if key.startswith("time.part.")}
    around = [parts.pop(f"time.part.{name}", 0.0) for name in ("data parallel", "optimizer", "stragglers")]
    passes, shown = schedule_passes(plan)
    assert shown == 8 and around[2] > 0
    assert max(each.end_s for each in passes) == pytest.approx(sum(parts.values()), rel=0.02)


def test_the_schedule_as_text_and_as_a_picture() -> None:
    model = Transformer(layers=4, hidden=1024, heads=8, vocab=1, context=1024)
    plan = estimate(model, Layout(pp=2, global_batch=3), Node("dgx-h100"))
    first, second, legend = schedule_text(plan, width=60).splitlines()
    assert [len(first), len(second)] == [60, 60]
    assert "".join(dict.fromkeys(first[9:])) == "01.a2bc" and "".join(dict.fromkeys(second[9:])) == ".0a1b2c"
    assert legend.startswith("forward 0-9, backward a-j by microbatch, idle . (25% of ")
    page = render_page(plan)
    assert page.count("<title>forward of microbatch") == page.count("<title>backward of microbatch") == 6
    zero = estimate(model, Layout(pp=2, global_batch=3, schedule="zero-bubble"), Node("dgx-h100"))
    first, second, legend = schedule_text(zero, width=60).splitlines()
    assert (
        "".join(dict.fromkeys(first[9:])) == "01.aA2bBcC"
        and "".join(dict.fromkeys(second[9:])) == ".0a1bA2cBC"
    )
    assert "backward a-j, of weights A-J, by microbatch" in legend
    assert render_page(zero).count("<title>weight gradients of microbatch") == 6
    long = estimate(model, Layout(pp=2, global_batch=4096), Node("dgx-h100"))
    assert "500 of 4096 microbatches" in schedule_text(long) and len(render_page(long)) < 1_000_000
    flat = estimate(model, Layout(), Node("dgx-h100"))
    assert "Pipeline schedule" not in render_page(flat)
    with pytest.raises(UsageError, match="one pipeline stage, so there is no schedule to draw"):
        schedule_text(flat)
