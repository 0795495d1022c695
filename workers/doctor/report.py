"""The report of `paceline doctor`: its measurements, as JSON and as text, and its advice."""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import accumulate
from operator import mul
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.protocol import Count

Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]

_LAST_WITHOUT_BFLOAT16 = 14
_BYTES_PER_PARAMETER = {4: 4.5 / 8, 8: 8.5 / 8}
"""Of weights with scales and biases for each group of 64."""
_SHARE_FOR_WEIGHTS = 0.75
"""The rest is for the caches of rows, and for activations."""
_PAYS = 1.03
"""A gain below this is noise."""
ROW_TOKENS = 8192


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NetworkAccess(StrEnum):
    """Whether this process may reach other machines of the local network."""

    ALLOWED = "allowed"
    DENIED = "denied"
    UNKNOWN = "unknown"
    NOT_NEEDED = "no permission needed"


class Machine(_Part):
    """The machine, without anything that names it or its user."""

    chip: str
    model: str
    """Apple's name, such as Mac16,5; empty elsewhere."""
    system: str
    python: str
    versions: dict[str, str]
    cores: Count
    performance_cores: Count
    """0 if unknown, as below."""
    efficiency_cores: Count
    memory_bytes: Count
    metal: bool
    """Whether MLX computes on a GPU of Apple's."""
    architecture: str
    """Of the GPU, such as applegpu_g16s."""
    generation: Count
    """Of the GPU: 13 is M1, 14 M2, 15 M3, 16 M4, 17 M5."""
    working_set_bytes: Count
    """Memory that the GPU may use without being slowed down."""
    largest_buffer_bytes: Count
    wired_limit_bytes: Count
    """As the owner has set it (iogpu.wired_limit_mb); 0: the system's default."""
    network: NetworkAccess


class Model(_Part):
    """The model that was measured."""

    name: str
    family: str
    parameters: Count
    weights_bytes: Count
    context_tokens: Count
    load_s: Seconds
    shares_passes: bool
    """Whether rows of different lengths share a pass."""
    verifies_natively: bool
    """Whether one pass verifies several tokens."""
    head: str
    """Why there is no MTP head, or that there is one."""
    memory_limit_bytes: Count
    row_bytes: Count
    """Of a row of `ROW_TOKENS` tokens."""
    longest_row_tokens: Count
    peak_bytes: Count
    """Memory of MLX at its peak during the measurement."""


class Round(_Part):
    """A round of decoding: each row drafts k tokens and verifies them."""

    rows: Count
    k: Count
    round_s: Seconds
    """Median."""
    samples: Count


class Equality(_Part):
    """How many answers equal those of the same questions asked one by one, without drafts."""

    answers: Count
    equal: Count
    first_differences: tuple[Count, ...] = ()
    """The token at which each other one leaves."""
    same_bits: Count | None = None
    """Answers with the same log-probabilities in every bit; None: not compared."""


class Report(_Part):
    """All that was measured; `paceline doctor` writes it as JSON."""

    version: int = 1
    created: str
    """In UTC."""
    machine: Machine
    model: Model
    prefill_tokens_per_s: Annotated[float, Field(ge=0)] = 0.0
    """0 if the time was over before, as for all empty lists below."""
    rounds: tuple[Round, ...] = ()
    acceptance: tuple[Share, ...] = ()
    """Share of drafts accepted at each position, given that all before it were."""
    with_drafts: Equality | None = None
    in_company: Equality | None = None
    exact: Equality | None = None
    """Of answers with `exact`, with and without company."""
    skipped: tuple[str, ...] = ()
    """Measurements that the time did not suffice for."""
    failures: tuple[str, ...] = ()
    """A defect of Paceline that its owner should report."""
    advice: tuple[str, ...] = ()

    def tokens_per_round(self, k: int) -> float:
        """Return the expected tokens of a row in a round that drafts k."""
        reached: Iterable[float] = accumulate(self.acceptance[:k], mul)
        return 1 + sum(reached)

    def tokens_per_s(self, rows: int, k: int) -> float:
        """Return the expected tokens a second of all rows; 0 if they are not known.

        That takes the time of a round, and the acceptance of the drafts in it.
        """
        costs_s = {(one.rows, one.k): one.round_s for one in self.rounds}
        round_s = costs_s.get((rows, k)) if k <= len(self.acceptance) else None
        return rows * self.tokens_per_round(k) / round_s if round_s else 0.0

    def best_k(self, rows: int) -> int | None:
        """Return the draft length with the most tokens a second; None if none was measured."""
        measured = [one.k for one in self.rounds if one.rows == rows]
        return max(measured, key=lambda k: self.tokens_per_s(rows, k), default=None)


def advise(report: Report) -> Iterator[str]:
    """Yield advice for this machine from its measurements; pure."""
    machine, model = report.machine, report.model
    yield from _advise_drafts(report)
    rows = sorted({one.rows for one in report.rounds})
    if len(rows) > 1:
        first, last = rows[0], rows[-1]
        alone = report.tokens_per_s(first, report.best_k(first) or 0)
        together = report.tokens_per_s(last, report.best_k(last) or 0)
        if alone:
            yield (
                f"{last} requests at once get {together / alone:.1f} times the tokens a second of "
                f"one, {together:.0f} in all."
            )
    if model.row_bytes:
        room = max(model.memory_limit_bytes - model.weights_bytes, 0) * 0.9
        fitting = int(room // model.row_bytes)
        if fitting < 8:
            yield (
                f"The memory beside the weights holds {fitting} conversations of {ROW_TOKENS:,} "
                "tokens: more wait. A smaller model, or fewer bits per weight, leaves more."
            )
    budget = machine.working_set_bytes * _SHARE_FOR_WEIGHTS
    if budget:
        four, eight = (budget / size / 1e9 for size in _BYTES_PER_PARAMETER.values())
        yield (
            f"Models of up to about {four:.0f} billion parameters in 4 bits, or {eight:.0f} in 8, "
            "leave a quarter of this memory for requests."
        )
    if machine.metal and 0 < machine.generation <= _LAST_WITHOUT_BFLOAT16:
        yield (
            "This chip computes no bfloat16: try `--dtype auto`, which reads prompts in float16 "
            "where the family allows it."
        )
    if machine.network is NetworkAccess.DENIED:
        yield (
            "macOS does not let this terminal reach the local network, so no gateway on another "
            "Mac can be joined from here: allow it in System Settings, Privacy & Security, Local "
            "Network."
        )
    differing = [one for one in (report.with_drafts, report.in_company) if one is not None]
    if any(one.equal < one.answers for one in differing):
        yield (
            "Rounding changes some answers here where two tokens are almost equally likely; "
            'requests whose answers must not change in any bit set "exact": true.'
        )


def _advise_drafts(report: Report) -> Iterator[str]:
    for rows in sorted({one.rows for one in report.rounds}):
        k, plain = report.best_k(rows), report.tokens_per_s(rows, 0)
        drafted = {one.k for one in report.rounds if one.rows == rows and one.k}
        if k is None or not plain or not drafted or not report.acceptance:
            continue
        gain = report.tokens_per_s(rows, k) / plain
        who = "one request" if rows == 1 else f"{rows} requests at once"
        if not k or gain < _PAYS:
            yield f"For {who} the head's drafts do not pay; the worker then drafts nothing."
        else:
            yield f"For {who} {k} drafted tokens pay most: {gain:.2f} times plain decoding."


def render(report: Report) -> RenderableType:
    """Draw the report for a terminal or a pipe."""
    parts: list[RenderableType] = [
        _pairs("Machine", _machine(report.machine)),
        _pairs("Model", _model(report)),
    ]
    if report.rounds:
        parts.append(_rounds(report))
    if report.exact is not None or report.with_drafts is not None:
        title = "Answers that equal those asked alone, without drafts"
        parts.append(_pairs(title, _equality(report)))
    for title, lines, style in (
        ("What this machine should run", report.advice, "bold"),
        ("Not measured, for lack of time", report.skipped, "yellow"),
        ("Faults: please report them", report.failures, "bold red"),
    ):
        if lines:
            parts.append(Group(Text(title, style=style), *(Text(f"- {line}") for line in lines)))
    return Group(*(one for part in parts for one in (part, "")))


def _table(title: str, *, show_header: bool) -> Table:
    return Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        title=title,
        title_justify="left",
        title_style="bold",
        show_header=show_header,
    )


def _pairs(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    table = _table(title, show_header=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, Text(value))
    return table


def _machine(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "chip", f"{machine.chip} ({machine.model})" if machine.model else machine.chip
    kinds = f" ({machine.performance_cores} fast, {machine.efficiency_cores} efficient)"
    yield "cores", f"{machine.cores}{kinds if machine.performance_cores else ''}"
    device = f"Metal, {machine.architecture}" if machine.metal else "the CPU, in float32"
    yield "computes on", device
    limits = (
        (", {} for the GPU", machine.working_set_bytes),
        (", {} in one buffer", machine.largest_buffer_bytes),
        ("; wired limit {}", machine.wired_limit_bytes),
    )
    known = "".join(text.format(_gb(size_bytes)) for text, size_bytes in limits if size_bytes)
    yield "memory", f"{_gb(machine.memory_bytes)} in all{known}"
    yield "local network", machine.network.value
    yield "system", f"{machine.system}, Python {machine.python}"
    yield "versions", ", ".join(f"{name} {number}" for name, number in machine.versions.items())


def _model(report: Report) -> Iterator[tuple[str, str]]:
    model, count = report.model, report.model.parameters
    size = f"{count / 1e9:.1f} billion" if count >= 10**8 else f"{count / 1e6:.1f} million"
    yield "model", f"{model.name} ({model.family}), {size} parameters"
    yield "weights", f"{_gb(model.weights_bytes)}, loaded in {model.load_s:.1f} s"
    passes = "rows share passes" if model.shares_passes else "rows decode one by one"
    verify = "one pass verifies a draft" if model.verifies_natively else "verifies token by token"
    yield "decoding", f"{passes}; {verify}"
    yield "MTP head", model.head
    yield (
        "memory",
        f"{_gb(model.row_bytes)} for {ROW_TOKENS:,} tokens; one row holds up to "
        f"{model.longest_row_tokens:,} tokens; {_gb(model.peak_bytes)} at the peak",
    )
    if report.prefill_tokens_per_s:
        yield "reading", f"{report.prefill_tokens_per_s:,.0f} tokens of a prompt a second"


def _rounds(report: Report) -> Table:
    title = "Rounds by k: time, and expected tokens a second of all rows"
    table = _table(title, show_header=True)
    table.add_column("rows", no_wrap=True)
    lengths = sorted({one.k for one in report.rounds})
    for k in lengths:
        table.add_column(f"k = {k}", justify="right", no_wrap=True)
    cells: dict[int, dict[int, str]] = {}
    for one in report.rounds:
        speed = report.tokens_per_s(one.rows, one.k)
        text = f"{one.round_s * 1e3:.1f} ms" + (f"  {speed:.0f}/s" if speed else "")
        cells.setdefault(one.rows, {})[one.k] = text
    for rows, by_k in sorted(cells.items()):
        table.add_row(str(rows), *(by_k.get(k, "-") for k in lengths))
    if report.acceptance:
        shares = ", ".join(f"{share:.0%}" for share in report.acceptance)
        table.caption = f"Accepted drafts by position: {shares}"
        table.caption_justify = "left"
    return table


def _equality(report: Report) -> Iterator[tuple[str, str]]:
    for name, found in (
        ("with drafts", report.with_drafts),
        ("in company", report.in_company),
        ("exact, in company", report.exact),
    ):
        if found is None:
            continue
        text = f"{found.equal} of {found.answers}"
        if found.same_bits is not None:
            text += f", {found.same_bits} of them in every bit"
        if found.first_differences:
            text += f"; the others leave at token {', '.join(map(str, found.first_differences))}"
        yield name, text


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.2f} GB"
