"""Any server with OpenAI's API, such as vLLM, and the common part of such kinds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from gateway.engines.base import (
    Ask,
    Engine,
    EngineModel,
    EngineState,
    EngineUnusable,
    Isolation,
    Question,
    Told,
    named,
)
from gateway.engines.refusals import Phrase, read_refusal
from gateway.errors import GatewayError
from gateway.protocols.engine_answer import FORMS
from gateway.protocols.event_stream import count, fact_pattern
from gateway.routing.features import LACKS
from gateway.routing.view import ModelView
from gateway.strict_json import Pieces, encode_body, size_of
from gateway.types import Json
from paceline.protocol import WorkerReport
from paceline.request.parser import USAGE_INTERVAL
from paceline.request.wires import OF_PACELINE

# These are not OpenAI's, and strict servers reject unknown fields. At these values they change
# nothing, so they can be left out.
_NEUTRAL = {"top_k": 0, "min_p": 0.0}
MODELS = Question("/v1/models")
"""The question for the list of models in OpenAI's shape."""


class OpenAIEngine(Engine):
    """An engine with OpenAI's API, which an admin has listed.

    `names` maps the names of models in the fleet to those of the engine; empty: all that it lists,
    under its names.
    """

    kind = "openai"
    health: ClassVar[Question] = MODELS
    """The question that an engine answers while it works."""
    default_pools: ClassVar[tuple[str, ...]] = ("vlm",)
    default_slots: ClassVar[int] = 8
    """Requests at a time, if neither the engine nor the admin says so."""
    facts = fact_pattern(*FORMS, "timings")
    phrases: ClassVar[Sequence[Phrase]] = ()
    """Errors of this kind in words that others do not use."""
    spellings: ClassVar[Sequence[tuple[str, str]]] = ()
    """The fields of a request that this kind spells in another way."""
    no_models: ClassVar[str] = "The engine lists no models. Name them, or load one there."

    def __init__(
        self, token: str = "", names: Mapping[str, str] | None = None, *, cache_salt: bool = False
    ) -> None:
        super().__init__(token)
        self.lacks = LACKS[self.kind]
        """Features that no model of this kind takes."""
        self._names = dict(names or {})
        self._last_model = ""
        """The model of the last request."""
        self._last_scope: str | None = None
        self._mixes_scopes = False
        """It has read prompts of two isolation scopes."""
        if cache_salt:
            self.isolation = Isolation.CACHE_SALT
        self.update(EngineState(tuple(map(EngineModel, self._names.values()))))

    async def read(self, ask: Ask) -> EngineState:
        """Ask the engine for its state; raise `EngineSilent` or `EngineUnusable`."""
        state = await self.ask_state(ask)
        if not state.models and not self._names:
            raise EngineUnusable(self.no_models)
        return state

    async def ask_state(self, ask: Ask) -> EngineState:
        """Ask the engine for its state, which may list no models."""
        listed = named((await ask(MODELS)).admitted().objects())
        return EngineState(
            tuple(
                EngineModel(name, context_tokens=count(entry.get("max_model_len")))
                for name, entry in listed
            )
        )

    def update(self, state: EngineState) -> None:
        """Replace the known state of the engine."""
        self.state = state
        self._listed = listed = {model.name: model for model in state.models}
        names = self._names or {name: name for name in listed}
        found = {
            name: self.listed_as(one, listed) if listed else one for name, one in names.items()
        }
        self.names: Mapping[str, str] = {name: one for name, one in found.items() if one}
        """The models that it has now, by their names in the fleet."""
        models = {name: self.model(name) for name in self.names}
        self._views = {
            name: ModelView(self.lacks | model.lacks, model.load_s)
            for name, model in models.items()
            if self.lacks or model.lacks or model.load_s
        }

    def listed_as(self, name: str, listed: Collection[str]) -> str:
        """Return under which listed name the engine has a model; empty if it lacks it.

        Servers in general take more names than they list.
        """
        return name

    def model(self, name: str) -> EngineModel:
        """Return the known state of a model, by its name in the fleet."""
        there = self.names.get(name, name)
        return self._listed.get(there, EngineModel(there))

    def models(self, report: WorkerReport) -> tuple[tuple[str, ...], Mapping[str, ModelView]]:
        """Return the present models of the engine, and the ones that differ."""
        return tuple(self.names), self._views

    def headers(self, told: Told) -> Mapping[str, str]:
        """Return the key: no other header is of use to it."""
        return self.authorization

    def body(self, body: Pieces, fields: Mapping[str, Any], salt: str) -> Pieces:
        """Return the body with the engine's name of the model and the fields that it knows.

        Record that the engine has its model and its prompt's scope in memory.
        """
        sent = {
            name: value
            for name, value in fields.items()
            if name not in OF_PACELINE and (name not in _NEUTRAL or value != _NEUTRAL[name])
        }
        sent["model"] = self.names.get(fields["model"], fields["model"])
        match sent.get("tool_choice"):
            case {"allowed_tools": {"mode": mode}}:  # the gateway leaves other calls out
                sent["tool_choice"] = mode
        if "stream_options" in sent:
            in_each = self.kind == "openai" and not sent["stream_options"].get(USAGE_INTERVAL, 1)
            running = {"continuous_usage_stats": True} if in_each else {}
            sent["stream_options"] = {"include_usage": True, **running}
        if salt and self.isolation is Isolation.CACHE_SALT:
            sent["cache_salt"] = salt
        for name, spelling in self.spellings:
            if name in sent:
                sent[spelling] = sent.pop(name)
        self._last_model = sent["model"]
        self._mixes_scopes |= self._last_scope not in (None, salt)
        self._last_scope = salt
        form = sent.get("response_format")
        if form and form.get("schema") is not None:  # only llama.cpp reads it there
            schema = {"name": "answer", "schema": form["schema"]}
            sent["response_format"] = {"type": "json_schema", "json_schema": schema}
        self.adapt(sent)
        return encode_body(sent, size_of(body))

    def adapt(self, fields: Json) -> None:
        """Change the values of a request that this kind does not take."""

    def refusal(self, status: int, body: bytes, fields: Mapping[str, Any]) -> GatewayError:
        """Return words of ours for an error of the engine."""
        return read_refusal(status, body, fields, self.phrases)


class LocalEngine(OpenAIEngine):
    """An engine of one machine: it serves the models that it lists, and no others."""

    spellings: ClassVar[Sequence[tuple[str, str]]] = (("max_completion_tokens", "max_tokens"),)
    """The older field limits an answer at all of them."""

    def listed_as(self, name: str, listed: Collection[str]) -> str:
        """Return a listed name, the only ones of the engine."""
        return name if name in listed else ""
