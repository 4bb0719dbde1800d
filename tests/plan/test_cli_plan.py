"""`headway plan`: exit codes, one-sentence errors, JSON, and no torch for presets."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import warm

from headway.cli import plan as verb
from headway.errors import HeadwayError, UsageError
from headway.plan import Layout, Node, estimate, preset
from headway.plan.input.plan_file import read_plan_file
from headway.plan.machine.calibration import Calibration, load_calibration
from headway.plan.report.html import render_page
from headway.plan.report.saved_plan import read_saved_plan

GOOD = """
model: llama-3.1-8b
layout: {dp: 8, zero: 3, microbatch: 1, global_batch: 8, sequence: 8192, precision: amp}
node: {name: h200-sxm8, price_per_hour: 30}
job: {tokens: 1e9}
search: {gpus: 16, global_batch: 64}
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    file = tmp_path / "plan.yaml"
    file.write_text(GOOD)
    return file


def test_a_plan_file_fits(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.main([str(plan_file)]) == 0
    output = capsys.readouterr().out
    assert "fits: needs" in output and "GiB" in output and "memory.needed" in output and "run.cost" in output


def test_a_plan_that_does_not_fit_exits_3(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_file.write_text(GOOD.replace("h200-sxm8", "aws-p4d"))
    assert verb.main([str(plan_file)]) == 3
    output = capsys.readouterr().out
    assert "does not fit: needs" in output and "->" in output


def test_json_save_and_html(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, web = tmp_path / "plan.json", tmp_path / "plan.html"
    assert verb.main([str(plan_file), "--json", "--save", str(out), "--html", str(web)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert printed["answers"]["parameters"]["value"] == 8_030_261_248
    assert web.read_text().startswith("<!doctype html>")
    assert verb.main([str(plan_file), "--save", str(out), "--html", str(web)]) == 0
    assert capsys.readouterr().out.endswith(f"written to {out}\nwritten to {web}\n")


def test_explain(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.main([str(plan_file), "--explain", "memory.needed"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("memory.needed = ") and "formula: allocated x" in output and "source:" in output


def test_search(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.main(["search", str(plan_file)]) == 0
    assert "is the fastest of" in capsys.readouterr().out
    assert verb.main(["search", str(plan_file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranked"][0]["step_s"] <= found["ranked"][1]["step_s"]
    plan_file.write_text(GOOD.replace("h200-sxm8", "rtx-4090-1").replace("llama-3.1-8b", "llama-3.1-405b"))
    assert verb.main(["search", str(plan_file)]) == 3
    plan_file.write_text(GOOD.partition("search")[0])
    capsys.readouterr()
    assert verb.main(["search", str(plan_file), "--json"]) == 0
    ranked = [row["layout"] for row in json.loads(capsys.readouterr().out)["ranked"]]
    gpus = {math.prod(layout.get(key, 1) for key in ("dp", "tp", "pp", "cp")) for layout in ranked}
    assert gpus == {read_plan_file(plan_file).layout.gpus}, "without `search`, as many GPUs as the layout has"


def test_presets_answer_without_torch() -> None:
    command = [
        "preset",
        "llama-3.1-8b",
        "--node",
        "dgx-h100",
        "--dp",
        "8",
        "--zero",
        "3",
        "--microbatch",
        "2",
        "--global-batch",
        "16",
    ]
    code = (
        "import sys; from headway.cli import plan; "
        f"code = plan.main({[*command, '--json']!r}); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr  # 2 x 8K tokens without checkpointing: more than 80 GB
    assert json.loads(done.stdout)["answers"]["parameters"]["value"] == 8_030_261_248


def test_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.main(["list"]) == 0
    output = capsys.readouterr().out
    assert "deepseek-v3" in output and "h200-sxm8       8 x h200-sxm-141, 3200 Gb/s" in output
    assert verb.main(["list", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "deepseek-v3" in facts["presets"]
    (node,) = (node for node in facts["nodes"] if node["name"] == "h200-sxm8")
    assert (node["gpus"], node["device"]) == (8, "h200-sxm-141")
    assert verb.main([]) == 0
    assert "usage: headway plan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["presets"], "there is no plan verb or file 'presets'"),
        (["none.yaml"], "cannot read none.yaml"),
        (["preset", "gpt9"], "'gpt9' is not a valid preset"),
        (["preset", "gpt2", "--node", "h200"], "'h200' is not a valid node"),
        (["preset", "gpt2", "--tp", "5"], "layout.tp is 5, which does not divide model.heads"),
        (["module", "x.py:f", "--extrapolate", "96"], "there is no file x.py"),
        (["import-dlcalc", "none.yaml"], "cannot read none.yaml"),
        (["list", "all"], "unrecognized arguments: all; see: headway plan list --help"),
        (
            ["preset", "gpt2", "--nod", "h200-sxm8"],
            "unrecognized arguments: --nod h200-sxm8 (did you mean --node?)",
        ),
        (
            ["preset", "gpt2", "--dp", "many"],
            "argument --dp: 'many' is not a whole number; see: headway plan preset --help",
        ),
        (
            ["preset", "gpt2", "--precision", "fp7"],
            "argument --precision: invalid choice: 'fp7' (choose from 'bf16'",
        ),
        (
            ["preset"],
            "the following arguments are required: NAME; see: headway plan preset --help",
        ),
        (
            ["measure", "x.py:f", "--batch-size", "a"],
            "argument --batch-size: 'a' is not a whole number; see: headway plan measure --help",
        ),
    ],
)
def test_mistakes_exit_2_with_one_sentence(argv: list[str], sentence: str) -> None:
    try:
        verb.main(argv)
    except UsageError as error:
        assert error.exit_code == 2 and sentence in str(error) and "\n" not in str(error)
    else:
        pytest.fail("nothing was printed")


def test_import_dlcalc_prints_a_plan_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old.yaml"
    old.write_text(
        """
model: {n_layers: 2, hidden_sz: 256, inter_sz: 512, n_q_heads: 8, n_kv_heads: 8, head_dim: 32, vocab_sz: 1000,
  glu: true, rotary_embeds: true, dropout: false, tie_embeddings: false}
parallelism: {tp: 2, pp: 1, dp: 4, vpp: 1, sp: true, zero_level: 1, bucket_size_mb: 250}
performance: {activation_checkpointing_type: none}
data: {gbs: 8, seqlen: 128, microbatch_sz: 1}
hardware: {node_type: p4de.24xlarge}
"""
    )
    assert verb.main(["import-dlcalc", str(old)]) == 0
    new = tmp_path / "new.yaml"
    new.write_text(capsys.readouterr().out)
    assert verb.main([str(new)]) == 0


def test_a_group_of_answers_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.main(["preset", "gpt2", "--explain", "flops"]) == 0
    output = capsys.readouterr().out
    assert [line.split(" = ")[0] for line in output.splitlines() if " = " in line] == [
        "flops.full",
        "flops.causal",
        "flops.hardware",
    ]
    assert output.count("formula: ") == output.count("source: ") == 3


def test_every_answer_explains_itself() -> None:
    layout = Layout(dp=2, tp=8, pp=8, cp=2, zero=1, global_batch=64, recompute="sac", sequence_parallel=True)
    plan = estimate(preset("llama-3.1-70b"), layout, Node("dgx-h100"))
    for key, answer in plan.answers.items():
        assert answer.formula and plan.explain(key).startswith(f"{key} = {answer}\n"), key


@pytest.mark.parametrize("flag", ["--html", "--save"])
def test_a_file_that_cannot_be_written_is_one_sentence(flag: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*/none/x: No such file or directory"):
        verb.main(["preset", "gpt2", flag, str(tmp_path / "none" / "x")])


@pytest.mark.parametrize("name", ["mixtral-8x7b", "llama-3.1-405b"])
def test_tables_fit_into_eighty_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb.main(
        [
            "preset",
            name,
            "--tp",
            "8",
            "--dp",
            "64",
            "--global-batch",
            "64",
            "--no-flash",
            "--sequence-parallel",
        ]
    )
    table = capsys.readouterr().out.partition("Matrix products")[2]
    assert "head" in table and "\u2026" not in table


def test_calibrate_writes_a_machine_that_plans_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
    with pytest.raises(HeadwayError, match="run: headway plan calibrate"):
        verb.main(["preset", "gpt2", "--node", "this"])
    zoo = Path(__file__).parent / "zoo.py"
    assert verb.main(["calibrate", "--json", "--loader", f"{zoo}:loader"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"]["loader_bytes_per_s"] > 1e5
    assert (
        found["measured"]["copy_bytes_per_s"] > 1e8 and found["measured"]["storage_write_bytes_per_s"] > 1e5
    )
    assert verb.main(["preset", "gpt2", "--node", "this", "--json"]) in (0, 3)
    planned = json.loads(capsys.readouterr().out)
    step = planned["answers"]["time.step"]
    assert step["high"] / step["value"] < 1.2  # measured constants narrow the interval


def test_measure_compares_on_this_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
    zoo = Path(__file__).parent / "zoo.py"
    argv = [
        "measure",
        f"{zoo}:tiny_language_model",
        "--inputs",
        "tiny_batch",
        "--batch-size",
        "8",
        "--also",
        "16",
    ]
    argv += ["--precision", "fp32", "--steps", "2", "--save", str(tmp_path / "own.yaml")]
    assert verb.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["batch_size"] for row in found["rows"]] == [8, 16]
    assert all(row["measured_s"] > 0 and row["predicted_s"] > 0 for row in found["rows"])
    assert found["calibration"]["source"] == "measured with a batch of 8"
    assert load_calibration(tmp_path / "own.yaml") == Calibration(**found["calibration"])


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_is_self_contained() -> None:
    model = preset("gpt3-175b")
    layout = Layout(dp=8, tp=8, pp=8, zero=1, global_batch=512, recompute="selective", flash=False)
    text = render_page(estimate(model, layout, Node("dgx-a100")))
    reader = _Reader()
    reader.feed(text)
    assert not reader.links and "script" not in reader.tags and "http" not in text
    assert reader.tags.count("svg") == 4 and reader.tags.count("rect") > 10
    for rank in ("first", "stage 4", "last"):
        assert f">{rank}<" in text


def test_the_page_escapes_what_users_write() -> None:
    plan = estimate(preset("gpt2"), Layout(), Node("h200-sxm1"))
    hostile = type(plan)(**{**vars(plan), "title": "<script>alert(1)</script>"})
    assert "<script>" not in render_page(hostile)


def test_a_search_takes_the_flags_of_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dp", "4", "--tp", "2", "--zero", "1", "--global-batch", "64", "--precision", "amp"]
    run = ["--node", "dgx-h100", "--tokens", "1e9", "--price-per-hour", "30"]
    assert verb.main(["search", "gpt2", "--gpus", "8", *flags, *run]) == 0
    output = capsys.readouterr().out
    assert "dp4 tp2 zero1 mb1, which was given, takes" in output and "most of the difference is" in output
    assert "run.cost = " in output and "tensor parallel 8 in the node, ZeRO 1 across: not possible" in output
    assert verb.main(["search", "gpt2", "--gpus", "8", "--global-batch", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"] == {} and not any("which was given" in reason for reason in found["reasons"])
    assert {row["trainable"] for row in found["ranked"]} <= {True, False}


def test_flags_override_the_plan_file_of_a_search(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file and a flag give what the file with the flag's value gives, also if the value is the default."""
    small = GOOD.replace("llama-3.1-8b", "{preset: gpt2, context: 8192}")
    plan_file.write_text(small.replace("h200-sxm8", "dgx-h100"))
    flags = [
        "--gpus",
        "8",
        "--global-batch",
        "32",
        "--precision",
        "bf16",
        "--node",
        "h200-sxm8",
        "--no-overlap",
    ]
    assert verb.main(["search", str(plan_file), *flags, "--price-per-hour=10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    same = small.replace("precision: amp", "precision: bf16, overlap: false")
    same = same.replace("gpus: 16, global_batch: 64", "gpus: 8, global_batch: 32")
    plan_file.write_text(same.replace("hour: 30", "hour: 10"))
    assert verb.main(["search", str(plan_file), "--json"]) == 0
    assert found == json.loads(capsys.readouterr().out)
    assert found["run"]["run.cost"]["value"] > 0


def test_the_plan_of_a_search_is_saved_and_emitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fastest layout becomes plan.json, with model, layout, node and answers, and a line that submits it."""
    file, saved = tmp_path / "run.yaml", tmp_path / "plan.json"
    file.write_text("model: gpt2\nnode: dgx-h100\nsearch: {gpus: 16, global_batch: 64}\n")
    argv = ["search", str(file), "--precision", "amp", "--save", str(saved)]
    assert verb.main([*argv, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["ranked"][0]
    kept = json.loads(saved.read_text())
    layout = Layout(**kept["layout"])
    assert layout == Layout(**best["layout"]) and layout.gpus == 16 and layout.precision == "amp"
    assert kept["model"]["layers"] == 12 and Node.of(**kept["hardware"]).gpus == 8
    planned = read_saved_plan(saved).planned("step")
    assert planned is not None and planned.value == pytest.approx(best["step_s"])
    assert verb.main([*argv, "--emit", "submit"]) == 0
    line = f"headway submit --nodes 2 --gpus-per-node 8 train.py  # with pipe.enable_plan({str(saved)!r})\n"
    assert capsys.readouterr().out == line
    saved.unlink()
    assert (
        verb.main(["search", "llama-3.1-405b", "--gpus", "8", "--global-batch", "8", "--save", str(saved)])
        == 3
    )
    assert not saved.exists()


def test_degrees_beside_a_file_are_compared_in_its_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: gpt2\nnode: dgx-h100\nsearch: {gpus: 16, global_batch: 64}\n")
    assert verb.main(["search", str(file), "--dp", "16", "--zero", "3"]) == 0
    assert "dp16 zero3 mb1, which was given, takes" in " ".join(capsys.readouterr().out.split())


def test_flags_may_come_before_the_file_of_a_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: gpt2\nnode: dgx-h100\nsearch: {gpus: 16, global_batch: 64}\n")
    assert verb.main(["search", "--dp", "16", "--zero", "3", str(file)]) == 0
    assert "dp16 zero3 mb1, which was given, takes" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("flags", [["--save", "{}"], ["--save={}"]])
def test_a_file_that_a_search_writes_is_not_its_plan_file(flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    assert verb.main(["search", "gpt2", "--gpus", "1", *(flag.format(file) for flag in flags)]) == 0
    assert file.exists()


@pytest.mark.parametrize("words", [["preset", "gpt2"], ["search", "gpt2", "--gpus", "1"]])
def test_a_price_counts_for_this_machine_too(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text("node: {name: this, device: h200-sxm-141, gpus: 1}\ncalibration: {matrix: 0.8}\n")
    monkeypatch.setattr("headway.plan.input.plan_file.calibration_file", lambda: file)
    assert verb.main([*words, "--node", "this", "--tokens", "1e9", "--price-per-hour", "3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.get("run", printed.get("answers"))["run.cost"]["value"] > 0


def test_a_bad_constant_is_reported_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "machine.yaml"
    monkeypatch.setattr("headway.plan.input.plan_file.calibration_file", lambda: file)
    for value in ("-1", "fast"):
        file.write_text(f"node: {{name: this, device: h200-sxm-141}}\ncalibration: {{matrix: {value}}}\n")
        with pytest.raises(
            UsageError, match=rf"machine.yaml: calibration.matrix is '?{value}'?; expected a number"
        ):
            verb.main(["preset", "gpt2", "--node", "this"])
    with pytest.raises(UsageError, match=r"nowhere.yaml: .*; give the path of a calibration file"):
        verb.main(["module", "train:make", "--calibration", str(tmp_path / "nowhere.yaml")])


def test_a_search_takes_a_config_and_only_what_train_can_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 8, "intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 2048,
    }))  # fmt: skip
    argv = ["search", str(config), "--gpus", "8", "--global-batch", "16", "--node", "dgx-h100", "--json"]
    assert verb.main(argv) == 0
    every = json.loads(capsys.readouterr().out)
    assert {row["trainable"] for row in every["pareto"] + every["ranked"]} == {True, False}
    assert verb.main([*argv, "--trainable"]) == 0
    some = json.loads(capsys.readouterr().out)
    assert 0 < some["tried"] < every["tried"] and all(row["trainable"] for row in some["ranked"])
    assert some["ranked"][0]["step_s"] >= every["ranked"][0]["step_s"]
    assert verb.main(["preset", str(config), "--node", "dgx-h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["hidden"] == 1024


def test_more_samples_than_the_devices_can_do_are_doubted(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "preset",
        "llama-3.1-8b",
        "--node",
        "h200-sxm8",
        "--dp",
        "8",
        "--zero",
        "3",
        "--global-batch",
        "8",
        "--sps",
    ]
    for rate, doubted in (("5", False), ("500", True)):
        assert verb.main([*argv, rate, "--json"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["rate.tokens"] > 0
        assert (
            f"--sps {rate} is " in captured.err and "of what the devices can do" in captured.err
        ) == doubted


@pytest.mark.parametrize(("flags", "gpus"), [([], 8), (["--dp", "16"], 16), (["--tp", "2", "--dp", "2"], 4)])
def test_a_batch_overrides_a_file_without_a_search(
    flags: list[str], gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a section `search`, the GPUs and samples of the layout are searched, and flags override them."""
    file = tmp_path / "run.yaml"
    file.write_text("model: gpt2\nnode: dgx-h100\nlayout: {dp: 8, global_batch: 8}\n")
    assert verb.main(["search", str(file), *flags, "--global-batch", "32", "--json"]) == 0
    ranked = [row["layout"] for row in json.loads(capsys.readouterr().out)["ranked"]]
    assert {layout["global_batch"] for layout in ranked} == {32}
    assert {layout["dp"] * layout["tp"] * layout["pp"] * layout["cp"] for layout in ranked} == {gpus}


def test_degrees_beside_a_file_without_a_search_are_compared_in_its_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: gpt2\nnode: dgx-h100\nlayout: {dp: 8, global_batch: 64}\n")
    assert verb.main(["search", str(file), "--dp", "16"]) == 0
    assert "dp16 mb1, which was given" in " ".join(capsys.readouterr().out.split())


def test_a_file_of_a_search_may_follow_two_dashes(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: gpt2\nnode: dgx-h100\nsearch: {gpus: 16, global_batch: 64}\n")
    assert verb.main(["search", "--gpus", "8", "--", str(file)]) == 0
