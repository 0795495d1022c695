"""The start of a worker, and the lines that it prints."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from paceline.lifecycle import Shutdown, first_of
from paceline.names import name_of_host
from paceline.private_files import make_private
from paceline.protocol import READY_PREFIX, START_PREFIX, ExitCode, StartStage, build_records
from paceline.request.profile import Endpoint
from paceline.settings import InvalidSettings
from paceline.terminal import StartDisplay, printable
from workers.engine.model.known_heads import known_head
from workers.engine.types import (
    Card,
    EngineSettings,
    ModelCard,
    ModelUnusable,
    PoolingCard,
    ProgressSink,
    SpecPrefillSettings,
)
from workers.group.hosts import Hosts
from workers.heartbeat import Membership, NotAdmitted, advertised_url, joined, wait_for_gateway
from workers.model_source import ModelSource, resolve_model
from workers.server.engines import RunningEngine
from workers.server.pictures import PictureMemory
from workers.server.runtime import StartingWorker, Worker
from workers.server.server import cannot_listen, serve, watch_leash
from workers.settings import KvBits, WorkerSettings, prefix_cache_on_disk

if TYPE_CHECKING:
    from workers.identity import WorkerIdentity

_START_INTERVAL_S = 0.2
_print = functools.partial(print, flush=True)
_EXIT_CODES: dict[type[Exception], ExitCode] = {
    InvalidSettings: ExitCode.SETTINGS,
    ModelUnusable: ExitCode.MODEL,
    NotAdmitted: ExitCode.NOT_ADMITTED,
}


def start(settings: WorkerSettings) -> int:
    """Run a worker until its end; return the exit code."""
    build_records()
    for verbose in ("httpx", "httpx2", "uvicorn"):
        logging.getLogger(verbose).setLevel(logging.WARNING)
    # Its warnings are for the authors of models, and repeat with every prompt of the warm-up.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    _keep_kernels(settings.state_dir.expanduser() / "kernels")
    try:
        return _run(settings)
    except (InvalidSettings, ModelUnusable, NotAdmitted) as error:
        sys.stderr.write(printable(f"paceline worker: {error}\n"))
        return _EXIT_CODES[type(error)]
    except KeyboardInterrupt:  # during the start; later the server shuts down
        sys.stdout.flush()
        os._exit(ExitCode.INTERRUPTED)  # MLX aborts a process that ends while a thread of it runs


def _keep_kernels(folder: Path) -> None:
    """Let MLX on Linux find its kernels again when the machine restarts, in a folder of this user.

    It compiles them into the folder of temporary files, for up to a minute.
    """
    if sys.platform == "linux" and "TMPDIR" not in os.environ:
        with contextlib.suppress(OSError):
            make_private(folder)
            os.environ["TMPDIR"] = str(folder)


def _run(settings: WorkerSettings) -> int:
    # Bind before the weights load, which may take minutes: a port in use is reported at once.
    with _bind(settings.listening_host, settings.port) as listener:
        host, port = listener.getsockname()[:2]
        # Stable over restarts, and unique on its machine.
        host_name = name_of_host(socket.gethostname()) or "worker"
        worker_id = settings.id or f"{host_name}-{port}"
        identity = _identity_of(settings)
        url = advertised_url(host, port, settings.join or None)
        url = identity.url(url) if identity else url
        if settings.join:
            pause = _pause_of(settings)
            wait_for_gateway(settings.join, settings.token, worker_id, url, pause)
        source = resolve_model(settings.model)
        adapter = resolve_model(settings.adapter) if settings.adapter else None
        starting = StartingWorker(
            worker_id=worker_id,
            boot_id=secrets.token_hex(8),
            url=url,
            model=_served_name(source, adapter),
            labels=settings.labels,
            clock=time.monotonic,
            started_s=time.monotonic(),
            step=(StartStage.WEIGHTS if source.folder else StartStage.DOWNLOAD, 0, 0),
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if settings.group:
                hosts = Hosts.read(settings.group)
                load = functools.partial(load_group, settings, hosts, source, runner.get_loop())
            else:
                cache = prefix_cache_on_disk(settings)
                load = functools.partial(load_engine, settings, source, adapter, cache)
            place = listener, identity
            return runner.run(_start_and_serve(settings, source, starting, load, place))


def _identity_of(settings: WorkerSettings) -> WorkerIdentity | None:
    """Return the identity of a paired worker; raise `InvalidSettings` if it cannot be used."""
    if not settings.nodes_key:
        return None
    from paceline.certificates import identity_file  # noqa: PLC0415  # slow, and not for others
    from workers.identity import WorkerIdentity  # noqa: PLC0415

    file = identity_file(settings.state_dir, settings.join, settings.id)
    try:
        return WorkerIdentity(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is damaged"
        raise InvalidSettings(
            f"{file} cannot be used: {reason}. Pair again: paceline join {settings.join}"
        ) from None


def _pause_of(settings: WorkerSettings) -> Callable[[float], object]:
    """Return `time.sleep`, or for a worker on a leash a wait that ends with its parent."""
    if not settings.leash:
        return time.sleep

    def pause(seconds: float) -> None:
        if select.select([sys.stdin], [], [], seconds)[0] and not os.read(sys.stdin.fileno(), 1024):
            raise KeyboardInterrupt

    return pause


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as opened:
            listener = opened.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and host == "::":
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(address)
            opened.pop_all()
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    return listener


def _served_name(source: ModelSource, adapter: ModelSource | None) -> str:
    return f"{source.served_name}+{adapter.served_name}" if adapter else source.served_name


def load_engine(
    settings: WorkerSettings,
    source: ModelSource,
    adapter: ModelSource | None,
    cache: tuple[Path | None, bytes],
    progress: ProgressSink,
) -> RunningEngine:
    """Return the running engine, after the downloads of its models; blocks."""
    download = functools.partial(progress, StartStage.DOWNLOAD)
    cache_dir, cache_secret = cache
    folder = source.fetch(download)
    # MLX takes seconds to import, and wrong settings and folders are reported before.
    from workers.engine.model.model_folder import check_folder, find_task, refusing  # noqa: PLC0415

    with refusing(folder):
        check_folder(folder)
    task = find_task(folder, source.served_name) if settings.task is None else settings.task
    if task in (Endpoint.EMBEDDINGS, Endpoint.RERANK):
        from workers.engine.pooling import PoolingEngine, PoolingSettings  # noqa: PLC0415

        pooling = PoolingSettings(
            model=folder, served_name=source.served_name, endpoint=Endpoint(task)
        )
        return PoolingEngine.start(pooling, progress)
    mtp = resolve_model(settings.mtp).fetch(download, head_only=True) if settings.mtp else None
    adapter_folder = adapter.fetch(download) if adapter else None
    spec_prefill = None
    if settings.spec_prefill:
        spec_prefill = SpecPrefillSettings(
            draft=resolve_model(settings.spec_prefill).fetch(download),
            threshold_tokens=settings.spec_prefill_threshold,
            keep_share=settings.spec_prefill_keep,
        )
    progress(StartStage.WEIGHTS, 0, 0)
    from workers.engine.engine import Engine  # noqa: PLC0415

    return Engine.start(
        EngineSettings(
            model=folder,
            served_name=_served_name(source, adapter),
            adapter=adapter_folder,
            dtype=settings.dtype,
            context_tokens=settings.context,
            max_rows=settings.rows,
            prefill_chunk_tokens=settings.prefill_chunk,
            lanes=settings.lanes,
            draft_tokens=settings.draft_tokens,
            mtp=mtp,
            prefix_cache_bytes=settings.prefix_cache_bytes,
            prefix_cache_quantized=settings.kv_bits is KvBits.EIGHT,
            prefix_cache_dir=cache_dir,
            prefix_cache_disk_bytes=int(settings.prefix_cache_gb * 1e9),
            prefix_cache_secret=cache_secret,
            spec_prefill=spec_prefill,
        ),
        progress,
    )


def load_group(
    settings: WorkerSettings,
    hosts: Hosts,
    source: ModelSource,
    loop: asyncio.AbstractEventLoop,
    progress: ProgressSink,
) -> RunningEngine:
    """Return the running engine of a group, whose ranks `loop` supervises; blocks."""
    from workers.group.engine import GroupEngine  # noqa: PLC0415 - as above

    return GroupEngine.start(settings, hosts, source, loop, progress)


async def _start_and_serve(
    settings: WorkerSettings,
    source: ModelSource,
    starting: StartingWorker,
    load: Callable[[ProgressSink], RunningEngine],
    place: tuple[socket.socket, WorkerIdentity | None],
) -> ExitCode:
    """Load the engine and serve until the end, and send heartbeats all the while."""
    listener, identity = place
    shutdown, changed = Shutdown(), asyncio.Event()
    worker: StartingWorker | Worker[RunningEngine] = starting
    membership = Membership(
        gateway_url=settings.join,
        token=settings.token,
        worker_id=starting.worker_id,
        report=lambda: worker.report(),  # noqa: PLW0108 - of what the worker is by then
        changed=changed,
        port=listener.getsockname()[1] if settings.follows_route else None,
        identity=identity,
    )
    with shutdown.on_signals(), contextlib.ExitStack() as ends:
        if settings.leash:
            ends.callback(asyncio.create_task(watch_leash(shutdown)).cancel)
        async with joined(membership) if settings.join else contextlib.nullcontext():
            async with _shown(starting, changed, leashed=settings.leash):
                engine = await _loaded(functools.partial(load, starting.advance), shutdown)
            ends.callback(engine.stop)
            worker = Worker(
                worker_id=starting.worker_id,
                boot_id=starting.boot_id,
                url=starting.url,
                labels=starting.labels,
                engine=engine,
                clock=time.time,
                started_s=time.time(),
                pictures=PictureMemory.within(engine.state().memory_limit_bytes),
                changed=changed,
            )
            # While a body is parsed, the collector reads all objects many times: not these.
            gc.collect()
            gc.freeze()
            on_ready = functools.partial(announce, worker, source, settings.join)
            alive = await serve(
                worker,
                listener,
                token=settings.token,
                nodes_key=settings.nodes_key,
                identity=identity,
                shutdown=shutdown,
                on_ready=on_ready,
            )
    return ExitCode.ENDED if alive else ExitCode.ENGINE_DIED


async def _loaded(load: Callable[[], RunningEngine], shutdown: Shutdown) -> RunningEngine:
    """Run `load` in a thread; raise `KeyboardInterrupt` if a shutdown is requested before its end.

    The process does not wait for the thread, which may download or load weights for long.
    """
    future: Future[RunningEngine] = Future()

    def run() -> None:
        try:
            future.set_result(load())
        except BaseException as error:  # noqa: BLE001 - the future passes it on
            future.set_exception(error)
        threading.Event().wait()  # MLX aborts a process in which a thread that imported it ends

    threading.Thread(target=run, name="paceline-start", daemon=True).start()
    loading = asyncio.wrap_future(future)
    await first_of(asyncio.wait({loading}), shutdown.requested.wait())
    if not loading.done():
        raise KeyboardInterrupt
    return loading.result()


@contextlib.asynccontextmanager
async def _shown(
    starting: StartingWorker, changed: asyncio.Event, *, leashed: bool
) -> AsyncIterator[None]:
    """Show the start within the context: to the parent process, or in the terminal or the log.

    The parent process gets a line for each step, and one a second.
    """
    display = StartDisplay(sys.stdout)

    async def follow() -> None:
        stage, printed = "", None
        while True:
            progress = starting.progress()
            if progress.stage != stage:
                stage = progress.stage
                changed.set()  # to the gateways too
            line = (stage, progress.done, int(progress.elapsed_s))
            if not leashed:
                display.show(progress)
            elif line != printed:
                printed = line
                _print(START_PREFIX + progress.model_dump_json())
            await asyncio.sleep(_START_INTERVAL_S)

    task = asyncio.create_task(follow())
    try:
        yield
    finally:
        task.cancel()
        display.close()


def announce(worker: Worker[Any], source: ModelSource, gateway_url: str) -> None:
    """Print the start lines for people, then to a pipe or a log the ready line for programs.

    The last line for people has the model, lanes, memory, and the model's features.
    """
    card = worker.engine.card
    if source.toy:
        _print(
            "This is a toy model that ships with Paceline. To serve a real one, start the worker "
            "with --model FOLDER_OR_REPOSITORY, for example --model Qwen/Qwen3.5-4B"
        )
    if not gateway_url:
        _print(
            "Not joined to any gateway: this worker answers at its own address alone. To join one, "
            "start it with --join http://GATEWAY:8000, and with its token in PACELINE_JOIN_TOKEN"
        )
    lanes = " and ".join(card.lanes)
    shared = "share one copy of the weights" if len(card.lanes) > 1 else "is the only lane"
    used_bytes = worker.engine.state().memory_bytes
    _print(
        f"Worker {worker.worker_id} serves {card.model} at {worker.url}. {lanes} {shared} "
        f"({card.weights_bytes / 1e6:.1f} MB; {used_bytes / 1e6:.1f} MB in use). "
        f"{_abilities(card)}"
    )
    if not sys.stdout.isatty():
        ready = {
            "url": worker.url,
            "worker_id": worker.worker_id,
            "model": card.model,
            "lanes": list(card.lanes),
        }
        _print(READY_PREFIX + json.dumps(ready))


def _abilities(card: Card) -> str:
    """Return whether the model drafts, or the kind of result of an embedder or reranker."""
    match card:
        case ModelCard():
            sparse = card.spec_prefill or ""
            return _drafts(card) + (f" {sparse[0].upper()}{sparse[1:]}." if sparse else "")
        case PoolingCard(lanes=(Endpoint.EMBEDDINGS.value,)):
            numbers = f"{card.dimensions} numbers"
            return (
                f"It returns vectors of {numbers} for texts of up to {card.context_tokens} tokens."
            )
        case _:
            return f"It ranks documents of up to {card.context_tokens} tokens, the query included."


def _drafts(card: ModelCard) -> str:
    """Return how many tokens the model drafts ahead, or why fewer than requested."""
    requested, effective = card.draft_tokens_requested, card.draft_tokens_effective
    count = f"{effective} token{'' if effective == 1 else 's'} ahead"
    fewer = f", and not {requested}" if effective < requested else ""
    reason = f": {card.mtp_unavailable_reason.rstrip('.')}" if card.mtp_unavailable_reason else ""
    drafts = f"It drafts {count}{fewer}" if effective else "It does not draft"
    more = ""
    if card.looks_up and card.mtp:
        more = " It drafts words that occurred before too (prompt lookup)."
    elif card.looks_up:
        drafts = "It drafts only words that occurred before (prompt lookup)"
    found = known_head(card.model) if requested and not card.mtp else None
    hint = f" There is an MTP head for it: start the worker with --mtp {found}." if found else ""
    return f"{drafts}{reason}.{more}{hint}"
