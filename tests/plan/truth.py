"""Published measurements, as models and layouts. Shared by the tests and by benchmarks/plan.py."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, NamedTuple

from headway.plan.model.layout import Layout
from headway.plan.model.presets import preset
from headway.plan.model.transformer import Transformer
from headway.plan.tracer.settings import TraceSettings

VOCAB = 51200


class Measured(NamedTuple):
    name: str
    model: Transformer
    layout: Layout
    seconds: float


def gpt(layers: int, hidden: int, heads: int) -> Transformer:
    return Transformer(layers=layers, hidden=hidden, heads=heads, vocab=VOCAB, context=2048, dropout=True)


def vtrain() -> list[Measured]:
    """109 Megatron-DeepSpeed steps on A100, 800 Gb/s a node (VIA-Research/vTrain, MIT)."""
    found = []
    lines = (Path(__file__).parent / "data" / "vtrain_multi.csv").read_text().splitlines()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        number = {key: int(row[key]) for key in row if key not in ("params_b", "iteration_ms")}
        model = gpt(number["layers"], number["hidden"], number["heads"])
        layout = Layout(
            dp=number["dp"],
            tp=number["tp"],
            pp=number["pp"],
            microbatch=number["micro_batch"],
            global_batch=number["global_batch"],
            recompute="full",
            precision="zero16",
            flash=False,
            overlap=False,
        )
        found.append(Measured(row["params_b"], model, layout, float(row["iteration_ms"]) / 1e3))
    return found


FITTED_ROWS = range(0, 110, 11)
"""The ten rows that the default calibration was fitted on: every eleventh, a rule that looks at nothing."""

# name, heads, hidden, layers, tp, pp, vpp, global batch, microbatch, full recompute s, selective + sequence s
KORTHIKANTI = [
    ("22B", 64, 6144, 48, 8, 1, 1, 4, 4, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 8, 3, 64, 1, 18.13, 13.75),
    ("530B", 128, 20480, 105, 8, 35, 3, 280, 1, 49.05, 37.83),
    ("1T", 160, 25600, 128, 8, 64, 1, 512, 1, 94.42, 71.49),
]


def korthikanti_model(name: str) -> tuple[Transformer, dict[str, int]]:
    row = next(row for row in KORTHIKANTI if row[0] == name)
    _, heads, hidden, layers, tp, pp, vpp, batch, micro, *_ = row
    keys = {"tp": tp, "pp": pp, "vpp": vpp, "global_batch": batch, "microbatch": micro}
    return gpt(layers, hidden, heads), keys


def korthikanti() -> list[Measured]:
    """Table 5: DGX A100, no data parallelism."""
    found = []
    for row in KORTHIKANTI:
        model, keys = korthikanti_model(row[0])
        common = Layout(flash=False, overlap=False, **keys)
        full = Layout(**{**vars(common), "recompute": "full"})
        both = Layout(**{**vars(common), "recompute": "selective", "sequence_parallel": True})
        found.append(Measured(f"{row[0]} full", model, full, row[9]))
        found.append(Measured(f"{row[0]} selective+sequence", model, both, row[10]))
    return found


FSDP = {"zero": 3, "precision": "amp"}
SAC = {**FSDP, "microbatch": 2, "sequence": 8192, "recompute": "sac"}
FULL = {**FSDP, "recompute": "full", "compiled": True}
TENSOR = {**FULL, "tp": 8, "sequence_parallel": True}
STAGES = {**TENSOR, "pp": 8, "reshard": False}
# model, layout without its batch, microbatches, GiB reserved on the fullest GPU
TORCHTITAN: list[tuple[str, dict[str, Any], int, float]] = [
    ("llama-3.1-8b", {**SAC, "dp": 8}, 1, 82.4),
    ("llama-3.1-8b", {**SAC, "dp": 128}, 1, 67.0),
    ("llama-3.1-8b", {**SAC, "dp": 8, "compiled": True}, 1, 77.0),
    ("llama-3.1-8b", {**SAC, "dp": 128, "compiled": True}, 1, 62.0),
    ("llama-3.1-8b", {**FULL, "dp": 8, "sequence": 32768}, 1, 83.9),
    ("llama-3.1-8b", {**FULL, "dp": 2, "cp": 4, "sequence": 131072}, 1, 84.0),
    ("llama-3.1-70b", {**TENSOR, "dp": 32, "microbatch": 16, "sequence": 8192}, 1, 71.9),
    ("llama-3.1-405b", {**STAGES, "dp": 8, "microbatch": 4, "sequence": 8192}, 8, 82.5),
    ("llama-3.1-405b", {**STAGES, "dp": 8, "microbatch": 4, "sequence": 8192, "vpp": 2}, 8, 72.7),
    ("llama-3.1-405b", {**STAGES, "dp": 8, "sequence": 32768}, 8, 75.3),
    ("llama-3.1-405b", {**STAGES, "dp": 2, "cp": 4, "sequence": 131072}, 8, 77.1),
]  # fmt: skip


def torchtitan() -> list[tuple[Transformer, Layout, float]]:
    """Memory on H100 at the end of 2024; the first two ran eagerly, those of 70B and 405B multiplied in fp8."""
    found = []
    for name, keys, microbatches, gib in TORCHTITAN:
        batch = keys["dp"] * keys.get("microbatch", 1) * microbatches
        found.append((preset(name), Layout(**keys, global_batch=batch), gib))
    return found


def h200_settings(index: int, **arguments: int) -> TraceSettings:
    """The step of one of `h200_rows`, to be traced."""
    row = h200_rows()[index]
    language = row["kind"] == "lm"
    batch = "image_batch" if not language else "long_batch" if row["T"] == 4096 else "language_batch"
    return TraceSettings(
        factory=f"{Path(__file__).parent / 'zoo.py'}:make",
        inputs=batch,
        loss=None if language else "cross_entropy",
        precision="pure-bf16" if row.get("pure_bf16") else "amp",
        batch_size=row["mb"],
        arguments={"row": index, **arguments},
    )


def h200_rows() -> list[dict[str, Any]]:
    """Eight training steps measured on one H200: torch 2.11, eager, AdamW."""
    lines = (Path(__file__).parent / "data" / "h200.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
