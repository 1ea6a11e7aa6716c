import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import * as skiff from "./scenarios.mjs";

const { ANSWER, DEMO, QUESTION, TOOLS, check } = skiff;
const compatible = (url) =>
  createOpenAICompatible({ name: "skiff", baseURL: `${url}/v1`, supportsStructuredOutputs: true });
const openai = (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const asked = [];
const tools = {
  get_weather: tool({
    description: "Returns the weather of a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      asked.push(city);
      return skiff.WEATHER;
    },
  }),
};

async function readStream(model) {
  let text = "";
  let deltas = 0;
  const result = streamText({
    model,
    prompt: QUESTION,
    onError({ error }) {
      throw error;
    },
  });
  for await (const delta of result.textStream) {
    text += delta;
    deltas += 1;
  }
  check(deltas > 3 && text.includes(ANSWER), text);
}

async function askForWeather(model) {
  asked.length = 0;
  const answer = await generateText({ model, tools, prompt: skiff.WEATHER_QUESTION, stopWhen: stepCountIs(3) });
  check(answer.text === skiff.WEATHER_ANSWER && asked.join() === "Paris", answer.text);
}

await skiff.runScenarios({
  async chat() {
    const answer = await generateText({ model: compatible(skiff.DEMO_URL)(DEMO), prompt: QUESTION });
    check(answer.text.includes(ANSWER), answer.text);
  },
  async stream() {
    await readStream(compatible(skiff.DEMO_URL)(DEMO));
  },
  async structured_output() {
    const schema = z.object({ certain: z.boolean() });
    const answer = await generateObject({ model: compatible(skiff.DEMO_URL)(DEMO), schema, prompt: QUESTION });
    check(typeof answer.object.certain === "boolean", answer.object);
  },
  async call_tool() {
    await askForWeather(compatible(skiff.TOOLS_URL)(TOOLS));
  },
  async reasoning_effort() {
    const providerOptions = { openaiCompatible: { reasoningEffort: "low" } };
    const model = compatible(skiff.DEMO_URL)(DEMO);
    const answer = await generateText({ model, prompt: QUESTION, providerOptions });
    check(answer.text.includes(ANSWER), answer.text);
  },
  async responses_stream() {
    await readStream(openai(skiff.DEMO_URL)(DEMO));
  },
  async responses_tool() {
    await askForWeather(openai(skiff.TOOLS_URL)(TOOLS));
  },
  async embeddings() {
    const model = compatible(skiff.DEMO_URL).textEmbeddingModel(DEMO);
    const answer = await embedMany({ model, values: [QUESTION, "A service has an address."] });
    check(answer.embeddings.length === 2 && answer.embeddings[0].length > 0, answer);
  },
});
