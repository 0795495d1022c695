"""The tokenizer: byte-level BPE on our corpus, with the special tokens of Qwen3.5."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from tools.demo_model.conversations import Chat, draw_chat

VOCABULARY_SIZE: Final = 1536
SPECIAL_TOKENS: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
ADDED_TOKENS: Final = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
QWEN_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The word split of Qwen2. transformers replaces any other split by it."""

ANSWER_WEIGHT: Final = 1.0
CONTEXT_WEIGHT: Final = 0.05


def train_tokenizer(seed: int, chats: int = 6000) -> Tokenizer:
    """Return a BPE tokenizer of VOCABULARY_SIZE entries, trained on `chats` chats."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    random = Random(seed)
    texts = ("\n".join(message.text for message in draw_chat(random)) for _ in range(chats))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(ADDED_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ADDED_TOKENS])
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the number of each special token."""
    vocabulary = tokenizer.get_vocab()
    return {token: vocabulary[token] for token in SPECIAL_TOKENS}


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer saved in `folder`."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@dataclass(frozen=True)
class TokenRow:
    """Token numbers of a chat; `weights[i]` is the weight of token i in the loss."""

    tokens: list[int]
    weights: list[float]


def encode_chat(tokenizer: Tokenizer, chat: Chat, end_weight: float = ANSWER_WEIGHT) -> TokenRow:
    """Return the tokens of a chat as the chat template renders it; context has a small weight.

    The last two tokens of an answer, its last mark and the end, have `end_weight`.
    """
    tokens: list[int] = []
    weights: list[float] = []
    for message in chat:
        is_answer = message.role == "assistant"
        parts: Iterable[tuple[str, bool]] = (
            (f"<|im_start|>{message.role}\n", False),
            (f"{message.text}<|im_end|>", is_answer),
            ("\n", False),
        )
        for text, is_weighted in parts:
            encoded = tokenizer.encode(text).ids
            tokens += encoded
            weights += [ANSWER_WEIGHT if is_weighted else CONTEXT_WEIGHT] * len(encoded)
            if is_weighted:
                weights[-2:] = [end_weight] * 2
    return TokenRow(tokens, weights)
