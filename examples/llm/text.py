"""Text to tokens and back, from a GGUF file's metadata: byte-level BPE through the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

# How text is cut before merges, by the name in tokenizer.ggml.pre: a pattern in front of the byte-level step, or None
# for GPT-2's own.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WHOLE_WORDS = {"llama-bpe", "llama3"}  # a word that is a token is not merged from its parts
_SPLITS = {"gpt-2": None, "default": None, "smollm": "digits", "llama-bpe": _LLAMA3, "llama3": _LLAMA3}
_CONTROL, _USER_DEFINED = 3, 4


class Text:
    """encode() and decode() of a model, and its chat template."""

    def __init__(self, metadata: Any, path: str = "model"):
        def value(key: str, default: Any = None) -> Any:
            return metadata.get(f"tokenizer.{key}", default)

        kind, split = value("ggml.model"), value("ggml.pre", "default")
        if kind != "gpt2" or split not in _SPLITS:
            raise ValueError(
                f"{path}: tokenizer {kind!r} with splits {split!r}: expected gpt2 with one of {', '.join(_SPLITS)}"
            )
        tokens, merges = value("ggml.tokens"), value("ggml.merges")
        if tokens is None or merges is None:
            raise ValueError(f"{path}: metadata lacks tokenizer.ggml.tokens or tokenizer.ggml.merges")
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        self._tokenizer = Tokenizer(
            models.BPE({token: i for i, token in enumerate(tokens)}, pairs, ignore_merges=split in _WHOLE_WORDS)
        )
        steps: list[Any] = []
        if _SPLITS[split] == "digits":
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        elif _SPLITS[split] is not None:
            steps.append(pre_tokenizers.Split(Regex(_SPLITS[split]), "isolated"))
        own = _SPLITS[split] in (None, "digits")
        steps.append(
            pre_tokenizers.ByteLevel(add_prefix_space=bool(value("ggml.add_space_prefix", False)), use_regex=own)
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        self._tokenizer.decoder = decoders.ByteLevel()
        kinds = value("ggml.token_type", ())
        special = [
            AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=False) if k == _CONTROL
        ]
        self._tokenizer.add_special_tokens(special)
        self._tokenizer.add_tokens(
            [AddedToken(t, normalized=False) for t, k in zip(tokens, kinds, strict=False) if k == _USER_DEFINED]
        )
        self._template, self._bos, eos = value("chat_template"), value("ggml.bos_token_id"), value("ggml.eos_token_id")
        self.end = {eos, value("ggml.eot_token_id")} - {None}
        name = lambda i: tokens[i] if i is not None and i < len(tokens) else ""  # noqa: E731
        self._names = {"bos_token": name(self._bos), "eos_token": name(eos)}
        self._path, self._add_bos = path, bool(value("ggml.add_bos_token", False))

    def encode(self, text: str) -> list[int]:
        """Tokens; control tokens that are written out in the text count as such."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [int(self._bos), *ids] if self._add_bos and self._bos is not None else ids

    def decode(self, ids: Any) -> str:
        return self._tokenizer.decode(list(map(int, ids)), skip_special_tokens=True)

    def chat(self, message: str, system: str | None = None) -> str:
        """A user's message in the model's chat template, up to where the answer begins; itself if there is none."""
        if not self._template:
            return message
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": message})
        try:
            template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(self._template)
            return template.render(messages=messages, add_generation_prompt=True, **self._names)
        except TemplateError as error:
            raise ValueError(f"{self._path}: its chat template: {error}; --plain does without") from error

    def stream(self) -> Callable[[int], str]:
        """A function from each new token to the text that it completes."""
        ids: list[int] = []

        def add(token: int) -> str:
            ids.append(token)
            text = self.decode(ids)
            if text.endswith("\ufffd") and len(ids) < 4:  # part of a character, which has four bytes at most
                return ""
            ids.clear()
            return text

        return add


def batches(tokens: Any, length: int, count: int, rng: Any) -> Iterator[Any]:
    """Random stretches [count, length + 1] of a text."""
    import numpy as np

    tokens = np.asarray(tokens, np.int32)
    while True:
        first = rng.integers(0, len(tokens) - length - 1, count)
        yield np.stack([tokens[i : i + length + 1] for i in first])
