"""A policy that somebody offers, in both of its forms: to be obeyed, and to be kept. Pure.

Whatever is to be in force comes through here, so that there is one answer to what may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gateway.config.static_workers import ListedWorker, listed_problems
from policies.document import PolicyDocument, PolicyInvalid, Problem, parse_policy, read_policy

Document = dict[str, Any]
"""A policy as JSON holds it: what its writer said, and no default that they left out."""
_SOURCE = "proposed"


class Proposal(NamedTuple):
    """A policy that is good by itself."""

    policy: PolicyDocument
    document: Document

    @classmethod
    def of(cls, policy: PolicyDocument) -> Proposal:
        """Write a policy as it is kept, and work out here what requests need of it.

        With thousands of routes that takes longer than the first request should have to wait.
        """
        _ = policy.compiled
        return cls(policy, policy.model_dump(mode="json", exclude_unset=True))


def propose(value: Any) -> Proposal:
    """Read a policy from plain values; raise `PolicyInvalid`."""
    return Proposal.of(read_policy(value, _SOURCE))


def propose_yaml(text: str) -> Proposal:
    """Read a policy as people write it; raise `PolicyInvalid` with lines."""
    return Proposal.of(parse_policy(text, _SOURCE))


def check_fits(proposal: Proposal, workers: Sequence[ListedWorker]) -> None:
    """Raise `PolicyInvalid` where workers are listed for pools that the policy does not have.

    In force it would stop the next start.
    """
    problems = [Problem("pools", what) for what in listed_problems(workers, proposal.policy)]
    if problems:
        raise PolicyInvalid(_SOURCE, tuple(problems))


def all_told(invalid: PolicyInvalid) -> str:
    """Tell in one line all that is wrong, without where it was read from."""
    return "; ".join(map(str, invalid.problems))
