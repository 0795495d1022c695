"""`paceline bench`: how fast any OpenAI endpoint answers, and what its speculation brings."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.cli.client import add_gateway_url
from gateway.loadgen import MeasurementError, report
from gateway.loadgen.client import Endpoint, RawResponse, Target, open_endpoint
from gateway.loadgen.plot import svg
from gateway.loadgen.prompts import built_in_prompts, read_prompts
from gateway.loadgen.report import compare
from gateway.loadgen.runner import Level, Measurement, Plan, measure_all
from gateway.server import run as run_on_loop

_BUSY_SHARE = 0.8
_PIPED_WIDTH = 120


@dataclass
class _Found:
    """What was measured until now; it is told also where the rest is cut short."""

    endpoints: list[dict[str, Any]] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)

    def names(self) -> list[str]:
        """Name each endpoint, by what it alone is asked too."""
        bodies = [endpoint["body"] for endpoint in self.endpoints]
        shared = [
            item for item in bodies[0].items() if all(item in body.items() for body in bodies)
        ]
        return [
            " ".join(
                (
                    f"{endpoint['model']} on {endpoint['url']}",
                    *(
                        f"{name}={value}"
                        for name, value in body.items()
                        if (name, value) not in shared
                    ),
                )
            )
            for endpoint, body in zip(self.endpoints, bodies, strict=True)
        ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench`."""
    add = parser.add_argument
    add_gateway_url(parser)
    add("--model", default="", help="default: the first that the endpoint lists")
    add(
        "--compare",
        metavar="URL",
        default="",
        help="a second endpoint, measured in turn (ABAB); its key is in PACELINE_COMPARE_API_KEY",
    )
    add("--compare-model", metavar="MODEL", default="", help="default: the same, if it has it")
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=_numbers(int),
        default=(1,),
        metavar="N,N,...",
        help="requests at a time, one level after another (default: 1)",
    )
    load.add_argument(
        "--rate",
        type=_numbers(float),
        metavar="R,R,...",
        help="requests a second in their place, however many still run; times count from the "
        "moment at which each was due",
    )
    add("--requests", type=_number(int), metavar="N", help="at each level (default: 16 or more)")
    add("--prompts", type=Path, metavar="FILE.jsonl", help="lines of {'prompt': ...} or messages")
    add("--max-tokens", type=_number(int), default=256, metavar="N", help="default: 256")
    add("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    add("--body", type=_json_object, default={}, metavar="JSON", help="more fields of requests")
    add(
        "--compare-body",
        type=_json_object,
        metavar="JSON",
        help="""those of the second endpoint, e.g. '{"draft_tokens": 0}' (default: the same)""",
    )
    add("--seed", type=int, default=0, help="which prompts are drawn, and when they come")
    add("--repeat", type=_number(int), metavar="N", help="default: 1; 2 where two are compared")
    add(
        "--json",
        type=_output_file,
        metavar="FILE",
        help="write all figures, named as vLLM names them",
    )
    add("--plot", type=_svg_file, metavar="FILE.svg", help="draw them over the levels of load")


def run(options: argparse.Namespace) -> int:
    """Measure, print and write; 0 if requests were answered, 1 if none was, 130 if interrupted."""
    found = _Found()
    interrupted = False
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    try:
        with _progress() as telling:
            run_on_loop(_measure(options, found, telling, console))
    except MeasurementError as reason:
        sys.exit(f"paceline: {reason}")
    except KeyboardInterrupt:
        interrupted = True
    if found.measurements:
        _tell(options, found, console)
    if interrupted:
        return 130
    return 0 if any(each.figures.completed for each in found.measurements) else 1


async def _measure(
    options: argparse.Namespace,
    found: _Found,
    telling: Callable[[str, int], Callable[[RawResponse], None]],
    console: Console,
) -> None:
    plan = Plan(
        levels=(
            tuple(Level(rate=rate) for rate in options.rate)
            if options.rate
            else tuple(Level(concurrency=number) for number in options.concurrency)
        ),
        prompts=read_prompts(options.prompts) if options.prompts else built_in_prompts(),
        requests=options.requests,
        repetitions=options.repeat or (2 if options.compare else 1),
        seed=options.seed,
    )
    async with contextlib.AsyncExitStack() as stack:
        endpoints: list[Endpoint] = []
        for target in _targets(options):
            like = endpoints[0].model if endpoints else ""
            endpoint = await stack.enter_async_context(open_endpoint(target, like=like))
            await endpoint.check(plan.prompts[0])
            found.endpoints.append(
                {"url": endpoint.url, "model": endpoint.model, "body": dict(target.fields)}
            )
            endpoints.append(endpoint)
        async for measured in measure_all(endpoints, plan, telling):
            found.measurements.append(measured)
            if len(endpoints) > 1:
                name = found.names()["AB".index(measured.endpoint)]
                console.print(f"{measured.endpoint}{measured.repetition}: {name}")
            console.print(report.block(measured))
            _warn(measured)


def _targets(options: argparse.Namespace) -> Iterator[Target]:
    common = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    yield Target(
        url=options.url,
        model=options.model,
        api_key=os.environ.get("PACELINE_API_KEY", ""),
        fields=common | options.body,
    )
    if options.compare:
        body = options.body if options.compare_body is None else options.compare_body
        yield Target(
            url=options.compare,
            model=options.compare_model,
            api_key=os.environ.get("PACELINE_COMPARE_API_KEY", ""),
            fields=common | body,
        )


def _warn(measured: Measurement) -> None:
    """Say what keeps the figures from meaning what they seem to mean."""
    figures = measured.figures
    said = [f"failed: {problem}" for problem in measured.problems[:5]]
    if figures.completed and not figures.tokens_counted:
        said.append("The server does not tell its tokens: pieces of text are counted for them.")
    if figures.drafts is not None and figures.drafts_of == "server":
        said.append("Drafts are counted by the server, over all who used it meanwhile.")
    if figures.client_busy > _BUSY_SHARE:
        said.append(
            f"The load generator itself was busy for {figures.client_busy:.0%} of the time: "
            "the server may be faster than this."
        )
    for line in said:
        sys.stderr.write(f"paceline: {line}\n")


def _tell(options: argparse.Namespace, found: _Found, console: Console) -> None:
    """Print the tables over all measurements; write the record and the picture."""
    measurements = found.measurements
    ratios = compare(measurements)
    if len(measurements) > 1:
        console.print("", report.sweep(measurements))
    if ratios:
        console.print("", report.comparison(ratios))
    if options.json:
        record = {
            "measured": datetime.now(UTC).isoformat(timespec="seconds"),
            "endpoints": found.endpoints,
            "seed": options.seed,
            "runs": [measured.to_json() for measured in measurements],
            "ratios": [ratio.as_json() for ratio in ratios],
        }
        _write(options.json, json.dumps(record, indent=2) + "\n")
    if options.plot:
        _write(options.plot, svg(measurements, endpoints=found.names()))


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        sys.exit(f"paceline: {file} cannot be written: {error.strerror}.")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int], Callable[[RawResponse], None]]]:
    """Show how far the requests are, on a terminal alone."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bars = Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=4,  # drawing takes time from what is measured
    )

    def telling(what: str, requests: int) -> Callable[[RawResponse], None]:
        for task in bars.task_ids:
            bars.remove_task(task)
        task = bars.add_task(what, total=requests)
        return lambda _heard: bars.advance(task)

    with bars:
        yield telling


def _numbers(kind: type[int] | type[float]) -> Callable[[str], Sequence[float]]:
    one = _number(kind)
    return lambda text: tuple(one(part) for part in text.split(","))


def _number(kind: type[int] | type[float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = kind(0)
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
        return number

    return read


def _json_object(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(read := json.loads(text), dict):
            return read
    raise argparse.ArgumentTypeError("must be a JSON object")


def _output_file(text: str) -> Path:
    """Take a file that can be written: who has measured for an hour is not to learn it then."""
    file = Path(text)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{file} cannot be written")
    return file


def _svg_file(text: str) -> Path:
    if Path(text).suffix != ".svg":
        raise argparse.ArgumentTypeError("the picture is an SVG: name it FILE.svg")
    return _output_file(text)
