"""`paceline bench`: measure throughput, latency and speculation of an OpenAI endpoint."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.cli import CommandError
from gateway.cli.client import add_gateway
from gateway.loadgen import MeasurementError, json_object, report, runner
from gateway.loadgen.client import Endpoint, open_endpoint
from gateway.loadgen.plot import svg
from gateway.loadgen.prompts import built_in_prompts, read_prompts
from gateway.loadgen.runner import Level, Measurement
from gateway.server import run as run_on_loop

_BUSY_SHARE = 0.8
_PIPED_WIDTH = 120


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench`."""
    parser.set_defaults(run=_run)
    add_gateway(parser)
    add = parser.add_argument
    add_count = functools.partial(add, type=_number(int), metavar="N")
    add_fields = functools.partial(add, type=_json_object, metavar="JSON")
    add("--model", default="", help="default: the first model of the endpoint")
    add(
        "--compare",
        metavar="URL",
        default="",
        help="a second endpoint, measured in alternation; its key is in PACELINE_COMPARE_API_KEY",
    )
    add(
        "--compare-model",
        metavar="MODEL",
        default="",
        help="default: the same model if the endpoint serves it",
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=_numbers(int),
        default=(1,),
        metavar="N,N,...",
        help="levels of concurrent requests, one after another (default: 1)",
    )
    load.add_argument(
        "--rate",
        type=_numbers(float),
        metavar="R,R,...",
        help="levels of requests per second instead; latencies count from the time at which each "
        "request is due",
    )
    add_count("--requests", help="requests per measurement (default: at least 16)")
    add("--prompts", type=Path, metavar="FILE.jsonl", help="JSON lines with 'prompt' or 'messages'")
    add_count("--max-tokens", default=256, help="default: 256")
    add("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    add_fields("--body", default={}, help="further fields of every request")
    add_fields(
        "--compare-body",
        help="""for the second endpoint, e.g. '{"draft_tokens": 0}' (default: --body)""",
    )
    add("--seed", type=int, default=0, help="selects prompts and arrival times")
    add_count("--repeat", help="repetitions (default: 1; 2 in a comparison)")
    add(
        "--json",
        type=_output_file,
        metavar="FILE",
        help="write all figures, under the names of vLLM",
    )
    add("--plot", type=_svg_file, metavar="FILE.svg", help="plot the figures by level of load")


def _run(options: argparse.Namespace) -> int:
    """Run the benchmark; return 0 if a request succeeded, 1 if none did, 130 if interrupted."""
    endpoints: list[Endpoint] = []
    measurements: list[Measurement] = []
    interrupted = False
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    try:
        run_on_loop(_measure(options, endpoints, measurements, console))
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
    options: argparse.Namespace,
    endpoints: list[Endpoint],
    measurements: list[Measurement],
    console: Console,
) -> None:
    """Add the endpoints and their measurements to the lists, and print each measurement."""
    levels = [Level(concurrency=number) for number in options.concurrency]
    plan = runner.Plan(
        levels=[Level(rate=rate) for rate in options.rate] if options.rate else levels,
        prompts=read_prompts(options.prompts) if options.prompts else built_in_prompts(),
        requests=options.requests,
        repetitions=options.repeat or (2 if options.compare else 1),
        seed=options.seed,
    )
    common = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    targets = [(options.gateway.url, options.model, options.body, "PACELINE_API_KEY")]
    if options.compare:
        body = options.body if options.compare_body is None else options.compare_body
        targets.append((options.compare, options.compare_model, body, "PACELINE_COMPARE_API_KEY"))
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
    """Return the names of the endpoints, with the request fields in which they differ."""
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
        warnings.append("The server reports no usage: pieces of text count as tokens.")
    if figures.get("spec_decode_counted_by") == "server":
        warnings.append(
            "Draft figures come from the server's counters and include all its clients."
        )
    if figures["client_busy"] > _BUSY_SHARE:
        warnings.append(
            f"The load generator used {figures['client_busy']:.0%} of a CPU core: "
            "the server may be faster than these figures."
        )
    for warning in warnings:
        sys.stderr.write(f"paceline: {warning}\n")


def _report(
    options: argparse.Namespace,
    endpoints: Sequence[Endpoint],
    measurements: Sequence[Measurement],
    console: Console,
) -> None:
    """Print the tables of all measurements; write the JSON record and the plot."""
    ratios = report.compare(measurements)
    if len(measurements) > 1:
        console.print("", report.sweep(measurements))
    if ratios:
        console.print("", report.comparison(ratios))
    if options.json:
        record = {
            "measured": datetime.now(UTC).isoformat(timespec="seconds"),
            "endpoints": [
                {"url": endpoint.url, "model": endpoint.model, "body": endpoint.fields}
                for endpoint in endpoints
            ],
            "seed": options.seed,
            "runs": [measured.to_json() for measured in measurements],
            "ratios": [ratio._asdict() for ratio in ratios],
        }
        _write(options.json, json.dumps(record, indent=2) + "\n")
    if options.plot:
        _write(options.plot, svg(measurements, endpoints=_names(endpoints)))


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error.strerror}.") from None


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


def _numbers(kind: type[int] | type[float]) -> Callable[[str], Sequence[float]]:
    parse = _number(kind)
    return lambda text: tuple(parse(part) for part in text.split(","))


def _number(kind: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = kind(0)
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
        return number

    return parse


def _json_object(text: str) -> dict[str, Any]:
    if (value := json_object(text)) is None:
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _output_file(text: str) -> Path:
    """Return a writable file; checking first avoids losing the results of a long measurement."""
    file = Path(text)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{file} cannot be written")
    return file


def _svg_file(text: str) -> Path:
    if Path(text).suffix != ".svg":
        raise argparse.ArgumentTypeError("the plot is an SVG file: use a name that ends in .svg")
    return _output_file(text)
