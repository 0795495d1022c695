"""The names that objects inside fields may have, on each wire.

A name is read; or it belongs to an answer that comes back, and asks for nothing; or it cannot
change an answer here, and is listed; or it is an error that names its path. In an answer of another
server any other name is listed too: the history never ends a conversation.
"""

import re
from typing import Any

from paceline.request.fields import FieldError
from paceline.request.wires import NAME_CHARS, Wire, rows_of, unknown

_INDEX = re.compile(r"\.\d+|\[\d+\]")
# $echo is what servers and clients add to messages, calls and items of an answer.
_TABLE = """
echo: id object type status annotations audio parsed parsed_arguments parsed_input images caller
  reasoning_details provider_specific_fields provider_data thinking_blocks extra_content namespace
  token_ids prompt_token_ids tool_plan stop_reason finish_reason created_by index async
cache: cache_control prompt_cache_breakpoint
tool: allowed_callers async defer_loading eager_input_streaming input_examples output_schema
CHAT messages: $echo role content name tool_call_id reasoning_content reasoning refusal tool_calls
  function_call prefix partial | $cache
CHAT messages.content: $echo text refusal image_url input_image image video_url video audio_url
  input_audio file file_data filename uuid logprobs | $cache detail citations
CHAT messages.content.source: url data format file_data filename file_id media_type uuid | detail
CHAT messages.tool_calls: $echo function custom | $cache
CHAT messages.tool_calls.function: $echo name arguments thought_signature
CHAT tools: type function custom | $cache $tool
CHAT tools.function: name description parameters strict | $cache $tool
CHAT tool_choice: type function custom allowed_tools
CHAT tool_choice.function: name
CHAT tool_choice.allowed_tools: mode tools
CHAT response_format: type json_schema schema
CHAT response_format.json_schema: name description schema strict
CHAT stream_options: include_usage continuous_usage_stats usage_interval_tokens
  | include_obfuscation
RERANK documents: text | id title url metadata
item: $echo role content phase summary encrypted_content call_id arguments input output name
  execution tools
RESPONSES input: $item | $cache
RESPONSES input.message: $item prefix partial | $cache
RESPONSES input.content: $echo text refusal logprobs image_url file_data filename file_id file_url
  summary input_audio | $cache detail
RESPONSES tools: type name description parameters strict format tools execution | $cache $tool
RESPONSES tools.format: type syntax definition
RESPONSES tool_choice: type name namespace mode tools server_label
RESPONSES tool_choice.tools: type name namespace server_label description parameters strict format
  | $cache $tool
RESPONSES reasoning: effort summary generate_summary | context mode
RESPONSES text: format | verbosity
RESPONSES text.format: type name schema strict description
RESPONSES conversation: id object metadata created_at
RESPONSES stream_options: include_obfuscation include_usage continuous_usage_stats
MESSAGES messages: $echo role content model stop_sequence stop_details usage container
  context_management diagnostics input_transformations prefix partial
  | clear_at output_config cache_control
MESSAGES messages.content: $echo text source title content thinking signature data name input tool
  tool_use_id tool_name toolset_name is_error parsed_output
  | cache_control citations transformations context
MESSAGES messages.content.source: type media_type data url file_id content
MESSAGES tools: type name description input_schema strict defer_loading
  | cache_control allowed_callers eager_input_streaming input_examples
MESSAGES tool_choice: type name disable_parallel_tool_use
MESSAGES thinking: type budget_tokens display | block_binding
MESSAGES output_config: effort format | task_budget
MESSAGES output_config.format: type schema name
"""
"""By wire and place, the known names and, after the bar, the ignored ones."""
_SHOWN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LISTED = 64


class Inside(dict[str, None]):
    """The ignored names inside the fields of a request, in its order."""

    echoed = False
    """Whether the checked value is part of an answer that comes back."""


KEYS = {
    place: tuple(frozenset(half.split()) for half in names.partition("|")[::2])
    for place, names in rows_of(_TABLE)
}


def check_keys(place: str, given: Any, inside: Inside | None = None, path: str = "") -> None:
    """Check the names of a value that may be an object, and collect ignored ones.

    Raise `FieldError` for a name that no schema knows, unless it is null.
    """
    known, ignored = KEYS[place]
    # Faster than `Mapping`, and a parsed body has no other.
    if not isinstance(given, dict) or given.keys() <= known:
        return
    wire, _, field = place.partition(" ")
    where = path or field
    for name, value in given.items():
        if name in known or value is None:
            continue
        if inside is None or not (name in ignored or inside.echoed):
            unknown_name = f"{where}.{name[:NAME_CHARS]}"
            raise FieldError(unknown_name, unknown(unknown_name, Wire[wire]))
        if name in ignored or (len(inside) < _LISTED and _SHOWN_NAME.fullmatch(name)):
            inside[f"{_INDEX.sub('', where)}.{name}"] = None
