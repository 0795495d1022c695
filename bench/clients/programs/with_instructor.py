# /// script
# dependencies = ["instructor==1.17.0"]
# ///
"""The `instructor` package: pydantic models from every mode of it that asks for a form."""

from functools import partial
from typing import Any

import instructor
from openai import OpenAI
from pydantic import BaseModel

from bench.clients import cases
from bench.clients.schemas import Anything, Person


def extract(model: type[BaseModel], kind: Any, mode: cases.Mode) -> str:
    client = instructor.from_openai(OpenAI(base_url=cases.API, api_key="none"), mode=kind)
    request: dict[str, Any] = {
        "model": cases.MODEL,
        "response_model": model,
        "messages": [{"role": "user", "content": cases.PERSON}],
        "temperature": mode.temperature,
        "max_retries": 0,
    }
    if not mode.stream:
        return repr(client.chat.completions.create(**request))[:60]
    *_, last = client.chat.completions.create_partial(**request)
    return repr(model.model_validate(last.model_dump()))


for _name in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "FUNCTIONS"):
    cases.case(f"Mode.{_name}")(partial(extract, Person, getattr(instructor.Mode, _name)))
# The schema is in the prompt alone, which the demo model does not understand.
cases.case("Mode.JSON")(partial(extract, Anything, instructor.Mode.JSON))

if __name__ == "__main__":
    cases.main()
