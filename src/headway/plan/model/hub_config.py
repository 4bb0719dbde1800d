"""Typed access to the keys of a Hugging Face `config.json`, and a reader of the keys that most decoders share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from headway.errors import UsageError
from headway.plan import checks
from headway.plan.model.transformer import Transformer


@final
class HubConfig:
    """Typed access to the keys of one config.json; a missing key is a usage error."""

    def __init__(self, data: Mapping[str, object], where: str) -> None:
        self._data, self._where = data, where

    def number(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        value = self._data.get(key)
        if value is None:
            if default is None:
                raise UsageError(
                    f"{self._where} has no {key!r}, which a {self._data['model_type']} config needs"
                )
            return default
        return checks.require_int(f"{self._where}: {key}", value, at_least=at_least)

    def count(self, key: str, value: str) -> int:
        """Returns how many entries of a list equal `value`; 0 if there is no such list."""
        found = self._data.get(key)
        return found.count(value) if isinstance(found, list) else 0

    def refuse_list(self, key: str) -> None:
        """Refuses a list of individual layers that differ from the rest: the parameter count does not include them."""
        if self._data.get(key):
            raise UsageError(
                f"{self._where}: {key} is {self._data[key]!r:.80}; expected an empty list or none"
            )

    def text(self, key: str, default: str) -> str:
        value = self._data.get(key, default)
        if not isinstance(value, str):
            raise UsageError(f"{self._where}: {key} is {value!r:.80}; expected a string")
        return value

    def length(self, key: str) -> int:
        """Returns the length of a list; 0 if there is no such list."""
        found = self._data.get(key)
        return len(found) if isinstance(found, list) else 0

    def flag(self, key: str, default: bool) -> bool:
        value = self._data.get(key, default)
        if not isinstance(value, bool):
            raise UsageError(f"{self._where}: {key} is {value!r}; expected true or false")
        return value


def read_decoder(c: HubConfig, *, tied: bool = False) -> Transformer:
    """Reads the keys that Llama and most decoders after it share."""
    heads, hidden = c.number("num_attention_heads"), c.number("hidden_size")
    return Transformer(
        layers=c.number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        vocab=c.number("vocab_size"),
        kv_heads=c.number("num_key_value_heads", heads),
        head_dim=c.number("head_dim", hidden // heads),
        ffn=c.number("intermediate_size"),
        gated=True,
        tied=c.flag("tie_word_embeddings", tied),
        position="rope",
        norm="rmsnorm",
        bias="none",
        context=c.number("max_position_embeddings", 4096),
    )
