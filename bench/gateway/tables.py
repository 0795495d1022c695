"""Tables of the measured gateways, with ratios and targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from bench.gateway.backend import EVENTS
from bench.gateway.contenders import OURS, OVER_TLS
from bench.gateway.load import Wire
from bench.harness.samples import Samples
from bench.harness.tables import Grid, Target, cell, ratio, targets

DIRECT: Final = "worker alone"
_CPU: Final = {
    "unstreamed_cpu_s": "CPU an answer, us",
    "stream_cpu_s": "CPU a stream of 64 words, us",
    "event_cpu_s": "CPU an event of 50 paced streams, us",
}
_BOUNDS_US: Final = {"unstreamed_cpu_s": 240, "stream_cpu_s": 400, "event_cpu_s": 35}
"""The targets of our gateway."""
_TLS_BOUND_US: Final = 40
_WIRE_RATIO: Final = 3.0
_ROUTERS: Final = ("vllm-router", "smg")


def metric(wire: Wire, *, stream: bool) -> str:
    name = "stream_cpu_s" if stream else "unstreamed_cpu_s"
    return name if wire is Wire.CHAT else f"{wire}_{name}"


def grids(samples: Mapping[str, Samples]) -> list[Grid]:
    ours = samples[OURS.name]

    rows = [
        (label, *(cell(one.median(name), 1e6) for one in samples.values()))
        for name, label in _CPU.items()
    ]
    for label, times in (("first word", _first_word_s), ("... of it added", _added_s)):
        for share in (0.5, 0.99):
            cells = [cell(times(samples, peer, share), 1e3, ".2f") for peer in samples]
            rows.append((f"{label}, p{share * 100:.0f}, ms", *cells))
    peers = [name for name in samples if name != DIRECT]
    ratios = [
        (
            label.rpartition(",")[0],
            *(
                cell(ratio(samples[peer].median(name), ours.median(name)), 1, ".2f")
                for peer in peers
            ),
        )
        for name, label in _CPU.items()
    ]
    wires = []
    for wire in Wire:
        cells = []
        for stream in (False, True):
            value = ours.median(metric(wire, stream=stream))
            over = ratio(value, ours.median(metric(Wire.CHAT, stream=stream)))
            cells += [cell(value, 1e6), cell(over, 1, ".2f")]
        wires.append((wire.value, *cells))
    columns = ("", "CPU an answer, us", "over a chat's", "CPU a stream, us", "over a chat's")
    return [
        Grid("Cost of one request", ("", *samples), rows),
        Grid("Cost relative to paceline", ("", *peers), ratios),
        Grid("Cost of paceline by wire format", columns, wires),
        targets([*_of_ours(samples), *_against_peers(samples)]),
    ]


def _of_ours(samples: Mapping[str, Samples]) -> Iterator[Target]:
    ours = samples[OURS.name]
    for name, bound_us in _BOUNDS_US.items():
        if (value := ours.median(name)) is not None:
            yield Target(_CPU[name], 1e6 * value, bound_us)
    for name, events, label in (
        ("stream_cpu_s", EVENTS, "an event of a stream of 64 words"),
        ("event_cpu_s", 1, "an event of 50 paced streams"),
    ):
        plain, secure = ours.median(name), samples.get(OVER_TLS.name, Samples()).median(name)
        if plain is not None and secure is not None:
            added_us = 1e6 * (secure - plain) / events
            yield Target(f"added by TLS to {label}, us", added_us, _TLS_BOUND_US)
    for share, bound_ms in ((0.5, 1), (0.99, 5)):
        if (added_s := _added_s(samples, OURS.name, share)) is not None:
            yield Target(f"added to first words, p{share * 100:.0f}, ms", 1e3 * added_s, bound_ms)
    for wire in (Wire.MESSAGES, Wire.RESPONSES):
        over = ratio(ours.median(metric(wire, stream=True)), ours.median("stream_cpu_s"))
        if over is not None:
            yield Target(f"CPU a stream of {wire.value.title()}, over a chat's", over, _WIRE_RATIO)


def _against_peers(samples: Mapping[str, Samples]) -> Iterator[Target]:
    ours = samples[OURS.name]
    compared = [(router, name, 1) for router in _ROUTERS for name in [*_CPU][1:]]
    for router, name, bound in (*compared, (_ROUTERS[0], "unstreamed_cpu_s", 2)):
        over = ratio(ours.median(name), samples.get(router, Samples()).median(name))
        if over is not None:
            yield Target(f"{_CPU[name].rpartition(',')[0]}, over {router}'s", over, bound)
    for name in ("unstreamed_cpu_s", "stream_cpu_s"):
        over = ratio(samples.get("litellm", Samples()).median(name), ours.median(name))
        if over is not None:
            label = f"litellm's {_CPU[name].rpartition(',')[0]}, over ours"
            yield Target(label, over, 90, at_least=True)


def _first_word_s(samples: Mapping[str, Samples], name: str, share: float) -> float | None:
    return samples[name].percentile("first_word_s", share)


def _added_s(samples: Mapping[str, Samples], name: str, share: float) -> float | None:
    """Return the difference of a percentile to that of the worker without a gateway."""
    direct = _first_word_s(samples, DIRECT, share)
    through = _first_word_s(samples, name, share)
    return None if direct is None or through is None else through - direct
