"""Chat template: from messages to the text of a prompt, for one checkpoint.

Text of a client may spell a control token: a tokenizer turns `<|im_end|>` into the token that ends
a message wherever it occurs, so that a client could write the system message, or a picture's
placeholder without a picture, which breaks a model. Such a spelling is split before the template is
rendered, and its parts are tokenized apart: the model reads the same characters, and no control
token.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from itertools import product, takewhile
from typing import Any, Final, TypeAlias

import jinja2

from workers.engine.text.reasoning import effort_variables, template_variables
from workers.engine.text.template_support import (
    ARGUMENT,
    CALL_CHAT,
    TemplateLimits,
    find_limits,
    joined,
)
from workers.engine.text.tool_formats import ToolFormat, detect_tool_format
from workers.engine.types import InvalidGeneration

logger = logging.getLogger(__name__)

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Variables: TypeAlias = Mapping[str, Any]

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
_CHAT: Final = [{"role": "user", "content": "Alpha"}]
_PROBE_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "Foxtrot",
        "parameters": {"properties": {ARGUMENT: {"type": ["string", "null"]}}},
    },
}


class ChatTemplate:
    """The chat template of one checkpoint; safe to call from any thread."""

    def __init__(self, processor: Any) -> None:
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self._added: Mapping[int, Any] = self._tokenizer.added_tokens_decoder
        special = {token.content for token in self._added.values() if token.special}
        self._control = ControlTokenEscaper(
            {*self._tokenizer.all_special_tokens, *special, *_PICTURE_PLACEHOLDERS}
        )
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
        """Return the given variables, with the template's variables for a reasoning effort.

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
        messages: Messages,
        tools: Messages | None = None,
        template_kwargs: Variables | None = None,
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
        arguments = {**self._without_thinking, **(template_kwargs or {})}
        plain = self._control.split([_for_template(message) for message in messages])
        if tools:
            plain = self._with_tools(tools, plain, arguments)
        else:
            arguments |= self._functions(())
        plain = self.limits.apply(plain)
        if continue_final_message:
            arguments["continue_final_message"] = True
        try:
            rendered = self._templated.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=add_generation_prompt, **arguments
            )
        except Exception as error:  # a template adds, indexes and calls what a client has sent
            param, subject = "messages", "model's chat template"
            if isinstance(error, RecursionError):
                fault = f"These messages or tools are nested too deeply for the {subject}."
            else:
                logger.info("template.rejected", exc_info=error)
                reason = f": {error}" if isinstance(error, jinja2.TemplateError) else "."
                fault = f"The {subject} rejects these messages{reason}"
                if continue_final_message:
                    param = "continue_final_message"
                    fault = f"The {subject} cannot go on from the last message."
            raise InvalidGeneration(param, fault) from error
        return str(rendered)

    @cached_property
    def _without_thinking(self) -> dict[str, Any]:
        """The variable that leaves out thinking, except for a template that refuses it.

        Thinking takes seconds, so a request has to enable it where the model can do without.
        """
        variables = {"enable_thinking": False}
        refused = not self._render(_CHAT, **variables) and self._render(_CHAT)
        return {} if refused else variables

    def _with_tools(
        self, tools: Messages, messages: list[dict[str, Any]], arguments: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Give the tools to the template: to its variable, to its field, or in a message."""
        plain = self._control.split(tools)
        if functions := self._functions(plain):
            arguments |= functions
            return messages
        if self._tool_changes is not None and "tools" in template_variables(self._template):
            arguments["tools"] = self._control.split([self._tool(tool) for tool in tools])
            return messages
        if _TOOLS_FIELD.search(self._template):
            return _with_system(messages, "", tools=_listed(plain))
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in plain]
        text = "\n".join(["You can use these functions:", *lines])
        if self._call_example:
            text += f"\nTo use them, write:\n{self._call_example}"
        if self.limits.system:
            return _with_system(messages, text)
        first = messages[0]
        return [{**first, "content": joined([text, first["content"]])}, *messages[1:]]

    def _functions(self, tools: Messages) -> dict[str, Any]:
        """Return the variables with tools for Firefunction's template; empty for others."""
        names = template_variables(self._template)
        if "functions" not in names or "tools" in names:
            return {}
        return {"functions": _listed(tools), "datetime": datetime.now(UTC).date().isoformat()}

    @cached_property
    def _tool_changes(self) -> dict[str, bool] | None:
        """The first changes of a tool with which the template takes it; None if it takes none."""
        for single, described in product((False, True), repeat=2):
            changes = {"described": described, "single_types": single}
            if self._render(_CHAT, tools=[_tool_for_template(_PROBE_TOOL, **changes)]):
                return changes
        return None if self._render(_CHAT) else {}

    def _tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        return _tool_for_template(tool, **(self._tool_changes or {}))

    @cached_property
    def limits(self) -> TemplateLimits:
        """The limits of the template on a history."""
        limits = find_limits(self._render_probe, self.tool_format)
        if limits.changes:
            logger.info("template.histories_changed %s", limits.changes)
        return limits

    @cached_property
    def _call_example(self) -> str:
        """A call as the model writes it, for a template that describes no tools; or nothing."""
        known = self.tool_format
        if known is None or not known.end:
            return ""
        rendered = self._render_probe(self.limits.apply(CALL_CHAT), True)
        begin, end = rendered.rfind(known.begin), rendered.rfind(known.end)
        return rendered[begin : end + len(known.end)] if 0 <= begin < end else ""

    def _render_probe(self, chat: Messages, with_tools: bool) -> str:
        """Return a rendering, with a tool because some templates render no call without."""
        arguments: dict[str, Any] = self._functions([_PROBE_TOOL] if with_tools else [])
        if with_tools and self._tool_changes is not None:
            arguments["tools"] = [self._tool(_PROBE_TOOL)]
        return self._render(chat, **arguments)

    def _render(self, chat: Messages, **arguments: Any) -> str:
        """Return a rendering; empty if the template rejects it."""
        arguments |= {"tokenize": False, "add_generation_prompt": True}
        try:
            return str(self._templated.apply_chat_template(chat, **arguments))
        except Exception as error:
            logger.debug("template.probe_rejected", exc_info=error)
            return ""

    def shared_prefix(
        self,
        messages: Messages,
        tools: Messages | None = None,
        template_kwargs: Variables | None = None,
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
        messages: Messages,
        tools: Messages | None = None,
        template_kwargs: Variables | None = None,
    ) -> int:
        """Return the length of the rendered `text` up to the end of the last message.

        A rendering with a further turn agrees up to there, with any template. One that demands
        alternating roles gets an answer first; the next prompt of the chat then agrees as far.
        """
        answer = {"role": "assistant", "content": "Alpha"}
        ends_turn = messages[-1]["role"] == "assistant" or not self.limits.alternates
        for further in (_CHAT, [answer, *_CHAT])[not ends_turn :]:
            with suppress(InvalidGeneration):
                longer = self.chat([*messages, *further], tools, template_kwargs)
                return common_length(text, longer)
        return 0

    def continues(self, template_kwargs: Variables | None = None) -> bool:
        """Return whether the next prompt of a chat begins with this one and its answer.

        It does not where a template leaves out the reasoning of earlier answers, for example.
        """
        key = repr(template_kwargs or {})
        if key not in self._continues:
            answer = {"role": "assistant", "content": "Alpha"}
            known = False
            with suppress(InvalidGeneration):
                first = self.chat(_CHAT, None, template_kwargs)
                second = self.chat([*_CHAT, answer, *_CHAT], None, template_kwargs)
                known = second.startswith(f"{first}Alpha")
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


def _tool_for_template(
    tool: Mapping[str, Any], *, described: bool = False, single_types: bool = False
) -> dict[str, Any]:
    """Return a tool with the fields that OpenAI's clients may leave out and templates read.

    Command R+'s template reads the description of each argument, and Hermes' takes no list of
    types for a value.
    """
    function = {name: value for name, value in tool["function"].items() if value is not None}
    parameters = dict(function.get("parameters", ()))
    parameters.setdefault("type", "object")
    parameters.setdefault("properties", {})
    if single_types:
        parameters = _with_single_types(parameters)
    if described:
        parameters["properties"] = {
            name: {"description": "", **schema} if isinstance(schema, Mapping) else schema
            for name, schema in parameters["properties"].items()
        }
    function.setdefault("description", "")
    return {**tool, "function": {**function, "parameters": parameters}}


def _listed(tools: Messages) -> str:
    return json.dumps([tool["function"] for tool in tools], ensure_ascii=False)


def _with_single_types(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_single_types(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {name: _with_single_types(value) for name, value in schema.items()}
    kinds = plain.get("type")
    if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
        plain["type"] = next((kind for kind in kinds if kind != "null"), "null")
    return plain


def _with_system(
    messages: Sequence[dict[str, Any]], text: str, **fields: Any
) -> list[dict[str, Any]]:
    """Add text, and fields for the template, to the system message; add one if there is none."""
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": text, **fields}, *messages]
    leading, *rest = messages
    return [{**leading, "content": joined([leading["content"], text]), **fields}, *rest]


class ControlTokenEscaper:
    """Spellings of the control tokens of one tokenizer."""

    def __init__(self, spellings: Iterable[str]) -> None:
        known = sorted((spelling for spelling in spellings if len(spelling) > 1), reverse=True)
        self._any = re.compile("|".join(map(re.escape, known)) or "(?!)")

    def split(self, value: Any) -> Any:
        """Return the same texts, mappings and lists with every control token split in two."""
        if isinstance(value, str):
            plain = value.replace(_SEPARATOR, "")
            return self._any.sub(lambda found: found[0][:1] + _SEPARATOR + found[0][1:], plain)
        if isinstance(value, Mapping):
            return {self.split(name): self.split(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.split(inner) for inner in value]
        return value


def split_pieces(text: str) -> list[str]:
    """Return the pieces of a text that are tokenized apart."""
    return text.split(_SEPARATOR)


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the number of leading items that two sequences have in common."""
    common, end = 0, min(len(first), len(second))
    while common < end:  # slices compare in C: each round halves what is left
        middle = (common + end + 1) // 2
        if first[common:middle] == second[common:middle]:
            common = middle
        else:
            end = middle - 1
    return common
