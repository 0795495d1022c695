"""Requests as a policy sees them: one that is sampled, and one that is greedy."""

from __future__ import annotations

from policies.request.profile import Endpoint, RequestProfile, Sampling

SAMPLED = RequestProfile(endpoint=Endpoint.CHAT, model="demo")
GREEDY = SAMPLED._replace(sampling=Sampling(temperature=0))
