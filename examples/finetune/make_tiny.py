"""Make a tiny model, its tokenizer and some examples, in the formats of the real ones. It needs no network.

python examples/finetune/make_tiny.py tiny
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if __name__ == "__main__":
    out = Path(sys.argv[1])
    words = ["<pad>", "<eos>", "<unk>", "plus", "is", *map(str, range(19))]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(out)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(words), tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(out)
    sums = [(a, b) for a in range(10) for b in range(10)]
    lines = [json.dumps({"prompt": f"{a} plus {b} is", "answer": f"{a + b}"}) for a, b in sums]
    (out / "sums.jsonl").write_text("\n".join(lines))
