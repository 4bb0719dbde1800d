"""A causal language model of Hugging Face, by hand and ported: a mean over tokens on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import headway as hw

WORDS, LENGTH, BATCHES, IGNORED = 32, 10, 4, -100


def make_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def batch_of(number: int, rank: int) -> dict[str, Tensor]:
    """Sentences of different lengths, filled up with tokens that are not learned."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    tokens = torch.randint(1, WORDS, (3, LENGTH), generator=generator)
    labels = tokens.clone()
    for row in range(3):
        labels[row, int(torch.randint(2, LENGTH, (), generator=generator)) :] = IGNORED
    return {"input_ids": tokens, "labels": labels}


class CausalLm(hw.TrainValStage):
    def step(self, batch: Any) -> tuple[Tensor, Tensor]:
        loss: Tensor = self.models["llama"](**batch).loss
        return loss, (batch["labels"][:, 1:] != IGNORED).sum()


def ported(directory: Path, accumulate: int) -> hw.Pipeline:
    pipe = hw.Pipeline(name="lm", root=directory)
    pipe.register_model("llama", make_model())
    pipe.register_optimizer("adamw", lambda ps: optim.AdamW(ps, lr=0.01, eps=1e-3), model="llama")
    pipe.register_dataset("train", [batch_of(number, hw.rank()) for number in range(BATCHES)])
    pipe.append_stage(CausalLm(accumulate=accumulate, log_every=1), max_epochs=1)
    pipe.run()
    return pipe


def by_hand(accumulate: int) -> tuple[nn.Module, list[float]]:
    """One process that has all tokens of a step, of all ranks, in one batch; returns the model and its losses."""
    model: Any = make_model()
    optimizer, losses = optim.AdamW(model.parameters(), lr=0.01, eps=1e-3), []
    for start in range(0, BATCHES, accumulate):
        parts = [
            batch_of(number, rank)
            for number in range(start, start + accumulate)
            for rank in range(hw.world_size())
        ]
        tokens, labels = (torch.cat([part[key] for part in parts]) for key in ("input_ids", "labels"))
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses
