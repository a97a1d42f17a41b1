// The state, the ledger and the evaluations of a run as elements. Text is only ever set as text.

import { row, shortNumber, withError } from "./charts.js";

export function tiles(place, facts) {
  place.replaceChildren(...Object.entries(facts).map(([name, value]) => {
    const tile = element("div");
    tile.append(element("dt", name), element("dd", value));
    return tile;
  }));
}

const FINAL = ["trained", "filtered", "stale", "abandoned", "lost"];

export function ledgerLine(place, ledger) {
  if (!ledger) return;
  const flying = Object.entries(ledger.in_flight).filter(([, count]) => count);
  const line = element("p", "ledger ", "ledger");
  line.append(
    ledger.balanced ? element("span", "✓ balanced", "badge good") : element("span", "✗ NOT BALANCED", "badge bad"),
    " admitted ", element("b", ledger.admitted), " = ",
  );
  for (const name of FINAL) line.append(name + " ", element("b", ledger[name]), " + ");
  line.append("in flight ", element("b", flying.reduce((sum, [, count]) => sum + count, 0)));
  if (flying.length) line.append(" (" + flying.map(([name, count]) => name + " " + count).join(", ") + ")");
  place.replaceChildren(line);
}

// One paragraph for each cause. Only what changed is put in place, so that it is read out once.
export function showBlockers(place, blockers) {
  const texts = blockers && (blockers.length ? blockers : ["nothing is stalled"]);
  if (place.textContent === (texts ?? []).join("")) return;
  place.replaceChildren(...(texts ?? []).map((text) => element("p", text, blockers.length ? "" : "moves")));
}

export function showProcesses(place, processes) {
  place.replaceChildren(...processes.map((one) => {
    const item = element("li", one.name + " ");
    item.append(element("b", one.state));
    if (one.pid) item.append(" " + one.pid);
    if (one.restarts) item.append(" restarted " + one.restarts + "x");
    return item;
  }));
}

export function showSentences(place, said) {
  if (place.childElementCount === said.length && place.lastChild?.textContent === said[said.length - 1]) return;
  place.replaceChildren(...said.map((text) => element("li", text)));
  place.scrollTop = place.scrollHeight;
}

// `runs` is [[name, rows]...]; the rows of a run are its evaluations, the newest first in the table.
export function showEvaluations(table, runs) {
  const rows = runs.flatMap(([run, found]) => found.map((one) => ({ run, ...one })).reverse());
  const ks = [...new Set(rows.flatMap((one) => Object.keys(one.pass_at_k ?? {})))]
    .filter((k) => Number(k) > 1).sort((a, b) => a - b);
  const names = ["run", "step", "policy version", "pass@1", ...ks.map((k) => "pass@" + k), "problems", "rollouts"];
  table.tHead.replaceChildren(row("col", names));
  table.tBodies[0].replaceChildren(...rows.map((one) => row("row", [one.run], [
    shortNumber(one.step), one.policy_version, withError(one.pass_at_1, one.standard_error),
    ...ks.map((k) => shortNumber(one.pass_at_k?.[k])), shortNumber(one.num_problems), shortNumber(one.num_rollouts),
  ])));
}
