// What a person takes away: a link with the whole state, the request for curl, and for Python.
const MAX_LINK = 30000; // characters of the state in a link
const MAX_STATE = 1 << 20; // characters of the state that a link unpacks to

async function packed(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const letters = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  return btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

async function unpacked(part) {
  const bytes = Uint8Array.from(atob(part.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const reader = stream.pipeThrough(new TextDecoderStream("utf-8", { fatal: true })).getReader();
  for (let text = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return text;
    text += value;
    if (text.length > MAX_STATE) {
      await reader.cancel();
      throw new Error("it is too large");
    }
  }
}

function offers(id, value) {
  return [...at(id).options].some((option) => option.value === value);
}

// Raises an error without having changed anything.
function checkState(state) {
  const { code, language, tests } = state || {};
  if (typeof code !== "string" || typeof language !== "string" || !tests) throw new Error("it is not a link of this page");
  if (!offers("language", language)) throw new Error(`${language.slice(0, 40)} is not installed here`);
  if (!offers("type", tests.type)) throw new Error(`tests of type ${String(tests.type).slice(0, 40)} are not offered here`);
  const rows = Array.isArray(tests.cases) && tests.cases.every((one) => one && typeof one === "object");
  if (tests.type === "stdin" && !rows) throw new Error("its tests are not cases");
}

function showState(state) {
  checkState(state);
  const { limits = {}, comparator = {} } = state;
  const set = (id, value) => { if (Number.isFinite(value)) at(id).value = value; };
  at("language").value = state.language;
  at("code").value = state.code;
  showTests(state.tests);
  set("wall", limits.wall_time_s);
  set("cpu", limits.cpu_time_s);
  set("memory", limits.memory_bytes / 1048576);
  set("tolerance", comparator.float_tolerance);
  if (offers("comparator", comparator.type)) at("comparator").value = comparator.type;
  at("stop").checked = state.stop_on_first_failure === true;
  drawCode();
}

async function showLink() {
  if (!location.hash.startsWith("#state=")) return;
  try {
    const part = location.hash.slice("#state=".length);
    if (part.length > MAX_LINK) throw new Error("it is too long");
    showState(JSON.parse(await unpacked(part)));
    say("This is the program of the link. Nothing was run yet.");
  } catch (error) {
    say("The link cannot be read: " + error.message);
  }
}

async function asLink(request) {
  const part = await packed(JSON.stringify(request));
  if (part.length > MAX_LINK) throw new Error(`a link may have ${MAX_LINK} characters, and this one has ${part.length}`);
  history.replaceState(null, "", "#state=" + part);
  return location.href;
}

function asCurl(request) {
  const token = at("token").value ? ` \\\n  -H "authorization: Bearer $NOUSCODER_TOKEN"` : "";
  const head = `curl -sf '${location.origin}/v1/grade' -H 'content-type: application/json'${token}`;
  return `${head} --data-binary @- <<'EOF'\n${JSON.stringify(request, null, 2)}\nEOF\n`;
}

// A JSON value as Python. JSON's texts are Python's.
function literal(value, indent) {
  const inner = indent + "    ";
  if (value === null || value === undefined || Number.isNaN(value) || Math.abs(value) === Infinity) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const parts = Array.isArray(value)
    ? value.map((one) => literal(one, inner))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = open + parts.join(", ") + close;
  return line.length <= 90 ? line : `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${indent}${close}`;
}

function asPython(request) {
  const fields = Object.entries(request).map(([name, value]) => `        ${name}=${literal(value, "        ")},\n`).join("");
  const token = at("token").value ? "  # with the token in NOUSCODER_TOKEN" : "";
  return `from nouscoder.client import Client\n\nwith Client("${location.origin}") as client:${token}\n`
    + `    answer = client.grade(\n${fields}    )\nprint(answer["verdict"], answer["passed"], "of", answer["total"])\n`;
}

// The text is also shown, because a page without TLS may not write to the clipboard.
async function take(what, make) {
  const text = at("taken");
  try {
    text.value = await make(requestGiven());
    text.hidden = false;
    text.select();
    const copied = navigator.clipboard && (await navigator.clipboard.writeText(text.value).then(() => true, () => false));
    at("shared").textContent = copied ? `${what} was copied.` : `Press Ctrl+C to copy the ${what.toLowerCase()}.`;
  } catch (error) {
    text.hidden = true;
    at("shared").textContent = `No ${what.toLowerCase()}: ${error.message}`;
  }
}
