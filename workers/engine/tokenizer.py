"""From messages to tokens: the chat template, the tokenizer, the picture processor.

None of it touches the MLX thread: it runs in whatever thread the caller likes, and hands over
plain numbers.

Which special tokens calls of tools are written with: as text they are kept where those are read.

A special token is no text, and is left out of an answer. But some models open a call with one
(Mistral's `[TOOL_CALLS]`), and what reads calls out of a text must find it there.

What a person writes is text, also where it spells a control token of the model.

A tokenizer turns `<|im_end|>` into the token that ends a turn wherever it stands: whoever could
write it into a question could write the system message too, and a picture's placeholder without a
picture breaks a model. So such a spelling is parted before the template is rendered, and tokenized
part by part: the model reads the very characters, and no control token.

The bytes that a token stands for: many characters take several tokens, and no token is one.
"""

from __future__ import annotations

import inspect
import logging
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import groupby, takewhile
from typing import Any

import jinja2
import numpy as np
from mlx_vlm.tools import SPECS, load_tool_module
from mlx_vlm.utils import prepare_inputs
from PIL import Image
from transformers.convert_slow_tokenizer import bytes_to_unicode

from workers.engine.detokenizer import TextStream
from workers.engine.types import Generation, InvalidGeneration, Picture, Prompt


def call_tokens(tokenizer: Any, parser_name: str | None) -> dict[int, str]:
    """Return the special tokens that a parser of mlx-vlm looks for, by id.

    Each parser tells what opens and what closes a call. What stands between, such as `[ARGS]`, is
    in its expressions alone, so its source is searched.
    """
    if parser_name is None:
        return {}
    source = inspect.getsource(load_tool_module(parser_name))
    return {
        index: token.content
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special and (token.content in source or re.escape(token.content) in source)
    }


# A code point that Unicode keeps out of all text for good, so nobody's words hold it.
_SEPARATOR = "\ufdd0"


class ControlTokenEscaper:
    """The control tokens of one tokenizer, by their spelling."""

    def __init__(self, spellings: Iterable[str]) -> None:
        known = sorted((spelling for spelling in spellings if len(spelling) > 1), reverse=True)
        self._any = re.compile("|".join(map(re.escape, known)) or "(?!)")

    def split(self, value: Any) -> Any:
        """Return the same texts, mappings and lists with every control token parted in two."""
        if isinstance(value, str):
            return self._any.sub(_split_match, value.replace(_SEPARATOR, ""))
        if isinstance(value, Mapping):
            return {self.split(name): self.split(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.split(inner) for inner in value]
        return value


def split_pieces(text: str) -> list[str]:
    """Return what is to be tokenized one after the other."""
    return text.split(_SEPARATOR)


def _split_match(spelled: re.Match[str]) -> str:
    return spelled[0][:1] + _SEPARATOR + spelled[0][1:]


_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of a token; where its spelling tells none, those of its text.

    How a vocabulary is spelled is tried, since no tokenizer says it: letter for byte (BPE on
    bytes), or with a mark for a space and `<0xE2>` for a byte (SentencePiece).
    """
    text = str(tokenizer.decode([token]))
    spelled = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(spelled, str) or spelled == text:
        return text.encode()
    if all(letter in _BYTES for letter in spelled):
        raw = bytes(_BYTES[letter] for letter in spelled)
        if _alike(raw.decode(errors="replace"), text):
            return raw
    if fallback := _FALLBACK.fullmatch(spelled):
        return bytes.fromhex(fallback[1])
    spaced = spelled.replace(_SPACE, " ")
    return (spaced if _alike(spaced, text) else text).encode()


def _alike(spelled: str, text: str) -> bool:
    """Compare but for the spaces that many a tokenizer leaves out where a text begins."""
    return spelled.lstrip(" ") == text.lstrip(" ")


logger = logging.getLogger(__name__)
TEMPLATE_PICTURE_TYPES = frozenset({"image_url", "input_image", "image"})

# What mlx-vlm's processors write in the place of a picture's tokens, and then replace wherever it
# stands: no token of any model, but in a message it would become a picture that is not there.
_PROCESSOR_MARKS = frozenset(
    f"<|{name}placeholder|>" for name in ("", "image_", "video_", "audio_", "minimax_m3_image_")
)
SHORTEST_PREFIX_TOKENS = 32
"""Reading so few anew costs less than keeping what comes of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The first tokens of a prompt, which other prompts share, and the key they are kept under."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """Token ids, and the arrays of the picture processor where there are pictures."""

    tokens: tuple[int, ...]
    prefix: Prefix | None = None
    media: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)


class PromptRenderer:
    """Renders and tokenizes prompts for one checkpoint; safe to call from any thread."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self._control = ControlTokenEscaper(_control_spellings(self._tokenizer))
        has_template = getattr(processor, "chat_template", None)
        self._templated = processor if has_template else self._tokenizer

    @property
    def has_vision(self) -> bool:
        """Say whether the checkpoint has a picture processor."""
        return getattr(self._processor, "image_processor", None) is not None

    @property
    def tool_parser_name(self) -> str | None:
        """Name the parser of mlx-vlm that reads this template's tool calls; None if it has none."""
        template = getattr(self._templated, "chat_template", None)
        if isinstance(template, Mapping):  # several named ones: tools are rendered by their own
            template = template.get("tool_use") or template.get("default")
        matching = [spec for spec in SPECS if spec.matches(template or "")]
        return str(max(matching, key=lambda spec: spec.priority).name) if matching else None

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages by the checkpoint's chat template, ready for the assistant's turn.

        Only the template writes control tokens; what spells one in a message stays text.
        """
        if not getattr(self._templated, "chat_template", None):
            raise InvalidGeneration(
                "messages", "This model has no chat template; use /v1/completions."
            )
        # Thinking costs seconds and nobody asked for it; whoever does names it.
        arguments = {"enable_thinking": False, **(template_kwargs or {})}
        if tools:
            arguments["tools"] = self._control.split(tools)
        try:
            rendered = self._templated.apply_chat_template(
                [self._control.split(_for_template(message)) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                **arguments,
            )
        except RecursionError as error:
            raise InvalidGeneration("messages", "These messages are nested too deeply.") from error
        except jinja2.TemplateError as error:
            raise InvalidGeneration(
                "messages", f"The model's chat template refuses these messages: {error}"
            ) from error
        return str(rendered)

    def shared_prefix(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return what every prompt with these leading system messages and tools begins with.

        Two renderings with different user texts agree exactly up to there, whatever the template
        (vllm-mlx #714 does the same). Empty when nothing is shared on purpose.
        """
        leading = list(takewhile(lambda message: message["role"] == "system", messages))
        if not leading and not tools:
            return ""
        first, second = (
            self.chat([*leading, {"role": "user", "content": text}], tools, template_kwargs)
            for text in ("Alpha", "Bravo")
        )
        return first[: _agreement(first, second)]

    def prepare(self, prompt: Prompt) -> PreparedPrompt:
        """Tokenize a rendered prompt and process its pictures."""
        if not prompt.pictures:
            tokens = self._tokenize(prompt.text)
            return PreparedPrompt(tokens=tokens, prefix=self._prefix(prompt, tokens))
        if not self.has_vision:
            raise InvalidGeneration("messages", "This model cannot see pictures.")
        try:
            inputs = prepare_inputs(
                self._processor, images=[_image(p) for p in prompt.pictures], prompts=[prompt.text]
            )
        except ValueError as error:
            # mlx-vlm makes a ValueError of all that its processors raise; no other is about inputs.
            if not isinstance(error.__context__ or error, ValueError):
                raise
            logger.warning("pictures.refused", exc_info=error)
            raise InvalidGeneration(
                "messages", "The model's picture processor refuses these pictures and messages."
            ) from error
        arrays = {
            name: np.array(value) for name, value in inputs.items() if hasattr(value, "shape")
        }
        tokens = tuple(arrays.pop("input_ids")[0].tolist())
        arrays.pop("attention_mask", None)
        return PreparedPrompt(tokens=tokens, media=arrays, prefix=self._prefix(prompt, tokens))

    def _tokenize(self, text: str) -> tuple[int, ...]:
        tokens: list[int] = []
        for piece in split_pieces(text):
            tokens += self._tokenizer(piece, add_special_tokens=False)["input_ids"]
        return tuple(tokens)

    def _prefix(self, prompt: Prompt, tokens: tuple[int, ...]) -> Prefix | None:
        """Find where the shared beginning ends in tokens: the last ones may grow into what follows.

        One token of the prompt is always left to be read, since its scores are needed.
        """
        if not prompt.prefix_text:
            return None
        shared = _agreement(self._tokenize(prompt.prefix_text), tokens[:-1])
        if shared < SHORTEST_PREFIX_TOKENS:
            return None
        return Prefix(key=prompt.prefix_key or _digest(tokens[:shared]), tokens=shared)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without the control tokens of the template."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def stream(self, generation: Generation) -> TextStream:
        """Begin the text of one answer."""
        decode = self._decode_with_calls if generation.keep_call_tokens else self.decode
        return TextStream(decode, generation.stop)

    def _decode_with_calls(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, and the control tokens of calls as they are spelled."""
        marks, texts = self._call_tokens, []
        for marked, group in groupby(tokens, marks.__contains__):
            run = list(group)
            texts.append("".join(marks[token] for token in run) if marked else self.decode(run))
        return "".join(texts)

    @cached_property
    def _call_tokens(self) -> dict[int, str]:
        return call_tokens(self._tokenizer, self.tool_parser_name)

    def spell(self, token: int) -> str:
        """Return one token as it stands in the vocabulary, control tokens too."""
        return str(self._tokenizer.decode([token]))

    def raw(self, token: int) -> bytes:
        """Return the bytes of one token, of which several may make up a character."""
        return token_bytes(self._tokenizer, token)


def _control_spellings(tokenizer: Any) -> set[str]:
    """Collect all that the tokenizer calls special (not only the named ones), and marks."""
    added = tokenizer.added_tokens_decoder.values()
    special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    return special | _PROCESSOR_MARKS


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce a message to what templates know: pictures become bare markers."""
    plain = {name: value for name, value in message.items() if value is not None}
    content = plain.get("content", "")
    if isinstance(content, list):
        content = [
            {"type": "image"}
            if part["type"] in TEMPLATE_PICTURE_TYPES
            else {"type": "text", "text": part.get("text", "")}
            for part in content
        ]
        if all(part["type"] == "text" for part in content):
            content = "".join(part["text"] for part in content)
    return {**plain, "content": content}


def _agreement(first: Sequence[object], second: Sequence[object]) -> int:
    """Count the leading items that two sequences have in common."""
    pairs = zip(first, second, strict=False)
    return next(
        (at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second))
    )


def _digest(tokens: Sequence[int]) -> str:
    return blake2b(array("q", tokens).tobytes(), digest_size=16).hexdigest()


def _image(picture: Picture) -> Image.Image:
    return Image.frombytes("RGB", (picture.width_px, picture.height_px), picture.rgb)
