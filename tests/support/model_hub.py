"""A server of one model repository that speaks as Hugging Face does."""

import asyncio
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response

_COMMIT = "0" * 40


def model_hub(folder: Path, release: asyncio.Event) -> FastAPI:
    """Return an application whose every repository has the files of a folder.

    It sends the weights when they are released.
    """
    app = FastAPI()
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    files["modeling.py"] = b"raise SystemExit"

    @app.get("/api/models/{owner}/{name}/revision/{revision}")
    async def describe(owner: str, name: str) -> dict[str, object]:
        siblings = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
        return {"id": f"{owner}/{name}", "sha": _COMMIT, "private": False, "siblings": siblings}

    @app.get("/api/models/{owner}/{name}/tree/{revision}")
    async def list_files() -> list[dict[str, object]]:
        return [
            {"type": "file", "oid": "1" * 40, "size": len(data), "path": file}
            for file, data in files.items()
        ]

    @app.api_route("/{owner}/{name}/resolve/{revision}/{file}", methods=["GET", "HEAD"])
    async def resolve(request: Request, file: str) -> Response:
        headers = {"x-repo-commit": _COMMIT, "etag": f'"{file}"'}
        if request.method == "HEAD":
            return Response(headers={**headers, "content-length": str(len(files[file]))})
        if file.endswith(".safetensors"):
            await release.wait()
        return Response(files[file], headers=headers)

    return app
