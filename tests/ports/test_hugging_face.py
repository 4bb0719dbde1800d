"""A causal language model of transformers, fine-tuned from a directory that `save_pretrained` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headway as hw
from headway.cli import checkpoint as command
from headway.testing import ranks
from headway.train import Fsdp, empty_parameters

try:
    import transformers
except ImportError:
    transformers = None
# test by test, and not the file: the suite counts the files that are collected
pytestmark = pytest.mark.skipif(transformers is None, reason="transformers is not installed")

WORDS, LENGTH = 48, 12


def make_config(**settings: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaConfig(
        vocab_size=WORDS, max_position_embeddings=32, use_cache=False, **sizes, **settings
    )


def make_directory(path: Path, **settings: Any) -> Any:
    """Writes a model in several shards, and returns it."""
    torch.manual_seed(11)
    model = transformers.LlamaForCausalLM(make_config(**settings))
    model.save_pretrained(path, max_shard_size="6KB")
    assert len(json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]) > 5
    return model


def tokens(rank: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(WORDS, (4, LENGTH), generator=generator) for _ in range(3)]


class Tune(hw.TrainValStage):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.losses: list[float] = []

    def step(self, batch: Any) -> Tensor:
        loss: Tensor = self.models["lm"](input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss


def fine_tune(root: Path, model: Any, **settings: Any) -> tuple[hw.Pipeline, Tune]:
    pipe, stage = hw.Pipeline(name="tune", root=root), Tune(log_every=1, gradient_clip=1.0)
    pipe.register_model("lm", model, **settings)
    pipe.register_optimizer("adamw", lambda params: torch.optim.AdamW(params, lr=1e-3), model="lm")
    pipe.register_dataset("train", tokens(pipe.world.rank))
    pipe.append_stage(stage, max_epochs=1)
    return pipe, stage


@ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_the_first_loss_is_that_of_transformers(tied: bool, tmp_path: Path) -> None:
    directory = tmp_path / "hub"
    world = hw.init()
    if world.is_root:
        make_directory(directory, tie_word_embeddings=tied)
    hw.barrier()
    reference = transformers.LlamaForCausalLM.from_pretrained(directory).eval()
    batch = tokens(world.rank)[0]
    with torch.no_grad():
        expected = reference(input_ids=batch, labels=batch).loss.item()
    config = make_config(tie_word_embeddings=tied)
    blocks = (transformers.models.llama.modeling_llama.LlamaDecoderLayer,)
    found = {}
    for kind, parallel in (("ddp", "ddp"), ("fsdp", Fsdp(blocks=blocks))):
        with empty_parameters():
            model = transformers.LlamaForCausalLM(config)
        pipe, stage = fine_tune(tmp_path, model, parallel=parallel, init_from=directory)
        report = pipe.registered_models["lm"].initial
        assert report is not None and not report.missing and not report.left_over
        pipe.run()
        assert stage.losses[0] == pytest.approx(expected, rel=1e-6)
        found[kind] = stage.losses
    assert found["fsdp"] == pytest.approx(found["ddp"], rel=1e-5)  # it trains, and both train alike
    assert found["ddp"][0] != found["ddp"][1]


def adapted(directory: Path, targets: tuple[str, ...] = ("q_proj", "v_proj"), **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    base = transformers.LlamaForCausalLM.from_pretrained(directory)
    torch.manual_seed(3)
    name = settings.pop("adapter_name", "default")
    config = peft.LoraConfig(r=2, target_modules=list(targets), **settings)
    return peft.get_peft_model(base, config, adapter_name=name)


def test_a_lora_run_keeps_and_exports_the_adapter_alone(tmp_path: Path) -> None:
    directory = tmp_path / "hub"
    make_directory(directory)
    model = adapted(directory)
    pipe, _ = fine_tune(tmp_path, model, ema=0.9)
    pipe.enable_checkpointing(every=1, background=False)
    run = pipe.run()
    saved = hw.checkpoint.load(run.checkpoint_dir(3)).state
    assert saved["models"]["lm"] and all(
        "lora_" in name for part in ("models", "averages") for name in saved[part]["lm"]
    )
    batch = tokens(5)[0]
    with torch.no_grad():
        expected = model.eval()(input_ids=batch).logits
    again = adapted(directory)
    resumed, _ = fine_tune(tmp_path, again, ema=0.9)
    resumed.enable_checkpointing(resume=run.path)
    resumed.run()  # it is finished: its end is restored
    whole = transformers.LlamaForCausalLM(make_config())
    peft = pytest.importorskip("peft")
    third = peft.get_peft_model(whole, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    base = hw.Pipeline(root=tmp_path)
    base.register_model("lm", third, init_from=directory)  # the base by its own names
    base.register_model("lm2", third, init_from=run)  # then the adapter
    command.main(["export", str(run.path), str(tmp_path / "adapter"), "--adapter", "lm"])
    fresh = transformers.LlamaForCausalLM.from_pretrained(directory)
    exported = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    for found in (again, third, exported):
        with torch.no_grad():
            assert found.eval()(input_ids=batch).logits.equal(expected)


def test_all_that_was_trained_of_an_adapter_is_exported(tmp_path: Path) -> None:
    """An embedding, biases, a whole head, and an adapter with a name of its own."""
    peft = pytest.importorskip("peft")
    directory, targets = tmp_path / "hub", ("embed_tokens", "q_proj")
    make_directory(directory, attention_bias=True)
    for name in ("default", "mine"):
        more = {"bias": "lora_only", "modules_to_save": ["lm_head"], "adapter_name": name}
        model = adapted(directory, targets, **more)
        pipe, _ = fine_tune(tmp_path / name, model)
        pipe.enable_checkpointing(every=1, background=False)
        run = pipe.run()
        hw.checkpoint.export_adapter(run.checkpoint_dir(3), tmp_path / f"adapter-{name}")
        fresh = transformers.LlamaForCausalLM.from_pretrained(directory)
        exported = peft.PeftModel.from_pretrained(fresh, tmp_path / f"adapter-{name}").eval()
        batch = tokens(5)[0]
        with torch.no_grad():
            assert exported(input_ids=batch).logits.equal(model.eval()(input_ids=batch).logits)


def test_the_base_of_an_adapter_with_a_whole_head_is_found(tmp_path: Path) -> None:
    """peft keeps the head of the base under another name, and trains a copy of it."""
    peft = pytest.importorskip("peft")
    base = make_directory(tmp_path / "hub").eval()
    torch.manual_seed(12)
    other = transformers.LlamaForCausalLM(make_config())
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(other, config)
    pipe = hw.Pipeline(root=tmp_path)
    pipe.register_model("lm", model, init_from=tmp_path / "hub")
    report = pipe.registered_models["lm"].initial
    assert report is not None and not report.left_over and all("lora_" in name for name in report.missing)
    batch = tokens(5)[0]
    with torch.no_grad():
        assert model.eval()(input_ids=batch).logits.equal(base(input_ids=batch).logits)


@pytest.mark.parametrize("name", ["default", "mine"])
def test_an_adapter_is_loaded_from_the_directory_of_its_export_and_of_peft(name: str, tmp_path: Path) -> None:
    """Names in its file leave out that of the adapter, which may be another one in the model."""
    directory = tmp_path / "hub"
    make_directory(directory)
    more = {"modules_to_save": ["lm_head"], "adapter_name": name}
    model = adapted(directory, **more)
    pipe, _ = fine_tune(tmp_path / "runs", model)
    pipe.enable_checkpointing(every=1, background=False)
    run = pipe.run()
    hw.checkpoint.export_adapter(run.checkpoint_dir(3), tmp_path / "exported")
    model.save_pretrained(tmp_path / "saved")
    saved = tmp_path / "saved" / name if name != "default" else tmp_path / "saved"
    batch = tokens(5)[0]
    for source in (tmp_path / "exported", saved):
        fresh = adapted(directory, modules_to_save=["lm_head"], adapter_name="other")
        fresh.base_model.model.register_buffer("seen", torch.ones(1))  # which the base model alone has
        other = hw.Pipeline(root=tmp_path)
        other.register_model("lm", fresh, init_from=source)
        with torch.no_grad():
            assert fresh.eval()(input_ids=batch).logits.equal(model.eval()(input_ids=batch).logits)
