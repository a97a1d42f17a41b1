
// The viewer of rollouts: a list that filters and sorts, and the tokens of one rollout. Text is only ever set as text.

function element(name, text, classes) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (classes) made.className = classes;
  return made;
}

function facts(one) {
  const [oldest, newest] = [Math.min(...one.versions), Math.max(...one.versions)];
  const clipped = one.clipped.reduce((sum, flag) => sum + flag, 0) / one.clipped.length;
  return {
    oldest, newest,
    step: one.step,
    versions: oldest === newest ? String(oldest) : oldest + "-" + newest,
    reward: one.reward,
    advantage: one.advantage.toFixed(3),
    length: one.length,
    clipped: (100 * clipped).toFixed(1) + " %",
    verdict: one.verdict,
    problem: one.problem_id,
  };
}

// The class of a ratio: how far it is from 1, on which side.
function shade(ratio) {
  const limits = ratio < 1 ? [0.98, 0.9, 0.7] : [1.02, 1.1, 1.3];
  const depth = limits.filter((limit) => (ratio < 1 ? ratio < limit : ratio > limit)).length;
  return depth ? (ratio < 1 ? "down-" : "up-") + depth : "";
}

function tokenSpan(one, at, colours) {
  const shown = colours === "versions"
    ? ["", "up-1", "down-1", "up-2", "down-2"][(one.versions[at] - Math.min(...one.versions)) % 5]
    : shade(one[colours][at]);
  const span = element("span", one.tokens[at], "token " + shown + (one.clipped[at] ? " clipped" : ""));
  span.title = "ratio " + one.ratios[at] + ", learner to sampler " + one.mismatches[at]
    + ", version " + one.versions[at] + (one.clipped[at] ? ", clipped" : "");
  return span;
}

function showRollout(place, one, colours) {
  const told = facts(one);
  const words = "step " + told.step + " · " + told.problem + " · " + told.verdict + " · reward " + told.reward
    + " · advantage " + told.advantage + " · version " + told.versions + " · staleness " + one.staleness
    + " · " + told.length + " tokens" + (one.overlong ? ", cut at the limit" : "") + " · " + told.clipped + " clipped";
  const text = element("pre", undefined, "tokens");
  const middle = one.left_out ? Math.floor(one.tokens.length / 2) : -1;
  one.tokens.forEach((_, at) => {
    if (at === middle) text.append(element("span", "\n[" + one.left_out + " tokens are left out]\n", "gap"));
    text.append(tokenSpan(one, at, colours));
  });
  place.replaceChildren(element("h3", words), element("pre", one.prompt, "prompt"), text);
}

// The list in `section`. Returns a function that adds rollouts; of more than `limit` the oldest are left out. The
// newest one is shown until another one is chosen.
function rolloutViewer(section, records, limit = Infinity) {
  const rollouts = [];
  const form = section.querySelector("form.rollout-filters");
  const body = section.querySelector("table.rollouts tbody");
  const place = section.querySelector("div.rollout");
  const columns = ["step", "versions", "reward", "advantage", "length", "clipped", "verdict", "problem"];
  let chosen = null, shown = null;

  function show() {
    shown = chosen ?? rollouts[rollouts.length - 1];
    if (!shown) return;
    showRollout(place, shown.one, form.elements.colours.value);
    for (const item of rollouts) item.row.toggleAttribute("aria-current", item === shown);
  }

  function addRow(item) {
    item.row = document.createElement("tr");
    for (const name of columns) item.row.append(element("td", item.told[name]));
    const button = element("button", item.told.step);
    button.type = "button";
    button.title = "show this rollout";
    item.row.cells[0].replaceChildren(button);
    item.row.addEventListener("click", () => { chosen = item; show(); });
    body.append(item.row);
  }

  function within(value, low, high) {
    return (low === "" || value >= Number(low)) && (high === "" || value <= Number(high));
  }

  function apply() {
    const limits = form.elements, inSteps = (told) => within(told.step, limits.step.value, limits.step_to.value);
    let count = 0;
    for (const item of rollouts) {
      const { reward, newest, oldest, length, verdict, problem } = item.told;
      const fits = inSteps(item.told) && within(reward, limits.reward.value, limits.reward_to.value)
        && within(newest, limits.version.value, "") && within(oldest, "", limits.version_to.value)
        && within(length, limits.tokens.value, limits.tokens_to.value)
        && (!limits.verdict.value || verdict === limits.verdict.value)
        && problem.toLowerCase().includes(limits.problem.value.trim().toLowerCase());
      item.row.hidden = !fits;
      count += fits;
    }
    form.querySelector("output").textContent = count + " of " + rollouts.length + " shown";
  }

  function add(records) {
    for (const one of records) {
      const item = { one, told: facts(one) };
      rollouts.push(item);
      addRow(item);
    }
    rollouts.sort((a, b) => a.one.batch_id - b.one.batch_id || a.one.step - b.one.step);
    while (rollouts.length > limit) rollouts.shift().row.remove();
    if (!section.querySelector("[aria-sort]")) body.append(...rollouts.map((item) => item.row).reverse());
    apply();
    if (!chosen) show();
  }

  form.addEventListener("input", () => { apply(); show(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  add(records);
  return add;
}

document.querySelectorAll("#rollouts-data").forEach((data) => {
  rolloutViewer(data.parentElement, JSON.parse(data.textContent));
});
document.querySelectorAll("table.rollouts").forEach(sortable);
