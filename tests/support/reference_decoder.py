"""Reference answers, decoded with mlx-vlm alone, and comparisons with them."""

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import mlx.core as mx

from tests.support.engine_lane import RowEvents
from workers.engine.model.checkpoint import Checkpoint
from workers.engine.model.target import Target
from workers.engine.types import Finished

Pick = Callable[[mx.array, Sequence[int]], int]
"""Function of the scores [1, 1, vocabulary] and the answer so far that returns a token."""
_ANSWERS: WeakKeyDictionary[Target, dict[tuple[int, ...], list[int]]] = WeakKeyDictionary()
"""By the model, which they do not keep in memory."""


def reference_greedy(checkpoint: Checkpoint, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Decode one prompt greedily, token by token; a model decodes each prompt once."""

    def likeliest(scores: mx.array, _: Sequence[int]) -> int:
        return int(mx.argmax(scores[0, -1]).item())

    answers = _ANSWERS.setdefault(checkpoint.target, {})
    key = (*prompt, max_tokens, *sorted(checkpoint.eos))
    if key not in answers:
        answers[key] = reference_decode(checkpoint, prompt, max_tokens, likeliest)
    return [*answers[key]]


def reference_decode(
    checkpoint: Checkpoint, prompt: Sequence[int], max_tokens: int, pick: Pick
) -> list[int]:
    """Decode one prompt token by token, without any code of the lanes."""
    language = checkpoint.target.language
    caches = language.make_cache()
    positions = mx.broadcast_to(mx.arange(len(prompt))[None, None], (3, 1, len(prompt)))
    scores = language(mx.array([list(prompt)]), cache=caches, position_ids=positions).logits
    answer = [pick(scores[:, -1:], [])]
    while answer[-1] not in checkpoint.eos and len(answer) < max_tokens:
        position = mx.full((3, 1, 1), len(prompt) + len(answer) - 1, dtype=mx.int32)
        scores = language(mx.array([[answer[-1]]]), cache=caches, position_ids=position).logits
        answer.append(pick(scores, answer))
    return answer


def assert_matches_reference(checkpoint: Checkpoint, *results: RowEvents) -> None:
    """Require that each of these rows has ended with the reference answer to its prompt."""
    for result in results:
        assert isinstance(result.end, Finished)
        prompt = result.row.prompt.tokens
        expected = reference_greedy(checkpoint, prompt, result.row.max_tokens)
        assert_equal_but_for_ties(checkpoint, prompt, result.row.answer, expected)


def assert_equal_but_for_ties(
    checkpoint: Checkpoint, prompt: Sequence[int], answer: Sequence[int], other: Sequence[int]
) -> None:
    assert answer == other or is_near_tie(checkpoint, prompt, answer, other)


def is_near_tie(
    checkpoint: Checkpoint, prompt: Sequence[int], answer: Sequence[int], other: Sequence[int]
) -> bool:
    """Return whether two answers first differ where the two best scores differ by float noise.

    The scores are recomputed in one pass over the common beginning: noise is at most four
    steps of bfloat16 at the size of the score.
    """
    at = next(i for i, (a, b) in enumerate(zip(answer, other, strict=False)) if a != b)
    tokens = [*prompt, *answer[:at]]
    positions = mx.broadcast_to(mx.arange(len(tokens))[None, None], (3, 1, len(tokens)))
    caches = checkpoint.target.language.make_cache()
    scores = (
        checkpoint.target.language(mx.array([tokens]), cache=caches, position_ids=positions)
        .logits[0, -1]
        .astype(mx.float32)
    )
    first, second = scores[answer[at]].item(), scores[other[at]].item()
    best = scores.max().item()
    noise = 4 * abs(best) / 256
    return bool(best - min(first, second) <= noise)
