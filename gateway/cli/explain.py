"""Show where a request would be routed, and why, without running it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway.cli import CommandError
from gateway.cli.client import connect, print_answer, read_text

BECAUSE = {
    "eligible": "the request is greedy text",
    "endpoint": "the request is for vectors or a ranking",
    "exact": "the answer must be exact",
    "media": "the request contains pictures, video, audio or files",
    "non_greedy_sampling": "temperature is {temperature}",
    "logits_processors": "a penalty, a bias or forbidden words change the token scores",
    "logprobs": "the request asks for log probabilities",
    "multiple_choices": "n is {choices}",
    "prompt_too_long": "the prompt is longer than the lane text-mtp accepts",
    "no_mtp_worker": "no worker that can draft is available",
    "mtp_not_paying": "the request is greedy text, though drafts would be slower now",
    "head_unhealthy": "the MTP head failed its self-test, or kept failing",
    "policy": "route '{route}' of the policy says so",
    "spilled": "the preferred pool is full",
}
"""Why a request is sent where it is, by its reason."""
KEPT_OUT = {
    "endpoint": "vectors and rankings",
    "exact": "exact answers",
    "media": "pictures and other media",
    "non_greedy_sampling": "temperature above 0",
    "logits_processors": "changed token scores",
    "logprobs": "log probabilities",
    "multiple_choices": "several choices",
    "prompt_too_long": "long prompts",
    "no_mtp_worker": "no worker that drafts",
    "mtp_not_paying": "drafts did not pay",
    "head_unhealthy": "faulty MTP head",
}
"""Why requests get no drafts of the lane `text-mtp`, in a few words."""


def run(*, request: str, url: str, as_json: bool) -> int:
    """Print the gateway's decision in sentences, or as JSON."""
    try:
        body = json.loads(read_text(request))
    except json.JSONDecodeError as error:
        name = "standard input" if request == "-" else request
        raise CommandError(f"{name} is not JSON: line {error.lineno}, {error.msg}.") from None
    explanation = connect(url).read("POST", "/v1/route/explain", json=body)
    first, *rest = explanation["candidates"] or [None]
    lines = ["No worker can take this request now."]
    if first is not None:
        lines = [f"{_place(first)}, because {_reason(first['reason'], explanation)}."]
    if refusal := explanation.get("refusal"):
        lines.append(f"The worker would refuse this request: {refusal['message']}")
    if rest:
        lines.append(f"Next: {', '.join(map(_place, rest))}.")
    if unavailable := explanation["unavailable"]:
        states = (f"{worker} ({state})" for worker, state in unavailable.items())
        lines.append(f"Unavailable: {', '.join(states)}.")
    return print_answer(explanation, "\n".join(lines), as_json=as_json)


def _place(candidate: Mapping[str, Any]) -> str:
    return f"{candidate['pool']} on {candidate['worker_id']}"


def _reason(reason: str, explanation: Mapping[str, Any]) -> str:
    """Return all reasons against the lane text-mtp if one of them decided, else the one."""
    bypass = explanation["bypass"]
    profile = explanation["profile"]
    clauses = (
        BECAUSE.get(one, one).format(
            temperature=profile["sampling"]["temperature"],
            choices=profile["choices"],
            route=explanation["route"],
        )
        for one in (bypass if reason in bypass else [reason])
    )
    return ", and ".join(clauses)
