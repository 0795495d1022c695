"""Abuse of keys: revoked keys, other teams' prompts, forbidden models, admin routes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any, Final

from bench.attack.attack import Answer, Tally, Target, play
from bench.attack.formats import COMPLETIONS, MESSAGES, RESPONSES
from bench.attack.http_client import (
    CHAT,
    cached_tokens,
    chat,
    chat_body,
    connection,
    encode,
    request,
    send,
)
from bench.attack.liar import ENDLESS
from bench.attack.liar import MODEL as LIAR

_MODEL: Final = "demo"
_ROLES: Final = ("user", "assistant", "user")
_WORDS: Final = "the of and to a in is it you that he was for on are with as his they".split()
_ADMIN: Final = (
    *("/admin/v1/keys", "/admin/v1/policy", "/admin/v1/workers", "/admin/v1/usage"),
    *("/admin/v1/policy/versions", "/admin/v1/keys/static", "/admin/v1/workers/demo/cordon"),
)


async def create_key(target: Target, name: str, **terms: Any) -> dict[str, Any]:
    """Create a key as an admin."""
    body = {"name": name, **terms}
    answer = await request(target.gateway_port, "/admin/v1/keys", body, key=target.admin_key)
    if answer.status != 201:
        raise RuntimeError(f"no key: {answer.status} {answer.body[:200]!r}")
    key: dict[str, Any] = answer.json()
    return key


async def _revoke(target: Target, key: dict[str, Any]) -> None:
    path = f"/admin/v1/keys/{key['id']}"
    await request(target.gateway_port, path, method="DELETE", key=target.admin_key)


def random_text(chance: Random, words: int) -> str:
    return " ".join(chance.choices(_WORDS, k=words))


def _chat(text: str, *, system: str = "", **fields: Any) -> bytes:
    body = chat_body(_MODEL, text, temperature=0, **fields)
    if system:
        body["messages"].insert(0, {"role": "system", "content": system})
    return json.dumps(body).encode()


class KeyAbuse:
    """Clients with keys that want more than their keys allow."""

    name = "keys"
    promise = "nothing of others, no admin route"
    share = 0.06

    async def run(self, target: Target, rng: Random, deadline_s: float, tally: Tally) -> None:
        revoked = await create_key(target, "revoked")
        await _revoke(target, revoked)
        forbidden = await create_key(target, "forbidden", models=[LIAR])
        teams = [await create_key(target, team, team=team) for team in ("red", "blue")]

        async def one(chance: Random) -> None:
            match chance.randrange(8):
                case 0:
                    await self._share_prompt(target, teams, chance, tally)
                case 1 if chance.random() < 0.2:
                    await self._revoke_in_stream(target, chance, tally)
                case 2:
                    await self._refused(target, revoked["secret"], {401}, chance, tally)
                case 3:
                    await self._refused(target, forbidden["secret"], {404}, chance, tally)
                case 4:
                    guess = chance.choice(("", "pk-", "pk-" + "A" * 43, "é", "a" * 8000))
                    await self._refused(target, guess or "x", {401}, chance, tally)
                case _:
                    secrets = ("", target.key, target.join_token, revoked["secret"], "x")
                    await self._open_admin(target, chance.choice(secrets), chance, tally)

        await play(one, rng, deadline_s, concurrency=8)

    async def _share_prompt(
        self, target: Target, teams: Sequence[dict[str, Any]], chance: Random, tally: Tally
    ) -> None:
        """Send a conversation of another team: nothing of it may come from a cache."""
        secret = f"{chance.getrandbits(64):x} " + random_text(chance, chance.choice((10, 30, 80)))
        path = chance.choice((CHAT, CHAT, MESSAGES, RESPONSES, COMPLETIONS))
        turns = [secret, random_text(chance, 40), "Go on."]
        said = [{"role": role, "content": turn} for role, turn in zip(_ROLES, turns, strict=True)]
        fields: dict[str, Any] = {
            CHAT: {"messages": [{"role": "system", "content": secret}, *said], "max_tokens": 1},
            MESSAGES: {"system": secret, "messages": said, "max_tokens": 1},
            RESPONSES: {"instructions": secret, "input": said, "max_output_tokens": 1},
            COMPLETIONS: {"prompt": [f"{secret} {secret}", " ".join(turns)], "max_tokens": 1},
        }[path]
        body = json.dumps({"model": _MODEL, "temperature": 0, **fields}).encode()
        for key in chance.sample(list(teams), 2):
            answer = await chat(target, "team", body, path=path, key=key["secret"], honest=True)
            tally.inputs += 1
            tally.answer(answer, body)
            if answer.status == 200 and cached_tokens(answer):
                tally.fail("cached tokens of another team's conversation", (path, body))

    async def _revoke_in_stream(self, target: Target, chance: Random, tally: Tally) -> None:
        """Revoke a key while it reads a stream without an end."""
        key = await create_key(target, "short-lived")
        text = f"{ENDLESS} {chance.getrandbits(48):x}"
        body = json.dumps(chat_body(LIAR, text, stream=True)).encode()
        request_id = target.request_id("revoked")
        async with connection(target.gateway_port) as opened:
            await opened.send(encode(body, key=key["secret"], request_id=request_id))
            first = await opened.read_some()
            target.sent.add(request_id)
            await _revoke(target, key)
            last = first
            while piece := await opened.read_some():
                last = (last + piece)[-2000:]
        tally.inputs += 1
        tally.answers["revoked in a stream"] += 1
        if b'"key_revoked"' not in last and first.startswith(b"HTTP/1.1 200"):
            tally.fail("a revoked key read on", last[-200:])

    async def _refused(
        self, target: Target, secret: str, statuses: set[int], chance: Random, tally: Tally
    ) -> None:
        body = _chat("Hi", max_tokens=1, stream=chance.random() < 0.5)
        answer = await chat(target, "refused", body, key=secret)
        tally.inputs += 1
        tally.answer(answer, (secret[:20], body))
        if answer.status not in statuses:
            tally.fail(f"{answer.status} instead of {statuses}", (secret[:20], body))

    async def _open_admin(self, target: Target, secret: str, chance: Random, tally: Tally) -> None:
        path, method = chance.choice(_ADMIN), chance.choice(("GET", "POST", "PUT", "DELETE"))
        headers = chance.choice(
            ((), ("x-forwarded-for: 127.0.0.1",), ("origin: http://localhost",))
        )
        body = b'{"name": "x"}' if method != "GET" else None
        raw = encode(body, path=path, method=method, key=secret, headers=headers)
        answer: Answer = await send(target.gateway_port, raw)
        tally.inputs += 1
        tally.answer(answer, raw)
        if answer.status not in (401, 403, 404, 405):
            tally.fail(f"{answer.status} for an admin route without the admin key", raw)
