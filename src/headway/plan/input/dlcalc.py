"""Converts dlcalc files (`3dtrn`) to plan files."""

from __future__ import annotations

from collections.abc import Mapping

from headway.errors import UsageError, unknown_name
from headway.plan import checks
from headway.plan.cost.states import on_rank
from headway.plan.input.plan_file import parse_plan

_NODES = {
    "p4d.24xlarge": "aws-p4d",
    "p4de.24xlarge": "aws-p4de",
    "p5.48xlarge": "aws-p5",
    "p5e.48xlarge": "aws-p5e",
    "p5en.48xlarge": "aws-p5en",
    "p6-b200.48xlarge": "aws-p6-b200",
    "b300": "dgx-b300",
    "gb300": "gb300-nvl72",
}
_RECOMPUTE = {
    "none": "none",
    "no": "none",
    "selective": "selective",
    "super-selective": "sac",
    "full": "full",
}


_KEYS = {
    "model": ("n_layers", "hidden_sz", "inter_sz", "n_q_heads", "n_kv_heads", "head_dim", "vocab_sz", "glu",
              "tie_embeddings", "dropout", "rotary_embeds", "moe"),
    "parallelism": ("tp", "pp", "dp", "vpp", "cp", "ep", "sp", "zero_level", "bucket_size_mb", "n_param_buckets"),
    "data": ("seqlen", "microbatch_sz", "gbs"),
    "performance": ("activation_checkpointing_type",),
    "hardware": ("node_type",),
}  # fmt: skip
"""The keys of a dlcalc file that have a counterpart in a plan; any other key is refused."""
_MOE_KEYS = ("n_experts", "experts_per_token", "expert_inter_sz", "moe_frequency", "capacity_factor",
             "expert_tp_degree")  # fmt: skip


def import_dlcalc(data: Mapping[str, object]) -> dict[str, object]:
    """Converts a dlcalc configuration to the mapping of a plan file, and checks it.

    `tie_embeddings` is copied as it is; note that dlcalc's Llama 3 sample ties embeddings that Meta's model does not.
    """
    if data.get("cross_dc") is not None:
        raise UsageError(
            "the dlcalc file has 'cross_dc'; a plan is for one data center: remove it, and import again"
        )
    checks.require_known_keys("the dlcalc file", data, (*_KEYS, "cross_dc"))
    for name, keys in _KEYS.items():
        if isinstance(data.get(name), Mapping):
            checks.require_known_keys(name, _section(data, name), keys)
    model, parallel = _section(data, "model"), _section(data, "parallelism")
    batch, speed, hardware = _section(data, "data"), _section(data, "performance"), _section(data, "hardware")
    plan: dict[str, object] = {
        "model": _model(model, batch),
        "layout": _layout(model, parallel, batch, speed),
        "node": _node(_get(hardware, "hardware", "node_type")),
    }
    parsed = parse_plan(plan, where="the imported plan")
    if "n_param_buckets" in parallel:
        buckets = checks.require_int("parallelism.n_param_buckets", parallel["n_param_buckets"])
        rank = on_rank(parsed.model, parsed.layout, 0)
        gradients = parsed.layout.element_bytes.gradient * (rank.shared + rank.experts)
        plan["layout"] = {**_section(plan, "layout"), "bucket_MB": round(gradients / buckets / 1e6, 3)}
    return plan


def approximations(data: Mapping[str, object]) -> list[str]:
    """Returns a sentence for each value of a dlcalc file that a plan can only approximate."""
    speed, model = _section(data, "performance"), _section(data, "model")
    found = []
    if speed.get("activation_checkpointing_type") == "super-selective":
        found.append(
            "super-selective became sac, the nearest: it also recomputes every other matrix product, so it keeps fewer "
            "activations and takes longer"
        )
    if model.get("rotary_embeds") is False:
        found.append(
            "rotary_embeds: false became learned positions, LayerNorm and biases, as in GPT-2: see position, norm, bias"
        )
    return found


def _model(model: Mapping[str, object], batch: Mapping[str, object]) -> dict[str, object]:
    rotary = bool(model.get("rotary_embeds", True))
    found: dict[str, object] = {
        "layers": _get(model, "model", "n_layers"),
        "hidden": _get(model, "model", "hidden_sz"),
        "ffn": _get(model, "model", "inter_sz"),
        "heads": _get(model, "model", "n_q_heads"),
        "kv_heads": _get(model, "model", "n_kv_heads"),
        "head_dim": _get(model, "model", "head_dim"),
        "vocab": _get(model, "model", "vocab_sz"),
        "gated": _get(model, "model", "glu"),
        "tied": _get(model, "model", "tie_embeddings"),
        "dropout": bool(model.get("dropout", False)),
        "position": "rope" if rotary else "learned",
        "norm": "rmsnorm" if rotary else "layernorm",
        "bias": "none" if rotary else "all",
        "context": _get(batch, "data", "seqlen"),
    }
    if model.get("moe") is not None:
        moe = checks.require_mapping("model.moe", model["moe"])
        checks.require_known_keys("model.moe", moe, _MOE_KEYS)
        found["moe"] = {
            "experts": _get(moe, "model.moe", "n_experts"),
            "top_k": _get(moe, "model.moe", "experts_per_token"),
            "ffn": _get(moe, "model.moe", "expert_inter_sz"),
            "every": _every(moe.get("moe_frequency", 1)),
            "capacity": moe.get("capacity_factor", 1.0),
        }
    return found


def _every(frequency: object) -> int:
    """Converts dlcalc's fraction of layers with experts: 0.5 is every other layer."""
    share = checks.require_number("model.moe.moe_frequency", frequency, at_most=1.0)
    if abs(1 / share - round(1 / share)) > 1e-6:
        raise UsageError(
            f"model.moe.moe_frequency is {frequency}; a plan has experts in every n-th layer: 1, 0.5, 0.25, ..."
        )
    return round(1 / share)


def _layout(
    model: Mapping[str, object],
    parallel: Mapping[str, object],
    batch: Mapping[str, object],
    speed: Mapping[str, object],
) -> dict[str, object]:
    recompute = str(_get(speed, "performance", "activation_checkpointing_type"))
    checks.require_choice("performance.activation_checkpointing_type", recompute, tuple(_RECOMPUTE))
    found: dict[str, object] = {
        "tp": _get(parallel, "parallelism", "tp"),
        "pp": _get(parallel, "parallelism", "pp"),
        "dp": _get(parallel, "parallelism", "dp"),
        "vpp": parallel.get("vpp", 1),
        "cp": parallel.get("cp", 1),
        "ep": parallel.get("ep", 1),
        "sequence_parallel": bool(parallel.get("sp", False)),
        "zero": parallel.get("zero_level", 1),
        "recompute": _RECOMPUTE[recompute],
        "microbatch": _get(batch, "data", "microbatch_sz"),
        "global_batch": _get(batch, "data", "gbs"),
        "sequence": _get(batch, "data", "seqlen"),
    }
    moe = model.get("moe")
    if isinstance(moe, Mapping) and "expert_tp_degree" in moe:
        found["expert_tp"] = moe["expert_tp_degree"]
    if "bucket_size_mb" in parallel:
        found["bucket_MB"] = parallel["bucket_size_mb"]
    return found


def _node(name: object) -> str:
    if str(name) not in _NODES:
        raise UsageError(
            f"{unknown_name('value of hardware.node_type', name, _NODES)}; for another node, import with one of "
            "these, then change `node` in the plan file to a name of: headway plan list"
        )
    return _NODES[str(name)]


def _section(data: Mapping[str, object], key: str) -> Mapping[str, object]:
    return checks.require_mapping(key, _get(data, "the dlcalc file", key))


def _get(section: Mapping[str, object], where: str, key: str) -> object:
    if key not in section:
        raise UsageError(f"{where} has no {key!r}; expected a dlcalc 3dtrn file")
    return section[key]
