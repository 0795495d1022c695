"""Tokenizer: from messages to tokens, and from tokens to text, for one checkpoint.

It tokenizes the rendered chat template, and runs the picture processor, in the caller's thread
and without MLX arrays.

Control tokens are left out of an answer, except those that mark tool calls for a request with tools
(Mistral's `[TOOL_CALLS]`): the parser of tool calls needs them in the text.
"""

import logging
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from itertools import chain, groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from mlx_vlm.utils import prepare_inputs
from PIL import Image
from transformers.convert_slow_tokenizer import bytes_to_unicode

from workers.engine.text.chat_template import ChatTemplate, common_length, split_pieces
from workers.engine.text.detokenizer import TextStream
from workers.engine.text.long_text import PIECE_CHARS, chars_beyond, in_turn
from workers.engine.text.reasoning import Reasoning, detect_reasoning
from workers.engine.types import Generation, InvalidGeneration, Picture, Prompt

logger = logging.getLogger(__name__)
MIN_PREFIX_TOKENS = 32
"""Reading fewer tokens again costs less than caching them."""
_CLOSING_TOKENS = 4
_COUNTED_CONTEXTS = 8
"""A client may count the tokens of a conversation that it must shorten."""

_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Length of the shared beginning of a prompt, and its key in the prefix cache."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """Token ids of a prompt, and the picture processor's arrays if it has pictures."""

    tokens: tuple[int, ...]
    prefix: Prefix | None = None
    media: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    scope: str | None = None
    """Prompts of the same scope share nodes of the prefix cache; None: they use no cache."""
    turn_tokens: int = 0
    """Length up to the end of the last message; 0 if unknown."""
    turn_key: str = ""
    """Key of the prompt up to there; empty without one."""
    closing: tuple[int, ...] = ()
    """Tokens that end a message, the first of them a control token; empty if unknown."""
    continues: bool = False
    """Whether the next prompt of the chat begins with this one and its answer."""
    identity: npt.NDArray[np.int64] = field(
        default_factory=lambda: np.empty(0, np.int64), compare=False
    )
    """The tokens as the prefix cache compares them: those of a picture are a digest of it."""

    def __post_init__(self) -> None:
        if len(self.identity) != len(self.tokens):
            object.__setattr__(self, "identity", np.array(self.tokens, np.int64))

    def check(self, context_tokens: int, vocabulary: int) -> None:
        """Raise `InvalidGeneration` if no engine with this model can read the prompt."""
        count = len(self.tokens)
        if not count:
            raise InvalidGeneration("messages", "The prompt is empty.")
        if count >= context_tokens:
            raise _too_long(context_tokens, count)
        if max(self.tokens) >= vocabulary:
            raise InvalidGeneration(
                "messages", f"Token {max(self.tokens)} of the prompt is not in the vocabulary."
            )


class PromptRenderer(ChatTemplate):
    """Renderer and tokenizer of prompts for one checkpoint; safe to call from any thread."""

    def __init__(self, processor: Any, context_tokens: int = 1 << 20) -> None:
        super().__init__(processor)
        self._processor = processor
        self._context_tokens = context_tokens
        self.reasoning_format = detect_reasoning(self._tokenizer, self._template)
        """None if the model does not reason."""

    @property
    def has_vision(self) -> bool:
        """Return whether the checkpoint has a picture processor."""
        return getattr(self._processor, "image_processor", None) is not None

    async def read(self, generation: Generation, context_tokens: int) -> PreparedPrompt:
        """Prepare the prompt of a generation; long texts wait for each other."""
        prompt, limit = generation.prompt, generation.prompt_limit
        if limit is not None and limit < 0:  # leave room for one token of the answer
            limit = context_tokens - 1
        return await in_turn(len(prompt.text), lambda: self.prepare(prompt, limit))

    def prepare(self, prompt: Prompt, limit: int | None = None) -> PreparedPrompt:
        """Tokenize a rendered prompt and process its pictures.

        `limit` leaves out the beginning of a prompt with more tokens, unless it has pictures. Raise
        `InvalidGeneration` without it for a text that is far beyond the context.
        """
        if limit is None or prompt.pictures:
            self._check_length(prompt.text, self._context_tokens)
            return self._prepare(prompt)
        cut = self._end(prompt.text, limit)
        if len(cut) < len(prompt.text):
            prompt = replace(prompt, text=cut, prefix_text="", turn_end=0)
        prepared = self._prepare(prompt)
        excess = len(prepared.tokens) - limit
        return PreparedPrompt(tokens=prepared.tokens[excess:]) if excess > 0 else prepared

    def _prepare(self, prompt: Prompt) -> PreparedPrompt:
        if not prompt.pictures:
            return self._prepared(prompt, prompt.tokens or self._tokenize(prompt.text))
        if not self.has_vision:
            raise InvalidGeneration("messages", "This model does not support pictures.")
        try:
            images = [
                Image.frombytes("RGB", (picture.width_px, picture.height_px), picture.rgb)
                for picture in prompt.pictures
            ]
            inputs = prepare_inputs(self._processor, images=images, prompts=[prompt.text])
        except ValueError as error:
            # mlx-vlm wraps every error of its processors in a ValueError; only a ValueError within
            # concerns the inputs.
            if not isinstance(error.__context__ or error, ValueError):
                raise
            logger.warning("request.pictures_rejected", exc_info=error)
            raise InvalidGeneration(
                "messages", "The model's picture processor rejects these pictures and messages."
            ) from error
        media = {name: np.array(value) for name, value in inputs.items() if hasattr(value, "shape")}
        tokens = tuple(media.pop("input_ids")[0].tolist())
        media.pop("attention_mask", None)
        prepared = replace(self._prepared(prompt, tokens), media=media)
        identity = self._identity(prompt.pictures, tokens)
        if identity is None:
            return replace(prepared, scope=None)
        return replace(prepared, identity=identity)

    def _prepared(self, prompt: Prompt, tokens: tuple[int, ...]) -> PreparedPrompt:
        turn_tokens = self._turn_tokens(prompt, tokens)
        last = tokens[max(turn_tokens - _CLOSING_TOKENS, 0) : turn_tokens]
        control = [at for at, token in enumerate(last) if token in self._added]
        return PreparedPrompt(
            tokens=tokens,
            prefix=self._prefix(prompt, tokens),
            scope=prompt.scope,
            turn_tokens=turn_tokens,
            closing=last[control[-1] :] if control else (),
            turn_key=prompt.turn_key,
            continues=prompt.continues,
        )

    def count(self, prompt: Prompt) -> int:
        """Return the number of tokens of a prompt, pictures included, also beyond the context."""
        self._check_length(prompt.text, self._context_tokens * _COUNTED_CONTEXTS)
        return len(self._prepare(prompt).tokens)

    def tokenize_completion(self, text: str, limit: int | None = None) -> tuple[int, ...]:
        """Return the tokens of a text to complete, behind the begin token of the model, if any.

        The templates of chats write that token themselves. With a `limit`, tokens before the last
        `limit` ones may be missing; -1 is that of the context. Raise `InvalidGeneration` without
        it for a text that is far beyond the context.
        """
        if limit is None:
            self._check_length(text, self._context_tokens)
        else:
            text = self._end(text, self._context_tokens if limit < 0 else limit)
        tokens, begin = self._tokenize(text), self._begin_token
        return tokens if begin is None or tokens[:1] == (begin,) else (begin, *tokens)

    @cached_property
    def _begin_token(self) -> int | None:
        """The token that the tokenizer puts before a text."""
        begin = getattr(self._tokenizer, "bos_token_id", None)
        tokens = self._tokenizer("a", add_special_tokens=True)["input_ids"]
        return int(begin) if begin is not None and tokens[:1] == [begin] else None

    def _tokenize(self, text: str) -> tuple[int, ...]:
        pieces = (self._tokenizer(one, add_special_tokens=False) for one in split_pieces(text))
        return tuple(chain.from_iterable(piece["input_ids"] for piece in pieces))

    def _check_length(self, text: str, limit: int) -> None:
        """Raise `InvalidGeneration` if a text certainly has more than `limit` tokens."""
        if beyond := chars_beyond(text, limit, self._count):
            count = beyond.tokens * len(text) // beyond.chars
            raise _too_long(self._context_tokens, count)

    def _end(self, text: str, limit: int) -> str:
        """Return the end of a text with its last `limit` tokens, and some before them.

        It begins before a space, where tokenizers begin a token, unless none is near.
        """
        beyond = chars_beyond(text, limit, self._count, from_end=True)
        if beyond is None:
            return text
        begin = len(text) - beyond.chars
        space = text.rfind(" ", max(begin - PIECE_CHARS, 0), begin)
        return text[begin if space < 0 else space :]

    def _count(self, piece: str) -> int:
        return len(self._tokenize(piece))

    def _prefix(self, prompt: Prompt, tokens: tuple[int, ...]) -> Prefix | None:
        """Return the shared beginning in tokens, which may end before its text does.

        The last characters of the text may share a token with the text after it. At least one token
        of the prompt is left to read, since the first token of the answer needs its scores.
        """
        if not prompt.prefix_text:
            return None
        shared = common_length(self._tokenize(prompt.prefix_text), tokens[:-1])
        if shared < MIN_PREFIX_TOKENS:
            return None
        digest = blake2b(array("q", tokens[:shared]).tobytes(), digest_size=16).hexdigest()
        return Prefix(key=prompt.prefix_key or digest, tokens=shared)

    def _identity(
        self, pictures: Sequence[Picture], tokens: tuple[int, ...]
    ) -> npt.NDArray[np.int64] | None:
        """Replace the tokens of each picture by a digest of its pixels; None if none are found.

        A processor that writes several runs of tokens for a picture does not say which: each gets
        the digest of all pictures.
        """
        identity = np.array(tokens, np.int64)
        at = np.flatnonzero(identity == getattr(self._processor, "image_token_id", None))
        if not at.size:
            return None
        runs = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
        digests = [_picture_digest([picture]) for picture in pictures]
        if len(runs) != len(digests):
            digests = [_picture_digest(pictures)] * len(runs)
        for run, digest in zip(runs, digests, strict=True):
            identity[run] = np.resize(digest, len(run))
        return identity

    def _turn_tokens(self, prompt: Prompt, tokens: tuple[int, ...]) -> int:
        """Return the number of tokens up to the end of the last message.

        A token that the end cuts in two is left out, and one token of the prompt is left to read.
        """
        if not prompt.turn_end:
            return 0
        rest = self._tokenize(prompt.text[prompt.turn_end :])
        end = len(tokens) - max(len(rest), 1)
        return max(end if tokens[end:] == rest or not rest else end - 1, 0)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without control tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def spell(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, control tokens too."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def stream(self, generation: Generation) -> TextStream:
        """Return an empty text stream for one answer."""
        decode = self._decode_with_calls if generation.keep_call_tokens else self.decode
        split = generation.split_reasoning and self.reasoning_format is not None
        return TextStream(decode, generation.stop, strip=split)

    def reasoning(self, generation: Generation, prompt: Sequence[int]) -> Reasoning | None:
        """Return the state of one answer's reasoning, if it is to be apart from the text."""
        if not generation.split_reasoning or self.reasoning_format is None:
            return None
        marks = generation.call_marks or ()
        calls = [index for index, token in self._added.items() if token.content in marks[:1]]
        state = self.reasoning_format.begin(
            prompt,
            generation.thinking_budget,
            constrained=generation.constraint is not None,
            call_mark=next(iter(calls), None),
        )
        return Reasoning(state, TextStream(self.decode, strip=True))

    def _decode_with_calls(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including the control tokens of tool calls."""
        marks, texts = self._call_tokens, []
        for marked, group in groupby(tokens, marks.__contains__):
            run = list(group)
            texts.append("".join(marks[token] for token in run) if marked else self.decode(run))
        return "".join(texts)

    @cached_property
    def _call_tokens(self) -> dict[int, str]:
        """Return the special tokens of the format of tool calls, by id."""
        known = self.tool_format
        return {
            index: token.content
            for index, token in self._added.items()
            if known is not None and token.special and known.has_mark(token.content)
        }

    def raw(self, token: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character."""
        return token_bytes(self._tokenizer, token)


def _too_long(context_tokens: int, count: int) -> InvalidGeneration:
    # In OpenAI's words, by which clients know that they must shorten a conversation.
    return InvalidGeneration(
        "messages",
        f"This model's maximum context length is {context_tokens} tokens. However, your messages "
        f"resulted in {count} tokens. Please reduce the length of the messages. "
        "(context_length_exceeded)",
        code="context_length_exceeded",
    )


def _picture_digest(pictures: Sequence[Picture]) -> npt.NDArray[np.int64]:
    """Return a digest as negative numbers, which are no tokens."""
    digest = blake2b(digest_size=32)
    for picture in pictures:
        digest.update(f"{picture.width_px}x{picture.height_px}:".encode())
        digest.update(picture.rgb)
    return np.frombuffer(digest.digest(), np.int64) | np.iinfo(np.int64).min


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of a token, or those of its text if the spelling has an unknown encoding.

    No tokenizer declares the encoding of its vocabulary, so this tries them: a letter for a byte
    (BPE on bytes), or a mark for a space and `<0xE2>` for a byte (SentencePiece).
    """
    text = str(tokenizer.decode([token]))
    spelled = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(spelled, str) or spelled == text:
        return text.encode()
    if all(letter in _BYTES for letter in spelled):
        raw = bytes(_BYTES[letter] for letter in spelled)
        if _equal_stripped(raw.decode(errors="replace"), text):
            return raw
    if fallback := _FALLBACK.fullmatch(spelled):
        return bytes.fromhex(fallback[1])
    spaced = spelled.replace(_SPACE, " ")
    return (spaced if _equal_stripped(spaced, text) else text).encode()


def _equal_stripped(spelled: str, text: str) -> bool:
    """Compare two texts without leading spaces, which many tokenizers omit."""
    return spelled.lstrip(" ") == text.lstrip(" ")
