"""What no plan may contradict, on random models, layouts and machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from headway.plan.cost import collectives
from headway.plan.cost.collectives import strided_group
from headway.plan.cost.memory import rank_memory
from headway.plan.cost.states import model_states, on_rank
from headway.plan.cost.steptime import step_time
from headway.plan.machine.calibration import Calibration
from headway.plan.machine.efficiency import default_calibration
from headway.plan.machine.hardware import Node, node_names
from headway.plan.model.layout import Layout
from headway.plan.model.transformer import Moe, Transformer

NODES = st.sampled_from(node_names()).map(Node)
POWERS = st.sampled_from([1, 2, 4, 8])


@st.composite
def models(draw: st.DrawFn) -> Transformer:
    """Transformers of 8 to 40 layers, uneven numbers included, dense or with experts in some of the layers."""
    experts = draw(st.sampled_from([0, 8, 32]))
    layers = draw(st.integers(8, 40))
    moe = None
    if experts:
        moe = Moe(
            experts=experts,
            top_k=draw(st.integers(1, 4)),
            ffn=draw(st.sampled_from([256, 1024])),
            shared_ffn=draw(st.sampled_from([0, 512])),
            dense_layers=draw(st.integers(0, 3)),
        )
    return Transformer(
        layers=layers, hidden=1024, heads=8, kv_heads=draw(st.sampled_from([2, 8])), context=2048,
        vocab=draw(st.integers(1000, 60000)), gated=draw(st.booleans()), tied=draw(st.booleans()),
        position="rope", moe=moe,
    )  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> tuple[Transformer, Layout]:
    """A model and a layout that it can be split into."""
    model, dp, tp, pp = draw(models()), draw(POWERS), draw(st.sampled_from([1, 2])), draw(POWERS)
    micro, m = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 4, 8]))
    layout = Layout(
        dp=dp, tp=tp, pp=pp, cp=draw(st.sampled_from([1, 2])), zero=draw(st.integers(0, 3)), microbatch=micro,
        ep=draw(st.sampled_from([1, dp])) if model.moe else 1, global_batch=micro * dp * m, sequence_parallel=tp > 1,
        recompute=draw(st.sampled_from(["none", "sac", "full"])),
        precision=draw(st.sampled_from(["bf16", "amp", "fp8"])), overlap=draw(st.booleans()),
        ep_overlap=draw(st.booleans()), compiled=draw(st.booleans()),
        dispatcher=draw(st.sampled_from(["fused", "all-to-all"])),
        graphs=draw(st.sampled_from(["none", "layers", "step"])),
    )  # fmt: skip
    layout.check_model(model)
    return model, layout


def slower(node: Node, *, network: float = 1.0, peers: float = 1.0) -> Node:
    keys = node.to_dict()
    device = dict(keys["device"])  # type: ignore[call-overload]
    for key in ("nvlink_GBps", "pcie_GBps"):
        device[key] = None if device[key] is None else device[key] * peers
    return Node.of(device=device, gpus=node.gpus, inter_Gbps=keys["inter_Gbps"] * network)  # type: ignore[operator]


@settings(max_examples=60)
@given(plan=plans(), node=NODES, factor=st.floats(0.05, 1.0))
def test_a_slower_link_never_makes_a_step_faster(
    plan: tuple[Transformer, Layout], node: Node, factor: float
) -> None:
    model, layout = plan
    constants = default_calibration(node.device)
    before = step_time(model, layout, node, constants).total
    for worse in (slower(node, network=factor), slower(node, peers=factor)):
        assert step_time(model, layout, worse, constants).total >= before * (1 - 1e-9)


@settings(max_examples=60)
@given(plan=plans(), node=NODES, longer=st.sampled_from([2, 4]))
def test_more_work_is_never_faster(plan: tuple[Transformer, Layout], node: Node, longer: int) -> None:
    """Longer sequences, or more of them in a step: more operations and more bytes in every part."""
    model, layout = plan
    constants = default_calibration(node.device)
    before = step_time(model, layout, node, constants).total
    for more in (
        replace(layout, sequence=longer * model.context),
        replace(layout, global_batch=longer * layout.global_batch),
    ):
        assert step_time(model, more, node, constants).total >= before * (1 - 1e-9)


@settings(max_examples=60)
@given(plan=plans(), node=NODES)
def test_a_step_is_the_sum_of_its_parts_and_no_faster_than_its_products(
    plan: tuple[Transformer, Layout], node: Node
) -> None:
    model, layout = plan
    step = step_time(model, layout, node, default_calibration(node.device))
    assert step.total == pytest.approx(sum(step.parts.values())) and min(step.parts.values()) > 0
    tokens = layout.global_batch * model.context / layout.gpus
    least = 6 * tokens * (model.active_parameters - model.embedding_parameters)
    assert step.total > least / node.device.precision_peak(layout.precision)


@settings(max_examples=80)
@given(plan=plans(), vpp=st.sampled_from([1, 2]))
def test_the_stages_hold_all_parameters_and_each_rank_is_the_sum_of_its_parts(
    plan: tuple[Transformer, Layout], vpp: int
) -> None:
    model, layout = plan
    if vpp > 1 and layout.pp > 1 and layout.pp * vpp <= model.layers:
        layout = replace(layout, vpp=vpp, global_batch=layout.dp * layout.microbatch * layout.pp)
    alone = replace(
        layout, tp=1, ep=1, sequence_parallel=False
    )  # tensor-parallel ranks hold norms more than once
    stages = [on_rank(model, alone, stage) for stage in range(layout.pp)]
    copy = model.vocab * model.hidden if model.tied and layout.pp > 1 else 0
    held = sum(stage.shared + stage.experts for stage in stages)
    assert held == pytest.approx(model.parameters + copy, rel=1e-9)
    for stage in range(layout.pp):
        rank, states = rank_memory(model, layout, stage), model_states(on_rank(model, layout, stage), layout)
        assert rank.allocated == pytest.approx(sum(rank.parts.values()))
        assert min(rank.parts.values()) > 0 and rank.allocated >= states.total


@given(
    node=NODES,
    size=st.sampled_from([2, 4, 8, 64]),
    stride=st.sampled_from([1, 2, 8]),
    sent=st.floats(1, 1e11),
)
def test_a_group_that_leaves_its_node_is_never_faster(
    node: Node, size: int, stride: int, sent: float
) -> None:
    """The same number of ranks as neighbors, or further apart: a slower link is added, and none becomes faster."""
    ideal = replace(Calibration(), peer=1.0, network=1.0, peer_latency_s=1e-6, network_latency_s=1e-6)
    near, far = (strided_group(size, apart, node, ideal) for apart in (1, stride))
    for collective in (
        collectives.all_reduce,
        collectives.all_gather,
        collectives.all_to_all,
        collectives.send,
    ):
        assert collective(far, sent) >= collective(near, sent) * (1 - 1e-9)


def test_without_a_switch_two_gpus_have_one_link() -> None:
    """ml-engineering on eight MI300X, all-reduce of 4 GiB: 47.7 GB/s between two of them, 312.9 among eight."""
    node = Node("mi300x-8")
    constants = default_calibration(node.device)
    two, eight = (strided_group(size, 1, node, constants).bytes_per_s / 1e9 for size in (2, 8))
    assert two == pytest.approx(47.7, rel=0.1) and eight == pytest.approx(312.9, rel=0.15)
    assert strided_group(2, 1, Node("dgx-h100"), constants).bytes_per_s == pytest.approx(
        450e9 * constants.peer
    )
