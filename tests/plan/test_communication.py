"""Collectives: each GPU has its own share of the network, and no link is faster than its bytes allow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from headway.plan.cost import collectives
from headway.plan.cost.collectives import axis_group, strided_group
from headway.plan.machine.calibration import Calibration
from headway.plan.machine.efficiency import default_calibration
from headway.plan.machine.hardware import GIB, Node
from headway.plan.model.layout import Layout

DGX = Node("dgx-h100")
IDEAL = replace(Calibration(), network=1.0, peer=1.0)


def test_an_all_to_all_between_nodes_has_the_network_of_its_own_gpu() -> None:
    """64 ranks on 8 nodes: 56/64 of each GPU's bytes leave by its own 400 Gb/s, not by the node's 3,200."""
    ranks = axis_group("ep", Layout(dp=64, ep=64, global_batch=64), DGX, Calibration())
    own = 400e9 / 8 * Calibration().network
    assert collectives.all_to_all(ranks, 1e9) == pytest.approx(56 / 64 * 1e9 / own, rel=0.01)
    assert collectives.all_to_all(ranks, 1e9) == pytest.approx(18.7e-3, rel=0.01)


def test_a_send_between_nodes_has_the_network_of_its_own_gpu() -> None:
    """Two stages per node and eight stages: the boundary between nodes carries four pairs over the node's links."""
    ranks = axis_group("pp", Layout(pp=8, tp=4), DGX, IDEAL)
    assert ranks.per_node == 2
    assert collectives.send(ranks, 1e9) == pytest.approx(1e9 / 50e9, rel=0.01)


def test_an_all_to_all_inside_a_node_uses_the_peer_links() -> None:
    ranks = axis_group("ep", Layout(dp=8, ep=8, global_batch=8), DGX, IDEAL)
    assert collectives.all_to_all(ranks, 1e9) == pytest.approx(7 / 8 * 1e9 / 450e9, rel=0.02)


# bus bandwidths in GB/s: stas00/ml-engineering at 744d01e, network/README.md (nccl-tests, 2025 and 2026)
MEASURED = [
    ("h200-sxm8", "all_gather", 8, 16 * GIB, 361.4),
    ("h200-sxm8", "reduce_scatter", 8, 16 * GIB, 362.9),
    ("h200-sxm8", "all_reduce", 4, 8 * GIB, 363.3),
    ("dgx-b200", "all_reduce", 4, 8 * GIB, 673.2),
    ("mi300x-8", "all_reduce", 8, 4 * GIB, 312.9),
    ("mi300x-8", "all_reduce", 2, 4 * GIB, 47.7),
    ("aws-p5en", "all_reduce", 32, 4 * GIB, 364.9),
    ("aws-p6-b200", "all_reduce", 32, 16 * GIB, 381.8),
    ("aws-p6-b200", "all_reduce", 32, GIB, 362.0),
    ("aws-p6-b200", "all_reduce", 32, GIB // 4, 229.1),
    ("aws-p6-b200", "all_reduce", 32, GIB // 16, 156.7),
    ("aws-p6-b200", "all_reduce", 32, GIB // 64, 64.4),
]


@pytest.mark.parametrize(("name", "kind", "ranks", "size", "measured"), MEASURED)
def test_collectives_take_as_long_as_measured(
    name: str, kind: str, ranks: int, size: int, measured: float
) -> None:
    """NVLink, AMD's links, and EFA, which reaches as much of its bandwidth as InfiniBand: one constant for both."""
    node = Node(name)
    group = strided_group(ranks, 1, node, default_calibration(node.device))
    volume = (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks * size
    bus = volume / getattr(collectives, kind)(group, size) / 1e9
    assert bus == pytest.approx(measured, rel=0.12 if size >= GIB else 0.4)


SIZES = st.sampled_from([2, 4, 8, 16, 64, 512])
STRIDES = st.sampled_from([1, 2, 4, 8, 64])
BYTES = st.floats(1, 1e11)
COLLECTIVES = (collectives.all_reduce, collectives.all_gather, collectives.reduce_scatter, collectives.all_to_all,
               collectives.send)  # fmt: skip


@given(size=SIZES, stride=STRIDES, least=BYTES, more=BYTES)
def test_more_bytes_are_never_faster(size: int, stride: int, least: float, more: float) -> None:
    ranks = strided_group(size, stride, DGX, Calibration())
    low, high = sorted((least, more))
    for collective in COLLECTIVES:
        assert collective(ranks, low) <= collective(ranks, high)


@given(size=SIZES, stride=STRIDES, sent=BYTES, slower=st.floats(0.05, 1.0))
def test_a_slower_link_is_never_faster(size: int, stride: int, sent: float, slower: float) -> None:
    before = strided_group(size, stride, DGX, Calibration())
    for key in ("network", "peer"):
        worse = replace(Calibration(), **{key: getattr(Calibration(), key) * slower})
        after = strided_group(size, stride, DGX, worse)
        for collective in COLLECTIVES:
            assert collective(after, sent) >= collective(before, sent)


@given(size=SIZES, stride=STRIDES, sent=BYTES)
def test_no_collective_is_faster_than_its_bytes_over_its_links(size: int, stride: int, sent: float) -> None:
    """Every rank receives (n-1)/n of the bytes; what comes from other nodes passes the links of the node."""
    ranks = strided_group(size, stride, DGX, IDEAL)
    here = min(size, max(1, DGX.gpus // stride))
    peer, own = 450e9, DGX.inter_bytes_per_s / DGX.gpus
    abroad = sent * (size - here) / size
    # of a ring, r ranks of a node share what enters it; in an all-to-all each receives its own
    ring = max((size - 1) / size * sent / peer, abroad / (own * here) if size > here else 0.0)
    direct = max(sent * (here - 1) / size / peer, abroad / own)
    assert collectives.all_gather(ranks, sent) >= ring * 0.999
    assert collectives.reduce_scatter(ranks, sent) >= ring * 0.999
    assert collectives.all_reduce(ranks, sent) >= 2 * ring * 0.999
    assert collectives.all_to_all(ranks, sent) >= direct * 0.999
    assert collectives.send(ranks, sent) >= sent / (own if size > here else peer) * 0.999
