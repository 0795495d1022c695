"""Isolation of two teams: what one asks changes nothing of what the other gets.

The gateway's own hasher derives the keys of the system prompts. Every answer of the second team is
compared with that of new lanes, which the first team has never used: its tokens, their
log-probabilities, and `cached_tokens`. `test_prefix_exchange.py` does so for what moves between
workers, `test_conversations.py` for features of pictures, `test_prompt_lookup.py` for drafts.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from gateway.routing.prefix_keys import PrefixHasher
from gateway.types import Caller, Inspected
from paceline.protocol import NO_PREFIX
from paceline.request.profile import Endpoint, RequestProfile, Sampling
from policies.sections import PrefixPolicy
from tests.support.engine_lane import GREEDY, RowEvents, run_until_idle
from tests.support.openai_requests import picture_body, text_and_cached_tokens, turns_body
from tests.support.policies import PolicyAdmin
from tests.support.running_gateway import RunningGateway, bearer_headers
from tests.support.served_engine import gateway_of
from tests.support.worker_process import RunningWorker
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.lane.sparse_prefill import NO_SPARSE_PREFILL, SparsePrefill
from workers.engine.model.checkpoint import Checkpoint
from workers.engine.prefix.cache import PrefixCache
from workers.engine.prefix.files import PrefixCacheFiles
from workers.engine.text.tokenizer import PromptRenderer
from workers.engine.types import LaneName, Picture, Prompt, SpecPrefillOptions, SpecPrefillSettings

RED = Caller(key="key-1", team="red")
BLUE = Caller(key="key-3", team="blue")
HASHER = PrefixHasher(b"join token")
SAMPLED = Sampling(temperature=0.9, top_p=0.95)
FILLER = "The red fox sees the old tree. The blue boat finds the warm stone. "
SYSTEMS = {
    "short": "Say heron.",
    "middle": "The code word is cormorant. Nobody else may ever learn of it, so be very brief.",
    "long": "You are the clerk. The code word is cormorant. " + FILLER * 8,
}
QUESTION = "What is the code word?"
PICTURE = Picture(width_px=64, height_px=64, rgb=bytes(range(256)) * 48)
OTHER_PICTURE = Picture(width_px=64, height_px=64, rgb=bytes(reversed(range(256))) * 48)

Kind = Literal["greedy", "sampled", "picture"]
Isolation = Literal["key", "team"]


class Answer(NamedTuple):
    """What a client can see of an answer."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    caller: Caller
    system: str
    user: str = QUESTION
    kind: Kind = "greedy"
    isolation: Isolation = "team"
    picture: Picture = PICTURE
    sparse: bool | None = None
    max_tokens: int = 6


class Worker:
    """Both lanes of a worker over one prefix cache."""

    def __init__(
        self,
        make_lane: Callable[..., LaneScheduler],
        submit: Callable[..., RowEvents],
        prompts: PromptRenderer,
        *,
        files: PrefixCacheFiles | None = None,
        sparse_prefill: SparsePrefill = NO_SPARSE_PREFILL,
    ) -> None:
        self.cache = PrefixCache(1 << 30, files)
        self._lanes = {
            name: make_lane(name, prefix_cache=self.cache, sparse_prefill=sparse_prefill)
            for name in LaneName
        }
        self._submit = submit
        self._prompts = prompts

    def ask(self, *questions: Question) -> list[Answer]:
        """Answer these requests at once, as gateway and worker pass them to the engine."""
        return self._run([self._add(question) for question in questions])

    def answer(self, prompt: Prompt) -> Answer:
        prepared = self._prompts.prepare(prompt)
        lane = self._lanes[LaneName.VLM]
        return self._run([self._submit(lane, prepared, top_logprobs=2, max_tokens=4)])[0]

    def _run(self, results: Sequence[RowEvents]) -> list[Answer]:
        for lane in self._lanes.values():
            run_until_idle(lane)
        return [
            Answer(
                tuple(result.row.answer),
                tuple(token.logprob for token in result.logprobs),
                result.row.cached_tokens,
            )
            for result in results
        ]

    def _add(self, question: Question) -> RowEvents:
        system: dict[str, Any] = {"role": "system", "content": question.system}
        profile = RequestProfile(
            endpoint=Endpoint.CHAT, model="demo", text_chars=len(question.system)
        )
        rules = PrefixPolicy(isolation=question.isolation)
        keys = HASHER.prefix_keys(
            Inspected("demo", profile, {"messages": [system]}), question.caller, rules
        )
        key = keys.ends[-1].key.hex() if keys.has_system else ""
        with_picture = question.kind == "picture"
        content: Any = [{"type": "image"}, {"type": "text", "text": question.user}]
        messages = [system, {"role": "user", "content": content if with_picture else question.user}]
        text = self._prompts.chat(messages)
        prepared = self._prompts.prepare(
            Prompt(
                text=text,
                turn_end=self._prompts.turn_end(text, messages),
                scope=HASHER.cache_salt(question.caller, rules),
                pictures=(question.picture,) if with_picture else (),
                prefix_text=self._prompts.shared_prefix(messages) if key else "",
                prefix_key=key or NO_PREFIX,
            )
        )
        result = self._submit(
            self._lanes[LaneName.TEXT_MTP if question.kind == "greedy" else LaneName.VLM],
            prepared,
            sampling=SAMPLED if question.kind == "sampled" else GREEDY,
            seed=7,
            top_logprobs=2,
            max_tokens=question.max_tokens,
            spec_prefill=SpecPrefillOptions(sparse=question.sparse),
        )
        result.row.prefetched = self.cache.prefetch(prepared.scope, prepared.identity)
        return result


@pytest.fixture
def new_worker(make_lane, submit, prompt_renderer) -> Callable[..., Worker]:
    """Return a function that makes a worker that has read nothing yet."""
    return lambda **parts: Worker(make_lane, submit, prompt_renderer, **parts)


def attempts(caller: Caller, secret: str, **fields: Any) -> Iterator[Question]:
    """Yield what a client asks to learn a system prompt of another, each time with more of it."""
    half = secret[: len(secret) // 2]
    yield Question(caller=caller, system="Be brief.", user=f"{secret} {QUESTION}", **fields)
    for system in (f"{half}pelican.", half, secret, f"{secret} Repeat the words above."):
        yield Question(caller=caller, system=system, **fields)


@pytest.mark.parametrize("kind", ["greedy", "sampled", "picture"])
def test_c8_a_team_gets_the_answers_of_a_worker_that_another_team_never_used(
    new_worker: Callable[..., Worker], kind: Kind
) -> None:
    secret = SYSTEMS["long"]
    worker = new_worker()
    own = Question(caller=RED, system=secret, kind=kind)
    first, second = worker.ask(own)[0], worker.ask(own)[0]
    assert first.cached_tokens == 0
    assert second.cached_tokens > 0, "the cache is in use"
    unused = new_worker()
    for question in attempts(BLUE, secret, kind=kind):
        assert worker.ask(question) == unused.ask(question)


def test_c8_files_of_one_team_change_no_answer_of_another_after_a_restart(
    new_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    def restarted() -> Worker:
        return new_worker(files=PrefixCacheFiles(tmp_path, 1 << 30, "demo", b"secret"))

    secret = SYSTEMS["long"]
    own = Question(caller=RED, system=secret)
    before = restarted()
    before.ask(own)
    before.cache.close()
    assert list(tmp_path.iterdir())
    worker, unused = restarted(), new_worker()
    for question in attempts(BLUE, secret):
        assert worker.ask(question) == unused.ask(question)
    assert worker.ask(own)[0].cached_tokens > 0, "the file is in use"
    worker.cache.close()


def test_c8_sparse_prompts_of_one_team_change_no_answer_of_another(
    new_worker: Callable[..., Worker], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    settings = SpecPrefillSettings(draft=tmp_path, threshold_tokens=300, keep_share=0.4)
    sparse_prefill = SparsePrefill(settings, checkpoint.target, checkpoint.context_tokens)
    secret = SYSTEMS["long"]
    for sparse in (True, None):
        user = FILLER * 8 + QUESTION
        worker = new_worker(sparse_prefill=sparse_prefill)
        for _ in range(2):
            worker.ask(Question(caller=RED, system=secret, user=user, sparse=sparse))
        for system in (secret, f"{secret} Repeat it."):
            question = Question(caller=BLUE, system=system, user=user, sparse=sparse)
            assert worker.ask(question) == new_worker(sparse_prefill=sparse_prefill).ask(question)


@pytest.mark.parametrize("kind", ["greedy", "sampled", "picture"])
def test_c8_rows_of_one_team_change_no_answer_of_another_in_the_same_batch(
    new_worker: Callable[..., Worker], kind: Kind
) -> None:
    """The batches have equal shapes, and differ in the secrets and pictures of one team."""

    def answers(word: str, picture: Picture) -> list[Answer]:
        secret = SYSTEMS["long"].replace("cormorant", word)
        questions = []
        for number in range(2):
            user = f"{number}. {QUESTION}"
            questions += [
                Question(caller=RED, system=secret, user=user, kind=kind, picture=picture,
                         max_tokens=12),
                Question(caller=BLUE, system=SYSTEMS["long"], user=user, kind=kind),
            ]  # fmt: skip
        worker = new_worker()
        worker.ask(questions[0])
        together = worker.ask(*questions)
        assert [answer.cached_tokens > 0 for answer in together[::2]] == [True] * 2
        assert together[1].cached_tokens == 0
        return together[1::2]

    expected = answers("spoonbill", OTHER_PICTURE)
    for found, fresh in zip(answers("cormorant", PICTURE), expected, strict=True):
        assert (found.tokens, found.cached_tokens) == (fresh.tokens, fresh.cached_tokens)
        assert found.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)


@pytest.mark.parametrize("key", [None, "any key"])
def test_c8_a_picture_in_a_system_message_is_never_cached(new_worker, prompt_renderer, key) -> None:
    """All pictures have the same tokens, by which the cache recognizes a prompt."""
    system: Any = [{"type": "text", "text": SYSTEMS["long"]}, {"type": "image"}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": QUESTION},
    ]

    def ask(worker: Worker, picture: Picture) -> Answer:
        prompt = Prompt(
            text=prompt_renderer.chat(messages),
            pictures=(picture,),
            prefix_text=prompt_renderer.shared_prefix(messages),
            prefix_key=key,
        )
        return worker.answer(prompt)

    worker = new_worker()
    ask(worker, PICTURE)
    assert ask(worker, OTHER_PICTURE) == ask(new_worker(), OTHER_PICTURE)


class Team(NamedTuple):
    gateway: RunningGateway
    headers: dict[str, str]

    def converse(self, path: str, body: dict[str, Any]) -> tuple[str, int, str]:
        """Return the text, the cached tokens and the id of an answer in any format."""
        client = self.gateway.client
        answer = client.post(path, headers=self.headers, json=body).raise_for_status().json()
        return *text_and_cached_tokens(answer), answer["id"] if "output" in answer else ""

    def ask(self, model: str, system: str, kind: Kind) -> tuple[Any, int]:
        """Return the choices and the cached tokens of an answer."""
        messages: Any = [{"role": "user", "content": QUESTION}]
        body: dict[str, Any] = {"messages": messages, "temperature": 0.0}
        if kind == "picture":
            body = picture_body(model, "red", size=64, temperature=0.0)
        elif kind == "sampled":
            body |= {"temperature": 0.9, "seed": 7, "logprobs": True, "top_logprobs": 2}
        body["messages"].insert(0, {"role": "system", "content": system})
        body |= {"model": model, "max_tokens": 4, "draft_tokens": 2}
        response = self.gateway.client.post(
            "/v1/chat/completions", headers=self.headers, json=body
        ).raise_for_status()
        # A prompt is read in chunks of measured time, whose sizes decide how scores are rounded.
        answer = json.loads(response.text, parse_float=lambda number: round(float(number), 2))
        return answer["choices"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@contextlib.contextmanager
def teams(
    worker: RunningWorker, folder: Path, isolation: Isolation, *names: str
) -> Iterator[list[Team]]:
    """Yield a key of each team at a gateway that the worker has joined."""
    with (
        gateway_of(folder, worker) as gateway,
        PolicyAdmin(gateway.url, gateway.admin_key) as admin,
    ):
        patch = json.dumps({"prefix": {"isolation": isolation}})
        admin.patch(patch, content_type="application/merge-patch+json").raise_for_status()
        yield [Team(gateway, bearer_headers(gateway.create_key(team=team))) for team in names]


@pytest.mark.parametrize("isolation", ["team", "key"])
def test_c8_no_key_gets_cached_tokens_of_another_team_through_a_gateway(
    real_worker: RunningWorker, tmp_path: Path, isolation: Isolation
) -> None:
    model = real_worker.model
    with teams(real_worker, tmp_path, isolation, "red", "red", "blue", "green") as keys:
        red, red_too, blue, green = keys
        cases: list[tuple[Kind, str]] = [("greedy", length) for length in SYSTEMS]
        if isolation == "team":
            cases += [("sampled", "long"), ("picture", "long")]
        for kind, length in cases:
            system = f"{isolation}, {kind}: {SYSTEMS[length]}"
            unused = green.ask(model, system, kind)
            red.ask(model, system, kind)
            assert (red.ask(model, system, kind)[1] > 0) == (length == "long")
            assert blue.ask(model, system, kind) == unused
            assert unused[1] == 0
        secrets = [f"{number}, {isolation}: {SYSTEMS['long']}" for number in range(4)]
        for secret in secrets:
            red.ask(model, secret, "greedy")
        with ThreadPoolExecutor(8) as pool:  # both teams in one batch
            answers = [
                pool.submit(team.ask, model, secret, "greedy")
                for secret, other in zip(secrets, (blue, blue, green, red_too), strict=True)
                for team in (red, other)
            ]
        cached = [answer.result()[1] > 0 for answer in answers]
        assert cached == [True, False] * 3 + [True, isolation == "team"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_c8_no_key_gets_anything_of_a_conversation_of_another_team(
    real_worker: RunningWorker, tmp_path: Path, path: str
) -> None:
    secret = f"At {path}: {SYSTEMS['long']}"

    def body(*turns: str) -> dict[str, Any]:
        fields = turns_body(path, turns, max_tokens=8)
        return {"model": real_worker.model, "temperature": 0.0, **fields}

    with teams(real_worker, tmp_path, "team", "red", "blue", "green") as (red, blue, green):
        first = body(secret)
        text, cached, response_id = red.converse(path, first)
        assert cached == 0
        again = body(secret, text, QUESTION)
        expected = [green.converse(path, each) for each in (first, again)]
        assert expected[0][1] == 0
        assert red.converse(path, again)[1] > 0, "the conversation is in the cache"
        found, cached, _ = blue.converse(path, again)
        assert (found, cached) == (expected[1][0], 0)
        assert blue.converse(path, first)[0] == expected[0][0]
        if response_id:
            stolen = blue.gateway.client.post(
                path, headers=blue.headers, json={**first, "previous_response_id": response_id}
            )
            assert stolen.status_code in (400, 404)
            route = f"{path}/{response_id}"
            assert blue.gateway.client.get(route, headers=blue.headers).status_code == 404
            assert red.gateway.client.get(route, headers=red.headers).status_code == 200
