"""Random uses of the prefix cache, compared with what the tokens themselves say.

Every array of these caches is a function of the tokens read so far, as in a model: a run that is
cut, joined or named wrongly shows as another number.
"""

import itertools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_vlm.models.cache import ArraysCache, KVCache

from workers.engine.prefix.cache import MIN_TOKENS, PrefixCache
from workers.engine.prefix.files import PrefixCacheFiles
from workers.engine.prefix.tree import Match, Node, RowState, TokenArray

LAYERS = 2
SLOTS = 300
"""Of the arrays of a row, which is shorter."""
SCOPE = "team"
LIMIT_BYTES = 1 << 30


def numbers(tokens: TokenArray) -> list[int]:
    """Return a number for each token that depends on all tokens up to it."""
    return list(itertools.accumulate(tokens.tolist(), lambda h, t: (h * 31 + t) % 9973))


def expected(tokens: TokenArray, layer: int, length: int) -> list[int]:
    """Return the keys of an attention layer after so many tokens."""
    return [number + layer for number in numbers(tokens)[:length]]


def expected_head(tokens: TokenArray, length: int) -> list[int]:
    """Return the keys of the head, which reads each token together with the next one."""
    return [number + 7 for number in numbers(tokens)[1:length]]


def layer_of(keys: Sequence[int]) -> tuple[mx.array, mx.array]:
    """Return keys and values of a row whose buffer is longer than its tokens."""
    padded = mx.array([*keys, *[-1] * (SLOTS - len(keys))], mx.float32)[None, None, :, None]
    return padded, -padded


def state_of_row(tokens: TokenArray, begin: int, *, drafts: bool, plain: bool) -> RowState:
    """Return the state of a row that has read all tokens, with the arrays of those from `begin`."""
    last = numbers(tokens)[-1]
    heads = expected_head(tokens, len(tokens))[max(begin - 1, 0) :]
    return RowState(
        [layer_of(expected(tokens, layer, len(tokens))[begin:]) for layer in range(LAYERS)],
        [] if plain else [[mx.array([[last]])]],
        [layer_of(heads)] if drafts else (),
        mx.array([[[last]]]) if drafts else None,
        begin=begin,
    )


def assert_restores(match: Match, tokens: TokenArray, *, drafts: bool, plain: bool) -> None:
    """Check that a row which starts from a match has the caches of one that read the tokens."""
    others = [] if plain else [ArraysCache(1)]
    attention = [KVCache() for _ in range(LAYERS)]
    heads = [KVCache()] if drafts else []
    match.restore([*attention, *others], heads, len(tokens) + 1)
    for layer, cache in enumerate(attention):
        keys, values = (array[0, 0, : match.tokens, 0].tolist() for array in cache.state)
        assert keys == expected(tokens, layer, match.tokens)
        assert values == [-key for key in keys]
        assert cache.offset == match.tokens
    for cache in heads:
        assert cache.offset == match.tokens - 1
        keys = cache.state[0][0, 0, : cache.offset, 0].tolist()
        assert keys == expected_head(tokens, match.tokens)
    last = numbers(tokens)[match.tokens - 1]
    assert [cache.state[0].item() for cache in others] == [last] * len(others)
    if drafts:
        assert match.snapshot is not None
        assert match.snapshot.last_hidden is not None
        assert match.snapshot.last_hidden.item() == last


class Cache(PrefixCache):
    """A cache with room for all, which counts its bytes."""

    def __init__(self) -> None:
        super().__init__(LIMIT_BYTES)

    def keep(
        self,
        tokens: TokenArray,
        begin: int = 0,
        *,
        drafts: bool = False,
        plain: bool = True,
        key: str = "",
        scope: str = SCOPE,
    ) -> bool:
        state = state_of_row(tokens, begin, drafts=drafts, plain=plain)
        return self.store(scope, tokens, state, room_bytes=LIMIT_BYTES, key=key)

    def check_size(self) -> None:
        assert self.size_bytes == sum(node.size_bytes for node in self._nodes())


BLOCKS = [np.arange(length) % 5 + first for first, length in ((1, 33), (1, 9), (2, 40), (6, 17))]
prompts = st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=5).map(np.concatenate)
A, AB = BLOCKS[0], np.concatenate([BLOCKS[0], BLOCKS[2]])
ABC = np.concatenate([AB, BLOCKS[3]])


def common(first: TokenArray, second: TokenArray) -> int:
    """Return the length of the common beginning of two prompts."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in pairs)


@given(stored=st.lists(prompts, min_size=1, max_size=8), asked=prompts)
@settings(max_examples=60)
def test_a_plain_row_starts_after_the_longest_common_beginning(stored, asked) -> None:
    cache = Cache()
    for tokens in stored:
        assert cache.keep(tokens, min(cache.known_tokens(SCOPE, tokens), len(tokens) - 1))
        cache.check_size()
    kept = [tokens for tokens in stored if len(tokens) >= MIN_TOKENS]
    longest = min(max((common(tokens, asked) for tokens in kept), default=0), len(asked) - 1)
    match = cache.match(SCOPE, asked, with_head=False, cuttable=True)
    assert (match.tokens if match else 0) == (longest if longest >= MIN_TOKENS else 0)
    if match:
        assert_restores(match, asked, drafts=False, plain=True)


@given(stored=st.lists(st.tuples(prompts, st.booleans()), min_size=1, max_size=8), asked=prompts)
@example(stored=[(A, False), (AB, True)], asked=AB)
@example(stored=[(A, False), (AB, False), (AB, True)], asked=AB)
@settings(max_examples=60)
def test_a_drafting_row_starts_after_the_longest_prompt_that_a_head_has_read(stored, asked) -> None:
    cache = Cache()
    for tokens, drafts in stored:
        assert cache.keep(tokens, drafts=drafts, plain=False)
        cache.check_size()
    asked = np.append(asked, 99)
    kept = [(tokens, has_head) for tokens, has_head in stored if len(tokens) >= MIN_TOKENS]
    begun = [(len(one), has_head) for one, has_head in kept if common(one, asked) == len(one)]
    for drafts in (False, True):
        ends = [end for end, has_head in begun if has_head >= drafts]
        match = cache.match(SCOPE, asked, with_head=drafts, cuttable=False)
        assert (match.tokens if match else 0) == max(ends, default=0)
        if match:
            assert_restores(match, asked, drafts=drafts, plain=False)


@given(stored=st.lists(prompts, min_size=2, max_size=8), share=st.floats(0, 1))
@settings(max_examples=60)
def test_names_stay_with_their_tokens_in_a_cut_tree(stored: list[TokenArray], share: float) -> None:
    cache = Cache()
    named: dict[str, TokenArray] = {}
    for at, tokens in enumerate(stored):
        cache.keep(tokens, key=f"system {at}")
        # Where the next prompt cuts this one.
        turn = tokens[: common(tokens, stored[(at + 1) % len(stored)]) or 1]
        cache.name_turn(SCOPE, turn, f"turn {at}")
        cache.name_turn(SCOPE, np.append(tokens, 99), "a turn that is not stored")
        named |= {f"system {at}": tokens, f"turn {at}": turn}
    cache.evict_to(int(cache.size_bytes * share))
    cache.check_size()
    holders = {id(node) for node in cache._nodes()}
    for key in cache.keys:
        node, tokens = cache._by_key[key], named[key]
        path = np.concatenate([each.tokens for each in node.path()])
        assert id(node) in holders
        assert node.begin < len(tokens) <= node.end
        assert path[: len(tokens)].tolist() == tokens.tolist()
        assert key.startswith("turn") or node.end == len(tokens)
    assert set(cache.evicted_keys).isdisjoint(cache.keys)


def test_a_key_of_two_scopes_outlives_either() -> None:
    cache = Cache()
    for scope in ("first", "second"):
        cache.keep(BLOCKS[0], key="shared", scope=scope)
    cache.drop("first").result()
    assert list(cache.keys) == ["shared"]
    cache.drop("second").result()
    assert list(cache.keys) == []
    assert cache.size_bytes == 0


def test_a_node_has_a_bounded_number_of_turns() -> None:
    cache, tokens = Cache(), BLOCKS[0]
    cache.keep(tokens)
    for at in range(70):
        cache.name_turn(SCOPE, tokens, f"turn {at}")
    cache.name_turn(SCOPE, tokens, "turn 0")
    assert len(cache.keys) == 64
    assert cache.keys[0] == "turn 0"


@given(
    stored=st.lists(prompts, min_size=1, max_size=6),
    known=prompts,
    asked=prompts,
    size_bytes=st.integers(0, 5000),
)
@example(stored=[ABC], known=A, asked=np.append(ABC, 99), size_bytes=0)
@example(stored=[BLOCKS[2], A, ABC], known=BLOCKS[1], asked=np.append(ABC, 99), size_bytes=5000)
@settings(max_examples=60)
def test_another_worker_gets_runs_that_join_to_the_same_caches(
    stored: list[TokenArray], known: TokenArray, asked: TokenArray, size_bytes: int
) -> None:
    cache, other = Cache(), Cache()
    for tokens in stored:
        key = "system" if tokens is stored[0] else ""
        cache.keep(tokens, drafts=True, plain=False, key=key)
    other.keep(known, plain=False)  # its head has not read the part that it holds already
    source = cache.match(SCOPE, asked, with_head=True, cuttable=False)
    end = source.tokens if source else 0
    has_system = common(stored[0], asked) == len(stored[0]) >= MIN_TOKENS
    for begin in (other.known_tokens(SCOPE, asked), 0):
        at, runs = begin, []
        while at < end:
            pending = cache.read_run(SCOPE, asked, at, end, size_bytes)
            assert pending is not None
            assert pending.name.begin == at < pending.name.end <= end
            at = pending.name.end
            assert pending.name.resumable == (at == end or (has_system and at == len(stored[0])))
            runs.append(pending.to_host())
        assert cache.read_run(SCOPE, asked, end, end, size_bytes) is None
        assert other.insert(SCOPE, asked, runs)

        for drafts in (False, True):
            match = other.match(SCOPE, asked, with_head=drafts, cuttable=False)
            if match:
                assert_restores(match, asked, drafts=drafts, plain=False)
    assert (match.tokens if match else 0) == end


def test_a_run_that_memory_does_not_take_is_not_taken_as_stored() -> None:
    cache, other = Cache(), Cache()
    cache.keep(ABC, plain=False)
    runs, at = [], 0
    while at < len(ABC):
        pending = cache.read_run(SCOPE, ABC, at, len(ABC), 0)
        assert pending is not None
        at = pending.name.end
        runs.append(pending.to_host())
    assert len(runs) > 1
    assert not other.insert(SCOPE, ABC, runs[1:]), "it lacks what comes before"
    other.limit_bytes = runs[0][1].size_bytes // 2
    assert not other.insert(SCOPE, ABC, runs[:1]), "it has no room"
    assert other.size_bytes == 0
    other.limit_bytes = LIMIT_BYTES
    assert not other.insert(SCOPE, ABC + 1, runs), "another prompt"
    assert other.insert(SCOPE, ABC, runs)


def test_nodes_are_written_ahead_one_after_another(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("workers.engine.prefix.cache._WRITE_AHEAD_SHARE", 0)
    files = PrefixCacheFiles(tmp_path, LIMIT_BYTES, "model", b"secret")
    cache = Cache()
    cache.use_files(files)
    for first in range(1, 4):
        cache.keep(A + 10 * first, plain=False)
        cache._writer.submit(lambda: None).result()
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert all(node.written for node in cache._nodes())
    cache.close()


def test_what_was_used_least_recently_is_evicted_first() -> None:
    cache = Cache()
    for first in range(3):
        cache.keep(A + 10 * first)
        cache.name_turn(SCOPE, A + 10 * first, f"turn {first}")
    cache.limit_bytes = cache.size_bytes
    assert cache.keep(A + 30)
    assert (cache.keys, cache.evicted_keys) == (("turn 2", "turn 1"), ("turn 0",))
    cache.evict_to(0)
    assert (cache.size_bytes, cache.keys) == (0, ())
    assert cache.evicted_keys == ("turn 2", "turn 1", "turn 0")


def test_texts_to_draft_from_are_others_of_the_scope_and_bounded_together(monkeypatch) -> None:
    monkeypatch.setattr("workers.engine.prefix.cache._OTHER_TOKENS", len(A) + 5)
    cache = Cache()
    texts = [A + 10 * first for first in range(4)]
    for text in texts:
        cache.keep(text)
    found = cache.other_texts(SCOPE, texts[3])
    assert [text.tolist() for text in found] == [texts[1][:5].tolist(), texts[2].tolist()]
    assert cache.other_texts("other", texts[3]) == []


def test_a_row_starts_anywhere_only_if_no_part_has_an_end_of_its_own() -> None:
    layers = [layer_of([1])]
    assert RowState(layers, []).cuttable
    assert not RowState(layers, [[mx.array([1])]]).cuttable
    assert not RowState(layers, [], head=layers).cuttable
    assert not RowState(layers, [], windows=layers).cuttable


def test_a_deep_tree_without_snapshots_is_measured() -> None:
    root = before = Node(tokens=np.zeros(0, np.int64), end=0)
    for end in range(1, 3000):
        node = Node(tokens=np.array([end]), end=end, parent=before)
        before.children[end] = before = node
    assert root.snapshot_distance() == 2999
