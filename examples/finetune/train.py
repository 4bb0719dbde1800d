"""Fine-tune a causal language model of Hugging Face on prompts and answers. README.md explains it.

headway run --nproc 8 examples/finetune/train.py --model Qwen3-8B --data chats.jsonl
headway submit --nodes 1 --gpus-per-node 8 examples/finetune/train.py --model $PWD/Qwen3-8B --data $PWD/chats.jsonl
"""

import argparse
import json
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import headway as hw

IGNORED = -100  # a label that is not to be learned


class Answers(torch.utils.data.Dataset):
    """Lines of {"prompt": ..., "answer": ...} as tokens; only those of the answer are learned."""

    def __init__(self, path, tokenizer):
        self.lines, self.tokenizer = path.read_text().splitlines(), tokenizer

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, number):
        line = json.loads(self.lines[number])
        prompt = self.tokenizer(line["prompt"]).input_ids
        answer = self.tokenizer(line["answer"], add_special_tokens=False).input_ids
        answer.append(self.tokenizer.eos_token_id)
        return torch.tensor(prompt + answer), torch.tensor([IGNORED] * len(prompt) + answer)

    def collate(self, samples):
        tokens, labels = zip(*samples, strict=True)
        padded = pad_sequence(tokens, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        return {
            "input_ids": padded,
            "attention_mask": (padded != self.tokenizer.pad_token_id).long(),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        }


class Tune(hw.TrainValStage):
    def step(self, batch):
        loss = self.models["lm"](**batch, use_cache=False).loss
        return loss, (batch["labels"][:, 1:] != IGNORED).sum()  # the mean, and over how many tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a directory of Hugging Face")
    parser.add_argument("--data", type=Path, required=True, help='lines of {"prompt": ..., "answer": ...}')
    parser.add_argument("--batch", type=int, default=64, help="samples of all ranks together in a step")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-5)
    options = parser.parse_args()

    pipe = hw.Pipeline(config=options, name="finetune")
    hw.seed(0)
    with hw.train.empty_parameters():  # no memory yet: each rank will read its own part of the weights
        lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model))
    blocks = (type(lm.model.layers[0]),)  # of Llama, Qwen, Mistral, Gemma and most others
    pipe.register_model(
        "lm",
        lm,
        parallel=hw.train.Fsdp(blocks=blocks),
        activation_checkpointing=blocks,
        init_from=options.model,
    )
    pipe.register_optimizer("adamw", lambda params: torch.optim.AdamW(params, lr=options.lr), model="lm")
    answers = Answers(options.data, AutoTokenizer.from_pretrained(options.model))
    train, val = hw.data.split(answers, 0.1, seed=0)
    for name, part in {"train": train, "val": val}.items():
        loader = hw.data.DataLoader(
            part, global_batch_size=options.batch, shuffle=name == "train", collate_fn=answers.collate
        )
        pipe.register_dataset(name, loader)
    pipe.append_stage(Tune(precision="bf16", gradient_clip=1.0), max_epochs=options.epochs)
    pipe.enable_checkpointing(every="10min", keep_best="val/loss")
    pipe.run()


if __name__ == "__main__":
    main()
