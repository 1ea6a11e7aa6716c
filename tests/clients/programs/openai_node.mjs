import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import * as skiff from "./scenarios.mjs";

const { ANSWER, DEMO, QUESTION, TOOLS, check } = skiff;
const demo = new OpenAI({ baseURL: `${skiff.DEMO_URL}/v1`, apiKey: "none" });
const tools = new OpenAI({ baseURL: `${skiff.TOOLS_URL}/v1`, apiKey: "none" });
const messages = [{ role: "user", content: QUESTION }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

await skiff.runScenarios({
  async chat() {
    const answer = await demo.chat.completions.create({ model: DEMO, messages });
    check(answer.choices[0].message.content.includes(ANSWER), answer);
  },
  async stream() {
    let text = "";
    for await (const chunk of await demo.chat.completions.create({ model: DEMO, messages, stream: true }))
      text += chunk.choices[0]?.delta?.content ?? "";
    check(text.includes(ANSWER), text);
  },
  async completions() {
    const answer = await demo.completions.create({ model: DEMO, prompt: "A pod is", max_tokens: 8 });
    check(answer.usage.completion_tokens === 8, answer);
  },
  async parse() {
    const format = zodResponseFormat(z.object({ certain: z.boolean() }), "verdict");
    const answer = await demo.chat.completions.parse({ model: DEMO, messages, response_format: format });
    check(typeof answer.choices[0].message.parsed.certain === "boolean", answer);
  },
  async call_tool() {
    const asked = [];
    const runner = tools.chat.completions.runTools({
      model: TOOLS,
      stream: true,
      messages: [{ role: "user", content: skiff.WEATHER_QUESTION }],
      tools: [
        {
          type: "function",
          function: {
            name: "get_weather",
            description: "Returns the weather",
            parameters,
            parse: JSON.parse,
            function: ({ city }) => {
              asked.push(city);
              return skiff.WEATHER;
            },
          },
        },
      ],
    });
    const answer = await runner.finalContent();
    check(answer === skiff.WEATHER_ANSWER, answer);
    check(JSON.stringify(asked) === '["Paris"]', asked);
  },
  async responses() {
    const stream = demo.responses.stream({ model: DEMO, input: QUESTION });
    const kinds = new Set();
    for await (const event of stream) kinds.add(event.type);
    const answer = await stream.finalResponse();
    check(kinds.has("response.output_text.delta") && kinds.has("response.completed"), [...kinds]);
    check(answer.output_text.includes(ANSWER), answer);
  },
  async embeddings() {
    const answer = await demo.embeddings.create({ model: DEMO, input: [QUESTION, "A service."] });
    check(answer.data.length === 2 && answer.data[0].embedding.length > 0, answer);
  },
});
