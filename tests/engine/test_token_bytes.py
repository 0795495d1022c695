"""Every token tells its own bytes, whatever alphabet its vocabulary is written in."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from workers.engine.model import Checkpoint
from workers.engine.tokenizer import PromptRenderer, token_bytes
from workers.engine.types import Prompt, ScoredToken

TEXT = "Gr\u00fc\u00dfe \U0001f642,  \u65e5\u672c <0xE2> ok\n"


def test_bytes_of_a_byte_level_vocabulary_join_to_the_text(prompts: PromptRenderer) -> None:
    tokens = prompts.prepare(Prompt(text=TEXT)).tokens
    pieces = [prompts.raw(token) for token in tokens]
    assert b"".join(pieces).decode() == TEXT
    assert bytes([0xF0]) in {piece[:1] for piece in pieces}


def test_bytes_and_spelling_of_every_token_agree(
    prompts: PromptRenderer, checkpoint: Checkpoint
) -> None:
    for token in range(checkpoint.vocabulary):
        assert prompts.raw(token).decode(errors="replace") == prompts.spell(token)


def test_bytes_of_a_sentencepiece_vocabulary_join_to_the_text() -> None:
    """As Llama 2 has it: a mark for a space, and a token for each byte of a rare character."""
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"Grue", "\u2581G"]
    tokenizer = Tokenizer(
        models.BPE(
            {letter: at for at, letter in enumerate(letters)},
            [("\u2581", "G")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    text = "Gr\u00fc  Gru\U0001f642e"
    tokens = whole(text, add_special_tokens=False)["input_ids"]
    assert b"".join(token_bytes(whole, token) for token in tokens).decode() == text


@pytest.mark.parametrize(
    ("raw", "text"),
    [(b" fox", " fox"), (b"\xf0\x9f", "\\xf0\\x9f"), (b" \xe2", " \\xe2"), (b"", "")],
)
def test_a_token_that_is_no_text_is_readable_and_told_from_others(raw: bytes, text: str) -> None:
    assert ScoredToken(token_id=1, raw=raw, logprob=0.0).text == text
