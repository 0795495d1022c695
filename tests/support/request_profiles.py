"""A sampled and a greedy request, as policies see them."""

from paceline.request.profile import Endpoint, RequestProfile, Sampling

SAMPLED = RequestProfile(endpoint=Endpoint.CHAT, model="demo")
GREEDY = SAMPLED._replace(sampling=Sampling(temperature=0))
