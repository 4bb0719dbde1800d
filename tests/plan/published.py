"""Published step times on Hopper, Blackwell and Ampere, as models, layouts and nodes (data/published.yaml)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from headway.plan.cost.flops import Convention, model_flops_per_token
from headway.plan.machine.hardware import Node
from headway.plan.model.layout import Layout
from headway.plan.model.presets import preset
from headway.plan.model.transformer import Transformer


class Row(NamedTuple):
    source: str
    name: str
    family: str
    model: Transformer
    layout: Layout
    node: Node
    seconds: float
    release: str = ""
    """The software of a source that publishes its steps again with each release."""

    @property
    def plan(self) -> tuple[Transformer, Layout, str]:
        """What a plan knows of the row: two releases of one software differ in nothing else."""
        return self.model, self.layout, self.node.name

    @property
    def kind(self) -> str:
        """What the table of errors has a line for: the parallelism, and experts with biases apart."""
        return "experts with biases" if self.model.name in NOT_FITTED else self.parallelism

    @property
    def parallelism(self) -> str:
        """What distinguishes the layout; every second row of each kind is fitted."""
        if self.model.moe:
            return "experts"
        if self.layout.cp > 1:
            return "context"
        if self.layout.zero == 3 and self.layout.tp == 1 and self.layout.pp == 1:
            return "sharded"
        return "tensor and pipeline"


NOT_FITTED = ("gpt-oss-120b",)
"""Models with kernels that the planner does not know: attention with learned sinks, experts with biases."""


def split(family: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The rows that constants are fitted on, and those set aside: every second of each kind of parallelism."""
    fitted, aside = [], []
    for kind in sorted({row.parallelism for row in family}):
        own = [row for row in family if row.parallelism == kind]
        fitted += [row for row in own[::2] if row.model.name not in NOT_FITTED]
        aside += own[1::2] + [row for row in own[::2] if row.model.name in NOT_FITTED]
    return fitted, aside


class Groups(NamedTuple):
    """The rows of a family by what the fit knows of them. The columns of the table of errors."""

    fitted: list[Row]
    aside: list[Row]
    """Of the same tables as the fitted ones."""
    never: list[Row]
    """Of tables of which no row was ever fitted."""
    repeated: list[Row]
    """Of either, with model, layout and node of a fitted row, in another release or by another table: nothing new."""


def groups(family: str) -> Groups:
    """All rows of a family of GPUs, by what the fit knows of them."""
    own = [row for row in rows() if row.family == family]
    fitted, aside = split(own) if family != "ampere" else ([], own)
    never = [row for row in rows(held_out=True) if row.family == family]
    new_aside, again = apart(aside, fitted)
    new_never, later = apart(never, fitted)
    return Groups(fitted, new_aside, new_never, [*again, *later])


def apart(chosen: Sequence[Row], seen: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The rows whose model, layout and node no seen row has, and the others."""
    known = {row.plan for row in seen}
    return [row for row in chosen if row.plan not in known], [row for row in chosen if row.plan in known]


def gave_a_constant(row: Row) -> bool:
    """Whether a constant that is not fitted comes from here: `TP_HIDDEN` is torchtitan's, from a pair of its rows."""
    return row.source == "torchtitan" and (row.layout.tp_overlap or row.name.startswith("llama3-70b "))


@cache
def rows(*, held_out: bool = False) -> tuple[Row, ...]:
    """The rows that `split` divides; or those that no constant was ever fitted on."""
    tables = yaml.safe_load((Path(__file__).parent / "data" / "published.yaml").read_text())
    readers = {"megatron_bridge": _bridge, "megatron_bridge_held_out": _bridge,
               "megatron_bridge_2602": _bridge, "megatron_bridge_later": _bridge,
               "megatron_bridge_2606": _bridge, "torchtitan": _titan,
               "torchtitan_async": _async, "torchtitan_h200": _h200, "mosaic": _mosaic, "megatron_core": _core,
               "megatron_core_experts": _core_experts,
               "llama3": _llama3, "sc21": _sc21, "sc21_zero": _sc21, "mt_nlg": _sc21}  # fmt: skip
    found = []
    chosen = {name: table for name, table in tables.items() if table.get("held_out", False) == held_out}
    for name, table in chosen.items():
        for cells in table["rows"]:
            found += readers[name](dict(zip(table["columns"], cells, strict=True)), table)
    return tuple(found)


def _row(source: str, what: str, model: Transformer, layout: Layout, node: str, *, tok_s_gpu: float) -> Row:
    layout.check_model(model)
    seconds = layout.global_batch * layout.tokens(model) / layout.gpus / tok_s_gpu
    family = {"a": "ampere", "h": "hopper", "g": "blackwell", "b": "blackwell"}[Node(node).device.name[0]]
    return Row(
        source, f"{what} {layout.describe()} {layout.precision}", family, model, layout, Node(node), seconds
    )


def _tok_s(model: Transformer, sequence: int, tflops: float, convention: Convention) -> float:
    return tflops * 1e12 / model_flops_per_token(model, sequence, convention)


_BRIDGE_MODELS = {"llama3-8b": "llama-3.1-8b", "llama3-70b": "llama-3.1-70b", "llama3.1-405b": "llama-3.1-405b",
                  "deepseek-v3-nomtp": "deepseek-v3", "deepseek-v3": "deepseek-v3"}  # fmt: skip
_BRIDGE_NODES = {
    "h100": "dgx-h100",
    "b200": "dgx-b200",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "b300": "dgx-b300",
}


def _bridge(r: dict[str, Any], _: object) -> Iterator[Row]:
    model = preset(_BRIDGE_MODELS.get(r["model"], r["model"]))
    if r["model"] == "deepseek-v3":  # with its extra layer that predicts a second token
        model = replace(model, layers=model.layers + 1)
    dp = r["gpus"] // (r["tp"] * r["pp"] * r["cp"])
    layout = Layout(
        dp=dp, tp=r["tp"], pp=r["pp"], cp=r["cp"], vpp=min(r["vp"] or 1, model.layers // r["pp"]), ep=r["ep"],
        expert_tp=1 if model.moe else None, zero=3 if r["fsdp"] else 1, microbatch=r["mbs"], global_batch=r["gbs"],
        sequence=r["seq"], precision="bf16" if r["precision"] == "bf16" else "fp8", sequence_parallel=r["tp"] > 1,
        tp_overlap=r["tp"] > 1, ep_overlap=r["ep_overlap"], dispatcher=r["dispatcher"] or "fused",
        graphs=r["graphs"] or "none",
    )  # fmt: skip
    node = _BRIDGE_NODES[r["system"]]
    row = _row("Megatron-Bridge", r["model"], model, layout, node, tok_s_gpu=r["tok_s_gpu"])
    yield row._replace(release=r["container"])


def _titan(r: dict[str, Any], _: object) -> Iterator[Row]:
    micro = 4 if r["local_batch"] == 32 else 1 if r["pp"] > 1 else r["local_batch"]
    layout = Layout(
        dp=r["fsdp"], tp=r["tp"], cp=r["cp"], pp=r["pp"], vpp=2 if r["schedule"] == "interleaved_1f1b" else 1, zero=3,
        reshard=r["pp"] == 1, microbatch=micro, global_batch=r["local_batch"] * r["fsdp"], sequence=r["seq"],
        recompute="sac" if r["ac"] == "selective" else "full", compiled=r["compile"],
        precision="amp-fp8" if r["float8"] else "amp", sequence_parallel=r["tp"] > 1, tp_overlap=r["async_tp"],
    )  # fmt: skip
    model = preset(r["model"].replace("llama3.1", "llama-3.1"))
    yield _row("torchtitan", r["model"], model, layout, "h100-96gb-sxm8", tok_s_gpu=r["tok_s_gpu"])


def _async(r: dict[str, Any], _: object) -> Iterator[Row]:
    for overlap, key in ((False, "vanilla_tp_tok_s"), (True, "async_tp_tok_s")):
        layout = Layout(
            dp=r["fsdp"], tp=r["tp"], zero=3, microbatch=r["local_batch"], global_batch=r["local_batch"] * r["fsdp"],
            sequence=8192, recompute="full", compiled=True, precision="amp", sequence_parallel=True, tp_overlap=overlap,
        )  # fmt: skip
        yield _row(
            "torchtitan", r["model"], preset("llama-3.1-70b"), layout, "h100-96gb-sxm8", tok_s_gpu=r[key]
        )


def _h200(r: dict[str, Any], _: object) -> Iterator[Row]:
    layout = Layout(
        dp=r["gpus"], zero=3, microbatch=2, global_batch=2 * r["gpus"], sequence=8192, recompute="sac", compiled=True,
        precision="amp-fp8",
    )  # fmt: skip
    yield _row(
        "torchtitan", r["model"], preset("llama-3.1-8b"), layout, "h200-sxm8", tok_s_gpu=r["tok_s_gpu"]
    )


def _mosaic(r: dict[str, Any], table: dict[str, Any]) -> Iterator[Row]:
    size = table["models"][r["model"]]
    model = Transformer(
        layers=size["L"], hidden=size["h"], heads=size["heads"], vocab=50368, context=2048, name=r["model"]
    )
    layout = Layout(
        dp=r["gpus"], zero=3 if r["sharding"] == "full" else 2, microbatch=r["micro_batch"],
        global_batch=r["global_batch"], recompute="full" if r["act_ckpt"] else "none",
        precision="amp" if r["precision"] == "amp_bf16" else "pure-bf16",
    )  # fmt: skip
    node = {"h100": "dgx-h100", "a100": "dgx-a100"}[r["gpu"]]
    yield _row("llm-foundry", r["model"], model, layout, node, tok_s_gpu=r["tok_s_gpu"])


def _core(r: dict[str, Any], _: object) -> Iterator[Row]:
    model = Transformer(
        layers=r["layers"], hidden=r["hidden"], heads=r["heads"], vocab=131072, context=4096, tied=False,
        position="rope", name=r["params"],
    )  # fmt: skip
    per_replica = r["global_batch"] // r["dp"]
    layout = Layout(
        dp=r["dp"], tp=r["tp"], pp=r["pp"], vpp=r["layers"] // r["pp"] if r["pp"] > 1 else 1, zero=1,
        microbatch=per_replica if r["pp"] == 1 else 1, global_batch=per_replica * r["dp"],
        sequence_parallel=r["tp"] > 1, tp_overlap=r["tp"] > 1,
    )  # fmt: skip
    rate = _tok_s(model, 4096, r["tflops_gpu"], "full")
    yield _row("Megatron-Core", r["params"], model, layout, "dgx-h100", tok_s_gpu=rate)


def _core_experts(r: dict[str, Any], _: object) -> Iterator[Row]:
    model = preset(r["model"])
    layout = Layout(
        dp=r["gpus"] // (r["tp"] * r["pp"]), tp=r["tp"], pp=r["pp"], vpp=r["vp"], ep=r["ep"], expert_tp=1, zero=1,
        microbatch=r["micro_batch"], global_batch=r["global_batch"], sequence=r["seq"], dispatcher=r["dispatcher"],
    )  # fmt: skip
    rate = _tok_s(model, r["seq"], r["tflops_gpu"], "full")
    row = _row("Megatron-Core", r["model"], model, layout, "dgx-h100", tok_s_gpu=rate)
    yield row._replace(release=r["release"])


def _llama3(r: dict[str, Any], _: object) -> Iterator[Row]:
    model = preset("llama-3.1-405b")
    layout = Layout(
        dp=r["dp"], tp=r["tp"], cp=r["cp"], pp=r["pp"], vpp=model.layers // r["pp"], zero=3, reshard=False,
        global_batch=r["batch_per_dp"] * r["dp"], sequence=r["seq"], sequence_parallel=True,
    )  # fmt: skip
    yield _row(
        "Llama 3",
        "405B",
        model,
        layout,
        "dgx-h100",
        tok_s_gpu=_tok_s(model, r["seq"], r["tflops_gpu"], "causal"),
    )


def _sc21(r: dict[str, Any], table: dict[str, Any]) -> Iterator[Row]:
    """Megatron and DeepSpeed on A100 in 2021 and 2022: attention is not fused, layers are recomputed."""
    h, layers, heads = (r.get(key, table.get(key)) for key in ("hidden", "layers", "heads"))
    model = Transformer(
        layers=layers, hidden=h, heads=heads, vocab=51200, context=2048, dropout=True, name=str(r["params_b"])
    )
    sharded = r.get("scheme") == "zero3"
    tp, pp = (1, 1) if sharded else (r.get("tp", 8), r.get("pp", r.get("model_parallel", 280) // 8))
    dp = r["gpus"] // (tp * pp)
    layout = Layout(
        dp=dp, tp=tp, pp=pp, zero=3 if sharded else 0, microbatch=r["micro_batch"], global_batch=r["global_batch"],
        recompute="full", precision="zero16", flash=False, overlap=sharded,
    )  # fmt: skip
    flops = 96 * r["global_batch"] * 2048 * layers * h**2 * (1 + 2048 / (6 * h) + 51200 / (16 * layers * h))
    seconds = r.get("iter_s") or flops / (r["gpus"] * r["tflops_gpu"] * 1e12)
    rate = r["global_batch"] * 2048 / r["gpus"] / seconds
    yield _row(table["name"], f"{r['params_b']}B", model, layout, "dgx-a100", tok_s_gpu=rate)
