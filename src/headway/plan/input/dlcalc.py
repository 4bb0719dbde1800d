"""Converts dlcalc files (`3dtrn`) to plan files."""

from __future__ import annotations

from collections.abc import Mapping

from headway.errors import UsageError, unknown_name
from headway.plan import checks
from headway.plan.input.plan_file import parse_plan

_NODES = {
    "p4d.24xlarge": "aws-p4d",
    "p4de.24xlarge": "aws-p4de",
    "p5.48xlarge": "aws-p5",
    "p5e.48xlarge": "aws-p5e",
    "p5en.48xlarge": "aws-p5en",
    "p6-b200.48xlarge": "aws-p6-b200",
}
_RECOMPUTE = {
    "none": "none",
    "no": "none",
    "selective": "selective",
    "super-selective": "sac",
    "full": "full",
}


def import_dlcalc(data: Mapping[str, object]) -> dict[str, object]:
    """Converts a dlcalc configuration to the mapping of a plan file, and checks it.

    `tie_embeddings` is taken as it is; note that dlcalc's Llama 3 sample ties embeddings that Meta's model does not.
    """
    model, parallel = _section(data, "model"), _section(data, "parallelism")
    batch, speed, hardware = _section(data, "data"), _section(data, "performance"), _section(data, "hardware")
    plan: dict[str, object] = {
        "model": _model(model, batch),
        "layout": _layout(parallel, batch, speed),
        "node": _node(_get(hardware, "hardware", "node_type")),
    }
    parse_plan(plan, where="the imported plan")
    return plan


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
        found["moe"] = {
            "experts": _get(moe, "model.moe", "n_experts"),
            "top_k": _get(moe, "model.moe", "experts_per_token"),
            "ffn": _get(moe, "model.moe", "expert_inter_sz"),
        }
    return found


def _layout(
    parallel: Mapping[str, object], batch: Mapping[str, object], speed: Mapping[str, object]
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
    if "bucket_size_mb" in parallel:
        found["bucket_MB"] = parallel["bucket_size_mb"]
    return found


def _node(name: object) -> str:
    if str(name) not in _NODES:
        raise UsageError(
            f"{unknown_name('value of hardware.node_type', name, _NODES)}; for another node, write a plan file"
        )
    return _NODES[str(name)]


def _section(data: Mapping[str, object], key: str) -> Mapping[str, object]:
    return checks.require_mapping(key, _get(data, "the dlcalc file", key))


def _get(section: Mapping[str, object], where: str, key: str) -> object:
    if key not in section:
        raise UsageError(f"{where} has no {key!r}; expected a dlcalc 3dtrn file")
    return section[key]
