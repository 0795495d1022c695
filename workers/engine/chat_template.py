"""Chat template: from messages to the text of a prompt, for one checkpoint.

Text of a client may spell a control token: a tokenizer turns `<|im_end|>` into the token that ends
a message wherever it occurs, so that a client could write the system message, or a picture's
placeholder without a picture, which breaks a model. Such a spelling is split before the template is
rendered, and its parts are tokenized apart: the model reads the same characters, and no control
token.
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import jinja2

from workers.engine.reasoning import effort_variables, template_variables
from workers.engine.tool_formats import ToolFormat, detect_tool_format, write_calls
from workers.engine.types import InvalidGeneration

logger = logging.getLogger(__name__)

_PICTURE_TYPES = frozenset({"image_url", "input_image", "image"})
# Placeholders that mlx-vlm's processors replace by a picture's tokens wherever they occur: they are
# no token of any model, but in a message they would become a picture that does not exist.
_PICTURE_PLACEHOLDERS = frozenset(
    f"<|{name}placeholder|>" for name in ("", "image_", "video_", "audio_", "minimax_m3_image_")
)
_MAX_TEMPLATE_VARIABLES = 64
# A code point that Unicode reserves as a non-character, so that no text contains it.
_SEPARATOR = "\ufdd0"

_TOOLS_FIELD = re.compile(r"message(?:\.tools|\[['\"]tools['\"]\])")
"""Phi-4's template reads the tools from the system message."""
_MISTRAL_CALL_ID = re.compile("[a-zA-Z0-9]{9}")
_CALLED, _ARGUMENT, _RESULT = "Bravo", "Charlie", "Echo"


class ChatTemplate:
    """The chat template of one checkpoint; safe to call from any thread."""

    def __init__(self, processor: Any) -> None:
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self._control = ControlTokenEscaper(_control_spellings(self._tokenizer))
        has_template = getattr(processor, "chat_template", None)
        self._templated = processor if has_template else self._tokenizer
        self._continues: dict[str, bool] = {}
        """Result of `continues` by the template's variables."""

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The format of this template's tool calls; None if it shows none."""
        return detect_tool_format(self._template)

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
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Render messages by the checkpoint's chat template, up to the assistant's answer.

        Only the template writes control tokens; their spelling in a message stays text. Without a
        generation prompt the text ends behind the last message, or within it where the answer is
        to go on from there.
        """
        if not getattr(self._templated, "chat_template", None):
            raise InvalidGeneration(
                "messages", "This model has no chat template; use /v1/completions."
            )
        # Thinking takes seconds, so a request has to enable it.
        arguments = {"enable_thinking": False, **(template_kwargs or {})}
        plain = self._control.split([_for_template(message) for message in messages])
        if tools:
            plain = self._with_tools(tools, plain, arguments)
        if any(message["role"] == "tool" or message.get("tool_calls") for message in plain):
            plain = self._call_style.apply(plain, self.tool_format)
        plain = self._turn_style.apply(plain)
        if continue_final_message:
            arguments["continue_final_message"] = True
        try:
            rendered = self._templated.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=add_generation_prompt, **arguments
            )
        except RecursionError as error:
            raise InvalidGeneration(
                "messages",
                "These messages or tools are nested too deeply for the model's chat template.",
            ) from error
        except Exception as error:  # a template adds, indexes and calls what a client has sent
            logger.info("template.rejected", exc_info=error)
            if continue_final_message:
                raise InvalidGeneration(
                    "continue_final_message",
                    "The model's chat template cannot go on from the last message.",
                ) from error
            reason = f": {error}" if isinstance(error, jinja2.TemplateError) else "."
            raise InvalidGeneration(
                "messages", f"The model's chat template rejects these messages{reason}"
            ) from error
        return str(rendered)

    def _with_tools(
        self,
        tools: Sequence[Mapping[str, Any]],
        messages: list[dict[str, Any]],
        arguments: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """Give the tools to the template: to its variable, to its field, or in a message."""
        known = self._control.split([_tool_for_template(tool) for tool in tools])
        if "tools" in template_variables(self._template):
            arguments["tools"] = known
            return messages
        listed = [tool["function"] for tool in self._control.split(tools)]
        if _TOOLS_FIELD.search(self._template):
            return _with_system(messages, "", tools=json.dumps(listed, ensure_ascii=False))
        lines = [json.dumps(function, ensure_ascii=False) for function in listed]
        text = "\n".join(["You can use these functions:", *lines])
        if self._call_example:
            text += f"\nTo use them, write:\n{self._call_example}"
        if self._takes_system:
            return _with_system(messages, text)
        first = messages[0]
        return [{**first, "content": _joined([text, first["content"]])}, *messages[1:]]

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the template takes system messages."""
        chat = [{"role": role, "content": _RESULT} for role in ("system", "user")]
        return self._try_render(chat).count(_RESULT) == len(chat)

    @cached_property
    def _turn_style(self) -> TurnStyle:
        """Which messages the template takes one after another."""
        user = {"role": "user", "content": "Alpha"}
        if "Alpha" not in self._try_render([user]):
            return TurnStyle()
        calls = self._render_call(self._call_style)
        return TurnStyle(
            system=self._takes_system,
            users=self._try_render([user, user]).count("Alpha") > 1,
            user_after_result=not calls or bool(self._render_call(self._call_style, [user])),
            parallel_calls=not calls or bool(self._render_call(self._call_style, calls=2)),
        )

    @cached_property
    def _call_style(self) -> CallStyle:
        """How the template takes calls and results: the first way in which it renders both."""
        rendered = {
            style: self._render_call(style)
            for style in (CallStyle(), CallStyle(json_arguments=True))
        }
        shown = [
            style
            for style, text in rendered.items()
            if _CALLED in text and _ARGUMENT in text and f'\\"{_ARGUMENT}' not in text
        ]
        # Python writes a mapping in these quotes where a template expects JSON text.
        as_json = (style for style in shown if f"'{_ARGUMENT}'" not in rendered[style])
        style = next(as_json, shown[0] if shown else CallStyle(in_text=True))
        texts = [rendered[style]] if shown else rendered.values()
        return replace(
            style,
            results_in_text=not any(_RESULT in text for text in texts),
            short_ids=self.tool_format is not None and self.tool_format.short_ids,
        )

    @cached_property
    def _call_example(self) -> str:
        """A call as the model writes it, for a template that describes no tools; or nothing."""
        known = self.tool_format
        if known is None or not known.end:
            return ""
        rendered = self._render_call(self._call_style)
        begin, end = rendered.rfind(known.begin), rendered.rfind(known.end)
        return rendered[begin : end + len(known.end)] if 0 <= begin < end else ""

    def _render_call(
        self, style: CallStyle, further: Sequence[dict[str, Any]] = (), calls: int = 1
    ) -> str:
        """Return the rendering of a chat with calls and results; empty if it is rejected."""
        call = {"name": _CALLED, "arguments": {_ARGUMENT: "Delta"}}
        ids = [f"abcdefgh{number}" for number in range(calls)]
        # Some templates render nothing without tools.
        tool = _tool_for_template({"type": "function", "function": {"name": "Foxtrot"}})
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": "Alpha"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": one, "type": "function", "function": call} for one in ids],
            },
            *(
                {"role": "tool", "tool_call_id": one, "name": _CALLED, "content": _RESULT}
                for one in ids
            ),
            *further,
        ]
        return self._try_render(style.apply(chat, self.tool_format), tools=[tool])

    def _try_render(self, chat: list[dict[str, Any]], **arguments: Any) -> str:
        """Return a rendering; empty if the template rejects it."""
        try:
            return str(
                self._templated.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=True, **arguments
                )
            )
        except Exception as error:
            logger.debug("template.probe_rejected", exc_info=error)
            return ""

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
        return first[: common_length(first, second)]

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
        ends_turn = messages[-1]["role"] == "assistant" or not self._turn_style.alternates
        for further in ([question], [answer, question])[not ends_turn :]:
            try:
                longer = self.chat([*messages, *further], tools, template_kwargs)
            except InvalidGeneration:
                continue
            return common_length(text, longer)
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


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in the form that templates support: pictures become bare markers."""
    plain = {name: value for name, value in message.items() if value is not None}
    content = plain.get("content", "")
    if isinstance(content, list):
        content = [
            {"type": "image"}
            if part["type"] in _PICTURE_TYPES
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


def _with_system(
    messages: Sequence[dict[str, Any]], text: str, **fields: Any
) -> list[dict[str, Any]]:
    """Add text, and fields for the template, to the system message; add one if there is none."""
    leading = messages[0] if messages and messages[0]["role"] == "system" else None
    if leading is None:
        return [{"role": "system", "content": text, **fields}, *messages]
    content = _joined([leading["content"], text])
    return [{**leading, "content": content, **fields}, *messages[1:]]


def _joined(contents: Sequence[Any], separator: str = "\n\n") -> Any:
    """Return one content of a message for several."""
    if all(isinstance(content, str) for content in contents):
        return separator.join(filter(None, contents))
    parts: list[Any] = []
    for content in filter(None, contents):
        parts += [{"type": "text", "text": separator}] if parts else []
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _one_by_one(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages with one call each, followed by its results."""
    remaining = deque(messages)
    while remaining:
        message = remaining.popleft()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        results = []
        while remaining and remaining[0]["role"] == "tool":
            results.append(remaining.popleft())
        for call in calls:
            yield {**message, "tool_calls": [call]}
            message = {"role": "assistant", "content": ""}
            own = [one for one in results if one.get("tool_call_id") == call.get("id")]
            yield from own
            results = [one for one in results if one not in own]
        yield from results


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStyle:
    """Which messages a chat template takes one after another.

    Gemma 2 takes no system message, Llama 3 one call at a time, and Mistral's templates demand that
    roles alternate, though agents write to the user's turn at any time: Claude Code beside the
    result of a call.
    """

    system: bool = True
    """Whether it takes system messages; else they are the user's, joined to those beside them."""
    users: bool = True
    """Whether a user's message may follow another; else they are one."""
    user_after_result: bool = True
    """Whether a user's message may follow the result of a call; else it is a part of that."""
    parallel_calls: bool = True
    """Whether a message may have several calls; else each is followed by its result."""

    @property
    def alternates(self) -> bool:
        """Whether messages of the user are joined to those before them."""
        return not (self.users and self.system and self.user_after_result)

    def _joins(self, last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
        """Return whether a message becomes a part of the one before it."""
        if message["role"] != "user":
            return False
        if last["role"] == "tool":
            return not self.user_after_result and isinstance(message["content"], str)
        return last["role"] == "user" and not (self.users and self.system)

    def apply(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in an order that the template takes; nothing of them is lost."""
        turns: list[dict[str, Any]] = []
        for message in messages if self.parallel_calls else _one_by_one(messages):
            turn = message
            if message["role"] == "system" and not self.system:
                turn = {**message, "role": "user"}
            if turns and self._joins(turns[-1], turn):
                joined = _joined([turns[-1]["content"], turn["content"]])
                turns[-1] = {**turns[-1], "content": joined}
            else:
                turns.append(turn)
        return turns


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStyle:
    """How a chat template takes the calls of earlier answers and their results."""

    json_arguments: bool = False
    """Whether arguments are JSON text; else they are a mapping."""
    in_text: bool = False
    """Whether calls are a part of the content, because the template renders none."""
    results_in_text: bool = False
    """Whether results are messages of the user, because the template renders none."""
    short_ids: bool = False
    """Whether ids have nine letters and digits."""

    def apply(
        self, messages: Sequence[dict[str, Any]], tool_format: ToolFormat | None
    ) -> list[dict[str, Any]]:
        """Return the messages as the template takes them."""
        styled: list[dict[str, Any]] = []
        joins = False
        """Whether the last message is a result, to which a message of the user is added."""
        for message in messages:
            one = dict(message)
            is_result = one["role"] == "tool" and self.results_in_text
            if is_result:
                name = one.get("name", "the function")
                one = {"role": "user", "content": f"Result of {name}: {one['content']}"}
            elif calls := one.get("tool_calls"):
                one = self._with_calls(one, calls, tool_format)
            if joins and one["role"] == "user" and isinstance(one["content"], str):
                one["content"] = f"{styled.pop()['content']}\n{one['content']}"
            styled.append(one)
            joins = is_result
        return [_with_short_ids(message) for message in styled] if self.short_ids else styled

    def _with_calls(
        self, message: dict[str, Any], calls: list[dict[str, Any]], tool_format: ToolFormat | None
    ) -> dict[str, Any]:
        if self.in_text:
            text = write_calls([call["function"] for call in calls], tool_format)
            content = _joined([message["content"], text], "\n")
            return {**message, "content": content, "tool_calls": []}
        if self.json_arguments:
            functions = [
                {**call["function"], "arguments": _as_json(call["function"]["arguments"])}
                for call in calls
            ]
            calls = [
                {**call, "function": function}
                for call, function in zip(calls, functions, strict=True)
            ]
        return {**message, "tool_calls": calls}


def _as_json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


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


def _control_spellings(tokenizer: Any) -> set[str]:
    """Return the tokenizer's special tokens, named or not, and the processors' placeholders."""
    added = tokenizer.added_tokens_decoder.values()
    special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    return special | _PICTURE_PLACEHOLDERS


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the number of leading items that two sequences have in common."""
    pairs = zip(first, second, strict=False)
    return next(
        (at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second))
    )
