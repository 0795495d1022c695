"""Parse a request body into a `RequestProfile`, or raise the error for an invalid field.

Gateway and worker share this one table of fields, types and bounds, so a worker rejects the same
requests when a client sends them directly.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.request.call_rules import MAX_TOOL_CALLS
from paceline.request.constraint import (
    call_fields,
    check_size,
    check_tool_grammars,
    read_constraint,
)
from paceline.request.content import PROMPTS_LIMIT, TOOL_NAME, are_tokens, read_content
from paceline.request.fields import FieldError, Fields, read_cache_salt
from paceline.request.json_pieces import json_bytes
from paceline.request.keys import Inside, check_keys
from paceline.request.pooling import pooling_profile
from paceline.request.profile import (
    GENERATING,
    OPENAI_DEFAULTS,
    REASONING_EFFORTS,
    Endpoint,
    RequestProfile,
    Sampling,
)
from paceline.request.wires import WIRE_OF, canonical, read_ignored, spellings

USAGE_INTERVAL = "usage_interval_tokens"
"""Of `stream_options`: chunks need not have the usage so far before so many further tokens."""
_FUNCTION_FIELDS = (
    ("description", str, "a string"),
    ("parameters", Mapping, "an object"),
    ("strict", bool, "true or false"),
)
TOOLS_LIMIT = 128
"""OpenAI allows as many."""
_TOOL_NAME = re.compile(TOOL_NAME)
_TEMPLATE_KWARGS_LIMIT = 32
# Variables of every template, and arguments of the function that renders it.
_RESERVED_KWARGS = frozenset(
    "messages tools documents chat_template conversation conversations add_generation_prompt "
    "continue_final_message tokenize tokenizer_kwargs processor_kwargs padding truncation "
    "max_length return_tensors return_dict return_assistant_tokens_mask load_audio_from_video "
    "sanitize_control_tokens bos_token eos_token".split()
)
_SWITCHES = ("enable_thinking", "thinking")
_VALUES = {"metrics": ("summary", "detailed"), "reasoning_effort": REASONING_EFFORTS}
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def read_profile(
    body: Mapping[str, Any],
    endpoint: Endpoint,
    defaults: Sampling = OPENAI_DEFAULTS,
    access: type[Fields] = Fields,
    *,
    exact: bool = False,
) -> RequestProfile:
    """Return the profile of a parsed body; raise `FieldError` for the first invalid field.

    `defaults` and `exact` apply to fields that the body omits. `access` reads the plain fields;
    `request_schema` passes a class that records them.
    """
    names = read_ignored(body, WIRE_OF[endpoint])
    plain, spelled = canonical(body), spellings(body)
    try:
        return _read(plain, endpoint, defaults, access, exact=exact, ignored=names, spelled=spelled)
    except FieldError as error:
        raise error.spelled(spelled) from None


def _read(
    body: Mapping[str, Any],
    endpoint: Endpoint,
    defaults: Sampling,
    access: type[Fields],
    *,
    exact: bool,
    ignored: tuple[str, ...],
    spelled: Mapping[str, str],
) -> RequestProfile:
    """Return the profile of a body without synonyms."""
    read_cache_salt(body)
    if endpoint not in GENERATING:
        return pooling_profile(body, endpoint, access, ignored)
    fields = access(body)
    content = read_content(body, endpoint)
    if content.continued:
        spelled = {**spelled, "continue_final_message": content.continued}
    continues = _read_continuation(fields, body, content.continued)
    _check_template_kwargs(body.get("chat_template_kwargs"))
    _check_choices(body)
    stream = fields.flag("stream")
    tools = read_functions(body, content.inside)
    fields.choice("parallel_tool_calls")
    fields.integer(MAX_TOOL_CALLS, None, low=1)
    include_usage, interval = _read_stream_options(body, content.inside, stream=stream)
    max_tokens = _read_max_tokens(fields, endpoint)
    constraint = read_constraint(body)
    return RequestProfile(
        endpoint=endpoint,
        model=fields.text("model"),
        stream=stream,
        include_usage=include_usage,
        usage_interval=interval,
        metrics=body.get("metrics") is not None,
        token_sources=fields.flag("token_sources"),
        media=tuple(sorted(content.media.items())),
        sampling=_read_sampling(fields, defaults),
        max_tokens=max_tokens,
        min_tokens=_read_min_tokens(fields, max_tokens),
        stop=_read_stop(body),
        stop_tokens=_read_stop_tokens(body.get("stop_token_ids")),
        ignore_eos=fields.flag("ignore_eos"),
        prompt_limit=_read_prompt_limit(fields, content.media),
        generation_prompt=not continues and fields.choice("add_generation_prompt") is not False,
        continues_message=continues,
        choices=_read_choices(fields, content.prompts),
        top_logprobs=_read_logprobs(fields, endpoint),
        tools=bool(tools),
        call_fields=call_fields(body, constraint) if tools else (),
        structured_output=constraint is not None,
        thinking_budget=_read_thinking_budget(fields),
        include_reasoning=fields.choice("include_reasoning") is not False,
        draft_tokens=fields.integer("draft_tokens", None, low=0, high=8),
        exact=_read_exact(fields, exact),
        spec_prefill=fields.choice("specprefill"),
        spec_prefill_keep=fields.number("specprefill_keep_pct", None, low=0, high=1, positive=True),
        messages=content.messages,
        prompts=content.prompts,
        echo=fields.flag("echo"),
        text_chars=content.text_chars + (json_bytes(tools) if tools else 0),
        pixels=content.pixels,
        ignored=(*ignored, *content.inside),
        spelled=tuple(spelled.items()),
    )


def _read_sampling(fields: Fields, defaults: Sampling) -> Sampling:
    top_k = fields.integer("top_k", defaults.top_k, low=-1) or 0
    return Sampling(
        temperature=fields.number("temperature", defaults.temperature, low=0, high=2),
        top_p=fields.number("top_p", defaults.top_p, low=0, high=1, positive=True),
        top_k=max(top_k, 0),  # -1 is vLLM's spelling of "whole vocabulary"
        min_p=fields.number("min_p", defaults.min_p, low=0, high=1),
        seed=fields.integer("seed", None, low=-(2**63), high=2**63 - 1),
        presence_penalty=fields.number("presence_penalty", 0.0, low=-2, high=2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, low=-2, high=2),
        repetition_penalty=fields.number(
            "repetition_penalty", defaults.repetition_penalty, low=0, high=10, positive=True
        ),
        logit_bias=_read_logit_bias(fields.get("logit_bias")),
    )


def _read_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping) or not all(map(_TOKEN_ID.fullmatch, map(str, value))):
        raise FieldError("logit_bias", "'logit_bias' must map token ids to numbers.")
    if len(value) > 1024:
        raise FieldError("logit_bias", "'logit_bias' may name at most 1024 tokens.")
    for bias in value.values():
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not number or not -100 <= bias <= 100:
            raise FieldError("logit_bias", "'logit_bias' values must be between -100 and 100.")
    return tuple(sorted((int(token), float(bias)) for token, bias in value.items()))


def _read_max_tokens(fields: Fields, endpoint: Endpoint) -> int | None:
    # A completion without an answer asks for the log-probabilities of its prompt.
    low = 0 if endpoint is Endpoint.COMPLETIONS else 1
    modern = fields.integer("max_completion_tokens", None, low=low)
    classic = fields.integer("max_tokens", None, low=low)
    if modern is not None and classic is not None and modern != classic:
        raise FieldError(
            "max_tokens", "'max_tokens' and 'max_completion_tokens' contradict each other."
        )
    limit = modern if modern is not None else classic
    if limit is None and endpoint is Endpoint.COMPLETIONS:
        return 16  # OpenAI's default for this endpoint
    return limit


def _read_thinking_budget(fields: Fields) -> int | None:
    budget = fields.integer("thinking_budget", None, low=0)
    other = fields.integer("thinking_token_budget", None, low=-1)  # vLLM's name; -1: no limit
    if None not in (budget, other) and budget != other:
        raise FieldError(
            "thinking_token_budget",
            "'thinking_budget' and 'thinking_token_budget' contradict each other.",
        )
    return budget if other in (None, -1) else other


def _read_exact(fields: Fields, default: bool) -> bool:
    wanted = fields.choice("exact")
    exact = default if wanted is None else wanted
    for name in ("draft_tokens", "specprefill"):
        if exact and fields.get(name):
            raise FieldError(name, f"'{name}' contradicts an exact answer ('exact').")
    return exact


def _read_choices(fields: Fields, prompts: int) -> int:
    choices = fields.integer("n", 1, low=1, high=16) or 1
    if choices * prompts > PROMPTS_LIMIT:
        raise FieldError("n", f"A request may have at most {PROMPTS_LIMIT} answers.")
    return choices


def _read_min_tokens(fields: Fields, max_tokens: int | None) -> int:
    fewest = fields.integer("min_tokens", 0, low=0) or 0
    if max_tokens is not None and fewest > max_tokens:
        raise FieldError("min_tokens", "'min_tokens' exceeds 'max_tokens'.")
    return fewest


def _read_prompt_limit(fields: Fields, media: Mapping[str, int]) -> int | None:
    limit = fields.integer("truncate_prompt_tokens", None, low=-1)
    if limit == 0:
        raise FieldError("truncate_prompt_tokens", "'truncate_prompt_tokens' must be at least 1.")
    if limit is not None and limit > 0 and media:
        raise FieldError(
            "truncate_prompt_tokens", "'truncate_prompt_tokens' cannot cut a prompt with media."
        )
    return limit


def _read_continuation(fields: Fields, body: Mapping[str, Any], mark: str) -> bool:
    """Return whether the answer goes on from the last message, as the field or a mark asks."""
    name = mark or "continue_final_message"
    if not (fields.flag("continue_final_message") or mark):
        return False
    messages, begins = body["messages"], fields.choice("add_generation_prompt")
    if begins or (begins is None and not mark):
        raise FieldError(name, f"'{name}' needs 'add_generation_prompt': false.")
    last, in_last = messages[-1], mark.startswith(f"messages[{len(messages) - 1}].") or not mark
    if not in_last or last["role"] != "assistant" or last.get("tool_calls"):
        raise FieldError(
            name, f"'{name}' needs a last message that is the assistant's, without tool calls."
        )
    return True


def _read_stop_tokens(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not are_tokens(value) or len(value) > 128:
        raise FieldError("stop_token_ids", "'stop_token_ids' must be a list of at most 128 tokens.")
    return tuple(value)


def _read_stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise FieldError("stop", "'stop' must be a non-empty string or a list of them.")
    if len(texts) > 16 or any(len(text) > 512 for text in texts):
        raise FieldError("stop", "'stop' may contain at most 16 strings of at most 512 characters.")
    return tuple(texts)


def _read_logprobs(fields: Fields, endpoint: Endpoint) -> int | None:
    if endpoint is Endpoint.COMPLETIONS:
        return fields.integer("logprobs", None, low=0, high=20)
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", None, low=0, high=20)
    if top and not wanted:  # 0 is vLLM's default
        raise FieldError("top_logprobs", "'top_logprobs' needs 'logprobs': true.")
    return (top or 0) if wanted else None


def read_functions(body: Mapping[str, Any], inside: Inside) -> Sequence[Any]:
    """Return the tools that an answer may call; check all, and their grammars."""
    tools = body.get("tools")
    if not isinstance(tools, list | None) or len(tools or ()) > TOOLS_LIMIT:
        raise FieldError("tools", f"'tools' must be a list of at most {TOOLS_LIMIT}.")
    named: dict[str, Any] = {}
    for index, tool in enumerate(tools or ()):
        at, given = f"tools[{index}]", tool if isinstance(tool, Mapping) else {}
        kind, function = given.get("type"), given.get("function")
        if kind not in (None, "function"):
            other = " Custom tools work on /v1/responses." if kind == "custom" else ""
            problem = f"'type' is {kind!r:.100}; a chat can only have functions.{other}"
            raise FieldError(f"{at}.type", problem)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise FieldError(at, "Each tool must be a function with a name.")
        if not _TOOL_NAME.fullmatch(function["name"]):
            bounds = "1 to 128 characters, without brackets, quotes or line breaks"
            raise FieldError(f"{at}.function.name", f"'name' must have {bounds}.")
        check_keys("CHAT tools", tool, inside, at)
        check_keys("CHAT tools.function", function, inside, f"{at}.function")
        for name, of_type, text in _FUNCTION_FIELDS:
            if not isinstance(function.get(name), of_type | None):
                raise FieldError(f"{at}.function.{name}", f"'{name}' must be {text}.")
        check_size(tool, at)
        if named.setdefault(function["name"], function) != function:
            # Nobody could say which one a call means; the same tool again is harmless.
            problem = f"Two different tools are called '{function['name']}'."
            raise FieldError(f"{at}.function.name", problem)
    check_tool_grammars(body)
    return (tools or ()) if body.get("tool_choice") != "none" else ()


def _check_choices(body: Mapping[str, Any]) -> None:
    choice = body.get("tool_choice")
    check_keys("CHAT tool_choice", choice)
    if isinstance(choice, Mapping):
        for name in ("function", "allowed_tools"):
            check_keys(f"CHAT tool_choice.{name}", choice.get(name))
    for name, values in _VALUES.items():
        if body.get(name) not in (None, *values):
            raise FieldError(name, f"'{name}' must be one of {values}.")


def _check_template_kwargs(given: Any) -> None:
    """Accept any variables of a template except the ones that clients must not set."""
    name = "chat_template_kwargs"
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise FieldError(name, f"'{name}' must be an object.")
    if len(given) > _TEMPLATE_KWARGS_LIMIT:
        raise FieldError(name, f"'{name}' may have at most {_TEMPLATE_KWARGS_LIMIT} names.")
    check_size(given, name)
    for reserved in sorted(_RESERVED_KWARGS.intersection(given)):
        raise FieldError(f"{name}.{reserved}", f"'{name}' may not contain '{reserved}'.")
    for switch in _SWITCHES:  # a template takes the text "false" for true
        if not isinstance(given.get(switch), bool | None):
            raise FieldError(f"{name}.{switch}", f"'{name}.{switch}' must be true or false.")


def _read_stream_options(
    body: Mapping[str, Any], inside: Inside, *, stream: bool
) -> tuple[bool, int | None]:
    """Return whether the stream has usage, and after how many tokens its chunks have it."""
    if body.get("stream_options") is None:
        return False, None
    if not stream:
        raise FieldError("stream_options", "'stream_options' needs 'stream': true.")
    given = Fields(body).object("stream_options")
    check_keys("CHAT stream_options", given, inside)
    options = Fields(given)
    usage, interval = options.flag("include_usage"), options.integer(USAGE_INTERVAL, 0, low=0)
    return usage, interval if options.flag("continuous_usage_stats") and usage else None
