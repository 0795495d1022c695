"""Tokenizer: from messages to tokens, and from tokens to text, for one checkpoint.

It renders the chat template, tokenizes, and runs the picture processor, in the caller's thread and
without MLX arrays.

Text of a client may spell a control token: a tokenizer turns `<|im_end|>` into the token that ends
a message wherever it occurs, so that a client could write the system message, or a picture's
placeholder without a picture, which breaks a model. Such a spelling is split before the template is
rendered, and its parts are tokenized apart: the model reads the same characters, and no control
token.

Control tokens are left out of an answer, except those that mark tool calls for a request with tools
(Mistral's `[TOOL_CALLS]`): the parser of tool calls needs them in the text.
"""

from __future__ import annotations

import inspect
import json
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
import numpy.typing as npt
from mlx_vlm.tools import SPECS, load_tool_module
from mlx_vlm.utils import prepare_inputs
from PIL import Image
from transformers.convert_slow_tokenizer import bytes_to_unicode

from workers.engine.detokenizer import TextStream
from workers.engine.reasoning import (
    Reasoning,
    detect_reasoning,
    effort_variables,
    template_variables,
)
from workers.engine.types import Generation, InvalidGeneration, Picture, Prompt

logger = logging.getLogger(__name__)
TEMPLATE_PICTURE_TYPES = frozenset({"image_url", "input_image", "image"})

# Placeholders that mlx-vlm's processors replace by a picture's tokens wherever they occur: they are
# no token of any model, but in a message they would become a picture that does not exist.
_PICTURE_PLACEHOLDERS = frozenset(
    f"<|{name}placeholder|>" for name in ("", "image_", "video_", "audio_", "minimax_m3_image_")
)
_MAX_TEMPLATE_VARIABLES = 64
MIN_PREFIX_TOKENS = 32
"""Reading fewer tokens again costs less than caching them."""

# A code point that Unicode reserves as a non-character, so that no text contains it.
_SEPARATOR = "\ufdd0"

_MISTRAL_CALL_ID = re.compile("[a-zA-Z0-9]{9}")

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
    """Prompts of the same scope share what the prefix cache holds; None: it holds nothing."""
    turn_tokens: int = 0
    """Length up to the end of the last message; 0 if unknown."""
    turn_key: str = ""
    """Key of the prompt up to there; empty without one."""
    continues: bool = False
    """Whether the next prompt of the chat begins with this one and its answer."""
    identity: npt.NDArray[np.int64] = field(
        default_factory=lambda: np.empty(0, np.int64), compare=False
    )
    """The tokens as the prefix cache compares them: those of a picture are a digest of it."""

    def __post_init__(self) -> None:
        if len(self.identity) != len(self.tokens):
            object.__setattr__(self, "identity", np.array(self.tokens, np.int64))


class PromptRenderer:
    """Renderer and tokenizer of prompts for one checkpoint; safe to call from any thread."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self._control = ControlTokenEscaper(_control_spellings(self._tokenizer))
        has_template = getattr(processor, "chat_template", None)
        self._templated = processor if has_template else self._tokenizer
        self._continues: dict[str, bool] = {}
        """Result of `continues` by the template's variables."""
        self._reasoning_format = detect_reasoning(self._tokenizer, self._template)

    @property
    def has_vision(self) -> bool:
        """Return whether the checkpoint has a picture processor."""
        return getattr(self._processor, "image_processor", None) is not None

    @property
    def tool_parser_name(self) -> str | None:
        """Return the name of mlx-vlm's parser for this template's tool calls, if it has one."""
        matching = [spec for spec in SPECS if spec.matches(self._template)]
        return str(max(matching, key=lambda spec: spec.priority).name) if matching else None

    @property
    def _template(self) -> str:
        template = getattr(self._templated, "chat_template", None)
        if isinstance(template, Mapping):  # several by name: one of them renders tools
            template = template.get("tool_use") or template.get("default")
        return template or ""

    def template_variables(self, given: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
        """Return the variables by which the template knows a reasoning effort, and those given.

        Names that the template does not read are left out: they change nothing, and may be
        arguments of the function that renders it.
        """
        efforts = effort_variables(self._template, effort) if effort else {}
        return {
            name: self._control.split(value)
            for name, value in {**efforts, **given}.items()
            if value is not None and name in template_variables(self._template)
        }

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages by the checkpoint's chat template, up to the assistant's answer.

        Only the template writes control tokens; their spelling in a message stays text.
        """
        if not getattr(self._templated, "chat_template", None):
            raise InvalidGeneration(
                "messages", "This model has no chat template; use /v1/completions."
            )
        # Thinking takes seconds, so a request has to enable it.
        arguments = {"enable_thinking": False, **(template_kwargs or {})}
        plain = [_for_template(message) for message in messages]
        if tools and "tools" in template_variables(self._template):
            arguments["tools"] = self._control.split([_tool_for_template(tool) for tool in tools])
        elif tools:
            plain = _describe_tools(tools, plain)
        if self.tool_parser_name == "mistral":
            plain = [_with_short_ids(message) for message in plain]
        try:
            rendered = self._templated.apply_chat_template(
                self._control.split(plain),
                tokenize=False,
                add_generation_prompt=True,
                **arguments,
            )
        except RecursionError as error:
            raise InvalidGeneration(
                "messages",
                "These messages or tools are nested too deeply for the model's chat template.",
            ) from error
        except Exception as error:  # a template adds, indexes and calls what a client has sent
            logger.info("template.rejected", exc_info=error)
            reason = f": {error}" if isinstance(error, jinja2.TemplateError) else "."
            raise InvalidGeneration(
                "messages", f"The model's chat template rejects these messages{reason}"
            ) from error
        return str(rendered)

    def shared_prefix(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text with which every prompt with these system messages and tools begins.

        Two renderings with different user texts agree exactly up to there, with any template
        (vllm-mlx #714 does the same). Empty without system messages and tools, and with a picture
        in a system message: its tokens are those of any other picture.
        """
        leading = list(takewhile(lambda message: message["role"] == "system", messages))
        pictured = any(isinstance(message.get("content"), list) for message in leading)
        if pictured or not (leading or tools):
            return ""
        first, second = (
            self.chat([*leading, {"role": "user", "content": text}], tools, template_kwargs)
            for text in ("Alpha", "Bravo")
        )
        return first[: _common_length(first, second)]

    def turn_end(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Return the length of the rendered `text` up to the end of the last message.

        A rendering with a further turn agrees up to there, with any template. One that demands
        alternating roles gets an answer first; the next prompt of the chat then agrees as far.
        """
        answer, question = ({"role": role, "content": "Alpha"} for role in ("assistant", "user"))
        for further in ([question], [answer, question]):
            try:
                longer = self.chat([*messages, *further], tools, template_kwargs)
            except InvalidGeneration:
                continue
            return _common_length(text, longer)
        return 0

    def continues(self, template_kwargs: Mapping[str, Any] | None = None) -> bool:
        """Return whether the next prompt of a chat begins with this one and its answer.

        It does not where a template leaves out the reasoning of earlier answers, for example.
        """
        key = repr(template_kwargs or {})
        if key not in self._continues:
            question, answer = (
                {"role": role, "content": "Alpha"} for role in ("user", "assistant")
            )
            try:
                first = self.chat([question], None, template_kwargs)
                second = self.chat([question, answer, question], None, template_kwargs)
                known = second.startswith(f"{first}Alpha")
            except InvalidGeneration:
                known = False
            if len(self._continues) >= _MAX_TEMPLATE_VARIABLES:
                self._continues.clear()
            self._continues[key] = known
        return self._continues[key]

    def prepare(self, prompt: Prompt) -> PreparedPrompt:
        """Tokenize a rendered prompt and process its pictures."""
        if not prompt.pictures:
            tokens = prompt.tokens or self._tokenize(prompt.text)
            return PreparedPrompt(
                tokens=tokens,
                prefix=self._prefix(prompt, tokens),
                scope=prompt.scope,
                turn_tokens=self._turn_tokens(prompt, tokens),
                turn_key=prompt.turn_key,
                continues=prompt.continues,
            )
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
        arrays = {
            name: np.array(value) for name, value in inputs.items() if hasattr(value, "shape")
        }
        tokens = tuple(arrays.pop("input_ids")[0].tolist())
        arrays.pop("attention_mask", None)
        identity = self._identity(prompt.pictures, tokens)
        return PreparedPrompt(
            tokens=tokens,
            media=arrays,
            prefix=self._prefix(prompt, tokens),
            scope=None if identity is None else prompt.scope,
            turn_tokens=self._turn_tokens(prompt, tokens),
            turn_key=prompt.turn_key,
            continues=prompt.continues,
            identity=np.array(tokens, np.int64) if identity is None else identity,
        )

    def count(self, prompt: Prompt) -> int:
        """Return the number of tokens of a prompt, pictures included."""
        return len(self.prepare(prompt).tokens)

    def tokenize_completion(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text to complete, behind the begin token of the model, if any.

        The templates of chats write that token themselves.
        """
        tokens, begin = self._tokenize(text), self._begin_token
        return tokens if begin is None or tokens[:1] == (begin,) else (begin, *tokens)

    @cached_property
    def _begin_token(self) -> int | None:
        """The token that the tokenizer puts before a text."""
        begin = getattr(self._tokenizer, "bos_token_id", None)
        tokens = self._tokenizer("a", add_special_tokens=True)["input_ids"]
        return int(begin) if begin is not None and tokens[:1] == [begin] else None

    def _tokenize(self, text: str) -> tuple[int, ...]:
        tokens: list[int] = []
        for piece in split_pieces(text):
            tokens += self._tokenizer(piece, add_special_tokens=False)["input_ids"]
        return tuple(tokens)

    def _prefix(self, prompt: Prompt, tokens: tuple[int, ...]) -> Prefix | None:
        """Return the shared beginning in tokens, which may end before its text does.

        The last characters of the text may share a token with the text after it. At least one token
        of the prompt is left to read, since the first token of the answer needs its scores.
        """
        if not prompt.prefix_text:
            return None
        shared = _common_length(self._tokenize(prompt.prefix_text), tokens[:-1])
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
        split = generation.split_reasoning and self._reasoning_format is not None
        return TextStream(decode, generation.stop, strip=split)

    def reasoning(self, generation: Generation, prompt: Sequence[int]) -> Reasoning | None:
        """Return the state of one answer's reasoning, if it is to be apart from the text."""
        if not generation.split_reasoning or self._reasoning_format is None:
            return None
        marks = generation.call_marks or ()
        added = self._tokenizer.added_tokens_decoder.items()
        calls = [index for index, token in added if token.content in marks[:1]]
        state = self._reasoning_format.begin(
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
        """Return the special tokens that mlx-vlm's parser of tool calls looks for, by id.

        A parser declares the tokens that open and close a call. Tokens within a call, such as
        `[ARGS]`, occur only in its expressions, so its source is searched.
        """
        if self.tool_parser_name is None:
            return {}
        source = inspect.getsource(load_tool_module(self.tool_parser_name))
        return {
            index: token.content
            for index, token in self._tokenizer.added_tokens_decoder.items()
            if token.special and (token.content in source or re.escape(token.content) in source)
        }

    def raw(self, token: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character."""
        return token_bytes(self._tokenizer, token)


def _picture_digest(pictures: Sequence[Picture]) -> npt.NDArray[np.int64]:
    """Return a digest as negative numbers, which are no tokens."""
    digest = blake2b(digest_size=32)
    for picture in pictures:
        digest.update(f"{picture.width_px}x{picture.height_px}:".encode())
        digest.update(picture.rgb)
    return np.frombuffer(digest.digest(), np.int64) | np.iinfo(np.int64).min


def _control_spellings(tokenizer: Any) -> set[str]:
    """Return the tokenizer's special tokens, named or not, and the processors' placeholders."""
    added = tokenizer.added_tokens_decoder.values()
    special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    return special | _PICTURE_PLACEHOLDERS


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in the form that templates support: pictures become bare markers."""
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


def _tool_for_template(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the fields that OpenAI's clients may leave out and templates read."""
    function = {name: value for name, value in tool["function"].items() if value is not None}
    parameters = dict(function.get("parameters", ()))
    parameters.setdefault("type", "object")
    parameters.setdefault("properties", {})
    function.setdefault("description", "")
    return {**tool, "function": {**function, "parameters": parameters}}


def _describe_tools(
    tools: Sequence[Mapping[str, Any]], messages: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Describe tools in the system message, for a template that renders none."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = f"You can use these functions:\n{functions}"
    leading = messages[0] if messages and messages[0]["role"] == "system" else None
    if leading is None:
        return [{"role": "system", "content": text}, *messages]
    content = leading["content"]
    if isinstance(content, str):
        content = f"{content}\n\n{text}"
    else:
        content = [*content, {"type": "text", "text": text}]
    return [{**leading, "content": content}, *messages[1:]]


def _with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with ids of tool calls as Mistral's templates require them."""
    short = dict(message)
    if "tool_call_id" in short:
        short["tool_call_id"] = _short_id(short["tool_call_id"])
    if "tool_calls" in short:
        short["tool_calls"] = [
            {**call, "id": _short_id(call["id"])} if call.get("id") else call
            for call in short["tool_calls"]
        ]
    return short


def _short_id(given: str) -> str:
    """Return nine letters and digits for an id of a tool call; vLLM shortens ids alike."""
    if _MISTRAL_CALL_ID.fullmatch(given):
        return given
    return blake2b(given.encode(), digest_size=5).hexdigest()[:9]


def _common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the number of leading items that two sequences have in common."""
    pairs = zip(first, second, strict=False)
    return next(
        (at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second))
    )


class ControlTokenEscaper:
    """Spellings of the control tokens of one tokenizer."""

    def __init__(self, spellings: Iterable[str]) -> None:
        known = sorted((spelling for spelling in spellings if len(spelling) > 1), reverse=True)
        self._any = re.compile("|".join(map(re.escape, known)) or "(?!)")

    def split(self, value: Any) -> Any:
        """Return the same texts, mappings and lists with every control token split in two."""
        if isinstance(value, str):
            return self._any.sub(_split_match, value.replace(_SEPARATOR, ""))
        if isinstance(value, Mapping):
            return {self.split(name): self.split(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.split(inner) for inner in value]
        return value


def split_pieces(text: str) -> list[str]:
    """Return the pieces of a text that are tokenized apart."""
    return text.split(_SEPARATOR)


def _split_match(spelled: re.Match[str]) -> str:
    return spelled[0][:1] + _SEPARATOR + spelled[0][1:]


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
