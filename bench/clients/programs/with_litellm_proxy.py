# /// script
# dependencies = ["litellm[proxy]==1.106.2"]
# [tool.paceline]
# scripted = true
# ///
"""The proxy of LiteLLM in front of a gateway: Messages, Responses and chat, each over each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai

from bench.clients.cases import (
    API,
    CALL,
    HELLO,
    KEY,
    LIMITED_KEY,
    MODEL,
    ONCE,
    OVERFLOW,
    SLOWLY,
    URL,
    Mode,
    case,
    check,
    leave,
    main,
)

_READY_S = 400.0
PROXY_KEY = "sk-of-this-proxy"
HEADERS = {"authorization": f"Bearer {PROXY_KEY}"}
BACKENDS = {
    "anthropic/": URL,
    "openai/": API,
    "hosted_vllm/": API,
}
"""LiteLLM's providers, which speak Messages, Responses (and chat), and chat, and their bases."""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "Get the weather of a city.", "input_schema": SCHEMA}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start() -> tuple[subprocess.Popen[bytes], str]:
    """Start the proxy with a model for each provider, and one for the key with a limit."""
    models = [
        {
            "model_name": name + suffix,
            "litellm_params": {
                "model": f"{provider}{MODEL}",
                "api_base": base,
                "api_key": key,
                "max_retries": 0,
            },
        }
        for provider, base in BACKENDS.items()
        for suffix, key in (("", KEY), ("-limited", LIMITED_KEY))
        for name in [provider.strip("/")]
    ]
    settings = {"model_list": models, "router_settings": {"num_retries": 0}}
    Path("config.yaml").write_text(json.dumps(settings))  # JSON is YAML
    port = free_port()
    process = subprocess.Popen(
        ["litellm", "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)],
        env={
            **os.environ,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_MASTER_KEY": PROXY_KEY,
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    until_s = time.monotonic() + _READY_S
    while True:
        try:
            if httpx.get(f"{url}/health/liveliness").is_success:
                return process, url
        except httpx.TransportError:
            check(time.monotonic() < until_s, "the proxy does not start")
            time.sleep(0.5)


def post(path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url + path, json=body, headers=HEADERS, timeout=60)


def answer_of(body: dict[str, Any]) -> Any:
    response = post("/v1/messages", body)
    check(response.is_success, f"{response.status_code}: {response.text}")
    return response.json()


def message(backend: str, *turns: Any, **fields: Any) -> dict[str, Any]:
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"model": backend, "max_tokens": 300, "messages": messages, **fields}


def messages(backend: str, _mode: Mode) -> str:
    """Go through a loop of tools on the proxy's Messages, and stream an answer."""
    asked = answer_of(message(backend, ("user", CALL), tools=[TOOL]))
    call = next(block for block in asked["content"] if block["type"] == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sunny in Paris"}
    turns = (("user", CALL), ("assistant", asked["content"]), ("user", [result]))
    answer = answer_of(message(backend, *turns, tools=[TOOL]))
    text = "".join(block.get("text", "") for block in answer["content"])
    check("sunny" in text, answer)
    streamed = post("/v1/messages", message(backend, ("user", "Hi"), stream=True)).text
    check("event: message_stop" in streamed, streamed[-300:])
    return text


def chat(backend: str, _mode: Mode) -> str:
    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key=PROXY_KEY, max_retries=0)
    request = {"model": backend, "messages": [{"role": "user", "content": "Hi"}]}
    whole = client.chat.completions.create(**request).choices[0].message.content
    chunks = client.chat.completions.create(**request, stream=True)
    streamed = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    check(whole == streamed == HELLO, (whole, streamed))
    return str(whole)


def responses(backend: str, _mode: Mode) -> str:
    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key=PROXY_KEY, max_retries=0)
    whole = client.responses.create(model=backend, input="Hi").output_text
    with client.responses.stream(model=backend, input="Hi") as stream:
        streamed = stream.get_final_response().output_text
    check(whole == streamed == HELLO, (whole, streamed))
    return str(whole)


def leaves(backend: str, _mode: Mode) -> str:
    def close_early() -> None:
        body = message(backend, ("user", SLOWLY), stream=True)
        with httpx.stream(
            "POST", f"{url}/v1/messages", json=body, headers=HEADERS, timeout=60
        ) as response:
            next(response.iter_raw())

    return leave(close_early)


def limited(backend: str, _mode: Mode) -> str:
    statuses = []
    for model, question in ((f"{backend}-limited", "Hi"),) * 2 + ((backend, OVERFLOW),):
        statuses.append(post("/v1/messages", message(model, ("user", question))).status_code)
    check(statuses[1:] == [429, 400], statuses)
    return ", ".join(map(str, statuses[1:]))


def not_served(backend: str, mode: Mode) -> str:
    """Ask for what the model does not serve: LiteLLM must not pause the model for everybody."""
    body = {"model": backend, "input": "Hi"}
    return f"{post('/v1/embeddings', body).status_code}, then {chat(backend, mode)}"


for _name in ("anthropic", "openai", "hosted_vllm"):
    case(f"Messages over {_name}/: a loop of tools, a stream", ONCE)(partial(messages, _name))
    case(f"chat over {_name}/", ONCE)(partial(chat, _name))
    case(f"Responses over {_name}/", ONCE)(partial(responses, _name))
    case(f"leaves a stream over {_name}/: the worker stops", ONCE)(partial(leaves, _name))
    case(f"a rate limit and the end of the context over {_name}/", ONCE)(partial(limited, _name))
case("openai/: embeddings, which the model lacks, then a chat", ONCE)(partial(not_served, "openai"))

if __name__ == "__main__":
    proxy, url = start()
    try:
        main()
    finally:
        proxy.terminate()
        proxy.wait(30)
