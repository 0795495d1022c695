"""The shipped examples: each is a valid policy and routes as its first lines describe."""

from pathlib import Path
from random import Random

import pytest

from gateway.routing.select import RoutingRequest, decide
from gateway.routing.view import FleetView
from paceline.request.fields import FieldError
from paceline.request.profile import Endpoint, RequestProfile, Sampling
from policies.compiler import ANONYMOUS, CallerAttributes
from policies.document import PolicyDocument, parse_policy
from policies.evaluate import sampling_defaults
from policies.sections import apply_limits
from tests.support.fleet_views import view_of
from tests.support.scripted_worker import lane_report

EXAMPLES = Path(__file__).parents[3] / "policies" / "examples"
SAMPLED = RequestProfile(endpoint=Endpoint.CHAT, model="m")
GREEDY = SAMPLED._replace(sampling=Sampling(temperature=0))
PICTURE = SAMPLED._replace(media=(("image", 1),), pixels=1_000_000)
SATURDAY_NOON = CallerAttributes(headers={"x-batch": "yes"}, minute_of_week=(5 * 24 + 12) * 60)
MONDAY_NOON = SATURDAY_NOON._replace(minute_of_week=12 * 60)
MONDAY_NIGHT = SATURDAY_NOON._replace(minute_of_week=21 * 60)
INTERNS, CI = CallerAttributes(team="interns"), CallerAttributes(headers={"x-client": "ci"})


def policy_of(example: str) -> PolicyDocument:
    """Return an example, which names its schema and describes its use."""
    text = (EXAMPLES / f"{example}.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=../schema.json\n# ")
    return parse_policy(text, example)


def fleet(*labels: str) -> FleetView:
    """Return a fleet with one worker per label, named after it, with both lanes."""
    lanes = lane_report("text-mtp"), lane_report("vlm")
    workers = [view_of(label, *lanes, models=("m",), labels=(label,)) for label in labels]
    return FleetView.of(workers, frozenset({"m"}))


@pytest.mark.parametrize(
    ("example", "profile", "attributes", "labels", "expected"),
    [
        ("speed_first", GREEDY, ANONYMOUS, ["fast"], "greedy-text: text-mtp fast, plain fast"),
        ("quality_first", GREEDY, ANONYMOUS, ["bf16", "4bit"], "greedy-text: best-mtp bf16"),
        ("quality_first", SAMPLED, ANONYMOUS, ["bf16", "4bit"], "everything-else: best bf16"),
        ("quality_first", SAMPLED, ANONYMOUS, ["4bit"], "everything-else: good 4bit"),
        ("quality_first", SAMPLED._replace(tools=True), ANONYMOUS, ["4bit"], "tools: no worker"),
        ("vision_on_the_big_mac", PICTURE, ANONYMOUS, ["big", "old"], "pictures: vision big"),
        ("vision_on_the_big_mac", PICTURE, ANONYMOUS, ["old"], "pictures: no worker"),
        ("teams", SAMPLED, CallerAttributes(team="product"), ["shared"], "product: shared shared"),
        ("teams", SAMPLED, INTERNS, ["shared"], "research: experiments shared"),
        ("teams", SAMPLED, CI, ["product"], "ci: no worker"),
        ("night_batch", SAMPLED, MONDAY_NOON, ["old"], "batch-by-day: no worker"),
        ("night_batch", SAMPLED, MONDAY_NIGHT, ["old"], "batch-at-night: everywhere old"),
        ("night_batch", SAMPLED, SATURDAY_NOON, ["old"], "batch-at-the-weekend: everywhere old"),
        ("night_batch", PICTURE, ANONYMOUS, ["old"], "pictures: vlm old"),
    ],
)
def test_an_example_routes_as_its_comments_describe(
    example, profile, attributes, labels, expected
) -> None:
    request = RoutingRequest(policy_of(example), profile, attributes)
    decision = decide(request, fleet(*labels), 0.0, Random(0))
    candidates = ", ".join(f"{one.pool} {one.worker_id}" for one in decision.candidates)
    assert f"{decision.route}: {candidates or 'no worker'}".startswith(expected)


def test_the_limits_of_the_examples_are_enforced() -> None:
    speed = policy_of("speed_first")
    assert sampling_defaults(speed, "qwen3.5-4b").temperature == 0
    assert apply_limits(SAMPLED, speed.limits, speed.media).max_tokens == 1024
    vision = policy_of("vision_on_the_big_mac")
    with pytest.raises(FieldError, match="'video' content is not allowed"):
        apply_limits(PICTURE._replace(media=(("video", 1),)), vision.limits, vision.media)
