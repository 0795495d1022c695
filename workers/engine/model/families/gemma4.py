"""Forward pass of Gemma 4 for rows of different lengths, on mlx-vlm's modules.

mlx-vlm's own pass reads the cursors on the host if it reads several tokens, so that a verify would
wait for the step before, and could not be compiled. This one takes everything from each row's
cursor. The last layers share keys and values: each attends to those of the last earlier
layer of its kind that has. Duck-typed to mlx-vlm's Gemma 4; `tests/model/test_assistant_heads.py`
compares both.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from workers.engine.model.families.family import Family, score
from workers.engine.model.head_formats import Assistant

SLIDING = "sliding_attention"


def _own_pass(language: Any, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
    model = language.model
    state = model.embed_tokens(tokens) * model.embed_scale
    inputs: Any = None
    if model.hidden_size_per_layer_input:
        inputs = model.project_per_layer_inputs(state, model.get_per_layer_inputs(tokens))
    masks: dict[str, mx.array] = {}
    attended: list[tuple[Any, Any]] = []
    for number, (layer, source) in enumerate(zip(model.layers, model.previous_kvs, strict=True)):
        cache = caches[number] if number < len(caches) else None
        if cache is not None and layer.layer_type not in masks:
            window = model.window_size if layer.layer_type == SLIDING else None
            masks[layer.layer_type] = cache.make_mask(tokens.shape[1], window_size=window)
        keys_values, offset = attended[source] if source < number else (None, None)
        state, keys_values, offset = layer(
            state,
            masks[layer.layer_type],
            cache,
            per_layer_input=None if inputs is None else inputs[:, :, number],
            shared_kv=keys_values,
            offset=offset,
        )
        attended.append((keys_values, offset))
    return model.norm(state)


def _score(language: Any, hidden: mx.array) -> mx.array:
    logits, softcap = score(language, hidden), language.final_logit_softcapping
    return logits if softcap is None else mx.tanh(logits / softcap) * softcap


def last_layers(language: Any) -> dict[str, int]:
    """Return the number of the last layer that has keys and values, by its kind."""
    own = language.model.layers[: language.model.first_kv_shared_layer_idx]
    return {layer.layer_type: number for number, layer in enumerate(own)}


FAMILIES = {
    "gemma4": Family(own_pass=_own_pass, score=_score, head=Assistant()),
    "gemma4_text": Family(score=_score, head=Assistant()),
}
