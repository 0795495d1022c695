"""`paceline bench`: measure throughput, latency and speculation of an OpenAI endpoint."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway import event_loop
from gateway.cli import CommandError
from gateway.cli.client import connect, fitting
from gateway.loadgen import MeasurementError, report, runner
from gateway.loadgen.client import Endpoint, open_endpoint
from gateway.loadgen.prompts import built_in_prompts, read_prompts
from gateway.loadgen.runner import Level, Measurement

_BUSY_SHARE = 0.8
_PIPED_WIDTH = 120


def run(**given: Any) -> int:
    """Run the benchmark; return 0 if a request succeeded, 1 if none did, 130 if interrupted."""
    options = SimpleNamespace(**given)
    if options.rate and options.concurrency:
        raise click.UsageError("--rate is not allowed with --concurrency.")
    endpoints: list[Endpoint] = []
    measurements: list[Measurement] = []
    interrupted = False
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    try:
        event_loop.run(_measure(options, endpoints, measurements, console))
    except MeasurementError as error:
        raise CommandError(str(error)) from None
    except KeyboardInterrupt:  # the measurements so far are reported
        interrupted = True
    if measurements:
        _report(options, endpoints, measurements, console)
    if interrupted:
        return 130
    return 0 if any(measured.figures["completed"] for measured in measurements) else 1


async def _measure(
    options: SimpleNamespace,
    endpoints: list[Endpoint],
    measurements: list[Measurement],
    console: Console,
) -> None:
    """Add the endpoints and their measurements to the lists, and print each measurement."""
    levels = [Level(concurrency=number) for number in options.concurrency or (1,)]
    plan = runner.Plan(
        levels=[Level(rate=rate) for rate in options.rate] if options.rate else levels,
        prompts=read_prompts(options.prompts) if options.prompts else built_in_prompts(),
        requests=options.requests,
        repetitions=options.repeat or (2 if options.compare else 1),
    )
    common = {"max_tokens": options.max_tokens, "temperature": 0.0}  # greedy
    targets = [(connect(options.url).url, options.model, options.body, "PACELINE_API_KEY")]
    if options.compare:
        body = options.body if options.compare_body is None else options.compare_body
        model = body.get("model", "")
        targets.append((options.compare, model, body, "PACELINE_COMPARE_API_KEY"))
    async with contextlib.AsyncExitStack() as stack:
        for url, model, body, key_variable in targets:
            opened = open_endpoint(
                url,
                model=model,
                like=endpoints[0].model if endpoints else "",
                api_key=os.environ.get(key_variable, ""),
                fields=common | body,
            )
            endpoint = await stack.enter_async_context(opened)
            await endpoint.check(plan.prompts[0])
            endpoints.append(endpoint)
        progress = stack.enter_context(_progress())
        async for measured in runner.measure_all(endpoints, plan, progress):
            measurements.append(measured)
            if len(endpoints) > 1:
                name = _names(endpoints)["AB".index(measured.endpoint)]
                console.print(f"{measured.endpoint}{measured.repetition}: {name}")
            console.print(report.block(measured))
            _warn(measured)


def _names(endpoints: Sequence[Endpoint]) -> list[str]:
    """Return the names of the endpoints, with the request fields that differ."""
    names = []
    for endpoint in endpoints:
        name = f"{endpoint.model} on {endpoint.url}"
        for field, value in endpoint.fields.items():
            if not all((field, value) in other.fields.items() for other in endpoints):
                name += f" {field}={value}"
        names.append(name)
    return names


def _warn(measured: Measurement) -> None:
    """Print warnings about figures that may mislead."""
    figures = measured.figures
    warnings = [f"failed: {problem}" for problem in measured.problems[:5]]
    if figures["completed"] and figures["output_tokens_counted_by"] == "pieces":
        warnings.append("The server does not report usage, so pieces of text count as tokens.")
    if figures.get("spec_decode_counted_by") == "server":
        warnings.append(
            "Draft figures come from the server's counters and include all of its clients."
        )
    if figures["client_busy"] > _BUSY_SHARE:
        warnings.append(
            f"The load generator used {figures['client_busy']:.0%} of a CPU core: "
            "the server may be faster than these figures show."
        )
    for warning in warnings:
        sys.stderr.write(f"paceline: {warning}\n")


def _report(
    options: SimpleNamespace,
    endpoints: Sequence[Endpoint],
    measurements: Sequence[Measurement],
    console: Console,
) -> None:
    """Print the tables of all measurements; write the JSON record."""
    ratios = report.compare(measurements)
    if len(measurements) > 1:
        console.print("", fitting(report.sweep(measurements), console), sep="\n")
    if ratios:
        console.print("", fitting(report.comparison(ratios), console), sep="\n")
    if options.json_file:
        record = {
            "measured": datetime.now(UTC).isoformat(timespec="seconds"),
            "endpoints": [
                {"url": endpoint.url, "model": endpoint.model, "body": endpoint.fields}
                for endpoint in endpoints
            ],
            "runs": [measured.to_json() for measured in measurements],
            "ratios": [ratio._asdict() for ratio in ratios],
        }
        try:
            options.json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            text = f"{options.json_file} cannot be written: {error.strerror}."
            raise CommandError(text) from None


@contextlib.contextmanager
def _progress() -> Iterator[runner.ProgressReporter]:
    """Show a progress bar if stderr is a terminal."""
    console = Console(stderr=True)
    bars = Progress(
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=4,  # drawing competes with the measurement
    )

    def start(title: str, requests: int) -> runner.OnEnd:
        for task in bars.task_ids:
            bars.remove_task(task)
        task = bars.add_task(title, total=requests)
        return lambda _response: bars.advance(task)

    with bars:
        yield start
