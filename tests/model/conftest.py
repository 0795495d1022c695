"""Fixtures on the demo checkpoint: manual lanes, an engine, a worker and a gateway that serve it.

Tests only send requests to them; a test that breaks a process starts one.
"""

import ctypes
import gc
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from openai import AsyncOpenAI, OpenAI

from paceline.request.profile import Bypass, Sampling
from tests.support.engine_lane import GREEDY, RowEvents, lanes_of, row_for, run_until_idle
from tests.support.lapack import invert_by_lapack
from tests.support.served_engine import (
    DemoGateway,
    ServedWorker,
    gateway_with,
    running_engine,
    served,
)
from tests.support.worker_process import RunningWorker
from workers.demo import CHECKPOINT
from workers.engine.engine import Engine
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.model.checkpoint import Checkpoint, load_checkpoint
from workers.engine.prefix.cache import PrefixCache
from workers.engine.text.tokenizer import PreparedPrompt, PromptRenderer
from workers.engine.types import LaneName, Prompt


@pytest.fixture(autouse=True)
def small_cache() -> None:
    """Let MLX keep few freed arrays, whatever an engine has set: a process has 600 MB."""
    mx.set_cache_limit(32 * 1024 * 1024)


@pytest.fixture(scope="session", autouse=True)
def no_fused_kernels() -> None:
    """Let MLX trace, keep and simplify what is compiled, but fuse nothing on Linux.

    Each fused kernel takes a C++ compiler a second there, and these tests have two hundred.
    """
    if sys.platform == "linux":
        mlx = ctypes.CDLL(str(Path(mx.__file__).parent / "lib" / "libmlx.so"))
        mlx._ZN3mlx4core16set_compile_modeENS0_11CompileModeE(2)  # CompileMode::no_fuse


@pytest.fixture(scope="session", autouse=True)
def quick_inverse() -> None:
    invert_by_lapack()


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    return load_checkpoint(CHECKPOINT)


@pytest.fixture(scope="session")
def prompt_renderer(checkpoint: Checkpoint) -> PromptRenderer:
    return PromptRenderer(checkpoint.processor)


@pytest.fixture
def make_lanes(checkpoint, prompt_renderer) -> Iterator[Callable[..., list[LaneScheduler]]]:
    """Yield a function that makes the lanes of a worker; at the end free all parts of them."""

    def make(
        names: Sequence[LaneName] = tuple(LaneName),
        *,
        prefix_cache: PrefixCache | None = None,
        **options: Any,
    ) -> list[LaneScheduler]:
        parts = {name: options.pop(name) for name in ("target", "head", "eos") if name in options}
        cache = PrefixCache(1 << 30) if prefix_cache is None else prefix_cache
        changed = replace(checkpoint, **parts)
        return lanes_of(changed, prompt_renderer, *names, cache=cache, **options)

    yield make
    gc.collect()
    mx.clear_cache()


@pytest.fixture
def make_lane(make_lanes: Callable[..., list[LaneScheduler]]) -> Callable[..., LaneScheduler]:
    """Return a function that makes the only lane of a worker."""

    def make(name: LaneName = LaneName.TEXT_MTP, **parts: Any) -> LaneScheduler:
        (lane,) = make_lanes((name,), **parts)
        return lane

    return make


@pytest.fixture
def submit(prompt_renderer: PromptRenderer) -> Callable[..., RowEvents]:
    """Return a function that adds a row to a lane: token ids, a prepared prompt, or a question."""

    def put(
        lane: LaneScheduler,
        prompt: str | list[int] | PreparedPrompt,
        *,
        system: str = "",
        max_tokens: int = 64,
        draft_tokens: int = 2,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        stop: tuple[str, ...] = (),
        bypass: tuple[Bypass, ...] = (),
        adaptive: bool = False,
        looks_up: bool = False,
        **options: Any,
    ) -> RowEvents:
        text = ""
        if isinstance(prompt, str):
            messages = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": prompt})
            text = prompt_renderer.chat(messages)
            prefix_text = prompt_renderer.shared_prefix(messages)
            turn_end = prompt_renderer.turn_end(text, messages)
            prepared = prompt_renderer.prepare(
                Prompt(text=text, prefix_text=prefix_text, turn_end=turn_end)
            )
        elif isinstance(prompt, PreparedPrompt):
            prepared = prompt
        else:
            prepared = PreparedPrompt(tokens=tuple(prompt))
        result = RowEvents()
        result.row = row_for(
            lane,
            prompt_renderer,
            prepared,
            draft_tokens if (lane.has_head or looks_up) and not bypass else 0,
            max_tokens,
            asked=Prompt(text=text),
            sampling=sampling,
            stop=stop,
            options=options,
            seed=seed,
            draft_tokens_fixed=not adaptive,
            with_head=lane.has_head,
            looks_up=looks_up,
            bypass=bypass,
            sink=result.on_event,
        )
        lane.add(result.row)
        return result

    return put


@pytest.fixture
def ask(submit: Callable[..., RowEvents]) -> Callable[..., RowEvents]:
    """Return a function that answers a prompt in a lane, with all that waits there."""

    def answer(
        lane: LaneScheduler, prompt: str | list[int] | PreparedPrompt, **options: Any
    ) -> RowEvents:
        result = submit(lane, prompt, **options)
        run_until_idle(lane)
        return result

    return answer


@pytest.fixture(scope="module")
def demo(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoGateway]:
    """Run a gateway and a worker with the engine of the session, for the tests of one file."""
    with gateway_with(tmp_path_factory.mktemp("demo"), engine) as running:
        yield running


@pytest.fixture
def openai_client(demo: DemoGateway) -> Iterator[OpenAI]:
    """Yield an unmodified `openai` client with the base_url of the gateway."""
    with OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_openai_client(demo: DemoGateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def real_worker(engine: Engine) -> Iterator[ServedWorker]:
    """Serve the engine of the session as a worker without a gateway.

    A test that stops, kills or floods a worker starts a process with `running_worker`.
    """
    with served(engine, "session") as worker:
        yield worker


@pytest.fixture
async def worker_client(worker_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{worker_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def worker_url(real_worker: RunningWorker) -> str:
    return real_worker.url


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """Run an engine for all tests, whose prefixes take little of the memory of the process."""
    with running_engine(prefix_cache_bytes=32 << 20) as running:
        yield running
