// /// script
// [tool.paceline]
// npm = ["ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.91", "@ai-sdk/anthropic@3.0.140", "zod@4.6.7", "node@22.23.3"]
// scripted = true
// ///
// The AI SDK of Vercel: its OpenAI provider, whose default is Responses, its Anthropic provider, and
// the one for chat completions.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { BENCH_URL, BENCH_MODEL, BENCH_KEY, BENCH_LIMITED_KEY } = process.env;
const CALL = "CALL the tool. What is the weather in Paris?";
const baseURL = `${BENCH_URL}/v1`;

const openai = createOpenAI({ baseURL, apiKey: BENCH_KEY });
const anthropic = createAnthropic({ baseURL, apiKey: BENCH_KEY });
const compatible = (apiKey) =>
  createOpenAICompatible({
    name: "paceline",
    baseURL,
    apiKey,
    includeUsage: true,
    supportsStructuredOutputs: true,
  })(BENCH_MODEL);
const WIRES = {
  Chat: {
    model: compatible(BENCH_KEY),
    limited: compatible(BENCH_LIMITED_KEY),
    code: (error) => error.code,
  },
  Responses: {
    model: openai(BENCH_MODEL),
    limited: createOpenAI({ baseURL, apiKey: BENCH_LIMITED_KEY })(BENCH_MODEL),
    webSearch: openai.tools.webSearch({}),
    code: (error) => error.code,
  },
  Messages: {
    model: anthropic(BENCH_MODEL),
    limited: createAnthropic({ baseURL, apiKey: BENCH_LIMITED_KEY })(BENCH_MODEL),
    webSearch: anthropic.tools.webSearch_20250305({}),
    code: (error) => error.type,
  },
};
const loop = {
  prompt: CALL,
  stopWhen: stepCountIs(4),
  tools: {
    get_weather: tool({
      description: "Get the weather of a city.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => `sunny in ${city}`,
    }),
  },
};

async function clientsLeft() {
  const headers = { authorization: `Bearer ${BENCH_KEY}` };
  const status = await (await fetch(`${BENCH_URL}/v1/status`, { headers })).json();
  return status.outcomes.client_left ?? 0;
}

function check(holds, message) {
  if (!holds) throw new Error(JSON.stringify(message)?.slice(0, 300));
}

const cases = {
  async "generateText, streamText"({ model }) {
    const whole = await generateText({ model, maxRetries: 0, prompt: "Hi" });
    const stream = streamText({ model, maxRetries: 0, prompt: "Hi" });
    check(whole.text === (await stream.text), whole.text);
    check(whole.usage.inputTokens === (await stream.usage).inputTokens, await stream.usage);
    return `${whole.text} ${whole.usage.inputTokens} tokens, ${whole.usage.cachedInputTokens} cached`;
  },
  async "a loop of tools, whole and streamed"({ model }) {
    const whole = await generateText({ model, maxRetries: 0, ...loop });
    const stream = streamText({ model, maxRetries: 0, ...loop });
    check(whole.text === (await stream.text), [whole.text, await stream.text]);
    check(whole.steps.length === 2, whole.steps.length);
    return whole.text;
  },
  async generateObject({ model }) {
    const schema = z.object({ city: z.string() });
    const { object } = await generateObject({ model, maxRetries: 0, schema, prompt: "Hi" });
    return JSON.stringify(object);
  },
  async "a hosted tool is left out by name"({ model, webSearch }) {
    const tools = { web_search: webSearch };
    const result = await generateText({ model, maxRetries: 0, tools, prompt: "Hi" });
    return result.response.headers["x-paceline-ignored"];
  },
  async "is aborted: the worker stops"({ model }) {
    const left = await clientsLeft();
    const abort = new AbortController();
    const stream = streamText({
      model,
      maxRetries: 0,
      prompt: "Answer SLOWLY.",
      abortSignal: abort.signal,
    });
    for await (const part of stream.fullStream) if (part.type === "text-delta") abort.abort();
    for (let attempt = 0; attempt < 100; attempt++) {
      if ((await clientsLeft()) > left) return "the gateway cancelled the request at its worker";
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
    throw new Error("the gateway does not see it");
  },
  async "meets a rate limit and the end of the context"({ model, limited, code }) {
    const errors = [];
    for (const request of [
      { model: limited, prompt: "Hi" },
      { model: limited, prompt: "Hi" },
      { model, prompt: "word ".repeat(40_000) },
    ]) {
      try {
        await generateText({ maxRetries: 0, ...request });
      } catch (error) {
        errors.push(error);
      }
    }
    const statuses = errors.slice(-2).map((error) => error.statusCode);
    check(String(statuses) === "429,400", statuses);
    return errors.slice(-2).map((error) => `${error.statusCode} ${code(error.data.error)}`).join(", ");
  },
};

async function loopWithoutState() {
  const openaiOptions = { store: false, include: ["reasoning.encrypted_content"] };
  const model = WIRES.Responses.model;
  const result = await generateText({ model, ...loop, providerOptions: { openai: openaiOptions } });
  check(result.text.includes("sunny"), result.text);
  return result.text;
}

const runs = [["Responses: a loop of tools without state", loopWithoutState]];
for (const [wire, parts] of Object.entries(WIRES)) {
  for (const [name, run] of Object.entries(cases)) {
    if (name.startsWith("a hosted tool") && !parts.webSearch) continue; // chat has none
    runs.push([`${wire}: ${name}`, () => run(parts)]);
  }
}
for (const [name, run] of runs) {
  const line = { case: name, runs: ["greedy whole"], works: true };
  try {
    line.result = await run();
  } catch (error) {
    Object.assign(line, { runs: [], works: false, result: String(error).slice(0, 300) });
  }
  console.log(JSON.stringify(line));
}
