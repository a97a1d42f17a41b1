// The live page of a run. Everything comes as events (run/console/feed.py); a connection that breaks comes back with
// the id of its last event, so nothing is missed. Text is only ever set as text.

import { Charts } from "./charts.js";
import { ledgerLine, showBlockers, showEvaluations, showProcesses, showSentences, tiles } from "./tables.js";

const TRY_AGAIN_MS = 5000, FIRST_BATCHES = 4, MOST_ROLLOUTS = 1024;
const at = (id) => document.getElementById(id);
const tools = at("chart-tools").elements;

// Events of one run. `hears` has a function for each kind. A server that refuses is asked again later.
class Events {
  constructor(run, hears, told) {
    Object.assign(this, { run, hears, told, last: "", ended: false });
    this.open();
  }

  open() {
    const asked = new URLSearchParams();
    if (this.run) asked.set("run", this.run);
    if (this.last) asked.set("after", this.last);
    this.source = new EventSource("/events?" + asked);
    this.source.addEventListener("open", () => this.told("live"));
    this.source.addEventListener("error", () => this.lost());
    for (const [kind, hear] of Object.entries(this.hears)) {
      this.source.addEventListener(kind, (event) => {
        if (event.lastEventId) this.last = event.lastEventId;
        hear(JSON.parse(event.data));
      });
    }
  }

  lost() {
    if (this.ended) return;
    this.told("not connected: trying again");
    if (this.source.readyState !== EventSource.CLOSED) return;  // the browser tries again by itself
    this.source.close();
    setTimeout(() => this.ended || this.open(), TRY_AGAIN_MS);
  }

  end() {
    this.ended = true;
    this.source.close();
  }
}

const charts = new Charts(at("charts"), (range) => {
  tools.low.value = range?.low ?? "";
  tools.high.value = range?.high ?? "";
});
const evaluated = new Map();
let own = "run", hasEnded = false;

function showLink(words) {
  const shown = words === "live" && hasEnded ? "ended" : words;
  at("link").textContent = shown;
  at("link").className = "badge " + (shown === "live" ? "good" : shown === "ended" ? "" : "bad");
}

function showRun({ name }) {
  own = name;
  at("name").textContent = "Run " + name;
  document.title = "NousCoder run " + name;
}

function showState(state) {
  at("phase").textContent = state.phase + (state.note ? " · " + state.note : "")
    + (state.total ? " · " + state.done + "/" + state.total : "") + (state.left && state.left !== "-" ? " · " + state.left + " left" : "");
  if (state.total) {
    at("bar").max = state.total;
    at("bar").value = Math.min(state.done, state.total);
  } else at("bar").removeAttribute("value");
  if (state.figures) tiles(at("figures"), { ...state.figures, learner: (state.learner || "-").replaceAll("_", " ") });
  ledgerLine(at("ledger"), state.ledger);
  showBlockers(at("blockers"), state.figures ? state.blockers : null);
  showProcesses(at("processes"), state.processes ?? []);
  showSentences(at("sentences"), state.said);
}

function showSummary(summary) {
  hasEnded = summary !== null;
  showLink("live");
  if (!hasEnded) return;
  const rate = (value) => (value === null || value === undefined ? "-" : value.toFixed(3));
  const seconds = Math.round(summary.learning_seconds ?? 0);
  at("phase").textContent = "the run has ended";
  at("bar").max = at("bar").value = 1;
  tiles(at("figures"), {
    "held-out pass@1 before": rate(summary.pass_at_1_before),
    "held-out pass@1 after": rate(summary.pass_at_1_after),
    steps: summary.steps ?? "-",
    "learning time": Math.floor(seconds / 60) + " min " + (seconds % 60) + " s",
  });
  ledgerLine(at("ledger"), summary.ledger);
  showBlockers(at("blockers"), null);
  showProcesses(at("processes"), []);
}

function showRows() {
  showEvaluations(at("evaluated"), [...evaluated]);
}

// Of a run: its curves and evaluations. `named` is its name in the charts. Layers of two runs cannot be overlaid.
function curvesOf(named, layered) {
  return {
    points: ({ charts: found, after }) => charts.take(
      named(), "steps", found.filter((chart) => layered || !chart.layered), after,
    ),
    evaluations: ({ charts: found, rows }) => {
      charts.take(named(), "evaluations", found, null);
      evaluated.set(named(), rows);
      showRows();
    },
  };
}

// Rollouts. The batches that are asked for are those from `firstBatch` on.

const addRollouts = rolloutViewer(at("browser"), [], MOST_ROLLOUTS);
const fetched = new Set();
let batches = [], firstBatch = null, fetching = Promise.resolve();

function showBatches() {
  const older = batches.filter((batch) => !fetched.has(batch) && batch < firstBatch);
  const words = element("span", batches.length + " batches have recorded tokens, " + fetched.size + " are in the list. ");
  at("batches").replaceChildren(words);
  if (!older.length) return;
  const button = element("button", "show the older ones too");
  button.type = "button";
  button.addEventListener("click", () => { firstBatch = 0; fetchBatches(); });
  at("batches").append(button);
}

function fetchBatches() {
  firstBatch ??= batches[Math.max(0, batches.length - FIRST_BATCHES)];
  for (const batch of batches.filter((one) => one >= firstBatch && !fetched.has(one))) {
    fetched.add(batch);
    fetching = fetching.then(async () => {
      const answer = await fetch("/tokens/" + batch);
      if (!answer.ok) throw new Error(answer.statusText);
      addRollouts(await answer.json());
    }).catch(() => fetched.delete(batch));  // the next event brings it
  }
  fetching.then(showBatches);
}

// The rollouts are loaded when somebody looks at them.
let looked = false;
new IntersectionObserver((seen, watcher) => {
  if (!seen.some((one) => one.isIntersecting)) return;
  watcher.disconnect();
  looked = true;
  if (batches.length) fetchBatches();
}, { rootMargin: "300px" }).observe(at("browser"));

function takeBatches(told) {
  batches = told.batches;
  if (!batches.length) return;
  if (looked) fetchBatches();
  else showBatches();
}

// The other run.

let beside = null;

async function listRuns() {
  const chosen = tools.run.value;
  const answer = await fetch("/runs");
  const names = answer.ok ? await answer.json() : [];
  tools.run.replaceChildren(new Option("no other run", ""), ...names.map((name) => new Option(name, name)));
  tools.run.value = names.includes(chosen) ? chosen : "";
}

function showBeside() {
  if (beside) {
    beside.end();
    charts.forget(beside.run);
    evaluated.delete(beside.run);
    showRows();
  }
  const { value } = tools.run;
  beside = value ? new Events(value, curvesOf(() => value, false), () => {}) : null;
}

tools.run.addEventListener("focus", listRuns);
tools.run.addEventListener("change", showBeside);
for (const limit of [tools.low, tools.high]) {
  limit.addEventListener("change", () => charts.zoom({
    low: tools.low.value === "" ? null : Number(tools.low.value),
    high: tools.high.value === "" ? null : Number(tools.high.value),
  }));
}
at("chart-tools").addEventListener("reset", () => charts.zoom(null));
at("chart-tools").addEventListener("submit", (event) => event.preventDefault());

showRows();
listRuns();
new Events("", {
  run: showRun,
  state: (state) => hasEnded ? showSentences(at("sentences"), state.said) : showState(state),
  summary: showSummary,
  rollouts: takeBatches,
  ...curvesOf(() => own, true),
}, showLink);
