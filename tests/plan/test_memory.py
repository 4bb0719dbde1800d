"""Memory: published peaks, and the properties that must hold for any layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import assume, given, settings, strategies as st
from truth import TORCHTITAN, torchtitan

from headway.plan import Node, estimate, search
from headway.plan.cost.activations import layer_bytes
from headway.plan.cost.memory import peak, rank_memory, representative_stages, reserve_factor, reserved_bytes
from headway.plan.cost.states import model_states, on_rank
from headway.plan.model.layout import Layout
from headway.plan.model.presets import preset
from headway.plan.model.transformer import Transformer

GIB = 2**30


@pytest.mark.parametrize("row", range(len(TORCHTITAN)))
def test_torchtitan_memory(row: int) -> None:
    """FSDP alone, with context, tensor and pipeline parallelism; the first two rows gave the allocator's share."""
    model, layout, published = torchtitan()[row]
    taken = peak(model, layout).allocated * reserve_factor(layout).value / GIB
    # interleaved, the sums of one chunk's gradients are scattered before the other's exist
    assert taken == pytest.approx(published, rel=0.02 if layout.tp == 1 or layout.vpp > 1 else 0.10)


@pytest.mark.parametrize(("row", "traced"), [(6, 57.6), (7, 72.0)], ids=["70b", "405b"])
def test_closed_forms_against_torchs_own_sharded_code(row: int, traced: float) -> None:
    """Bytes that FSDP2 and DTensor keep allocated, traced by benchmarks/sharded.py."""
    model, layout, _ = torchtitan()[row]
    assert peak(model, replace(layout, compiled=False)).allocated / GIB == pytest.approx(traced, rel=0.02)


# one H200, eager, AMP: the closed forms, without tracing anything
@pytest.mark.parametrize(
    ("name", "keys", "measured"),
    [
        ("gpt2", {"microbatch": 8}, 9_884_334_080),
        ("gpt2-medium", {"microbatch": 8, "recompute": "full"}, 10_158_294_016),
        ("gpt2-xl", {"microbatch": 4}, 37_414_910_976),
        ("llama-3.2-1b", {"microbatch": 2, "sequence": 4096}, 44_859_082_752),
        ("llama-3.2-1b", {"microbatch": 2, "sequence": 4096, "precision": "pure-bf16"}, 32_188_733_440),
        ("vit-b-16", {"microbatch": 256}, 18_932_696_576),
    ],
)
def test_closed_forms_against_an_h200(name: str, keys: dict[str, object], measured: int) -> None:
    layout = Layout(**{"precision": "amp", "global_batch": keys["microbatch"], **keys})  # type: ignore[arg-type]
    model = replace(preset(name), dropout=False)
    assert peak(model, layout).allocated == pytest.approx(measured, rel=0.06)


def layouts() -> st.SearchStrategy[Layout]:
    def build(
        tp: int, pp: int, dp: int, zero: int, mb: int, m: int, recompute: str, precision: str, sp: bool
    ) -> Layout:
        return Layout(
            tp=tp, pp=pp, dp=dp, zero=zero, microbatch=mb, global_batch=mb * dp * m, recompute=recompute,  # type: ignore[arg-type]
            sequence_parallel=sp, sequence=1024, precision=precision,  # type: ignore[arg-type]
        )  # fmt: skip

    powers = st.sampled_from([1, 2, 4, 8])
    ways = st.sampled_from(["none", "selective", "sac", "full"])
    precisions = st.sampled_from(["bf16", "amp"])
    return st.builds(
        build,
        powers,
        powers,
        powers,
        st.integers(0, 3),
        powers,
        st.integers(1, 8),
        ways,
        precisions,
        st.booleans(),
    )


MODEL = Transformer(layers=16, hidden=1024, heads=16, kv_heads=8, vocab=32000, gated=True, position="rope")


@given(layout=layouts())
def test_parts_add_up(layout: Layout) -> None:
    for stage in representative_stages(MODEL, layout):
        rank = rank_memory(MODEL, layout, stage)
        assert rank.allocated == pytest.approx(sum(rank.parts.values()))
        assert all(size > 0 for size in rank.parts.values())


@given(layout=layouts())
def test_more_tensor_parallelism_never_raises_parameter_memory(layout: Layout) -> None:
    assume(layout.tp < 8)
    wider = replace(layout, tp=layout.tp * 2)
    for stage in representative_stages(MODEL, layout):
        less = on_rank(MODEL, wider, stage)
        assert less.shared <= on_rank(MODEL, layout, stage).shared
        assert model_states(less, wider).total <= model_states(on_rank(MODEL, layout, stage), layout).total


@given(layout=layouts())
def test_zero_stages_are_ordered(layout: Layout) -> None:
    rank = on_rank(MODEL, layout, 0)
    totals = [model_states(rank, replace(layout, zero=stage)).total for stage in range(4)]
    assert totals == sorted(totals, reverse=True)
    if layout.dp > 1:
        assert len(set(totals)) == 4


GRID = [
    Layout(
        tp=tp, pp=pp, dp=dp, microbatch=mb, global_batch=mb * dp * m, recompute=recompute, precision=precision,  # type: ignore[arg-type]
        sequence_parallel=sp, sequence=1024,
    )
    for tp, pp, dp in product((1, 2, 8), (1, 2, 8), (1, 2, 4, 8))
    for mb, m in product((1, 8), (1, 8))
    for recompute, sp in product(("none", "sac", "full"), (False, True))
    for precision in ("bf16", "amp", "pure-bf16")
]  # fmt: skip


def leaves_order(layout: Layout, stage: int) -> bool:
    """Whether what ZeRO 2 and 3 put together again for a moment is at most what they have spread.

    FSDP holds its shard beside the embedding, the head and two layers as a whole: on a model of few layers and on two
    ranks that is more than the model. The same goes for the gradient of one layer.
    """
    rank, numbers = on_rank(MODEL, layout, stage), layout.element_bytes
    spread = (1 - 1 / layout.shards) * rank.shared
    gathered = numbers.activation * min(rank.shared, rank.outer + 2 * rank.layer)
    return layout.dp == 1 or (gathered <= numbers.weight * spread and rank.layer <= spread)


def test_whole_peaks_fall_with_each_zero_stage() -> None:
    ordered = 0
    for layout in GRID:
        for stage in representative_stages(MODEL, layout):
            peaks = [rank_memory(MODEL, replace(layout, zero=zero), stage).allocated for zero in range(4)]
            falls = all(less <= more * (1 + 1e-9) for more, less in pairwise(peaks))
            assert falls or not leaves_order(layout, stage), (layout, stage, peaks)
            ordered += falls
    assert ordered > 0.98 * sum(len(representative_stages(MODEL, layout)) for layout in GRID)


def test_gathered_weights_can_be_more_than_fsdp_saves() -> None:
    """One layer on two ranks: all weights are gathered at once, and the shard is there beside them."""
    small = replace(MODEL, layers=1, hidden=4096, heads=32)
    peaks = [peak(small, Layout(dp=2, zero=zero, global_batch=2, sequence=128)) for zero in (2, 3)]
    assert peaks[1].parts["gathered weights"] == 2 * small.parameters
    assert peaks[1].allocated > peaks[0].allocated


PRESETS = ("gpt2", "llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "vit-b-16", "mixtral-8x7b")


@pytest.mark.parametrize("name", PRESETS)
def test_what_known_models_need_falls_with_each_zero_stage(name: str) -> None:
    """With the allocator's share, and without exception."""
    model, precisions = preset(name), ("bf16", "zero16", "amp", "fp32", "pure-bf16")
    sequence = None if model.image else min(2048, model.tokens_per_sample)
    for dp, precision, mb, way in product((2, 8, 64), precisions, (1, 4), ("none", "sac", "full")):
        layout = Layout(
            dp=dp, microbatch=mb, global_batch=mb * dp, sequence=sequence, precision=precision, recompute=way,  # type: ignore[arg-type]
        )  # fmt: skip
        stages = [replace(layout, zero=zero) for zero in range(4)]
        needed = [
            reserved_bytes(peak(model, stage).allocated, stage, Node("dgx-h100").device) for stage in stages
        ]
        assert needed == sorted(needed, reverse=True), layout


@given(layout=layouts())
def test_recomputing_more_never_keeps_more(layout: Layout) -> None:
    kept = [
        rank_memory(MODEL, replace(layout, recompute=way), 0).parts.get("activations", 0.0)  # type: ignore[arg-type]
        for way in ("none", "sac", "full")
    ]
    if all(kept):
        assert kept == sorted(kept, reverse=True)


@given(layout=layouts())
def test_doubling_dp_at_fixed_global_batch_halves_samples_per_rank(layout: Layout) -> None:
    assume(layout.microbatches % 2 == 0)
    wider = replace(layout, dp=layout.dp * 2)
    assert wider.microbatches * wider.microbatch * 2 == layout.microbatches * layout.microbatch


@settings(max_examples=50)
@given(layout=layouts(), stage=st.integers(0, 7))
def test_no_stage_beats_the_reported_peak(layout: Layout, stage: int) -> None:
    """First, middle and last are enough to look at, when layers divide evenly."""
    assume(stage < layout.pp)
    assert rank_memory(MODEL, layout, stage).allocated <= peak(MODEL, layout).allocated * (1 + 1e-9)


def test_experts_are_sharded_by_their_own_group() -> None:
    model = preset("mixtral-8x7b")
    plain = Layout(dp=8, zero=1, global_batch=8)
    split = replace(plain, ep=8)
    all_experts = model.moe_layers * model.expert_parameters
    assert on_rank(model, plain, 0).experts == all_experts
    assert on_rank(model, split, 0).experts == all_experts / 8
    # with ep = dp there is nobody left to shard the experts' optimizer with
    shared, experts = on_rank(model, split, 0).shared, all_experts / 8
    assert model_states(on_rank(model, split, 0), split).optimizer == pytest.approx(
        12 * (shared / 8 + experts)
    )


def test_all_parameters_are_somewhere() -> None:
    for name in ("gpt2", "llama-3.1-8b", "deepseek-v3", "vit-b-16", "bert-base-uncased"):
        model = preset(name)
        whole = on_rank(model, Layout(), 0)
        assert whole.shared + whole.experts == pytest.approx(model.parameters, rel=1e-9)
        layout = Layout(pp=4, global_batch=4)
        spread = [on_rank(model, layout, stage) for stage in range(4)]
        copy = model.vocab * model.hidden if model.tied and not model.image else 0
        assert sum(r.shared + r.experts for r in spread) == pytest.approx(model.parameters + copy, rel=1e-9)


def test_torch_saves_the_inputs_that_it_gathered_along_the_sequence() -> None:
    """Megatron saves its shard of the inputs of attention and feed-forward; benchmarks/sharded.py shows torch's."""
    model = preset("llama-3.1-8b")
    torch, megatron = (
        layer_bytes(model, Layout(tp=8, sequence_parallel=True, sequence=8192, precision=precision))
        for precision in ("pure-bf16", "bf16")
    )
    fused = 2 * 8192 * model.width / 8  # the activation inside its SwiGLU, which Megatron computes again
    assert torch - megatron == pytest.approx(2 * 2 * 8192 * model.hidden * 7 / 8 + fused)


@pytest.mark.parametrize("name", ["deepseek-v3", "llama-3.1-405b", "gpt2-xl"])
@pytest.mark.parametrize(("pp", "vpp"), [(4, 1), (5, 1), (7, 2), (16, 1), (16, 3)])
def test_the_peak_is_that_of_the_fullest_of_all_stages(name: str, pp: int, vpp: int) -> None:
    model = preset(name)
    for microbatches, zero in product((pp, 3 * pp), (0, 1, 3)):
        layout = Layout(dp=8, pp=pp, vpp=vpp, zero=zero, global_batch=8 * microbatches, sequence=4096)
        every = [rank_memory(model, layout, stage).allocated for stage in range(pp)]
        assert peak(model, layout).allocated == max(every)
        spread = [on_rank(model, layout, stage) for stage in range(pp)]
        copy = model.vocab * model.hidden if model.tied else 0
        assert sum(r.shared + r.experts for r in spread) == pytest.approx(model.parameters + copy, rel=1e-9)


def test_deepseek_does_not_fit_because_of_its_second_stage() -> None:
    """The first stage has three dense layers of 61; the second has four with experts and as many in flight."""
    layout = Layout(pp=16, dp=128, ep=64, zero=1, global_batch=128 * 64, sequence=4096)
    node = Node("h100-96gb-sxm8")
    plan = estimate(preset("deepseek-v3"), layout, node)
    assert not plan.fits
    assert reserved_bytes(plan.answers["memory.rank.0"].value, layout, node.device) < node.device.memory_bytes
    assert plan.answers["memory.rank.1"].value > 1.1 * plan.answers["memory.rank.0"].value
    assert plan.answers["memory.allocated"].value == plan.answers["memory.rank.1"].value


def test_layouts_that_fit_for_certain_come_first() -> None:
    found = search(preset("llama-3.1-8b"), Node("dgx-h100"), gpus=8, global_batch=32, keep=10_000)
    certain = sum(row.safe for row in found.ranked)
    assert 0 < certain < found.fitting
    assert all(row.safe == (rank < certain) for rank, row in enumerate(found.ranked))
    assert all((row.most <= found.capacity) == row.safe for row in found.ranked)


def test_a_fused_optimizer_needs_no_copy_of_the_weights() -> None:
    """A model with few activations is fullest in its optimizer step: foreach has a temporary copy there."""
    layout = Layout(precision="amp", recompute="full", sequence=64)
    default, foreach, fused = (
        rank_memory(MODEL, replace(layout, optimizer=name), 0)  # type: ignore[arg-type]
        for name in ("adamw", "adamw-foreach", "adamw-fused")
    )
    assert default.parts == foreach.parts
    assert default.parts["optimizer temporaries"] == pytest.approx(4 * MODEL.parameters)
    assert "optimizer temporaries" not in fused.parts and fused.allocated < default.allocated


def test_every_optimizer_that_is_not_fused_copies_the_weights_it_updates() -> None:
    """The copy is of the weights, however many moments stand beside them; a shard of them under ZeRO."""
    model = preset("gpt2")
    for precision, dp, width in (("amp", 1, 4), ("bf16", 2, 4), ("pure-bf16", 1, 2), ("fp32", 2, 4)):
        layout = Layout(
            dp=dp, zero=dp - 1, global_batch=dp, sequence=16, precision=precision, recompute="full"
        )  # type: ignore[arg-type]  # fmt: skip
        for optimizer in ("adamw", "sgd", "sgd-momentum", "lion", "muon"):
            copied = peak(model, replace(layout, optimizer=optimizer)).parts["optimizer temporaries"]  # type: ignore[arg-type]
            assert copied == pytest.approx(width * model.parameters / dp, rel=1e-3)
        for fused in ("adamw-fused", "adamw8bit"):
            assert "optimizer temporaries" not in peak(model, replace(layout, optimizer=fused)).parts


def test_checkpointed_products_of_experts_are_kept_for_each_expert_of_a_token() -> None:
    """Every other product is kept: of each expert one of width ffn, and its token on the way there and back."""
    mixtral, layout = preset("mixtral-8x7b"), Layout(recompute="sac", sequence=4096)
    assert mixtral.moe is not None
    sizes = {}
    for chosen in (1, 2, 4, 8):
        model = replace(mixtral, moe=replace(mixtral.moe, top_k=chosen))
        sizes[chosen] = layer_bytes(model, layout, moe=True)
        assert sizes[chosen] < layer_bytes(model, replace(layout, recompute="none"), moe=True)
        assert sizes[chosen] > layer_bytes(model, replace(layout, recompute="full"), moe=True)
    each = 4096 * 2 * (mixtral.moe.ffn + 2 * mixtral.hidden)
    for fewer, more in pairwise(sizes):
        assert sizes[more] - sizes[fewer] == pytest.approx((more - fewer) * each)
    shared = replace(mixtral, moe=replace(mixtral.moe, shared_ffn=1024))
    dense = replace(mixtral, ffn=1024)
    assert layer_bytes(shared, layout, moe=True) > sizes[2]
    assert layer_bytes(dense, layout, moe=True) == sizes[2]  # layers with experts have no other feed-forward


def test_a_cpu_has_no_cuda_context() -> None:
    """A machine without a GPU is calibrated as the device "cpu": 767 MiB less than the same numbers of a GPU."""
    numbers = {"memory_GB": 24, "hbm_GBps": 20, "bf16": 0.1}
    cpu, gpu = (
        estimate(
            preset("gpt2"), Layout(), Node.of(name="this", device={"name": name, **numbers}, gpus=1)
        ).answers["memory.needed"]
        for name in ("cpu", "card")
    )
    for least in ("low", "value", "high"):
        assert getattr(gpu, least) - getattr(cpu, least) == pytest.approx(767 * 2**20)
    assert "context" in gpu.formula and "context" not in cpu.formula


@pytest.mark.parametrize("precision", ["bf16", "amp", "pure-bf16"])
def test_moments_of_their_own_width_have_it_in_every_precision(precision: str) -> None:
    """bitsandbytes keeps two moments of a byte each, DeepSeek-V3 two of two bytes, whatever the weights are in."""
    for optimizer, moments in (("adamw8bit", 2), ("adamw-bf16", 4), ("sgd", 0)):
        layout = Layout(precision=precision, optimizer=optimizer)  # type: ignore[arg-type]
        parameters = on_rank(preset("gpt2"), layout, 0)
        per_parameter = model_states(parameters, layout).optimizer / (parameters.shared + parameters.experts)
        assert per_parameter == pytest.approx(layout.element_bytes.master + moments)


@pytest.mark.parametrize(
    ("name", "dp", "ep"), [("llama-3.1-8b", 1, 1), ("mixtral-8x7b", 8, 8), ("mixtral-8x7b", 8, 4)]
)
def test_what_nothing_shards_is_not_kept_twice(name: str, dp: int, ep: int) -> None:
    """One replica, or each expert on one rank: ZeRO 2 has no full gradients beside those that it would scatter."""
    needed = {}
    for vpp, zero in product((1, 2), range(4)):
        layout = Layout(pp=2, vpp=vpp, dp=dp, ep=ep, zero=zero, global_batch=8 * dp, sequence=4096)
        needed[vpp, zero] = rank_memory(preset(name), layout, 0).allocated
        if ep == dp:
            assert needed[vpp, zero] <= needed[vpp, max(0, zero - 1)] * (1 if zero < 3 else 1.02)
    if dp == 1:
        assert len({needed[2, zero] for zero in range(4)}) == 1


def test_ranks_that_split_an_expert_keep_each_others_tokens() -> None:
    """Mixtral on four ranks: one that has whole experts keeps a quarter of all copies of tokens, else all."""
    model = preset("mixtral-8x7b")
    whole = Layout(tp=4, expert_tp=1, sequence_parallel=True, sequence=4096)
    split = replace(whole, expert_tp=None)
    more = layer_bytes(model, split, moe=True) - layer_bytes(model, whole, moe=True)
    assert more == pytest.approx(
        2 * (2 * 4096 * 4096) * (1 - 1 / 4)
    )  # two bytes of two copies of 4096 x 4096


def test_ranks_of_one_sequence_reduce_their_gradients_in_a_copy_too() -> None:
    """They hold the same weights as replicas do, and DDP reduces between all of them."""
    model = preset("gpt2")
    replicas = Layout(dp=2, global_batch=2, precision="amp")
    pieces = Layout(cp=2, global_batch=1, precision="amp")
    copies = [rank_memory(model, layout, 0).parts.get("buckets", 0.0) for layout in (replicas, pieces)]
    assert copies[0] == copies[1] > 0
