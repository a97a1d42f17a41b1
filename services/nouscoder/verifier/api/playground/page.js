// The page: the form, the run and its result. examples.js, editor.js and share.js are before it in the same script.
const at = (id) => document.getElementById(id);
let running = null;

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
  at("language").value = "python";
  at("code").value = EXAMPLES[name].code;
  at("example").value = name;
  showTests(EXAMPLES[name].tests);
  drawCode();
}

// A program that somebody has written is not replaced.
function showStarter() {
  const known = [...Object.values(LANGUAGES).map((one) => one.starter), ...Object.values(EXAMPLES).map((example) => example.code), ""];
  const starter = LANGUAGES[at("language").value].starter;
  if (at("type").value === "stdin" && known.includes(at("code").value)) at("code").value = starter;
  drawCode();
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

const absent = document.body.dataset.absent.split(" ");
for (const name of Object.keys(EXAMPLES).filter((one) => !absent.includes(one))) {
  at("example").append(new Option(name, name));
  at("type").append(new Option(name, name));
}
at("code").addEventListener("input", drawCode);
at("code").addEventListener("scroll", followScroll);
at("code").addEventListener("keydown", onEditorKey);
at("code").addEventListener("blur", () => { leaveWithTab = false; });
at("add").addEventListener("click", () => addCase("", "").querySelector("textarea").focus());
at("type").addEventListener("change", () => { showTests(EXAMPLES[at("type").value].tests); drawCode(); });
at("language").addEventListener("change", showStarter);
at("link").addEventListener("click", () => take("Link", asLink));
at("curl").addEventListener("click", () => take("Command", asCurl));
at("python").addEventListener("click", () => take("Program", asPython));
window.addEventListener("hashchange", showLink);
at("example").addEventListener("change", () => showExample(at("example").value));
at("run").addEventListener("click", run);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  }
});
showExample("stdin");
showLink();
