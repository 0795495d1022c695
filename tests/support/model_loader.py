"""A process that loads model folders, each in a child that it forks.

`python -m tests.support.model_loader` imports everything once and reads one folder per line from
standard input. For each it prints the exit code of the child: `SERVED`, `REFUSED`, any other code
for a defect, or the negative number of the signal that killed it.
"""

import asyncio
import gc
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx_vlm.models.qwen3_5.qwen3_5
import mlx_vlm.tools  # noqa: F401 - it imports FastAPI, which takes longer than the demo model
import transformers.models.auto.processing_auto  # noqa: F401 - children find them imported

from paceline.request.profile import Sampling
from paceline.terminal import printable
from tests.support.lapack import invert_by_lapack
from workers.engine.engine import Engine
from workers.engine.types import EngineError, EngineSettings, Generation, ModelUnusable, Prompt

SERVED, REFUSED = 0, 3
CPU_LIMIT_S = 60
WALL_LIMIT_S = 240
MEMORY_LIMIT_BYTES = 4 << 30
"""Address space beyond that of the process that forks."""
MAX_SENTENCE_CHARS = 1000


@dataclass(frozen=True, slots=True)
class ModelLoader:
    process: subprocess.Popen[str]

    def load(self, folder: Path) -> tuple[int, str]:
        """Load a folder and generate a few tokens; return the exit code and the output."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        code, output = json.loads(self.process.stdout.readline())
        return code, output


@contextmanager
def model_loader(environment: Mapping[str, str] = os.environ) -> Iterator[ModelLoader]:
    with subprocess.Popen(
        [sys.executable, "-m", __name__],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield ModelLoader(process)
        finally:
            process.kill()


def _serve() -> None:
    """Fork a child for each line of standard input."""
    invert_by_lapack()
    gc.freeze()  # the collector of a child would copy the memory of all modules to look at them
    for line in sys.stdin:
        folder = Path(line.rstrip("\n"))
        log = folder.with_name(folder.name + ".log")
        child = os.fork()
        if not child:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.exit(_load(folder))
        _, status = os.waitpid(child, 0)
        output = log.read_text(errors="replace")[-20_000:]
        sys.stdout.write(json.dumps([os.waitstatus_to_exitcode(status), output]) + "\n")
        sys.stdout.flush()


def _load(folder: Path) -> int:
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used_bytes + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.alarm(WALL_LIMIT_S)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
    try:
        engine = Engine.start(EngineSettings(model=folder, served_name="hostile"))
    except ModelUnusable as error:
        sentence = str(error)
        sys.stderr.write(f"{sentence}\n")
        is_sentence = (
            printable(sentence) == " ".join(sentence.split())
            and len(sentence) <= MAX_SENTENCE_CHARS
        )
        return REFUSED if is_sentence else 1

    async def generate() -> None:
        text = engine.prompts.chat([{"role": "user", "content": "Hello"}])
        generation = Generation(
            request_id="hostile",
            lane=engine.lanes[0].name,
            prompt=Prompt(text=text),
            sampling=Sampling(),
            max_tokens=8,
        )
        async for _ in engine.generate(generation):
            pass

    try:
        asyncio.run(generate())
    except EngineError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    engine.stop()
    return SERVED


if __name__ == "__main__":
    _serve()
