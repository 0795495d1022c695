"""Tables of the measured gateways, with ratios and targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from bench.gateway.contenders import OURS
from bench.gateway.load import Wire
from bench.harness.samples import Samples
from bench.harness.tables import MISSING, Grid, Target
from bench.harness.tables import targets as targets_grid

DIRECT: Final = "worker alone"
_CPU: Final = {
    "unstreamed_cpu_s": "CPU an answer, us",
    "stream_cpu_s": "CPU a stream of 64 words, us",
    "event_cpu_s": "CPU an event of 50 paced streams, us",
}
# The targets of our gateway, in CPU seconds.
_BOUNDS_S: Final = {"unstreamed_cpu_s": 240e-6, "stream_cpu_s": 400e-6, "event_cpu_s": 35e-6}
_WIRE_RATIO: Final = 3.0
_ROUTERS: Final = ("vllm-router", "smg")


def grids(samples: Mapping[str, Samples]) -> list[Grid]:
    """Return the tables of metrics, ratios and targets."""
    return [_figures(samples), _ratios(samples), _wires(samples[OURS.name]), _targets(samples)]


def failures(samples: Mapping[str, Samples]) -> list[str]:
    """List the metrics that could not be measured, with the reason."""
    return [
        f"- {name}, {metric}: {reason}"
        for name, values in samples.items()
        for metric, reason in values.failures.items()
    ]


def _figures(samples: Mapping[str, Samples]) -> Grid:
    rows = [
        (label, *(_cell(values.median(name), 1e6, ".0f") for values in samples.values()))
        for name, label in _CPU.items()
    ]
    for share in (0.5, 0.99):
        label = f"first word, p{share * 100:.0f}, ms"
        cells = (
            _cell(values.percentile("first_word_s", share), 1e3, ".2f")
            for values in samples.values()
        )
        rows.append((label, *cells))
    for share in (0.5, 0.99):
        label = f"... of it added, p{share * 100:.0f}, ms"
        cells = (_cell(_added_s(samples, name, share), 1e3, ".2f") for name in samples)
        rows.append((label, *cells))
    return Grid(title="Cost of one request", columns=("", *samples), rows=tuple(rows))


def _ratios(samples: Mapping[str, Samples]) -> Grid:
    rows = []
    for name, label in _CPU.items():
        ours = samples[OURS.name].median(name)
        cells = (
            _cell(_over(values.median(name), ours), 1, ".2f")
            for peer, values in samples.items()
            if peer != DIRECT
        )
        rows.append((label.rpartition(",")[0], *cells))
    names = [name for name in samples if name != DIRECT]
    return Grid(title="Cost relative to paceline", columns=("", *names), rows=tuple(rows))


def _wires(ours: Samples) -> Grid:
    rows = []
    for wire in Wire:
        cells = []
        for name in ("unstreamed_cpu_s", "stream_cpu_s"):
            value = ours.median(_metric(wire, name))
            ratio = _over(value, ours.median(name))
            cells += [_cell(value, 1e6, ".0f"), _cell(ratio, 1, ".2f")]
        rows.append((wire.value, *cells))
    columns = ("", "CPU an answer, us", "over a chat's", "CPU a stream, us", "over a chat's")
    return Grid(title="Cost of paceline by wire format", columns=columns, rows=tuple(rows))


def _metric(wire: Wire, name: str) -> str:
    return name if wire is Wire.CHAT else f"{wire}_{name}"


def _targets(samples: Mapping[str, Samples]) -> Grid:
    ours = samples[OURS.name]
    results = [
        _at_most(f"{_CPU[name]}", 1e6 * value, 1e6 * bound_s)
        for name, bound_s in _BOUNDS_S.items()
        if (value := ours.median(name)) is not None
    ]
    for share, bound_s in ((0.5, 1e-3), (0.99, 5e-3)):
        if (added_s := _added_s(samples, OURS.name, share)) is not None:
            results.append(
                _at_most(
                    f"added to first words, p{share * 100:.0f}, ms", 1e3 * added_s, 1e3 * bound_s
                )
            )
    stream = ours.median("stream_cpu_s")
    for wire in (Wire.MESSAGES, Wire.RESPONSES):
        if (ratio := _over(ours.median(_metric(wire, "stream_cpu_s")), stream)) is not None:
            label = f"CPU a stream of {wire.value.title()}, over a chat's"
            results.append(_at_most(label, ratio, _WIRE_RATIO))
    return targets_grid([*results, *_against_peers(samples)])


def _against_peers(samples: Mapping[str, Samples]) -> list[Target]:
    results = []
    ours = samples[OURS.name]
    for router in _ROUTERS:
        for name in ("stream_cpu_s", "event_cpu_s"):
            ratio = _over(ours.median(name), samples.get(router, Samples()).median(name))
            if ratio is not None:
                label = _CPU[name].rpartition(",")[0]
                results.append(_at_most(f"{label}, over {router}'s", ratio, 1))
    unstreamed = ours.median("unstreamed_cpu_s")
    router_ratio = _over(
        unstreamed, samples.get("vllm-router", Samples()).median("unstreamed_cpu_s")
    )
    if router_ratio is not None:
        results.append(_at_most("CPU an answer, over vllm-router's", router_ratio, 2))
    for name in ("unstreamed_cpu_s", "stream_cpu_s"):
        ratio = _over(samples.get("litellm", Samples()).median(name), ours.median(name))
        if ratio is not None:
            label = f"litellm's {_CPU[name].rpartition(',')[0]}, over ours"
            results.append(Target(name=label, reached=ratio, bound=90, at_least=True))
    return results


def _added_s(samples: Mapping[str, Samples], name: str, share: float) -> float | None:
    """Return the difference of a percentile to that of the worker without a gateway."""
    direct = samples[DIRECT].percentile("first_word_s", share)
    through = samples[name].percentile("first_word_s", share)
    return None if direct is None or through is None else through - direct


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def _at_most(name: str, reached: float, bound: float) -> Target:
    return Target(name=name, reached=reached, bound=bound, at_least=False)


def _cell(value: float | None, scale: float, form: str) -> str:
    return MISSING if value is None else format(value * scale, form)
