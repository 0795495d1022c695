"""Pictures are validated before they are decoded, and reach the model unchanged."""

import asyncio
import gc
from dataclasses import replace
from typing import Any

import httpx
import pytest
from PIL import Image

from paceline.request import content
from paceline.request.content import PIXELS_LIMIT
from tests.support.images import data_url, encode_image, png_header
from tests.support.scripted_engine import (
    CARD,
    ScriptedEngine,
    make_worker,
    serve_worker,
    text_events,
    worker_client,
)
from tests.support.worker_process import RunningWorker
from workers.engine.types import LaneName
from workers.server.errors import BadRequest
from workers.server.pictures import PictureMemory

TEXT = [{"role": "user", "content": "hello"}]
FIELD = "messages[0].content[1].image_url"


def question(*urls: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is it?"}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize("kind", ["png", "gif", "webp", "jpeg"])
async def test_a_picture_is_decoded_into_rgb_rows(kind: str) -> None:
    image = Image.new("RGB", (3, 2), (250, 0, 0))
    (picture,) = await PictureMemory().decode([(FIELD, encode_image(image, kind))])
    assert (picture.width_px, picture.height_px, len(picture.rgb)) == (3, 2, 18)
    assert picture.rgb[0] > 200
    assert picture.rgb[1] < 50


async def test_a_picture_is_rotated_by_its_exif_orientation() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    (picture,) = await PictureMemory().decode(
        [(FIELD, encode_image(Image.new("RGB", (3, 2)), "jpeg", exif=exif))]
    )
    assert (picture.width_px, picture.height_px) == (2, 3)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "data:image/svg+xml;base64,PHN2Zz4=",
        "data:image/png;base64,****",
        data_url(b"no picture at all"),
        data_url(png_header(3, 3)),
        data_url(b"II*\x00" + bytes(40)),
        data_url(bytes(600)),
    ],
)
async def test_an_invalid_picture_is_rejected_with_its_field(monkeypatch, url) -> None:
    monkeypatch.setattr(content, "PICTURE_LIMIT_BYTES", 599)
    with pytest.raises(BadRequest) as rejected:
        await PictureMemory().decode([(FIELD, url)])
    assert rejected.value.param == FIELD
    assert "0x" not in rejected.value.message


async def test_a_decompression_bomb_is_rejected_by_its_header() -> None:
    with pytest.raises(BadRequest, match="pixels"):
        await PictureMemory().decode([(FIELD, data_url(png_header(50_000, 50_000)))])


async def test_the_limit_on_pixels_applies_to_all_pictures_together() -> None:
    url = data_url(png_header(6000, 6000))
    with pytest.raises(BadRequest, match="pixels in all"):  # before it decodes any
        await PictureMemory().decode([("first", url), (FIELD, url)])


async def test_pictures_reach_the_engine_in_order() -> None:
    engine = ScriptedEngine(text_events("ok"))
    urls = [encode_image(Image.new("RGB", (width, 1))) for width in (5, 3)]
    body = {"model": "scripted", "messages": question(*urls), "temperature": 0}
    async with worker_client(engine) as client:
        response = await client.post("/v1/chat/completions", json=body)
        forced = await client.post(
            "/v1/chat/completions", json=body, headers={"x-paceline-lane": "text-mtp"}
        )
    assert response.status_code == 200
    (generation,) = engine.generations
    assert [picture.width_px for picture in generation.prompt.pictures] == [5, 3]
    assert generation.lane is LaneName.VLM, "although it is greedy"
    assert (forced.status_code, forced.json()["error"]["param"]) == (400, "messages")


async def test_l6_the_decoded_pictures_of_all_requests_are_bounded() -> None:
    hold = asyncio.Event()
    engine = ScriptedEngine([hold, *text_events("ok")])
    worker = replace(make_worker(engine), pictures=PictureMemory(limit_pixels=10))
    (first, broken) = (
        {"model": "scripted", "messages": question(picture)}
        for picture in (encode_image(Image.new("RGB", (3, 2))), data_url(png_header(3, 2)))
    )
    path = "/v1/chat/completions"
    async with serve_worker(worker) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        running = asyncio.create_task(client.post(path, json=first))
        await engine.started.wait()
        rejected = await client.post(path, json=broken)
        plain = asyncio.create_task(client.post(path, json={**first, "messages": TEXT}))
        hold.set()
        assert (await running).status_code == (await plain).status_code == 200
        engine.generations.clear()
        gc.collect()
        later = [await client.post(path, json=body) for body in (broken, first)]
    assert (rejected.status_code, rejected.headers["retry-after"]) == (429, "1"), "not decoded"
    assert [response.status_code for response in later] == [400, 200]


def test_l6_a_machine_of_16_gb_holds_the_pictures_of_all_slots() -> None:
    memory_bytes = 11_500_000_000  # which macOS recommends for the GPU
    assert PictureMemory.within(0)._free_pixels == PIXELS_LIMIT
    assert 2 * PIXELS_LIMIT < PictureMemory.within(memory_bytes)._free_pixels < 3 * PIXELS_LIMIT


async def test_a_model_without_vision_rejects_a_picture_with_its_field() -> None:
    engine = ScriptedEngine(text_events("ok"), card=replace(CARD, vision=False))
    body = {"model": "scripted", "messages": question("data:image/png;base64,AA")}
    async with worker_client(engine) as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, FIELD)


async def test_text_that_spells_a_placeholder_next_to_a_picture_stays_text(real_worker) -> None:
    """Such a text once failed its request on every worker, and the gateway ejected them all."""
    (message,) = question(encode_image(Image.new("RGB", (128, 128), (200, 30, 30))))
    message["content"][0]["text"] = "What is <|placeholder|>?"
    body = {"model": real_worker.model, "messages": [message], "temperature": 0, "max_tokens": 2}
    async with httpx.AsyncClient(base_url=real_worker.url, timeout=60) as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("width_px", "height_px"), [(1, 1), (2, 2), (1, 200), (1, 201), (1500, 1)])
async def test_s37_the_smallest_and_narrowest_pictures_do_not_break_the_engine(
    real_worker: RunningWorker, width_px: int, height_px: int
) -> None:
    """CVE-2026-22773: they succeed or are rejected with 400, and the next request succeeds."""
    thin = question(encode_image(Image.new("RGB", (width_px, height_px))))
    body = {"model": real_worker.model, "temperature": 0, "max_tokens": 2}
    async with httpx.AsyncClient(base_url=real_worker.url, timeout=60) as client:
        response = await client.post("/v1/chat/completions", json={**body, "messages": thin})
        invalid = max(width_px, height_px) > 200
        assert response.status_code == (400 if invalid else 200), response.text
        plain = [{"role": "user", "content": "What is it?"}]
        after = await client.post("/v1/chat/completions", json={**body, "messages": plain})
    assert after.status_code == 200
