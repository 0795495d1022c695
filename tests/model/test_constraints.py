"""Answers of a prescribed form, on the real engine and through the gateway."""

import asyncio
import json
import random
import re
import threading
from contextlib import suppress
from typing import Any, cast

import httpx
import jsonschema_rs
import openai
import pytest
from openai import OpenAI

from bench.engine.schemas import ask_each, draw_schemas
from paceline.request.constraint import Constraint, ConstraintKind
from paceline.request.profile import Sampling
from tests.support import engine_answers
from workers.engine.decode.draft_length import DraftLength
from workers.engine.engine import Engine
from workers.engine.text import grammar
from workers.engine.text.grammar import CACHED_GRAMMARS
from workers.engine.text.grammar_trial import ConstraintTrial, Refusal
from workers.engine.types import Finished, FinishReason, InvalidGeneration


def closed(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has each of these properties and no other."""
    required = {"required": [*properties], "additionalProperties": False}
    return {"type": "object", "properties": properties, **required}


def tool(name: str, parameters: dict[str, Any] | None = None, *, strict: bool = True) -> Any:
    function: dict[str, Any] = {"name": name, "strict": strict}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def forced(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


PERSON = closed(
    name={"type": "string", "maxLength": 12},
    age={"type": "integer", "minimum": 0, "maximum": 120},
    mood={"enum": ["😀 merry", "sad"]},
)
GREETING = closed(who={"$ref": "#/$defs/who"}, note={"const": '"\\{'})
TOOLS: Any = [tool("now"), tool("greet", {**GREETING, "$defs": {"who": PERSON}})]
QUESTION: Any = [{"role": "user", "content": "Tell me about a person."}]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


def ask(client: OpenAI, **fields: Any) -> Any:
    """Return the choice of an answer, to `QUESTION` unless told."""
    fields = {"model": "demo", "messages": QUESTION, **fields}
    return client.chat.completions.create(**fields).choices[0]


def streamed(client: OpenAI, **fields: Any) -> Any:
    """Return the message of the same answer, from its stream."""
    fields = {"model": "demo", "messages": QUESTION, **fields}
    with client.chat.completions.stream(**fields) as stream:
        return stream.get_final_completion().choices[0].message


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def check_person(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "age", "mood"]
    assert len(person["name"]) <= 12
    assert 0 <= person["age"] <= 120
    assert person["mood"] in ("😀 merry", "sad")


async def answer(
    engine: Engine,
    question: str,
    constraint: Constraint | None = None,
    *,
    temperature: float = 0,
    max_tokens: int = 64,
    **fields: Any,
) -> tuple[str, Finished]:
    sampling = Sampling(temperature=temperature, seed=7)
    fields |= {"constraint": constraint, "sampling": sampling, "max_tokens": max_tokens}
    return await engine_answers.answer(engine, question, **fields)


def schema(value: Any) -> Constraint:
    return Constraint(ConstraintKind.JSON, value, "guided_json")


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_schema_holds_whole_and_streamed(openai_client: OpenAI, temperature: float) -> None:
    fields: Any = {"temperature": temperature, "seed": 1, "response_format": FORMAT}
    whole = ask(openai_client, **fields)
    check_person(whole.message.content)
    assert whole.finish_reason == "stop"
    assert streamed(openai_client, **fields).content == whole.message.content


def test_a_greedy_constrained_request_speculates(openai_client: OpenAI) -> None:
    """The gateway counts no bypass for it, and the worker drafts."""
    raw = openai_client.chat.completions.with_raw_response.create(
        model="demo",
        messages=QUESTION,
        temperature=0,
        response_format=FORMAT,
        extra_body={"metrics": "summary", "draft_tokens": 2},
    )
    assert raw.headers["x-paceline-pool"] == "text-mtp"
    # The worker measures whether its drafts pay.
    assert raw.headers["x-paceline-reason"] in ("eligible", "mtp_not_paying")
    assert json.loads(raw.text)["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"guided_choice": ["é", "green"]}, "é|green"),
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"guided_grammar": 'start: "a" "b"'}, "ab"),
        ({"guided_grammar": 'root ::= "a" "b" | "c"'}, "ab|c"),
        ({"guided_json": '{"enum": [17, true]}'}, "17|true"),
        ({"structured_outputs": {"choice": ["red"], "regex": None}}, "red"),
    ],
)
def test_vllms_fields_prescribe_the_answer(openai_client, fields, form) -> None:
    chat = ask(openai_client, temperature=1, extra_body=fields)
    assert re.fullmatch(form, chat.message.content)
    text = openai_client.completions.create(model="demo", prompt="Say", extra_body=fields)
    assert re.fullmatch(form, text.choices[0].text)


async def test_constrained_rows_leave_the_others_alone(engine: Engine) -> None:
    questions = [f"Count from {first} to 30." for first in range(3)]
    free = [await answer(engine, question) for question in questions]
    bound = [
        await answer(engine, q, schema(PERSON), temperature=t) for q in questions for t in (0, 1)
    ]
    together = await asyncio.gather(
        *(answer(engine, question) for question in questions),
        *(answer(engine, q, schema(PERSON), temperature=t) for q in questions for t in (0, 1)),
        *(answer(engine, "Hello", schema({"enum": ["yes", "no"]})) for _ in range(2)),
    )
    assert [text for text, _ in together[:3]] == [text for text, _ in free]
    assert [text for text, _ in together[3:9]] == [text for text, _ in bound]
    assert [text for text, _ in together[9:]] in (['"yes"'] * 2, ['"no"'] * 2)
    for text, end in together[3:9]:
        check_person(text)
        assert end.reason is FinishReason.STOP


@pytest.mark.parametrize("temperature", [0, 1])
async def test_drafts_do_not_change_a_constrained_answer(engine, temperature) -> None:
    nine = {"type": "array", "items": {"enum": [*range(40)]}, "minItems": 9, "maxItems": 9}
    options: Any = {"constraint": schema(nine), "temperature": temperature}
    answers = [
        await answer(engine, "Count from 1 to 9.", draft_tokens=count, **options)
        for count in (0, 1, 2)
    ]
    assert len({text for text, _ in answers}) == 1
    for text, end in answers:
        assert len(json.loads(text)) == 9
        drafts = end.speculation
        assert drafts.accepted <= drafts.drafted
        assert end.usage.completion_tokens == answers[0][1].usage.completion_tokens
    assert answers[2][1].speculation.accepted > 0


async def test_what_a_schema_forces_is_drafted(engine: Engine) -> None:
    """Where only one text may follow, that text is the draft, and the target accepts it."""
    flags = {f"field_number_{index}": {"type": "boolean"} for index in range(4)}
    form = schema(closed(**flags))
    text, end = await answer(engine, "Hello", form, draft_tokens=2, max_tokens=128)
    assert list(json.loads(text)) == [*flags]
    assert end.speculation.accepted > 0.8 * end.speculation.drafted


async def test_forced_text_longer_than_a_draft_of_the_head_is_one_draft(engine: Engine) -> None:
    """Unless the request names its draft length; the answer is the same, and the counts add up."""
    names = [f"a_long_name_of_the_field_{index}" for index in range(3)]
    constraint = schema(closed(**{name: {"const": 1} for name in names}))
    texts = set()
    for draft_tokens, longest in ((0, 0), (2, 2), (None, 4)):
        for temperature in (0, 1):
            for lane in engine.lanes:  # a length without samples is tried, whatever it costs
                lane._decoder._draft_length = DraftLength(engine.settings.draft_tokens)
            options = {"temperature": temperature, "max_tokens": 128}
            text, end = await answer(
                engine, "Hello", constraint, draft_tokens=draft_tokens, **options
            )
            texts.add(text)
            drafts = end.speculation
            assert max([step.drafted for step in end.steps], default=0) == longest
            assert sum(step.drafted for step in end.steps) == drafts.drafted
            assert sum(drafts.histogram) == drafts.steps
            assert drafts.accepted > 0.8 * drafts.drafted or not longest
    assert texts == {json.dumps(dict.fromkeys(names, 1))}


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"not": {"type": "string"}}, "'not'"),
        ({"type": "string", "format": "iri"}, "'format'"),
        ({"type": "string", "pattern": "(?=a)b"}, "'pattern'"),
        ({"$ref": "#/$defs/none"}, "'$ref'"),
        ({"$ref": "https://example.com/schema"}, "'$ref'"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "'oneOf'"),
        ({"type": "text"}, "'type'"),
        ({"minimum": "x"}, "'minimum'"),
        ({"properties": 3}, "'properties'"),
        ({"type": ["string", 3]}, "'type'"),
        ({"$ref": "#name"}, "'$ref'"),
        ({"type": "number", "multipleOf": 0}, "'multipleOf'"),
        ({"type": "number", "multipleOf": 123456.789}, "'multipleOf'"),
        ({"type": "integer", "minimum": 10**20}, "'minimum'"),
        ({"type": "number", "exclusiveMaximum": -1e20}, "'exclusiveMaximum'"),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 1}, "'minProperties'"),
        (
            {"properties": {"a": {"$ref": "#", "type": "object"}}, "type": "object"},
            "keywords beside a '$ref'",
        ),
        ({"enum": []}, "satisfy"),
        ({"$ref": "#"}, "schema"),
        ({"not": {}}, "satisfy"),
        ({"not": {"const": 1}, "x-guidance": {"lenient": True}}, "'not'"),
    ],
)
def test_a_schema_that_cannot_be_held_is_refused(openai_client, bad, named) -> None:
    """The error names the field and the keyword, whole or streamed, and no answer is generated."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            openai_client.chat.completions.create(
                model="demo", messages=QUESTION, response_format=form, stream=stream
            )
        assert str(refused.value.param).startswith("response_format.json_schema.schema")
        assert named in refused.value.message
        assert "lenient" not in refused.value.message


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"not": {"type": "string"}}, "'not'"),
        ({"if": {"type": "string"}}, "'if'"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "'oneOf'"),
        ({"$ref": "#/$defs/none"}, "'$ref'"),
    ],
)
def test_a_strict_tool_that_cannot_be_held_is_refused(openai_client, bad, named, choice) -> None:
    """A free call of it is refused by the keyword as a forced one is."""
    with pytest.raises(openai.BadRequestError) as refused:
        ask(openai_client, tools=[tool("get_weather", closed(city=bad))], tool_choice=choice)
    assert refused.value.param == f"tools[0].function.parameters.properties.city.{named[1:-1]}"
    assert named in refused.value.message


def test_an_error_in_a_schema_names_its_place_at_each_wire(openai_client: OpenAI) -> None:
    n = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/D"}]}
    schema = closed(a={"type": "string"}, n=n)
    schema["$defs"] = {"D": {"type": "array", "items": {"type": "strin"}}}
    at = "$defs.D.items.type"
    fine = {"name": "f", "parameters": closed(), "strict": True}
    bad = {"name": "bad", "parameters": schema, "strict": True}
    named = {"name": "x", "schema": schema}
    form = {"type": "json_schema", **named}
    chat: Any = {"messages": QUESTION}
    tools = [{"type": "function", "function": one} for one in (fine, bad)]
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools[1:]}}
    message = {"messages": QUESTION, "max_tokens": 9}
    given = [{"name": one["name"], "input_schema": one["parameters"]} for one in (fine, bad)]
    flat = [{"type": "function", **one} for one in (fine, bad)]
    cases = [
        ("chat/completions", chat | {"tools": tools}, f"tools[1].function.parameters.{at}"),
        ("chat/completions", chat | {"tools": tools, "tool_choice": only},
         f"tools[1].function.parameters.{at}"),
        ("chat/completions", chat | {"response_format": FORMAT | {"json_schema": named}},
         f"response_format.json_schema.schema.{at}"),
        ("chat/completions", chat | {"guided_json": json.dumps(schema)}, f"guided_json.{at}"),
        ("completions", {"prompt": "x", "structured_outputs": {"json": schema}},
         f"structured_outputs.json.{at}"),
        ("responses", {"input": "x", "tools": flat}, f"tools[1].parameters.{at}"),
        ("responses", {"input": "x", "tools": [{"type": "namespace", "name": "s", "tools": flat}]},
         f"tools[0].tools[1].parameters.{at}"),
        ("responses", {"input": "x", "text": {"format": form}}, f"text.format.schema.{at}"),
        ("messages", message | {"tools": given, "tool_choice": {"type": "any"}},
         f"tools.1.input_schema.{at}"),
        ("messages", message | {"output_config": {"format": form}},
         f"output_config.format.schema.{at}"),
    ]  # fmt: skip
    with httpx.Client(base_url=str(openai_client.base_url)) as client:
        for path, body, place in cases:
            for stream in (False, True):
                answer = client.post(path, json={"model": "demo", "stream": stream, **body})
                error = answer.json()["error"]
                assert answer.status_code == 400
                assert "'type' is invalid" in error["message"]
                if path == "messages":
                    assert error["message"].startswith(f"{place}: ")
                else:
                    assert error["param"] == place


def test_a_forced_call_of_a_tool_that_is_not_strict_needs_no_schema_that_can_be_held(
    openai_client: OpenAI,
) -> None:
    """Pydantic AI forces a call of an output tool, whose schema has a set, without `strict`."""
    tags = {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2}
    parameters = closed(tags={**tags, "uniqueItems": True}, size={"enum": ["S", "L"]})
    label = tool("label", parameters, strict=False)
    choice = ask(openai_client, tools=[label], tool_choice=forced("label"), max_tokens=200)
    ((_, arguments),) = calls_of(choice.message)
    assert [*json.loads(arguments)] == ["tags", "size"]
    assert json.loads(arguments)["size"] in ("S", "L")
    bad = tool("f", {"type": "text"}, strict=False)
    with pytest.raises(openai.BadRequestError, match="'type' is invalid"):
        ask(openai_client, tools=[bad], tool_choice="required")


async def test_a_hostile_constraint_ends_with_an_error_of_its_own(engine: Engine) -> None:
    deep = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1800)}
    deep["d1800"] = {"type": "string"}
    wide = {f"p{i}": {"type": "string", "pattern": f"x{i}+"} for i in range(1500)}
    rules = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"\n'
    for constraint in (
        schema({"$ref": "#/$defs/d0", "$defs": deep}),
        schema({"type": "object", "properties": wide}),
        Constraint(ConstraintKind.REGEX, "(a{200}){200}", "guided_regex"),
        Constraint(ConstraintKind.GRAMMAR, rules, "guided_grammar"),
        Constraint(ConstraintKind.GRAMMAR, "root ::= " + "(" * 30_000, "guided_grammar"),
    ):
        with suppress(InvalidGeneration):
            await answer(engine, "Hello", constraint, max_tokens=4)
    assert engine.alive


async def test_a_constraint_that_takes_too_long_is_an_error(engine, monkeypatch) -> None:
    """It holds the thread that compiles, and no request for longer than the limit."""
    monkeypatch.setattr(grammar, "COMPILE_TIMEOUT_S", 0)
    with pytest.raises(InvalidGeneration, match="too long to compile"):
        await answer(engine, "Hello", Constraint(ConstraintKind.REGEX, "[a-q]{3}", "guided_regex"))


@pytest.mark.parametrize("form", ["date", "time", "date-time"])
async def test_a_date_or_a_time_exists(engine: Engine, form: str) -> None:
    """No day that a month lacks, no leap second in every minute, at any temperature."""
    constraint = schema({"type": "string", "format": form})
    for temperature in (0, 1):
        text, end = await answer(engine, "When?", constraint, temperature=temperature)
        assert end.reason is FinishReason.STOP
        check = jsonschema_rs.validator_for(constraint.value, validate_formats=True)
        assert check.is_valid(json.loads(text)), text


async def test_answers_to_random_schemas_validate(engine: Engine) -> None:
    """An answer validates, or ends by `length`, or the schema is refused; `bench` asks 2,000."""
    outcomes = await ask_each(engine, draw_schemas(12), max_tokens=64)
    assert {kind for kind, _ in outcomes} <= {"valid", "length", "refused"}, outcomes
    assert [kind for kind, _ in outcomes].count("valid") >= 4


async def test_the_cache_of_grammars_is_bounded(engine: Engine) -> None:
    for number in range(CACHED_GRAMMARS + 3):
        await engine.grammars.matcher(schema({"const": number}))
    assert len(engine.grammars._cache) == CACHED_GRAMMARS
    await engine.grammars.matcher(schema({"const": CACHED_GRAMMARS}))
    assert len(engine.grammars._cache) == CACHED_GRAMMARS


async def test_c8_no_scope_gets_a_grammar_sooner_because_another_one_uses_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[object] = []
    source = ConstraintTrial.source

    def counted(trial: ConstraintTrial, *given: Any) -> str | Refusal:
        compiled.append(given)
        return source(trial, *given)

    monkeypatch.setattr(ConstraintTrial, "source", counted)
    for scope in ("red", "red", "blue", "red.salt", "red", "blue", None):
        await engine.grammars.matcher(schema({"const": "of red"}), scope=scope)
    assert len(compiled) == 4


async def test_n1_no_process_outlives_a_constraint_that_takes_much_memory(engine: Engine) -> None:
    """Its allocator would keep that, and the next constraint might take as much again."""
    trial = engine.grammars._trial
    assert trial is not None
    chance = random.Random(7)
    words = [f"{chance.getrandbits(40):x}" for _ in range(40_000)]
    for value, ended in (("a", False), (words, True), ("b", False)):
        source = trial.source(schema({"enum": [*value]}), None)
        assert isinstance(source, str)
        assert (trial._process is None) is ended


def _doubled(rule: str, levels: int) -> str:
    """Return rules that each contain the next one twice."""
    rules = (f"{rule}{level}: {rule}{level + 1} {rule}{level + 1}" for level in range(levels))
    return "\n".join([f"start: {rule}0", *rules, f'{rule}{levels}: "x"'])


@pytest.mark.parametrize(
    "constraint",
    [
        schema({"allOf": [{"type": "string", "pattern": f"a{n}"} for n in range(60)]}),
        schema({"type": "string", "pattern": "^((((a{100}){100}){100}){100})$"}),
        Constraint(ConstraintKind.GRAMMAR, _doubled("R", 24), "guided_grammar"),
    ],
    ids=["patterns that must all hold", "a pattern that repeats", "rules that double"],
)
async def test_n1_a_constraint_that_explodes_is_refused_and_delays_no_later_one(
    engine: Engine, constraint: Constraint
) -> None:
    with pytest.raises(InvalidGeneration, match="It is too complex"):
        await engine.grammars.matcher(constraint)
    text, _ = await answer(engine, "Hi", schema({"enum": ["after", "later"]}))
    assert text in ('"after"', '"later"')
    with pytest.raises(InvalidGeneration, match="It is too complex"):  # known by now
        await engine.grammars.matcher(constraint)


@pytest.mark.parametrize("salted", [False, True])
async def test_n2_constraints_of_one_team_delay_those_of_another_by_two(engine, salted) -> None:
    """Whatever the salts of the team (C8), each of which has a scope of its own."""
    done: list[str] = []

    async def compile_one(team: str, number: int) -> None:
        form = schema({"const": f"{team} {number} {salted}"})
        await engine.grammars.matcher(form, scope=f"{team}.{number}" if salted else team)
        done.append(team)

    all_wait = threading.Event()
    engine.grammars._thread.submit(all_wait.wait)
    reds = [compile_one("red", number) for number in range(12)]
    compiled = asyncio.gather(*reds, compile_one("blue", 0))
    await asyncio.sleep(0)
    all_wait.set()
    await compiled
    assert done.index("blue") <= 1


async def test_a_long_forced_text_is_computed_once(engine: Engine) -> None:
    """Each step of the engine would take as long as the text otherwise."""
    text = "Nothing else may be said. " * 20
    matcher = await engine.grammars.matcher(schema({"const": text}))
    computed = 0

    class CountedState:
        def __getattr__(self, name: str) -> Any:
            nonlocal computed
            computed += name == "compute_ff_tokens"
            return getattr(state, name)

    state, matcher.state = matcher.state, cast("Any", CountedState())
    tokens = 0
    while not matcher.complete:
        matcher.advance(matcher.forced()[0])
        tokens += 1
    assert tokens > 100
    assert computed < 20


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("choice", ["required", forced("greet")])
def test_a_forced_call_is_made_and_its_arguments_follow_the_schema(
    openai_client: OpenAI, choice: Any, temperature: float
) -> None:
    """`tool_choice` gets calls alone, whole and streamed alike, and one call of a named tool."""
    fields: Any = {
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": temperature == 1,
        "temperature": temperature,
        "seed": 3,
    }
    whole = ask(openai_client, **fields)
    assert (whole.message.content, whole.finish_reason) == (None, "tool_calls")
    calls = calls_of(whole.message)
    assert calls
    if choice != "required":
        assert [name for name, _ in calls] == ["greet"]
    for name, arguments in calls:
        if name == "greet":
            check_person(json.dumps(json.loads(arguments)["who"]))
        else:
            assert json.loads(arguments) == {}
    message = streamed(openai_client, **fields)
    assert calls_of(message) == calls
    assert not message.content


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_free_call_of_a_strict_tool_has_the_form_of_its_arguments(
    openai_client: OpenAI, temperature: float
) -> None:
    """The model may answer in text; whole and streamed, its calls follow the schema."""
    parameters = closed(town={"type": "string", "maxLength": 9}, days={"const": 3})
    fields: Any = {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [tool("get_weather", parameters)],
        "temperature": temperature,
        "max_tokens": 100,
    }
    called = 0
    for seed in range(2):
        calls = calls_of(ask(openai_client, **fields, seed=seed).message)
        assert calls_of(streamed(openai_client, **fields, seed=seed)) == calls
        for _, text in calls:
            arguments = json.loads(text)
            assert list(arguments) == ["town", "days"]
            assert len(arguments["town"]) <= 9
            assert arguments["days"] == 3
            called += 1
    assert called or temperature


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    "city", [{"minLength": 9, "maxLength": 12}, {"pattern": "^[0-9]{3}$"}, {"format": "date"}]
)
def test_a_text_of_a_strict_tool_follows_its_schema(openai_client, city, temperature) -> None:
    """Also where the model would write another text: its own is "Paris"."""
    parameters = closed(city={"type": "string", **city})
    choice = ask(
        openai_client,
        messages=[{"role": "user", "content": "What time is it in Paris?"}],
        tools=[tool("get_time", parameters)],
        temperature=temperature,
        seed=1,
        max_tokens=100,
    )
    calls = calls_of(choice.message)
    for _, arguments in calls:
        assert jsonschema_rs.is_valid(parameters, json.loads(arguments), validate_formats=True)
    assert calls or temperature


def test_a_schema_beside_tools_leaves_the_model_its_calls(openai_client: OpenAI) -> None:
    """With `response_format` and free tools an answer is a call, or JSON of the schema."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    weather = tool("get_weather", parameters, strict=False)
    fields: Any = {"temperature": 0, "tools": [weather], "response_format": FORMAT}
    question: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = ask(openai_client, messages=question, **fields)
    assert choice.finish_reason == "tool_calls"
    called = choice.message.model_dump()["tool_calls"][0]
    assert called["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    answered: Any = [
        *question,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": called["id"], "content": '{"weather": "sunny"}'},
    ]
    choice = ask(openai_client, messages=answered, **fields)
    if choice.finish_reason == "stop":
        check_person(choice.message.content)
