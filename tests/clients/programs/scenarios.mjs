// The frame of a JavaScript client's program; scenarios.py is its counterpart, and describes the values.

export const DEMO_URL = process.env.SKIFF_DEMO_URL;
export const TOOLS_URL = process.env.SKIFF_TOOLS_URL;
export const DEMO = "skiff-demo";
export const TOOLS = "skiff-tools";
export const QUESTION = "What is a pod?";
export const ANSWER = "pod";
export const WEATHER_QUESTION = "What is the weather in Paris?";
export const WEATHER = "18 degrees";
export const WEATHER_ANSWER = "It is 18 degrees in Paris.";

export function check(condition, found) {
  if (!condition) throw new Error(`found ${JSON.stringify(found)}`);
}

export async function runScenarios(scenarios) {
  let failed = false;
  for (const [name, scenario] of Object.entries(scenarios)) {
    let error = null;
    try {
      await scenario();
    } catch (caught) {
      error = caught.stack ?? String(caught);
      failed = true;
    }
    console.log("\n" + JSON.stringify({ scenario: name, error }));
  }
  process.exit(failed ? 1 : 0);
}
