// Tokens per CPU-second of llama.cpp through the prebuilt library of the npm package node-llama-cpp, one thread, greedy.
// Arguments: GGUF file, prompt tokens, decoded tokens. Prints one line of JSON.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The package lies in the working directory, this file does not.
const find = createRequire(process.cwd() + "/");
const { getLlama } = await import(pathToFileURL(find.resolve("node-llama-cpp")).href);
const [file, prompt, decode] = [process.argv[2], Number(process.argv[3]), Number(process.argv[4])];
const cpu = () => {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6;
};
const llama = await getLlama({ gpu: false, build: "never", logLevel: "error", maxThreads: 1 });
const model = await llama.loadModel({ modelPath: file });
const context = await model.createContext({ contextSize: prompt + decode + 16, batchSize: 512, threads: 1 });
const vocabulary = model.fileInfo.metadata.tokenizer.ggml.tokens.length;
const tokens = Array.from({ length: prompt }, (_, i) => (i * 7919 + 13) % vocabulary);
const begin = cpu();
let first;
let count = 0;
for await (const token of context.getSequence().evaluate(tokens, { temperature: 0, yieldEogToken: true })) {
  first ??= cpu();
  if (count++ >= decode) break;
}
console.log(JSON.stringify({ prefill: prompt / (first - begin), decode: (count - 1) / (cpu() - first) }));
process.exit(0);
