"""One rank of a group: `python -m workers.group.rank`, the generator of mlx-lm's server on pipes.

The supervisor writes a `RankOrder` and later a `RankStart` to standard input, each as a line of
JSON; rank 0 then reads requests there. Every rank writes `RankMessage` lines to standard output:
what it found on its machine, a beat each second, and rank 0 the tokens of the answers. A rank ends
when its standard input closes, however its supervisor ended, and when its generator dies.

mlx-lm's HTTP server is left out: it answers to any page in a browser of its machine, loads whatever
model a request names, and tells no token ids. This is the one file that knows mlx-lm's server.
"""

import contextlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from paceline.private_files import make_private
from paceline.request.profile import Sampling
from paceline.terminal import configure_logging
from workers.blas import restart_with_blas
from workers.group.hosts import Backend, free_port
from workers.settings import Split

BEAT_S = 1.0
_VERSIONS = ("paceline", "mlx", "mlx-lm", "transformers")
_CACHED_SEQUENCES = 10
"""As in mlx-lm; a limit in bytes would part ranks whose parts of the model differ."""
_PREFILL_CHUNK = 1024
"""Tokens of a prompt in one pass."""
_NO_TOKEN = -1
"""Ends a beginning that is looked up for itself: no cached sequence continues with it."""


class RankOrder(BaseModel):
    """The facts that a rank must know before it reports its own."""

    rank: int
    model: str
    """A folder or a repository, on the machine of the rank."""
    addresses: tuple[str, ...]


class RankFacts(BaseModel):
    """The facts of a rank's machine."""

    pid: int
    versions: dict[str, str]
    ports: tuple[int, ...]
    """A free port for each of its addresses."""
    fingerprint: str
    """Of the model in its folder."""
    limit_bytes: int
    """Memory that MLX may use."""
    free_bytes: int


class RankStart(BaseModel):
    """The facts that a rank must know to load its part of the model."""

    backend: Backend
    split: Split
    variables: dict[str, str]
    files: dict[str, Any]
    """Contents in JSON of files that variables name."""
    rows: int


class RankRequest(BaseModel):
    """A request for rank 0."""

    id: int
    prompt: list[int] = Field(default_factory=list)
    """Empty: delete the prefix cache, and answer nothing."""
    segments: list[int] = Field(default_factory=list)
    """Where the prompt is cut, so that the prefix cache holds its beginning apart."""
    scope: str = ""
    """Requests of one scope share the prefix cache; those of two never run together."""
    max_tokens: int = 1
    sampling: Sampling = Sampling(temperature=0)
    top_logprobs: int = 0
    stop: list[str] = Field(default_factory=list)


class RankMessage(BaseModel):
    """A line of a rank; of an answer if it has an `id`."""

    facts: RankFacts | None = None
    beat_bytes: int | None = None
    """A sign of life: the memory in use by MLX."""
    refusal: str = ""
    """Why the rank cannot start, for people."""
    id: int = 0
    cached_tokens: int | None = None
    """The request was accepted; this many tokens of its prompt were in the prefix cache."""
    read: tuple[int, int] | None = None
    """Tokens of the prompt that were read, and all of them."""
    token: int | None = None
    logprob: float = 0.0
    top: list[tuple[int, float]] = Field(default_factory=list)
    finish_reason: str = ""
    ended: bool = False
    """Nothing follows of this answer."""
    failure: str = ""
    """The words of mlx-lm, only for the log."""


def main() -> None:
    """Run a rank until its standard input closes."""
    lines = _Lines()
    order = RankOrder.model_validate_json(sys.stdin.readline())
    configure_logging(logging.WARNING, f"%(asctime)s %(levelname)s rank {order.rank}: %(message)s")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    lines.beat()
    try:
        folder, facts = _find(order)
    except Exception as error:  # noqa: BLE001 - whatever it is, the supervisor tells the person
        lines.write(RankMessage(refusal=str(error) or type(error).__name__))
        return
    lines.write(RankMessage(facts=facts))
    if not (line := sys.stdin.readline()):
        return
    start = RankStart.model_validate_json(line)
    with tempfile.TemporaryDirectory(prefix="paceline-rank-") as scratch:
        os.environ.update(start.variables, MLX_RANK=str(order.rank))
        for name, content in start.files.items():
            path = Path(scratch, name)
            path.write_text(json.dumps(content))
            os.environ[name] = str(path)
        generator = _generator(folder, start)
        lines.generator = generator
    answers: dict[int, _Answer] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "cancel" in request:
            if answer := answers.pop(request["cancel"], None):
                answer.cancel()
            continue
        given = RankRequest.model_validate(request)
        answers[given.id] = _Answer(given.id, lines, answers)
        generator.requests.put((answers[given.id], *_as_mlx_lm(given)))
    os._exit(0)  # the generator's thread waits for the other ranks, which may be gone


class _Lines:
    """The lines that the supervisor reads; whatever libraries print goes to standard error."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._lock = threading.Lock()
        self.generator: Any = None

    def write(self, message: RankMessage) -> None:
        line = message.model_dump_json(exclude_defaults=True)
        try:
            with self._lock:
                self._file.write(line + "\n")
                self._file.flush()
        except BrokenPipeError:
            os._exit(0)  # as for a closed standard input

    def beat(self) -> None:
        """Write a beat each second from now on; end this process if the generator has died."""
        import mlx.core as mx  # noqa: PLC0415 - takes a second

        def run() -> None:
            while True:
                if self.generator is not None and not self.generator.is_healthy:
                    os._exit(1)
                self.write(RankMessage(beat_bytes=mx.get_active_memory()))
                time.sleep(BEAT_S)

        threading.Thread(target=run, name="beats", daemon=True).start()


class _Answer:
    """The queue that mlx-lm gives an answer's items to; writes each as a line."""

    def __init__(self, number: int, lines: _Lines, answers: dict[int, "_Answer"]) -> None:
        self._id, self._lines, self._answers = number, lines, answers
        self._context: Any = None
        self._cancelled = False

    def put(self, item: Any) -> None:
        """Take an item; called by the generator's thread."""
        message = RankMessage(id=self._id)
        match item:
            case None:
                self._answers.pop(self._id, None)
                message.ended = True
            case Exception():
                self._answers.pop(self._id, None)
                message.failure = type(item).__name__  # its words may be those of a prompt
                message.ended = True
            case (int() as read, int() as total):
                message.read = (read, total)
            case _ if hasattr(item, "prompt_cache_count"):
                self._context = item
                if self._cancelled:
                    item.stop()
                message.cached_tokens = max(item.prompt_cache_count, 0)
            case _:
                message.token, message.logprob = item.token, item.logprob
                message.top = [(one["id"], one["logprob"]) for one in item.top_tokens]
                message.finish_reason = item.finish_reason or ""
        self._lines.write(message)

    def cancel(self) -> None:
        """Leave the batch at the next step; called by the thread that reads requests."""
        self._cancelled = True
        if self._context is not None:
            self._context.stop()


def _find(order: RankOrder) -> tuple[Path, RankFacts]:
    """Return the folder of the model, after its download, and the facts."""
    from workers.engine.decode.memory_pressure import memory_reader  # noqa: PLC0415
    from workers.engine.model.device import memory_limit_bytes  # noqa: PLC0415
    from workers.engine.model.model_folder import check_folder, forbid_code  # noqa: PLC0415
    from workers.engine.prefix.fingerprint import DIGESTS, ModelFiles  # noqa: PLC0415
    from workers.model_source import resolve_model  # noqa: PLC0415

    forbid_code()
    ports = []
    for address in order.addresses:
        try:
            ports.append(free_port(address))
        except OSError as error:
            raise ValueError(f"it cannot listen on {address}: {error.strerror}") from error
    folder = resolve_model(order.model).fetch()
    check_folder(folder)
    limit_bytes = memory_limit_bytes()
    memory = memory_reader(limit_bytes)()
    state = Path(os.environ.get("PACELINE_STATE_DIR", "~/.paceline")).expanduser() / "prefix-cache"
    with contextlib.suppress(OSError):  # then each start reads the weights
        make_private(state)
    found = ModelFiles(folder, kept=state / DIGESTS).read()
    if found is None:
        raise ValueError("the files of the model change")
    return folder, RankFacts(
        pid=os.getpid(),
        versions={name: version(name) for name in _VERSIONS},
        ports=tuple(ports),
        fingerprint=found.answers,
        limit_bytes=limit_bytes,
        free_bytes=max(memory.limit_bytes - memory.used_bytes, 0) or limit_bytes,
    )


def _generator(folder: Path, start: RankStart) -> Any:
    """Return mlx-lm's generator on its own thread, which loads the rank's part of the model."""
    import mlx.core as mx  # noqa: PLC0415
    from mlx_lm.models.cache import LRUPromptCache  # noqa: PLC0415
    from mlx_lm.server import ModelProvider, ResponseGenerator  # noqa: PLC0415

    from workers.engine.model.device import cast_for_device  # noqa: PLC0415

    class Provider(ModelProvider):  # type: ignore[misc]
        """Serves the one model of the group, whatever a request names; the name is its scope."""

        def load(
            self, model_path: str, adapter_path: object = None, draft_model_path: object = None
        ) -> tuple[Any, Any]:
            del adapter_path, draft_model_path
            if self.model is None:
                super().load("default_model")
                cast_for_device(self.model)
            self.model_key = model_path  # of the prefix cache too
            return self.model, self.tokenizer

    class PromptCache(LRUPromptCache):  # type: ignore[misc]
        """Finds the same beginning of a prompt on all ranks, and leaves one token of it to read.

        Ranks with other kinds of layers keep and cut other sequences; a rank that reads another
        number of tokens than the next one garbles the answer, and then hangs. And mlx-lm cannot
        answer a prompt that is cached whole.
        """

        def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
            cache, known = self._nearest(model, tokens[:-1])
            shortest = min(everywhere := _on_all_ranks(known))
            if max(everywhere) > shortest:
                if known > shortest:
                    cache, known = self._nearest(model, [*tokens[:shortest], _NO_TOKEN])
                if set(_on_all_ranks(known)) != {shortest}:
                    return None, tokens
            return (cache, tokens[shortest:]) if shortest else (None, tokens)

        def _nearest(self, model: Any, tokens: list[int]) -> tuple[Any, int]:
            if not tokens:
                return None, 0
            cache, rest = super().fetch_nearest_cache(model, tokens)
            return cache, len(tokens) - len(rest)

    class Generator(ResponseGenerator):  # type: ignore[misc]
        """Takes prompts as tokens, as the chat template of the worker has rendered them."""

        def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> tuple[Any, ...]:
            del tokenizer, args
            prompt, cuts = request.prompt
            if not prompt:
                self.prompt_cache.trim_to(n_sequences=0)
                raise CacheDropped
            ends = [*cuts, len(prompt)]
            segments = [prompt[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
            kinds = ["system", "user", "assistant"][-len(segments) :]
            return prompt, segments, kinds, "normal", None

    # On all ranks at once; `strict`, because MLX otherwise goes on as a group of one.
    mx.distributed.init(strict=True, backend=start.backend.value)
    options = Namespace(
        model=str(folder),
        adapter_path=None,
        draft_model=None,
        num_draft_tokens=0,
        trust_remote_code=False,
        chat_template="",
        use_default_chat_template=False,
        chat_template_args={},
        pipeline=start.split is Split.PIPELINE,
        decode_concurrency=start.rows,
        prompt_concurrency=start.rows,
        prefill_step_size=_PREFILL_CHUNK,
        prompt_cache_bytes=None,
        kv_bits=None,
        kv_group_size=64,
        quantized_kv_start=0,
    )
    return Generator(Provider(options), PromptCache(_CACHED_SEQUENCES))


def _on_all_ranks(number: int) -> list[int]:
    """Return the number that each rank gives; called by all of them at once."""
    import mlx.core as mx  # noqa: PLC0415

    numbers: list[int] = mx.distributed.all_gather(mx.array([number])).tolist()
    return numbers


class CacheDropped(Exception):
    """The prefix cache is empty now."""


def _as_mlx_lm(given: RankRequest) -> tuple[Any, Any]:
    from mlx_lm.server import (  # noqa: PLC0415
        CompletionRequest,
        GenerationArguments,
        LogitsProcessorArguments,
        ModelDescription,
        SamplingArguments,
    )

    context, sampling = len(given.prompt) + given.max_tokens, given.sampling
    penalty = sampling.repetition_penalty
    return CompletionRequest(
        request_type="text",
        prompt=(given.prompt, given.segments),
        messages=[],
        tools=None,
        role_mapping=None,
    ), GenerationArguments(
        model=ModelDescription(model=given.scope, draft=None, adapter=None),
        sampling=SamplingArguments(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            xtc_probability=0.0,
            xtc_threshold=0.1,
        ),
        logits=LogitsProcessorArguments(
            logit_bias=dict(sampling.logit_bias) or None,
            repetition_penalty=0.0 if penalty == 1 else penalty,
            repetition_context_size=context,
            presence_penalty=sampling.presence_penalty,
            presence_context_size=context,
            frequency_penalty=sampling.frequency_penalty,
            frequency_context_size=context,
        ),
        stop_words=given.stop,
        max_tokens=given.max_tokens,
        num_draft_tokens=0,
        logprobs=True,
        top_logprobs=given.top_logprobs,
        seed=sampling.seed,
        chat_template_kwargs=None,
    )


if __name__ == "__main__":
    restart_with_blas("workers.group.rank")
    main()
