"""llama.cpp's own server, compiled once from the sources in the sdist of `llama-cpp-python`."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path
from typing import Final

from bench.harness.servers import Contender
from bench.harness.venvs import PeerUnavailable, last_line

_SOURCES: Final = "llama-cpp-python==0.3.36"
_PINS: Final = ("gguf==0.19.0", "cmake==4.4.5", "ninja==1.13.2")
_WRITER: Final = Path(__file__).with_name("tiny_gguf.py")
_OPTIONS: Final = (
    *"-G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_UI=OFF".split(),
    *"-DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF".split(),
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)
_COMMAND: Final = (
    "{program} -m {model} --alias tiny --host 127.0.0.1 --port {port} --jinja "
    "--parallel 4 --ctx-size 8192 --threads 1"
)
LLAMA_SERVERS: Final = tuple(
    Contender(
        name=name,
        pins=_PINS,
        environment="llama.cpp",
        command=_COMMAND + more,
        version=f"of {_SOURCES.replace('==', ' ')}",
    )
    for name, more in (
        ("llama.cpp", ""),
        (
            "llama.cpp+draft",
            " --model-draft {model} --spec-type draft-simple --spec-draft-n-max 3",
        ),
    )
)


def llama_server(python: Path, folder: Path) -> tuple[Path, Path]:
    """Return the program and a tiny model, both made under `folder` if they are missing.

    Compiling takes some 14 minutes of CPU.
    """
    home = folder / f"llama-server-{_SOURCES.rpartition('=')[2]}"
    home.mkdir(parents=True, exist_ok=True)
    program, model, log = home / "llama-server", home / "tiny.gguf", home / "install.log"
    try:
        with log.open("ab") as output:
            if not program.exists():
                _compile(python, home, output.fileno())
            command = [str(python), str(_WRITER), str(model)]
            subprocess.run(command, check=True, stdout=output, stderr=output)
    except (subprocess.CalledProcessError, OSError, tarfile.TarError) as error:
        raise PeerUnavailable(f"not compilable: {last_line(log)}") from error
    return program, model


def _compile(python: Path, home: Path, output: int) -> None:
    def run(*command: str) -> None:
        subprocess.run(command, check=True, cwd=home, stdout=output, stderr=output)

    pip = (str(python), "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python")
    run(*pip, _SOURCES)
    (archive,) = home.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(home, filter="data")
    (source,) = home.glob("llama_cpp_python-*/vendor/llama.cpp")
    programs = python.parent
    ninja = f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}"
    run(str(programs / "cmake"), "-S", str(source), "-B", "build", *_OPTIONS, ninja)
    run(str(programs / "ninja"), "-C", "build", "-j", "2", "llama-server")
    (home / "build" / "bin" / "llama-server").rename(home / "llama-server")
