# /// script
# dependencies = ["litellm[proxy]==1.106.2"]
# [tool.paceline]
# scripted = true
# ///
"""The proxy of LiteLLM in front of a gateway: Messages, Responses and chat, each over each."""

import json
import os
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai

from bench.clients import cases
from bench.harness.processes import free_port

_READY_S = 400.0
PROXY_KEY = "sk-of-this-proxy"
HEADERS = {"authorization": f"Bearer {PROXY_KEY}"}
BACKENDS = {
    "anthropic/": cases.URL,
    "openai/": cases.API,
    "hosted_vllm/": cases.API,
}
"""LiteLLM's providers, which speak Messages, Responses (and chat), and chat, and their bases."""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "Get the weather of a city.", "input_schema": SCHEMA}


def start() -> tuple[subprocess.Popen[bytes], str]:
    """Start the proxy with a model for each provider, and one for the key with a limit."""
    models = [
        {
            "model_name": name + suffix,
            "litellm_params": {
                "model": f"{provider}{cases.MODEL}",
                "api_base": base,
                "api_key": key,
                "max_retries": 0,
            },
        }
        for provider, base in BACKENDS.items()
        for suffix, key in (("", cases.KEY), ("-limited", cases.LIMITED_KEY))
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
            cases.check(time.monotonic() < until_s, "the proxy does not start")
            time.sleep(0.5)


def post(path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url + path, json=body, headers=HEADERS, timeout=60)


def answer_of(body: dict[str, Any]) -> Any:
    response = post("/v1/messages", body)
    cases.check(response.is_success, f"{response.status_code}: {response.text}")
    return response.json()


def message(backend: str, *turns: Any, **fields: Any) -> dict[str, Any]:
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"model": backend, "max_tokens": 300, "messages": messages, **fields}


def messages(backend: str) -> str:
    """Go through a loop of tools on the proxy's Messages, and stream an answer."""
    asked = answer_of(message(backend, ("user", cases.CALL), tools=[TOOL]))
    call = next(block for block in asked["content"] if block["type"] == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sunny in Paris"}
    turns = (("user", cases.CALL), ("assistant", asked["content"]), ("user", [result]))
    answer = answer_of(message(backend, *turns, tools=[TOOL]))
    text = "".join(block.get("text", "") for block in answer["content"])
    cases.check("sunny" in text, answer)
    streamed = post("/v1/messages", message(backend, ("user", "Hi"), stream=True)).text
    cases.check("event: message_stop" in streamed, streamed[-300:])
    return text


def chat(backend: str) -> str:
    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key=PROXY_KEY, max_retries=0)
    request = {"model": backend, "messages": [{"role": "user", "content": "Hi"}]}
    whole = client.chat.completions.create(**request).choices[0].message.content
    chunks = client.chat.completions.create(**request, stream=True)
    streamed = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    cases.check(whole == streamed == cases.HELLO, (whole, streamed))
    return str(whole)


def responses(backend: str) -> str:
    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key=PROXY_KEY, max_retries=0)
    whole = client.responses.create(model=backend, input="Hi").output_text
    with client.responses.stream(model=backend, input="Hi") as stream:
        streamed = stream.get_final_response().output_text
    cases.check(whole == streamed == cases.HELLO, (whole, streamed))
    return str(whole)


def close_early(backend: str) -> None:
    body = message(backend, ("user", cases.SLOWLY), stream=True)
    asked = httpx.stream("POST", f"{url}/v1/messages", json=body, headers=HEADERS, timeout=60)
    with asked as response:
        next(response.iter_raw())


def limited(backend: str) -> str:
    statuses = []
    for model, question in ((f"{backend}-limited", "Hi"),) * 2 + ((backend, cases.OVERFLOW),):
        statuses.append(post("/v1/messages", message(model, ("user", question))).status_code)
    cases.check(statuses[1:] == [429, 400], statuses)
    return ", ".join(map(str, statuses[1:]))


def not_served(backend: str) -> str:
    """Ask for what the model does not serve: LiteLLM must not pause the model for everybody."""
    body = {"model": backend, "input": "Hi"}
    return f"{post('/v1/embeddings', body).status_code}, then {chat(backend)}"


for _name in ("anthropic", "openai", "hosted_vllm"):
    cases.once(f"Messages over {_name}/: a loop of tools, a stream", _name)(messages)
    cases.once(f"chat over {_name}/", _name)(chat)
    cases.once(f"Responses over {_name}/", _name)(responses)
    cases.leaves(f"leaves a stream over {_name}/: the worker stops", partial(close_early, _name))
    cases.once(f"a rate limit and the end of the context over {_name}/", _name)(limited)
cases.once("openai/: embeddings, which the model lacks, then a chat", "openai")(not_served)

if __name__ == "__main__":
    proxy, url = start()
    try:
        cases.main()
    finally:
        proxy.terminate()
        proxy.wait(30)
