"""`python -m workers.doctor`, which is `paceline doctor`: its command line and its progress."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.command_line import describe_usage_error, doctor_command
from paceline.protocol import ExitCode, StartProgress, StartStage
from paceline.terminal import StartDisplay, configure_logging, printable

if TYPE_CHECKING:
    from workers.doctor.report import Report
    from workers.engine.engine import Engine
    from workers.server.model_source import ModelSource

_DRAFT_TOKENS = 3
"""The longest draft of the head that is measured."""


def main(arguments: Sequence[str]) -> int:
    """Measure this machine; return the exit code."""
    configure_logging(logging.ERROR, "%(asctime)s %(levelname)s %(message)s")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        command = doctor_command(_run)
        with command.make_context("paceline doctor", list(arguments)) as context:
            exit_code: int = command.invoke(context)
    except click.exceptions.Exit as end:  # after `--help`
        return end.exit_code
    except click.UsageError as error:
        sys.stderr.write(printable(f"paceline doctor: {describe_usage_error(error)}\n"))
        return ExitCode.SETTINGS
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(ExitCode.INTERRUPTED)  # MLX aborts a process that ends while a thread of it runs
    return exit_code


def _run(model: str, mtp: str, json_file: Path, seconds: float) -> int:
    from workers.engine.types import ModelUnusable  # noqa: PLC0415  # not for help

    if importlib.util.find_spec("mlx") is None:
        sys.stderr.write(
            "paceline doctor: MLX is not installed; `scripts/setup worker` installs it.\n"
        )
        return ExitCode.SETTINGS
    try:
        report = _examine(model, mtp, seconds)
    except ModelUnusable as error:
        sys.stderr.write(printable(f"paceline doctor: {error}\n"))
        return ExitCode.MODEL
    from rich.console import Console  # noqa: PLC0415

    from workers.doctor.report import render  # noqa: PLC0415

    width = None if sys.stdout.isatty() else 120
    Console(highlight=False, width=width).print(render(report))
    try:
        json_file.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        problem = f"paceline doctor: cannot write {json_file}: {error.strerror}\n"
        sys.stderr.write(printable(problem))
        return 1
    print(  # noqa: T201
        f"\n{json_file} has all of it, and nothing that names this machine or its user. Please "
        "attach it to an issue of the project: it is how the speeds of Macs become known."
    )
    return 1 if report.failures else 0


def _examine(named: str, mtp: str, seconds: float) -> Report:
    """Load a model as a worker does, and measure it."""
    from workers.server.model_source import resolve_model  # noqa: PLC0415

    source, head = resolve_model(named), resolve_model(mtp) if mtp else None
    # A wrong name is reported before: MLX takes seconds to import.
    import mlx.core as mx  # noqa: PLC0415

    from workers.doctor.machine import inspect_machine  # noqa: PLC0415
    from workers.doctor.measure import Session, measure_all, row_bytes, steps_of  # noqa: PLC0415
    from workers.doctor.report import Model, Report, advise  # noqa: PLC0415

    engine, load_s = _load(source, head)
    card, target = engine.card, engine.checkpoint.target
    metal = mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
    report = Report(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=inspect_machine(mx.device_info(), metal=metal),
        model=Model(
            name=source.served_name,
            family=card.family,
            parameters=card.parameters,
            weights_bytes=card.weights_bytes,
            context_tokens=card.context_tokens,
            load_s=load_s,
            shares_passes=target.supports_batching,
            verifies_natively=target.native_verify,
            head=card.mtp_unavailable_reason or "drafts",
            memory_limit_bytes=engine.state().memory_limit_bytes,
            row_bytes=row_bytes(engine),
            longest_row_tokens=engine.admission.memory.max_row_tokens(),
            peak_bytes=0,
        ),
    )
    mx.reset_peak_memory()
    with _progress(steps_of(engine)) as step:
        session = Session(engine, until_s=time.perf_counter() + seconds, step=step)
        report = measure_all(session, report)
    peak = report.model.model_copy(update={"peak_bytes": mx.get_peak_memory()})
    failures = (*report.failures, *_changed_answers(report))
    report = report.model_copy(update={"model": peak, "failures": failures})
    return report.model_copy(update={"advice": tuple(advise(report))})


def _changed_answers(report: Report) -> Iterator[str]:
    exact = report.exact
    if exact is not None and (exact.same_bits or 0) < exact.answers:
        yield (
            f"Of {exact.answers} exact answers {exact.answers - (exact.same_bits or 0)} changed "
            "in the company of others."
        )


def _load(source: ModelSource, head: ModelSource | None) -> tuple[Engine, float]:
    """Return the engine, and the time that loading it took."""
    from workers.engine.engine import load_engine  # noqa: PLC0415
    from workers.engine.types import EngineSettings, LaneName  # noqa: PLC0415

    display, begun_s = StartDisplay(sys.stderr), time.monotonic()

    def show(stage: StartStage, done: int, total: int) -> None:
        elapsed_s = time.monotonic() - begun_s
        display.show(StartProgress(stage=stage, done=done, total=total, elapsed_s=elapsed_s))

    def downloaded(done: int, total: int) -> None:
        show(StartStage.DOWNLOAD, done, total)

    try:
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
    finally:
        display.close()
    return engine, time.monotonic() - loading_s


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[str], None]]:
    """Show what is measured: a bar on a terminal, elsewhere a line now and then."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("Measuring {task.description}"), BarColumn(24),
        MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    bars = Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=4,  # drawing competes with the measurement
    )
    task = bars.add_task("", total=steps)
    printed_s = time.monotonic()

    def step(name: str) -> None:
        nonlocal printed_s
        bars.update(task, description=name, advance=1)
        if not console.is_terminal and time.monotonic() - printed_s >= StartDisplay.LINE_EVERY_S:
            printed_s = time.monotonic()
            console.print(f"Measuring {name} ...", markup=False)

    with bars:
        yield step


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
