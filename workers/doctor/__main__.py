"""`python -m workers.doctor`, which is `paceline doctor`: its command line and its progress."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.command_line import CONTEXT, Command, seconds_from
from paceline.protocol import ExitCode, StartProgress, StartStage
from paceline.terminal import StartDisplay, configure_logging, printable
from workers.blas import restart_with_blas
from workers.command_line import run_command

if TYPE_CHECKING:
    from workers.doctor.report import Report
    from workers.engine.engine import Engine
    from workers.model_source import ModelSource

_DRAFT_TOKENS = 3
"""The longest draft of the head that is measured."""


def main(arguments: Sequence[str]) -> int:
    """Measure this machine; return the exit code."""
    configure_logging(logging.ERROR, "%(asctime)s %(levelname)s %(message)s")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        return run_command(doctor, arguments)
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(ExitCode.INTERRUPTED)  # MLX aborts a process that ends while a thread of it runs


@click.command(cls=Command, context_settings={**CONTEXT})
@click.option(
    "--model",
    default="",
    help="Folder or Hugging Face name of an MLX model (default: a toy model).",
)
@click.option(
    "--mtp",
    default="",
    metavar="HEAD",
    help="Folder or Hugging Face name of an MTP head for the model.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default="paceline-doctor.json",
    metavar="FILE",
    help="The report to send in (default: paceline-doctor.json).",
)
@click.option(
    "--seconds",
    type=seconds_from(1),
    default="120",
    metavar="N",
    help="Limit of the measurements, after the model is loaded (default: 120).",
)
def doctor(model: str, mtp: str, json_file: Path, seconds: float) -> int:
    """Measure a model on this Mac, and recommend settings.

    The measurements are rounds by draft length and number of requests, reading, memory, and whether
    answers stay the same. Nothing else should run meanwhile. A report for people goes to the
    terminal, and one to send in to a file.
    """
    from rich.console import Console  # noqa: PLC0415  # not for help

    from workers.doctor.report import render  # noqa: PLC0415
    from workers.engine.types import ModelUnusable  # noqa: PLC0415

    try:
        report = _examine(model, mtp, seconds)
    except ModelUnusable as error:
        return _failed(ExitCode.MODEL, error)
    width = None if sys.stdout.isatty() else 120
    Console(highlight=False, width=width).print(render(report))
    try:
        json_file.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        return _failed(1, f"cannot write {json_file}: {error.strerror}")
    print(  # noqa: T201
        f"\n{json_file} has all of it, and nothing that names this machine or its user. Please "
        "attach it to an issue of the project: it is how the speeds of Macs become known."
    )
    return 1 if report.failures else 0


def _failed(exit_code: int, problem: object) -> int:
    sys.stderr.write(printable(f"paceline doctor: {problem}\n"))
    return exit_code


def _examine(named: str, mtp: str, seconds: float) -> Report:
    """Load a model as a worker does, and measure it."""
    from workers.model_source import resolve_model  # noqa: PLC0415

    source, head = resolve_model(named), resolve_model(mtp) if mtp else None
    # A wrong name is reported before: MLX takes seconds to import.
    import mlx.core as mx  # noqa: PLC0415

    from workers.doctor.machine import inspect_machine  # noqa: PLC0415
    from workers.doctor.measure import Session, measure_all, steps_of  # noqa: PLC0415
    from workers.doctor.report import ROW_TOKENS, Model, Report, advise  # noqa: PLC0415

    engine, load_s = _load(source, head)
    card, target = engine.card, engine.checkpoint.target
    metal = mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
    machine = inspect_machine(mx.device_info(), metal=metal)
    mx.reset_peak_memory()
    done, steps = itertools.count(), steps_of(engine)
    with _progress("Measuring") as show:
        until_s = time.perf_counter() + seconds
        measured = measure_all(Session(engine, until_s, lambda: show("steps", next(done), steps)))
    model = Model(
        name=source.served_name,
        family=engine.checkpoint.family,
        parameters=card.parameters,
        weights_bytes=card.weights_bytes,
        context_tokens=card.context_tokens,
        load_s=load_s,
        shares_passes=target.supports_batching,
        verifies_natively=target.native_verify,
        head=card.mtp_unavailable_reason or "drafts",
        memory_limit_bytes=engine.state().memory_limit_bytes,
        row_bytes=engine.admission.memory.row_cache_bytes(ROW_TOKENS),
        longest_row_tokens=engine.admission.memory.max_row_tokens(),
        peak_bytes=mx.get_peak_memory(),
    )
    created = datetime.now(UTC).isoformat(timespec="seconds")
    report = Report(created=created, machine=machine, model=model, **measured)
    return report.model_copy(update={"advice": tuple(advise(report))})


def _load(source: ModelSource, head: ModelSource | None) -> tuple[Engine, float]:
    """Return the engine, and the time that loading it took."""
    from workers.engine.engine import load_engine  # noqa: PLC0415
    from workers.engine.types import EngineSettings, LaneName  # noqa: PLC0415

    with _progress() as show:
        downloaded = partial(show, StartStage.DOWNLOAD)
        folder = source.fetch(downloaded)
        head_folder = head.fetch(downloaded) if head else None
        loading_s = time.monotonic()
        settings = EngineSettings(
            model=folder,
            served_name=source.served_name,
            mtp=head_folder,
            lanes=(LaneName.VLM,),
            draft_tokens=_DRAFT_TOKENS,
            prefix_cache_bytes=0,
        )
        engine = load_engine(settings, show)
    return engine, time.monotonic() - loading_s


@contextmanager
def _progress(*title: str) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows a stage, its progress and its total."""
    display, begun_s = StartDisplay(sys.stderr, *title), time.monotonic()

    def show(stage: str, done: int, total: int) -> None:
        elapsed_s = time.monotonic() - begun_s
        display.show(StartProgress(stage=stage, done=done, total=total, elapsed_s=elapsed_s))

    try:
        yield show
    finally:
        display.close()


if __name__ == "__main__":
    restart_with_blas("workers.doctor")
    sys.exit(main(sys.argv[1:]))
