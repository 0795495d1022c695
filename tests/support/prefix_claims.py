"""Prefix claims of two workers."""

from hashlib import blake2b

from gateway.routing.prefix_affinity import PrefixIndex
from gateway.routing.prefix_keys import PrefixEnd, PrefixKeys
from gateway.routing.view import CachedPrefix, CachedPrefixes
from policies.sections import PrefixPolicy

RULES = PrefixPolicy()
STUDIO, LAPTOP = ("studio", "1"), ("laptop", "1")
"""Two workers, each with the id of its boot."""
END_BYTES = 4000


def key_of(name: str) -> bytes:
    """Return the key of an end with this name."""
    return blake2b(name.encode(), digest_size=8).digest()


def system_prompt(name: str = "p") -> PrefixKeys:
    """Return the keys of a prompt of which other requests share the system prompt alone."""
    end = PrefixEnd(key_of(name), END_BYTES, 1)
    return PrefixKeys((end,), has_system=True, unscoped=key_of(f"unscoped {name}"))


def conversation(name: str, turns: int, system: str = "p", changed_from: int = 99) -> PrefixKeys:
    """Return the keys of a turn: a user's message ends each, an assistant's is between two.

    The texts of this conversation and of another one of its name differ from one message on.
    """
    last = 2 * turns
    ends = [
        PrefixEnd(
            key_of(f"{system} {name} {number}{' changed' if number >= changed_from else ''}"),
            number * END_BYTES,
            number,
        )
        for number in range(2, last + 1)
    ]
    head = system_prompt(system)
    return PrefixKeys((*reversed(ends), *head.ends), head.has_system, head.unscoped)


def prefix_holders(prefixes: PrefixIndex, name: str = "p") -> set[tuple[str, str]]:
    """Return the workers and boots with a claim for a system prompt."""
    return set(prefixes.cached(system_prompt(name)))


def cached_at(
    *boots: tuple[str, str], tokens: int = 1000, is_system: bool = True
) -> CachedPrefixes:
    """Return that these boots have so many tokens of a prompt cached."""
    end = PrefixEnd(key_of("p"), END_BYTES, 1)
    return {boot: CachedPrefix(tokens, end, is_system) for boot in boots}
