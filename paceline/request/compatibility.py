"""Fields of OpenAI's and vLLM's schemas that Paceline does not act on.

One is accepted where the answer is the same without it, and refused by name where it would not be.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from paceline.request.fields import FieldError
from paceline.request.profile import Endpoint

IGNORED = frozenset(
    # of OpenAI: for its accounts and caches, or a hint to its own models
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "prompt_cache_options prediction verbosity "
    # of vLLM: names, order and ways of the work, parameters of beam search, and parts of answers
    # that other endpoints of it have
    "request_id session_id priority guided_decoding_backend length_penalty "
    "early_stopping spaces_between_special_tokens stream_interval return_token_offsets "
    "return_mm_kwargs routed_experts_prompt_start".split()
)
"""They may have any value."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "suffix": ("",),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "best_of": (1,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_prompt_text": (False,),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "logprob_token_ids": (),
    "truncation_side": ("left",),
    "add_special_tokens": (False,),
    "watermarking": (False,),
    "repetition_detection": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
}
"""The values with which each changes nothing in a chat, besides null."""
# A chat template writes the begin token itself; a completion has none unless the tokenizer adds it.
_OF_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {**NEUTRAL, "add_special_tokens": (True,)}


def neutral_values(endpoint: Endpoint) -> Mapping[str, tuple[Any, ...]]:
    """Return the values with which each field changes nothing at an endpoint, besides null."""
    return _OF_COMPLETIONS if endpoint is Endpoint.COMPLETIONS else NEUTRAL


def read_ignored(
    body: Mapping[str, Any], endpoint: Endpoint, honoured: Set[str], elsewhere: Set[str]
) -> tuple[str, ...]:
    """Return the fields that an endpoint ignores, in their order.

    A field that only another endpoint honours (`elsewhere`) may be null. Raise `FieldError` for a
    field that no schema knows, and for a value that would change the answer.
    """
    ignored = []
    neutral = neutral_values(endpoint)
    for name, value in body.items():
        if name in honoured or (value is None and name in elsewhere):
            continue
        if name in neutral:
            if value is not None and not any(_same(value, one) for one in neutral[name]):
                raise FieldError(name, f"This value of '{name}' is not supported; omit the field.")
        elif name not in IGNORED:
            raise FieldError(name, f"Unknown field '{name[:100]}'.")
        if value is not None:
            ignored.append(name)
    return tuple(ignored)


def _same(value: Any, neutral: Any) -> bool:
    # In Python 1 equals True.
    return type(value) is type(neutral) and value == neutral
