"""The one table of fields: which ones each wire honours, ignores or refuses.

Parsing, translation, schemas and the table of docs/reference/requests.md come from here. A field is
honoured; or it is accepted if the answer is the same without it, and listed; or it is an error
that names it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from pydantic_core import from_json

from paceline.request.fields import FieldError
from paceline.request.profile import Endpoint


class Wire(StrEnum):
    """A format of requests, by the path that takes it."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    EMBEDDINGS = "/v1/embeddings"
    RERANK = "/v1/rerank"


NAME_CHARS = 100
"""Of a name that an error repeats."""
WIRE_OF = {endpoint: Wire[endpoint.name] for endpoint in Endpoint}
# $forms stands for the names of that row. Of the rows of ignored fields, $servers are those of
# llama.cpp, SGLang, mlx-lm, mlx-vlm and Ollama: caches, places and names of the work, marks that a
# worker finds by itself, and parts of answers that clients do not miss. $vllm are such, and
# parameters of beam search; $openai are for its accounts and caches, or hints to its own models.
_FIELDS = """
forms: response_format structured_outputs guided_json guided_regex guided_choice guided_grammar
text: $forms model stream temperature top_p top_k min_p seed presence_penalty frequency_penalty
  repetition_penalty repeat_penalty logit_bias stop ignore_eos min_tokens stop_token_ids
  truncate_prompt_tokens draft_tokens exact specprefill specprefill_keep_pct metrics cache_salt
chats: $text chat_template_kwargs enable_thinking reasoning_effort thinking_budget
  thinking_token_budget include_reasoning add_generation_prompt continue_final_message
counted: max_tokens max_completion_tokens n logprobs stream_options token_sources
CHAT: $chats $counted messages tools tool_choice tool_grammars parallel_tool_calls top_logprobs
  max_tool_calls
COMPLETIONS: $text $counted prompt echo
RESPONSES: $chats background conversation include input instructions max_output_tokens metadata
  max_tool_calls parallel_tool_calls previous_response_id reasoning store text tool_choice tools
  top_logprobs truncation
MESSAGES: $chats max_tokens messages system tools tool_choice tool_grammars stop_sequences thinking
  output_config output_format context_management thread
EMBEDDINGS: model input encoding_format dimensions truncate cache_salt
RERANK: model query documents top_n return_documents truncate max_tokens_per_doc cache_salt
paceline: draft_tokens exact metrics specprefill specprefill_keep_pct token_sources tool_grammars
  truncate max_tokens_per_doc max_tool_calls
servers: cache_prompt id_slot timings_per_token return_progress t_max_predict_ms dry_base
  dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat_tau mirostat_eta
  xtc_threshold rid extra_key data_parallel_rank custom_labels bootstrap_host bootstrap_port
  bootstrap_room routed_experts_start_len num_draft_tokens tool_parser keep_alive
  speculative.n_max speculative.n_min speculative.p_min
vllm: request_id session_id priority guided_decoding_backend length_penalty early_stopping
  spaces_between_special_tokens stream_interval return_token_offsets return_mm_kwargs
  routed_experts_prompt_start
openai: user metadata store service_tier safety_identifier prompt_cache_key prediction verbosity
  prompt_cache_retention prompt_cache_options
ignored: $servers $vllm $openai
ignored RESPONSES: client_metadata stream_options context_management image access_programs
ignored MESSAGES: stream_options container inference_geo speed cache_control diagnostics
  billing_policy fallbacks fallback_credit_token user_profile_id workspace_id
unserved RESPONSES: prompt moderation
unserved MESSAGES: compaction mcp_servers
"""
"""By row, the names of fields; those of a wire are honoured there."""
# What stands before each row are the values with which each of its fields changes nothing where no
# wire honours it, besides null.
_NEUTRAL = """
false: echo use_beam_search include_stop_str_in_output continue_final_message token_sources logprobs
  return_tokens_as_token_ids return_token_ids return_prompt_text watermarking add_special_tokens
  return_tokens post_sampling_probs return_hidden_states return_cached_tokens_details no_stop_trim
  return_routed_experts return_meta_info return_flat_raw_output_top_logprobs return_sampling_mask
  return_input_ids_in_sglext return_output_ids_in_sglext return_prompt_token_ids p_less
  return_spec_tokens_details use_audio_in_video thinking_forced_open guided_json_object
  enable_response_messages
true: skip_special_tokens add_generation_prompt separate_reasoning stream_reasoning parse_tool_calls
  parallel_tool_calls
0: n_probs min_keep n_keep n_indent mirostat dynatemp_range xtc_probability dry_multiplier
  top_logprobs
1: best_of n typical_p dynatemp_exponent
0, -1: top_n_sigma
[]: functions allowed_token_ids bad_words documents logits_processors lora stop_regex mcp_servers
{}: mm_processor_kwargs media_io_kwargs kv_transfer_params ec_transfer_params vllm_xargs options
  images_config video_config
"": suffix grammar regex ebnf
: audio web_search_options moderation prompt_logprobs prompt_embeds logprob_token_ids chat_template
  repetition_detection guided_whitespace_pattern adapters adapter_path lora_path role_mapping
  json_schema custom_logit_processor custom_params session_params input_ids min_pixels max_pixels
  resize_shape max_dynamic_patch min_dynamic_patch watermark sampling_logprobs_mode
  previous_input_messages repeat_last_n repetition_context_size presence_context_size
  frequency_context_size
"none", "auto": function_call
["text"]: modalities
"left": truncation_side
"auto", "deepseek": reasoning_format
"default_model": draft_model
"<think>": thinking_start_token
"</think>": thinking_end_token
"""
_INSTEAD = """
guided_grammar: grammar ebnf
guided_regex: regex
response_format: json_schema guided_json_object
top_logprobs: n_probs
reasoning_effort: think
CHAT max_tokens: max_output_tokens n_predict num_predict
CHAT reasoning_effort: reasoning thinking
CHAT stop: stop_sequences
COMPLETIONS max_tokens: max_output_tokens n_predict num_predict
COMPLETIONS logprobs: top_logprobs
RESPONSES max_output_tokens: max_tokens max_completion_tokens n_predict num_predict
RESPONSES input: messages
RESPONSES tools: functions
RESPONSES tools.format: tool_grammars
RESPONSES top_logprobs: logprobs
RESPONSES stop: stop_sequences
MESSAGES max_tokens: max_completion_tokens max_output_tokens n_predict num_predict
MESSAGES tools: functions
MESSAGES tool_choice.disable_parallel_tool_use: parallel_tool_calls
MESSAGES thinking: reasoning
EMBEDDINGS truncate: truncate_prompt_tokens
RERANK truncate: truncate_prompt_tokens
"""
"""The field that replaces the ones in its row: on a wire, or wherever it is honoured."""
SYNONYMS = {
    "repeat_penalty": "repetition_penalty",
    "enable_thinking": "chat_template_kwargs.enable_thinking",
}
"""The names that other servers have for a field, or for a name within one."""


def rows_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield the rows of a table with their names; `$row` stands for those of an earlier one."""
    rows: dict[str, str] = {}
    for line in text.replace("\n ", "").strip().splitlines():
        row, _, names = line.rpartition(": ")
        rows[row] = re.sub(r"\$(\w+)", lambda found: rows[found[1]], names)
        yield row, rows[row]


_ROWS = {row: frozenset(names.split()) for row, names in rows_of(_FIELDS)}
HONOURED = {wire: _ROWS[wire.name] for wire in Wire}
CONSTRAINT_FIELDS = _ROWS["forms"]
CHAT_FIELDS = _ROWS["chats"]
"""Fields that mean the same in a chat and on each wire that becomes one."""
OF_PACELINE = _ROWS["paceline"]
"""Fields that other engines lack, and without which they answer all the same."""
IGNORED = _ROWS["ignored"]
"""They may have any value."""
IGNORED_ON = {wire: _ROWS.get(f"ignored {wire.name}", frozenset()) for wire in Wire}
"""Fields that choose among the services of a wire's makers, or limit tools that run there."""
NEUTRAL: Mapping[str, Sequence[Any]] = {
    name: from_json(f"[{values}]") for values, names in rows_of(_NEUTRAL) for name in names.split()
}
UNSENT = NEUTRAL.keys() | _ROWS["servers"]
"""Ignored fields that no engine gets: strict ones reject unknown fields."""
INSTEAD = {
    (wire, name): field
    for wire, _, field, names in ((*row.rpartition(" "), names) for row, names in rows_of(_INSTEAD))
    for name in names.split()
}
_SPELLED = {
    **dict.fromkeys(sorted(CONSTRAINT_FIELDS - {"response_format"}), "response_format"),
    **SYNONYMS,
    "max_completion_tokens": "max_tokens",
    "thinking_token_budget": "thinking_budget",
    "frequency_penalty": "presence_penalty",
}
"""The names in errors for fields with these other spellings."""


def neutral_values(wire: Wire) -> Mapping[str, Sequence[Any]]:
    """Return the values that make each field neutral on a wire, besides null."""
    known = {name: values for name, values in NEUTRAL.items() if name not in HONOURED[wire]}
    # A template writes the begin token itself; a completion has none unless the tokenizer adds it.
    return known | ({"add_special_tokens": [True]} if wire is Wire.COMPLETIONS else {})


_NEUTRAL_ON = {wire: neutral_values(wire) for wire in Wire}
_IGNORED_ON = {wire: (IGNORED | IGNORED_ON[wire]) - HONOURED[wire] for wire in Wire}


def read_ignored(body: Mapping[str, Any], wire: Wire) -> tuple[str, ...]:
    """Return the fields that a wire ignores, in their order.

    Null is no value, whatever the name. Raise `FieldError` for a field that no schema knows, and
    for a value that would change the answer.
    """
    honoured, always, neutral = HONOURED[wire], _IGNORED_ON[wire], _NEUTRAL_ON[wire]
    if body.keys() <= honoured:
        return ()
    ignored = []
    for name, value in body.items():
        if value is None or name in honoured:
            continue
        if name not in always and not any(_same(value, one) for one in neutral.get(name, ())):
            shown = name[:NAME_CHARS]
            raise FieldError(shown, _refusal(shown, wire))
        ignored.append(name)
    return tuple(ignored)


def _refusal(name: str, wire: Wire) -> str:
    """Return the words of the error for a field that a wire does not take."""
    other = INSTEAD.get((wire.name, name)) or INSTEAD.get(("", name), "")
    if other.partition(".")[0] in HONOURED[wire]:
        return f"'{name}' is not supported here; use '{other}'."
    if name in _ROWS.get(f"unserved {wire.name}", ()):
        return f"This gateway does not support '{name}'."
    if homes := [one.value for one in Wire if name in HONOURED[one]]:
        return f"'{name}' works on {', '.join(homes)}, but not on {wire}."
    if name in NEUTRAL:
        return f"This value of '{name}' is not supported; omit the field."
    return unknown(name, wire)


def unknown(path: str, wire: Wire) -> str:
    """Return the words of the makers of a wire for a field that no schema knows."""
    match wire:
        case Wire.RESPONSES:
            return f"Unknown parameter: '{path}'."
        case Wire.MESSAGES:
            return f"{path}: Extra inputs are not permitted."
    return f"Unknown field '{path}'."


def canonical(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a body with the field for each synonym; raise `FieldError` if both differ."""
    if SYNONYMS.keys().isdisjoint(body):
        return body
    plain = {name: value for name, value in body.items() if name not in SYNONYMS}
    for name, meant in SYNONYMS.items():
        value = body.get(name)
        outer, _, inner = meant.partition(".")
        held = plain.get(outer)
        if value is None or not isinstance(held if inner else {}, Mapping | None):
            continue  # the parser refuses what is no object
        given = (held or {}).get(inner) if inner else held
        if given is not None and given != value:
            raise FieldError(name, f"'{name}' and '{meant}' contradict each other.")
        plain[outer] = {**(held or {}), inner: value} if inner else value
    return plain


def spellings(body: Mapping[str, Any]) -> dict[str, str]:
    """Return the names in errors that the client spells differently, with its spelling."""
    if _SPELLED.keys().isdisjoint(body):
        return {}
    return {
        name: other
        for other, name in _SPELLED.items()
        if body.get(name) is None and body.get(other) is not None
    }


def _same(value: Any, neutral: Any) -> bool:
    # In Python 1 equals True, and 1.0.
    return isinstance(value, bool) is isinstance(neutral, bool) and value == neutral
