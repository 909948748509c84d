// What the Vercel AI SDK's quickstart does: a text, a stream, and a tool loop. Prints one line of JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "clawstream",
  baseURL: process.env.BASE_URL,
  apiKey: "unused",
  includeUsage: true,
});
const model = provider("policy");

const messages = [{ role: "user", content: "What is the capital of Australia?" }];
const first = await generateText({ model, messages });
messages.push(...first.response.messages, { role: "user", content: "Is that certain?" });

const stream = streamText({ model, messages });
let streamed = "";
for await (const part of stream.textStream) streamed += part;
const answer = await stream.response;
messages.push(...answer.messages, { role: "user", content: "And the weather in Paris?" });

const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `21 degrees in ${city}`,
});
const last = await generateText({ model, messages, tools: { weather }, stopWhen: stepCountIs(3) });

console.log(
  JSON.stringify({
    first: first.text,
    streamed,
    last: last.text,
    steps: last.steps.length,
    usage: (await stream.usage).outputTokens,
  }),
);
