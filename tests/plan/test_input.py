"""Bad input is one sentence with the key and the valid values."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from headway.cli import main
from headway.errors import UsageError
from headway.launcher.sweep import grid
from headway.launcher.targets import read_target
from headway.plan import Layout, Node, preset
from headway.plan.cost.states import on_rank
from headway.plan.input.dlcalc import import_dlcalc
from headway.plan.input.plan_file import parse_plan, read_plan_file
from headway.plan.machine.calibration import Calibration, load_calibration, save_calibration
from headway.plan.model.hugging_face import from_hf_config
from headway.plan.report.estimates import estimate
from headway.plan.report.saved_plan import read_saved_plan

GOOD = {"model": "gpt2", "node": "h200-sxm8", "layout": {"global_batch": 8}}
DEVICE = {"memory_GB": 80, "hbm_GBps": 2000, "bf16": 300}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"node": "h200-sxm9"},
            r"'h200-sxm9' is not a valid node \(did you mean 'h200-sxm8'.*valid: aws-p4d",
        ),
        ({"node": 5}, "node is 5; expected a mapping"),
        ({"node": {"gpus": 8}}, "node has no device"),
        (
            {"node": {"device": "a100-sxm-81"}},
            r"'a100-sxm-81' is not a valid value of node.device \(did you mean 'a100-sxm-80'",
        ),
        ({"node": {"device": {"memory_GB": 80}}}, "node.device has no hbm_GBps"),
        ({"node": {"device": "a100-sxm-80", "gpus": -8}}, "node.gpus is -8"),
        ({"node": {"device": "a100-sxm-80", "inter_Gbps": -8}}, "node.inter_Gbps is -8"),
        ({"model": "gpt5"}, "'gpt5' is not a valid preset"),
        ({"model": {"layers": 2, "hidden": 64}}, "model has no 'heads'; it needs layers, hidden, heads"),
        (
            {"model": {"preset": "gpt2", "layer": 2}},
            r"'layer' is not a valid key of model \(did you mean 'layers'",
        ),
        (
            {"model": {"preset": "gpt2", "tied": "maybe"}},
            "'maybe' is not a valid value of model.tied; valid: True, False",
        ),
        (
            {"layout": {"tp": 5}},
            r"layout.tp is 5, which does not divide model.heads \(12\); valid: 1, 2, 3, 4, 6, 12",
        ),
        (
            {"layout": {"dp": 3, "global_batch": 8}},
            r"multiple of dp x microbatch \(3 x 1\); valid: multiples of 3",
        ),
        ({"layout": {"dp": -1}}, "layout.dp is -1; expected an integer of at least 1"),
        ({"layout": {"dp": 1.5}}, "layout.dp is 1.5"),
        ({"layout": {"zero": 4}}, "4 is not a valid value of layout.zero; valid: 0, 1, 2, 3"),
        ({"layout": {"zero": True}}, "True is not a valid value of layout.zero"),
        (
            {"layout": {"precision": "bf17"}},
            r"'bf17' is not a valid value of layout.precision \(did you mean 'bf16'",
        ),
        ({"layout": {"vpp": 2, "pp": 2, "global_batch": 3}}, "interleaved schedule needs"),
        ({"layout": {"pp": 13, "global_batch": 13}}, r"layout.pp x vpp is 13, more than model.layers \(12\)"),
        ({"layout": {"ep": 2, "dp": 2, "global_batch": 2}}, "the model has no experts; valid: 1"),
        ({"layout": {"cp": 3}}, r"layout.cp is 3, which does not divide layout.sequence \(1024\)"),
        (
            {"layout": {"cp": 4, "sequence": 1020}},
            r"layout.sequence is 1020, which is not a multiple of 2 x cp \(8\)",
        ),
        (
            {"layout": {"sequence": 4096}},
            "layout.sequence is 4096, but the model has learned 1024 positions; valid: at most 1024",
        ),
        (
            {"layout": {"sequence": 4096}, "model": "vit-b-16"},
            "layout.sequence is 4096, but the model reads images of 197 tokens; leave it out",
        ),
        (
            {"layout": {"precision": "fp8"}, "node": "dgx-a100"},
            "layout.precision is fp8, but a100-sxm-80 has no peak rate in fp8; use bf16 or amp",
        ),
        (
            {"layout": {"tp": 2}, "model": "mixtral-8x7b"},
            "layout.tp is 2 without sequence_parallel, which Megatron refuses for models with experts",
        ),
        (
            {"layout": {"recompute_layers": 5}},
            "layout.recompute_layers is 5, but layout.recompute is none; choose what these layers recompute",
        ),
        ({"layout": []}, r"layout is \[\]; expected a mapping"),
        ({"job": {"tokens": -1}}, "job.tokens is -1; expected a number above 0"),
        ({"job": {"tokens": "many"}}, "job.tokens is 'many'"),
        ({"jobs": {}}, r"'jobs' is not a valid key of .* \(did you mean 'job'"),
        ({"search": {"gpus": 8}}, "search has no 'global_batch'"),
        ({"calibration": {"matrix": -1}}, "calibration.matrix is -1"),
        ({"job": {"tokens": 10**400}}, "job.tokens is 1000.*expected a number above 0"),
        ({"job": {"tokens": 16**5000}}, "job.tokens is a number of thousands of digits"),
        ({"node": {"device": "a100-sxm-80", "inter_Gbps": 1e-300}}, "at least 1e-18"),
        ({"layout": {"dp": 16**5000}}, "layout.dp is a number of thousands of digits"),
        ({"layout": [16**5000]}, "layout is a number of thousands of digits; expected a mapping"),
        ({"layout": {"sequence": 10**300}}, "expected an integer of at most 1,000,000,000,000"),
        ({"layout": {"dp": 10**8, "global_batch": 10**8}}, "dp x tp x pp x cp is 100000000.*10,000,000"),
        ({"model": {"layers": 2, "hidden": 10**300, "heads": 1}}, "model.hidden is 1000"),
        ({"model": {"layers": 10**8, "hidden": 64, "heads": 1}}, "model.layers is 100000000.*10,000"),
        ({"search": {"gpus": 10**9 + 7, "global_batch": 8}}, "search.gpus is 1000000007"),
        ({"node": {"device": "a100-sxm-80", "cls": 1}}, "'cls' is not a valid key of node"),
        (
            {
                "node": {"device": {**DEVICE, "peers": float("inf")}, "gpus": 8},
                "layout": {"dp": 8, "global_batch": 8},
            },
            "device.peers is inf; expected a number above 0 and at most 1e.18",
        ),
        (
            {"node": {"device": {**DEVICE, "memory_GB": 1e300}}},
            "device.memory_GB is 1e.300; expected a number",
        ),
        ({"calibration": {"measured": 5}}, "calibration.measured is 5; expected a list of constants"),
        ({"calibration": {"source": 5}}, "calibration.source is 5; expected text"),
        ({"model": {"hf": "a\0b"}}, "cannot read .*embedded null.*; give the path of a config.json"),
        ({"calibration": "\ud800"}, "cannot read .*; give the path of a calibration file"),
    ],
)
def test_mistakes_are_sentences(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        plan = parse_plan({**GOOD, **change})
        estimate(plan.model, plan.layout, plan.node)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["model", "node"])
def test_missing_keys_are_named(key: str) -> None:
    with pytest.raises(UsageError, match=f"has no '{key}'"):
        parse_plan({name: value for name, value in GOOD.items() if name != key})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model: !!python/object/apply:os.system [echo]", "has the tag tag:yaml.org,2002:python"),
        ("a: &x [1]\nb: *x", "has an alias"),
        ("[1, 2]", "expected a mapping"),
        ("a: [", "is not valid YAML"),
        ("a: 1\n--- \nb: 2", "is not valid YAML"),
        ("x: " + "[" * 5000, "nested more than 20 levels deep"),
        ("a: [" + "1, " * 30_000 + "1]", "more than 20,000 entries"),
        ("1: 2", "expected a mapping of names"),
        ("a: " + "7" * 5000, "line 1, has a whole number of 5,000 digits"),
        ("a: -0x" + "f" * 5000, "line 1, has a whole number of 5,003 digits"),
        ("a: " + "1:" * 200 + "1.5", "is not valid YAML: OverflowError"),
        ("", "expected a mapping"),
    ],
)
def test_strange_yaml_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=sentence):
        read_plan_file(file)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_bytes(b"a" * (10 << 20))
    with pytest.raises(UsageError, match=r"has more than 1,048,576 bytes"):
        read_plan_file(file)
    with pytest.raises(UsageError, match=r"has more than 1,048,576 bytes"):
        read_plan_file("/dev/zero")


def _read_sweep(path: Path) -> object:
    return grid([str(path)])


@pytest.mark.parametrize(
    "text",
    [
        "root:hunter2:0:0:/root\nme:hunter2:1:1:/me", "- hunter2", "hunter2", "[hunter2, {a: hunter2}]",
        "root:*:hunter2:\n  me: !hunter2", "hunter2: [", "a: hunter2\n\tb: hunter2", "1: hunter2", "'hunter2",
        "d: 2026-99-99",
        "{hunter2", "@hunter2", "%hunter2", "a: b: hunter2", "model: " + "x" * 100 + "hunter2", '"hunter2"',
        "x" * 100 + "hunter2: 1",
    ],
)  # fmt: skip
def test_a_message_does_not_print_the_file(text: str, tmp_path: Path) -> None:
    """Any file may be given by mistake, and messages go to logs that others read."""
    readers = {
        "x.yaml": read_plan_file,
        "x.json": from_hf_config,
        "y.yaml": read_target,
        "z.yaml": _read_sweep,
    }
    for name, read in readers.items():
        file = tmp_path / name
        file.write_text(text)
        message = None
        try:
            read(file)
        except UsageError as error:
            message = str(error)
        assert message or name == "z.yaml", "a sweep may hold these names and values"
        assert "hunter2" not in (message or "").replace("!hunter2", "")


HOSTILE = ["/dev/zero", "pipe", "deep", "digits", "nothing", "."]


@pytest.mark.parametrize("name", HOSTILE)
def test_files_of_anybody_are_read_within_bounds(name: str, tmp_path: Path) -> None:
    """Endless, without a writer, nested 100,000 levels deep, a number of 5,000 digits, missing, a directory."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep").write_text('{"a":' * 100_000)
    (tmp_path / "digits").write_text('{"answers": ' + "1" * 5000 + "}")
    for read in (read_saved_plan, read_plan_file, from_hf_config):
        with pytest.raises(UsageError) as caught:
            read(tmp_path / name)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_plan_file(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="Is a directory"):
        read_plan_file(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        read_plan_file(tmp_path / "binary.yaml")


def test_numbers_in_scientific_notation_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("model: gpt2\nnode: h200-sxm8\njob: {tokens: 1e12}\n")
    assert read_plan_file(file).workload.tokens == 1e12


def test_own_node_and_model() -> None:
    plan = parse_plan(
        {
            "model": {
                "layers": 2,
                "hidden": 64,
                "heads": 4,
                "vocab": 100,
                "moe": {"experts": 4, "top_k": 2, "ffn": 64},
            },
            "node": {
                "device": {"memory_GB": 48, "hbm_GBps": 900, "bf16": 180},
                "gpus": 4,
                "price_per_hour": 3,
            },
        }
    )
    assert plan.node.gpus == 4 and plan.node.price_per_hour == 3
    assert plan.model.moe is not None and plan.model.moe.experts == 4
    assert estimate(plan.model, Layout(), plan.node).fits


def test_names_may_be_numbers_and_dates(tmp_path: Path) -> None:
    """YAML reads 4090 as a number and 2026-11-15 as a date."""
    file = tmp_path / "plan.yaml"
    file.write_text(
        "model: {preset: gpt2, name: 2026-11-15}\n"
        "node: {device: {name: 4090, source: 2026-11-15, memory_GB: 24, hbm_GBps: 1008, bf16: 165}}\n"
    )
    argv = ["plan", str(file), "--json", "--save", str(tmp_path / "plan.json")]
    assert main([*argv, "--html", str(tmp_path / "plan.html")]) == 0
    kept = json.loads((tmp_path / "plan.json").read_text())
    assert (kept["model"]["name"], kept["hardware"]["device"]["name"]) == ("2026-11-15", "4090")


def test_four_gpus_of_an_eight_gpu_node_can_be_planned() -> None:
    """dlcalc raised ValueError here."""
    assert estimate(preset("gpt2"), Layout(dp=4, global_batch=4), Node("dgx-a100")).fits


def test_calibration_files_read_back(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    wanted = Calibration(matrix=0.7, source="measured on a test machine")
    save_calibration(file, wanted, facts={"gemm": 1.0})
    assert load_calibration(file) == wanted
    assert yaml.safe_load(file.read_text())["measured"] == {"gemm": 1.0}


DLCALC = """
model: {n_layers: 80, hidden_sz: 8192, inter_sz: 28672, n_q_heads: 64, n_kv_heads: 8, head_dim: 128,
  vocab_sz: 128256, glu: true, rotary_embeds: true, dropout: false, tie_embeddings: true}
parallelism: {tp: 8, pp: 2, dp: 64, vpp: 1, sp: true, zero_level: 1, bucket_size_mb: 250}
performance: {activation_checkpointing_type: selective}
data: {gbs: 2048, seqlen: 2048, microbatch_sz: 1}
hardware: {node_type: p4d.24xlarge}
"""


def test_dlcalc_sample_is_imported() -> None:
    """Their README's example: dlcalc 0.1.3 said 132 GiB because it held max(m, p) microbatches instead of min."""
    plan = parse_plan(import_dlcalc(yaml.safe_load(DLCALC)))
    assert (
        plan.model.parameters == preset("llama-3.1-70b").parameters - 128256 * 8192
    )  # the sample ties embeddings
    assert (plan.layout.gpus, plan.layout.microbatches, plan.node.name) == (1024, 32, "aws-p4d")
    found = estimate(plan.model, plan.layout, plan.node)
    assert found.answers["memory.in_flight"].value == 2
    assert 25 < found.answers["memory.allocated"].value / 2**30 < 45


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("n_layers: 80, ", "", "model has no 'n_layers'"),
        ("selective", "some", "valid: none, no, selective"),
        ("p4d.24xlarge", "trn1n.32xlarge", "'trn1n.32xlarge' is not a valid value of hardware.node_type"),
        ("tp: 8", "tp: 7", "does not divide model.heads"),
    ],
)
def test_dlcalc_mistakes(old: str, new: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        plan = parse_plan(import_dlcalc(yaml.safe_load(DLCALC.replace(old, new))))
        estimate(plan.model, plan.layout, plan.node)


MIXTRAL_DLCALC = """
model: {n_layers: 32, hidden_sz: 4096, inter_sz: 14336, n_q_heads: 32, n_kv_heads: 8, head_dim: 128,
  vocab_sz: 32000, glu: true, rotary_embeds: true, dropout: false, tie_embeddings: false,
  moe: {n_experts: 8, experts_per_token: 2, expert_inter_sz: 14336, capacity_factor: 1.25, moe_frequency: 0.5,
    expert_tp_degree: 1}}
parallelism: {tp: 4, pp: 2, dp: 8, vpp: 1, sp: true, ep: 8, zero_level: 1, n_param_buckets: 5}
performance: {activation_checkpointing_type: selective}
data: {gbs: 256, seqlen: 4096, microbatch_sz: 1}
hardware: {node_type: p5.48xlarge}
"""


def test_dlcalc_experts_are_imported_as_they_are() -> None:
    """Experts in every other layer: dlcalc counts 26.97 B parameters."""
    plan = parse_plan(import_dlcalc(yaml.safe_load(MIXTRAL_DLCALC)))
    assert plan.model.parameters == pytest.approx(26.97e9, rel=0.001)
    assert plan.model.moe is not None and plan.model.moe.capacity == 1.25 and plan.model.moe_layers == 16
    assert (plan.layout.ep, plan.layout.expert_tp) == (8, 1)
    rank = on_rank(plan.model, plan.layout, 0)
    assert plan.layout.bucket_MB == pytest.approx(4 * (rank.shared + rank.experts) / 5 / 1e6, rel=1e-3)
    assert rank.experts == plan.model.expert_parameters * 8 / 8  # eight such layers a stage, over eight ranks


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "moe_frequency: 0.5",
            "moe_frequency: 0.4",
            "moe_frequency is 0.4; a plan has experts in every n-th",
        ),
        ("hardware:", "cross_dc: {n_dcs: 2}\nhardware:", "the dlcalc file has 'cross_dc'; a plan is for one"),
        ("vpp: 1", "vpp: 1, overlap: 3", "'overlap' is not a valid key of parallelism"),
        ("capacity_factor: 1.25", "capacity: 2", "'capacity' is not a valid key of model.moe"),
    ],
)
def test_dlcalc_keys_are_refused_by_name(old: str, new: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence)):
        import_dlcalc(yaml.safe_load(MIXTRAL_DLCALC.replace(old, new)))


# what `3dtrn` of dlcalc 0.2.0 prints for these two files
LLAMA_DLCALC = """
model: {n_layers: 80, hidden_sz: 8192, inter_sz: 28672, n_q_heads: 64, n_kv_heads: 8, head_dim: 128,
  vocab_sz: 128256, glu: true, rotary_embeds: true, dropout: false, tie_embeddings: false}
parallelism: {tp: 8, cp: 1, pp: 4, dp: 32, vpp: 1, sp: true, zero_level: 1, n_param_buckets: 5}
performance: {activation_checkpointing_type: super-selective}
data: {gbs: 1024, seqlen: 8192, microbatch_sz: 1}
hardware: {node_type: p5.48xlarge}
"""
EXPERTS_DLCALC = (
    MIXTRAL_DLCALC.replace("moe_frequency: 0.5", "moe_frequency: 1.0")
    .replace("tp: 4, pp: 2, dp: 8, vpp: 1", "tp: 2, pp: 2, dp: 16, vpp: 2")
    .replace("n_param_buckets: 5", "n_param_buckets: 4")
    .replace("gbs: 256", "gbs: 512")
    .replace("p5.48xlarge", "p4de.24xlarge")
)
GIB, MB = 2**30, 1e6


@pytest.mark.parametrize(
    ("file", "figures"),
    [
        (
            LLAMA_DLCALC,
            {
                "parameters": 70.55e9,
                "memory.part.weights": 4.230 * GIB,
                "memory.part.gradients": 8.459 * GIB,
                "memory.in_flight": 4,
                "time.microbatches": 32,
                "time.bubble": 0.0938,
                "bucket": 454.15 * 4 * MB,
                "optimizer": (0.132 * 2 + 0.264 + 0.264) * GIB,  # dlcalc keeps master weights in 2 bytes
            },
        ),
        (
            EXPERTS_DLCALC,
            {
                "parameters": 46.70e9,
                "parameters.active": 12.88e9,
                "memory.part.weights": 5.997 * GIB,
                "memory.part.gradients": 11.995 * GIB,
                "time.microbatches": 32,
                "time.bubble": 0.0156,
                "bucket": 804.95 * 4 * MB,
            },
        ),
    ],
    ids=["llama", "experts"],
)
def test_figures_of_dlcalc_that_must_agree(file: str, figures: dict[str, float]) -> None:
    plan = parse_plan(import_dlcalc(yaml.safe_load(file)))
    answers = estimate(plan.model, plan.layout, plan.node).answers
    found = {key: answer.value for key, answer in answers.items()}
    found |= {"bucket": plan.layout.bucket_MB * MB, "optimizer": found["memory.part.optimizer"]}
    assert {key: found[key] for key in figures} == pytest.approx(figures, rel=4e-3)


@pytest.mark.parametrize(("theirs", "ours"), [("b300", "dgx-b300"), ("gb300", "gb300-nvl72")])
def test_every_gpu_node_of_dlcalc_has_its_name_here(theirs: str, ours: str) -> None:
    file = LLAMA_DLCALC.replace("p5.48xlarge", theirs).replace("dp: 32", "dp: 36").replace("1024", "1152")
    assert parse_plan(import_dlcalc(yaml.safe_load(file))).node.name == ours


def test_words_of_dlcalc_that_a_plan_only_comes_near_to_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.yaml").write_text(LLAMA_DLCALC.replace("rotary_embeds: true", "rotary_embeds: false"))
    assert main(["plan", "import-dlcalc", str(tmp_path / "old.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "# super-selective became sac, the nearest" in shown and "# rotary_embeds: false became" in shown
    assert yaml.safe_load(shown)["layout"]["recompute"] == "sac"
    (tmp_path / "old.yaml").write_text(MIXTRAL_DLCALC)
    assert main(["plan", "import-dlcalc", str(tmp_path / "old.yaml")]) == 0
    assert "#" not in capsys.readouterr().out


def test_padding_of_experts_costs_time_and_is_not_counted_as_work() -> None:
    plan = parse_plan(import_dlcalc(yaml.safe_load(MIXTRAL_DLCALC)))
    assert plan.model.moe is not None
    fair = replace(plan.model, moe=replace(plan.model.moe, capacity=1.0))
    padded, exact = (estimate(model, plan.layout, plan.node).answers for model in (plan.model, fair))
    assert padded["flops.full"].value == exact["flops.full"].value
    for key in ("time.part.matrix products", "time.part.expert parallel", "memory.part.activations"):
        assert padded[key].value > 1.01 * exact[key].value
