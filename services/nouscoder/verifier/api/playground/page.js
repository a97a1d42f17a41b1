"use strict";
const at = (id) => document.getElementById(id);
const HINTS = {
  stdin: "The program reads the input on stdin and must print the output.",
  call: "The function, or the method of class Solution, is called with args and kwargs; the returned value is compared.",
  assert: "Each case is a few lines of Python after the program and the setup; it passes when they raise nothing.",
  checker: "A program of yours, given the files input, output and answer, says by its exit code whether the output is right.",
  interactive: "The program talks with a program of yours over stdin and stdout.",
  math: "Nothing is run: the text on the left is an answer, compared with the expected one as mathematics.",
};
const CHECKER = `import sys
given, output, answer = (open(name).read().split() for name in sys.argv[1:4])
sys.exit(0 if sorted(output) == sorted(answer) else 1)
`;
const INTERACTOR = `import sys
secret = int(open(sys.argv[1]).read())
for turn in range(10):
    guess = int(input())
    print("=" if guess == secret else "<" if secret < guess else ">", flush=True)
    if guess == secret:
        sys.exit(0)
sys.exit(1)
`;
const EXAMPLES = {
  stdin: {
    code: "a, b = map(int, input().split())\nprint(a + b)\n",
    tests: { type: "stdin", cases: [{ input: "1 2\n", output: "3\n" }, { input: "40 2\n", output: "42\n" }, { input: "5 5\n", output: "11\n" }] },
  },
  call: {
    code: "class Solution:\n    def twoSum(self, nums, target):\n        seen = {}\n        for i, n in enumerate(nums):\n            if target - n in seen:\n                return [seen[target - n], i]\n            seen[n] = i\n",
    tests: { type: "call", entry_point: "twoSum", cases: [{ args: [[2, 7, 11, 15], 9], expected: [0, 1] }, { args: [[3, 3], 6], expected: [0, 1] }] },
  },
  assert: {
    code: "def is_even(n):\n    return n % 2 == 0\n",
    tests: { type: "assert", setup: "", cases: ["assert is_even(4)", "assert not is_even(7)"] },
  },
  checker: {
    code: "n = int(input())\nprint(*range(n, 0, -1))\n",
    tests: { type: "checker", checker: { language: "python", code: CHECKER }, cases: [{ input: "3\n", output: "1 2 3\n" }] },
  },
  interactive: {
    code: "low, high = 1, 100\nwhile True:\n    guess = (low + high) // 2\n    print(guess, flush=True)\n    answer = input()\n    if answer == \"=\":\n        break\n    if answer == \"<\":\n        high = guess - 1\n    else:\n        low = guess + 1\n",
    tests: { type: "interactive", interactor: { language: "python", code: INTERACTOR }, cases: [{ input: "37\n", output: "" }] },
  },
  math: {
    code: "The area is $\\frac{1}{2}\\pi$.\n",
    tests: { type: "math", cases: [{ expected: "\\frac{\\pi}{2}" }] },
  },
};

let running = null;
let leaveWithTab = false;

function drawLines() {
  const count = at("code").value.split("\n").length;
  at("lines").textContent = Array.from({ length: count }, (_, index) => index + 1).join("\n") + "\n\n";
  at("lines").scrollTop = at("code").scrollTop;
}

function field(name, text, value) {
  const label = document.createElement("label");
  const area = Object.assign(document.createElement("textarea"), { className: name, value, rows: 2, spellcheck: false });
  label.append(text, area);
  return label;
}

function addCase(input, output) {
  const row = Object.assign(document.createElement("div"), { className: "case" });
  const remove = Object.assign(document.createElement("button"), { type: "button", className: "quiet", textContent: "Remove" });
  remove.addEventListener("click", () => row.remove());
  row.append(field("input", "Input", input), field("output", "Expected output", output), remove);
  at("cases").append(row);
  return row;
}

function showTests(tests) {
  const forms = tests.type === "stdin";
  at("type").value = tests.type;
  at("hint").textContent = HINTS[tests.type];
  at("cases").replaceChildren();
  at("cases").hidden = at("add").hidden = !forms;
  at("tests-json").hidden = forms;
  if (forms) tests.cases.forEach((one) => addCase(one.input, one.output));
  else at("tests-json").value = JSON.stringify(tests, null, 2);
}

function showExample(name) {
  at("code").value = EXAMPLES[name].code;
  at("example").value = name;
  showTests(EXAMPLES[name].tests);
  drawLines();
}

function testsGiven() {
  if (at("type").value !== "stdin") return JSON.parse(at("tests-json").value);
  const rows = [...at("cases").children];
  const text = (row, name) => row.querySelector("." + name).value;
  return { type: "stdin", cases: rows.map((row) => ({ input: text(row, "input"), output: text(row, "output") })) };
}

function requestGiven() {
  const number = (id) => Number(at(id).value);
  return {
    language: at("language").value,
    code: at("code").value,
    tests: testsGiven(),
    limits: { wall_time_s: number("wall"), cpu_time_s: number("cpu"), memory_bytes: Math.round(number("memory") * 1048576) },
    comparator: { type: at("comparator").value, float_tolerance: number("tolerance") },
    stop_on_first_failure: at("stop").checked,
  };
}

function say(text, verdict) {
  at("status").replaceChildren(text);
  if (!verdict) return;
  const good = verdict === "accepted";
  const badge = Object.assign(document.createElement("span"), { textContent: verdict.replaceAll("_", " ") });
  badge.className = "badge " + (good ? "good" : "bad");
  at("status").prepend(badge);
}

function showOutcome(outcome) {
  const item = document.createElement("li");
  item.className = outcome.outcome === "accepted" ? "good" : "bad";
  item.dataset.index = outcome.index;
  item.textContent = `${outcome.index + 1} ${outcome.outcome.replaceAll("_", " ")} ${(outcome.wall_time_s * 1000).toFixed(0)} ms`;
  item.title = `${outcome.cpu_time_s.toFixed(3)} s CPU, ${(outcome.memory_bytes / 1048576).toFixed(0)} MiB`;
  const after = [...at("outcomes").children].find((other) => Number(other.dataset.index) > outcome.index);
  at("outcomes").insertBefore(item, after || null);
}

function showFailure(verdict) {
  const failure = verdict.first_failure;
  at("failure").hidden = !failure && !verdict.detail;
  const rows = failure
    ? [["Test", String(failure.index + 1)], ["Input", failure.input], ["Expected", failure.expected], ["Output", failure.output], ["stderr", failure.stderr]]
    : [];
  if (verdict.detail) rows.push(["Detail", verdict.detail]);
  at("failure").replaceChildren(...rows.filter(([, text]) => text).flatMap(([name, text]) => [
    Object.assign(document.createElement("dt"), { textContent: name }),
    Object.assign(document.createElement("dd"), { textContent: text, tabIndex: 0 }),
  ]));
}

function showEvent(block) {
  const lines = block.split("\n");
  const record = JSON.parse(lines.find((line) => line.startsWith("data: ")).slice(6));
  if (lines[0] === "event: outcome") return showOutcome(record);
  if (lines[0] === "event: fault") return say(record.detail);
  const time = record.cached ? "answered from the cache" : `${record.duration_s.toFixed(3)} s`;
  say(`${record.passed} of ${record.total} tests passed, ${record.graded} run, ${time}`, record.verdict);
  return showFailure(record);
}

async function readEvents(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    blocks.forEach(showEvent);
  }
}

async function ask(signal) {
  const headers = { "Content-Type": "application/json" };
  if (at("token").value) headers.Authorization = "Bearer " + at("token").value;
  const answer = await fetch("/v1/grade/stream", { method: "POST", headers, body: JSON.stringify(requestGiven()), signal });
  if (answer.ok) return readEvents(answer);
  const fault = await answer.json().catch(() => ({ detail: answer.statusText }));
  return say(answer.status === 401 ? "This service asks for a token: enter yours above." : `${answer.status}: ${fault.detail}`);
}

async function run() {
  if (running) return;
  const mine = (running = new AbortController());
  at("run").disabled = true;
  at("outcomes").replaceChildren();
  at("failure").hidden = true;
  say("Running…");
  try {
    await ask(mine.signal);
  } catch (error) {
    if (error.name === "AbortError") return;
    say(error instanceof SyntaxError ? "The tests are not valid JSON: " + error.message : "No answer: " + error.message);
  } finally {
    running = null;
    at("run").disabled = false;
  }
}

function insertText(area, text) {
  area.setRangeText(text, area.selectionStart, area.selectionEnd, "end");
  drawLines();
}

function shiftLines(area, back) {
  const start = area.value.lastIndexOf("\n", area.selectionStart - 1) + 1;
  const old = area.value.slice(start, area.selectionEnd);
  const moved = back ? old.replace(/^ {1,4}/gm, "") : old.replace(/^/gm, "    ");
  area.setRangeText(moved, start, area.selectionEnd, "select");
  drawLines();
}

function onEditorKey(event) {
  const area = event.target;
  if (event.key === "Escape") leaveWithTab = true;
  else if (event.key === "Tab" && !leaveWithTab) {
    event.preventDefault();
    const many = area.value.slice(area.selectionStart, area.selectionEnd).includes("\n");
    if (many || event.shiftKey) shiftLines(area, event.shiftKey);
    else insertText(area, "    ");
  } else if (event.key === "Enter" && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    const line = area.value.slice(area.value.lastIndexOf("\n", area.selectionStart - 1) + 1, area.selectionStart);
    insertText(area, "\n" + line.match(/^\s*/)[0] + (/:\s*$/.test(line) ? "    " : ""));
  }
  if (event.key !== "Escape" && event.key !== "Tab") leaveWithTab = false;
}

const absent = document.body.dataset.absent.split(" ");
for (const name of Object.keys(EXAMPLES).filter((one) => !absent.includes(one))) {
  at("example").append(new Option(name, name));
  at("type").append(new Option(name, name));
}
at("code").addEventListener("input", drawLines);
at("code").addEventListener("scroll", () => { at("lines").scrollTop = at("code").scrollTop; });
at("code").addEventListener("keydown", onEditorKey);
at("code").addEventListener("blur", () => { leaveWithTab = false; });
at("add").addEventListener("click", () => addCase("", "").querySelector("textarea").focus());
at("type").addEventListener("change", () => showTests(EXAMPLES[at("type").value].tests));
at("example").addEventListener("change", () => showExample(at("example").value));
at("run").addEventListener("click", run);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  }
});
showExample("stdin");
