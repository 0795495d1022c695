// /// script
// [tool.paceline]
// npm = ["ai@6.0.326", "@ai-sdk/openai@3.0.141", "zod@4.6.7", "node@22.23.3"]
// scripted = true
// ///
// The AI SDK of Vercel with the default model of its OpenAI provider, which speaks Responses.

import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { BENCH_URL, BENCH_MODEL, BENCH_KEY, BENCH_LIMITED_KEY } = process.env;
const CALL = "CALL the tool. What is the weather in Paris?";

const openai = createOpenAI({ baseURL: `${BENCH_URL}/v1`, apiKey: BENCH_KEY });
const limited = createOpenAI({ baseURL: `${BENCH_URL}/v1`, apiKey: BENCH_LIMITED_KEY });
const settings = { model: openai(BENCH_MODEL), maxRetries: 0 };
const loop = {
  ...settings,
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

async function status() {
  const headers = { authorization: `Bearer ${BENCH_KEY}` };
  return (await fetch(`${BENCH_URL}/v1/status`, { headers })).json();
}

function check(holds, message) {
  if (!holds) throw new Error(JSON.stringify(message)?.slice(0, 300));
}

const cases = {
  async "generateText, streamText"() {
    const whole = await generateText({ ...settings, prompt: "Hi" });
    const stream = streamText({ ...settings, prompt: "Hi" });
    check(whole.text === (await stream.text), whole.text);
    return `${whole.text} ${whole.usage.inputTokens} tokens, ${whole.usage.cachedInputTokens} cached`;
  },
  async "a loop of tools, whole and streamed"() {
    const whole = await generateText(loop);
    const stream = streamText(loop);
    check(whole.text === (await stream.text), [whole.text, await stream.text]);
    check(whole.steps.length === 2, whole.steps.length);
    return whole.text;
  },
  async "a loop of tools without state"() {
    const openaiOptions = { store: false, include: ["reasoning.encrypted_content"] };
    const result = await generateText({ ...loop, providerOptions: { openai: openaiOptions } });
    check(result.text.includes("sunny"), result.text);
    return result.text;
  },
  async "generateObject"() {
    const schema = z.object({ city: z.string() });
    return JSON.stringify((await generateObject({ ...settings, schema, prompt: "Hi" })).object);
  },
  async "a hosted tool is left out by name"() {
    const tools = { web_search: openai.tools.webSearch({}) };
    const result = await generateText({ ...settings, tools, prompt: "Hi" });
    return result.response.headers["x-paceline-ignored"];
  },
  async "is aborted: the worker stops"() {
    const left = (await status()).outcomes.client_left ?? 0;
    const abort = new AbortController();
    const stream = streamText({ ...settings, prompt: "Answer SLOWLY.", abortSignal: abort.signal });
    for await (const part of stream.fullStream) if (part.type === "text-delta") abort.abort();
    for (let attempt = 0; attempt < 100; attempt++) {
      if (((await status()).outcomes.client_left ?? 0) > left) {
        return "the gateway cancelled the request at its worker";
      }
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
    throw new Error("the gateway does not see it");
  },
  async "meets a rate limit and the end of the context"() {
    const codes = [];
    const attempts = [
      { model: limited(BENCH_MODEL), prompt: "Hi" },
      { model: limited(BENCH_MODEL), prompt: "Hi" },
      { ...settings, prompt: "word ".repeat(40_000) },
    ];
    for (const request of attempts) {
      try {
        await generateText({ maxRetries: 0, ...request });
      } catch (error) {
        codes.push(`${error.statusCode} ${error.data.error.code}`);
      }
    }
    check(codes.length === 2, codes);
    return codes.join(", ");
  },
};

for (const [name, run] of Object.entries(cases)) {
  const line = { case: name, runs: ["greedy whole"], works: true };
  try {
    line.result = await run();
  } catch (error) {
    Object.assign(line, { runs: [], works: false, result: String(error).slice(0, 300) });
  }
  console.log(JSON.stringify(line));
}
