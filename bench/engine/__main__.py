"""Our worker compared with other engines, on one checkpoint, in one run.

`python -m bench.engine` makes a virtual environment for each peer, then starts, measures and stops
one server after another, so that each server has the machine to itself. Every repetition measures
them in another order, so that a warm or busy machine slows all of them alike.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.engine import tables
from bench.engine.measurements import FULL, QUICK, CountTokens, Plan, measure
from bench.engine.rounds import Bare, measure_bare
from bench.harness.blas import preload
from bench.harness.contenders import OURS, PEERS
from bench.harness.options import parser, peers_option
from bench.harness.samples import Samples, rotated
from bench.harness.servers import running_engine
from bench.harness.tables import Grid, console, failures, provenance, report, targets
from bench.harness.venvs import PeerUnavailable


def _token_counter(model: Path) -> CountTokens:
    """Return a function that counts the tokens of all engines by one rule."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


async def measure_all(
    all_samples: dict[str, Samples], bare: Bare, options: Any, plan: Plan, repetitions: int
) -> None:
    """Measure all contenders repeatedly, each time in another order."""
    model = options.model.resolve()
    contenders = [one for one in (OURS, *PEERS) if one.name in all_samples]
    count_tokens = _token_counter(model)
    for repetition in range(repetitions):
        for contender in rotated(contenders, repetition):
            ours = contender is OURS
            samples = all_samples[contender.name]
            console().print(f"{repetition + 1}/{repetitions} {contender.name}")
            try:
                async with running_engine(contender, options.folder, model=model) as server:
                    seed = repetition + 1
                    await measure(server, samples, plan, count_tokens, ours=ours, seed=seed)
            except PeerUnavailable as reason:
                samples.failures["start"] = str(reason)
            if ours:  # immediately: bare rounds are the ceiling of the last measurement
                rounds, rollbacks = await measure_bare(model)
                bare.rounds.extend(rounds)
                bare.rollbacks.extend(rollbacks)


def main() -> None:
    made = parser("engine", __doc__, model=True)
    peers_option(made, [peer.name for peer in PEERS])
    made.add_argument("--repetitions", type=int, default=3)
    options = made.parse_args()
    repetitions = 1 if options.quick else options.repetitions
    samples = {name: Samples() for name in (OURS.name, *options.peers)}
    bare = Bare([], [])
    plan = QUICK if options.quick else FULL
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop the servers then, too
    try:
        asyncio.run(measure_all(samples, bare, options, plan, repetitions))
    except KeyboardInterrupt:
        console().print("Interrupted: these are the results so far.")
    blas = preload().get("LD_PRELOAD", "of the platform")
    pins = sorted({pin for peer in PEERS for pin in peer.pins})
    about = f"{provenance()}, BLAS {blas}; {repetitions} repetitions; peers: {', '.join(pins)}."
    parts: list[str | Grid] = [
        tables.engines(samples),
        tables.draft_lengths(samples[OURS.name], bare.rounds),
        targets(tables.judge(samples, bare)),
        "\n".join(failures(samples)),
    ]
    report("engine.md", "Engine", about, *parts, write=not options.quick and bool(bare.rounds))


if __name__ == "__main__":
    main()
