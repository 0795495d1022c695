"""`make bench`: run the benchmarks and print what they measured."""

from __future__ import annotations

import asyncio

from rich.console import Console

from bench import relay


def main() -> None:
    console = Console(highlight=False)
    console.print(relay.table(asyncio.run(relay.measure())))


if __name__ == "__main__":
    main()
