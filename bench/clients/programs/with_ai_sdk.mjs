// /// script
// [tool.paceline]
// npm = ["ai@6.0.326", "@ai-sdk/openai-compatible@2.0.91", "zod@4.6.7", "node@22.23.3"]
// ///
// The AI SDK of Vercel.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const { BENCH_URL, BENCH_MODEL } = process.env;
const PERSON = "Tell me about a person.";
const WEATHER = "What is the weather in Paris?";
const MODES = [
  { temperature: 0, stream: false },
  { temperature: 1, stream: false },
  { temperature: 0, stream: true },
  { temperature: 1, stream: true },
];

const provider = createOpenAICompatible({
  name: "paceline",
  baseURL: `${BENCH_URL}/v1`,
  supportsStructuredOutputs: true,
});
const model = provider(BENCH_MODEL);
const person = z.object({
  name: z.string().max(20),
  age: z.number().int().min(0).max(120),
  mood: z.enum(["merry", "sad"]),
});
const getWeather = {
  description: "Get the weather of a city.",
  inputSchema: z.object({ city: z.string().max(20) }),
};

function settings(mode, prompt) {
  return { model, prompt, temperature: mode.temperature, maxOutputTokens: 300, maxRetries: 0 };
}

async function text(mode, options) {
  const request = { ...settings(mode, WEATHER), ...options };
  if (!mode.stream) return generateText(request);
  const errors = [];
  const result = streamText({ ...request, onError: ({ error }) => errors.push(error) });
  await result.consumeStream();
  if (errors.length) throw errors[0];
  return {
    text: await result.text,
    toolCalls: await result.toolCalls,
    steps: await result.steps,
    output: options.output ? await result.output : undefined,
  };
}

const CASES = {
  "generateObject, streamObject": async (mode) => {
    const request = { ...settings(mode, PERSON), schema: person };
    if (!mode.stream) return JSON.stringify(person.parse((await generateObject(request)).object));
    const errors = [];
    const result = streamObject({ ...request, onError: ({ error }) => errors.push(error) });
    let last;
    for await (const object of result.partialObjectStream) last = object;
    if (errors.length) throw errors[0];
    return JSON.stringify(person.parse(last));
  },
  "Output.object": async (mode) => {
    const { output } = await text(mode, { prompt: PERSON, output: Output.object({ schema: person }) });
    return JSON.stringify(person.parse(output));
  },
  "toolChoice: required": async (mode) => {
    const tools = { getWeather: tool(getWeather) };
    const { toolCalls } = await text(mode, { prompt: PERSON, tools, toolChoice: "required" });
    if (!toolCalls.length) throw new Error("no call");
    return JSON.stringify(toolCalls[0].input);
  },
  "a tool, called and answered": async (mode) => {
    const tools = { get_weather: tool({ ...getWeather, execute: async () => "weather: sunny" }) };
    const answer = await text(mode, { tools, stopWhen: stepCountIs(3) });
    const calls = answer.steps.flatMap((step) => step.toolCalls);
    if (!calls.length && !mode.temperature) throw new Error(`no call: ${answer.text}`);
    return calls.length ? `${JSON.stringify(calls[0].input)} -> ${answer.text}` : "text";
  },
  "reasoningEffort": async (mode) => {
    const providerOptions = { paceline: { reasoningEffort: "low" } };
    const answer = await text(mode, { providerOptions });
    return answer.text ? "text" : "no text";
  },
};

function label(mode) {
  return `${mode.temperature ? "sampled" : "greedy"} ${mode.stream ? "stream" : "whole"}`;
}

async function attempt(run, mode) {
  try {
    return { works: true, result: await run(mode) };
  } catch (error) {
    console.error(error);
    return { works: false, result: `${error.name}: ${error.message}`.slice(0, 300) };
  }
}

for (const [name, run] of Object.entries(CASES)) {
  const outcomes = [];
  for (const mode of MODES) outcomes.push({ label: label(mode), ...(await attempt(run, mode)) });
  const atOnce = await Promise.all([...MODES, ...MODES].map((mode) => attempt(run, mode)));
  outcomes.push({ label: "8 at once", ...(atOnce.find((one) => !one.works) ?? atOnce[0]) });
  const failures = outcomes.filter((one) => !one.works);
  console.log(
    JSON.stringify({
      case: name,
      runs: outcomes.filter((one) => one.works).map((one) => one.label),
      works: !failures.length,
      result: failures.length
        ? failures.map((one) => `${one.label}: ${one.result}`).join("; ")
        : outcomes[0].result,
    }),
  );
}
