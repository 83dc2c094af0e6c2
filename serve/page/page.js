// The status page: asks `status` every few seconds and draws what it answers.
// Text from the server is put in as text only, never as markup.
"use strict";

const POLL_MS = 5000;
const PATIENCE_MS = 20000;
const SWITCH_PATIENCE_MS = 60000;
const SPAN_SECONDS = 900;

let key = null;
let shown = null; // the last status, to draw again when the width changes
let answeredAt = null;
let timer = null;
let polling = false;
let switching = false;
let failure = null; // of the last switch, and the mode that it left: told until the mode is another

const at = (id) => document.getElementById(id);

// --- Building -------------------------------------------------------------------------------------------------------

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const element = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const shape = (name, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

function say(id, text) {
  // Screen readers announce a live region when it changes: leave it alone while it does not.
  if (at(id).textContent !== text) at(id).textContent = text;
}

function table(headings, rows, words = false) {
  return element(
    "table",
    words ? { class: "words" } : {},
    element("thead", {}, element("tr", {}, ...headings.map((text) => element("th", { scope: "col" }, text)))),
    element(
      "tbody",
      {},
      ...rows.map(([first, ...others]) =>
        element("tr", {}, element("th", { scope: "row" }, first), ...others.map((text) => element("td", {}, text))),
      ),
    ),
  );
}

function facts(id, pairs) {
  const rows = pairs.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, String(value))),
  );
  at(id).replaceChildren(...rows);
}

function chart(id, height, label, draw) {
  const width = Math.max(240, at(id).clientWidth);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  draw(svg, width);
  at(id).replaceChildren(svg);
}

function legend(...entries) {
  const items = entries.map(([text, mark]) =>
    element("li", {}, shape("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, mark), text),
  );
  return element("ul", { class: "legend" }, ...items);
}

const swatch = (name) => shape("rect", { width: 14, height: 14, rx: 2, class: name });

// --- Numbers --------------------------------------------------------------------------------------------------------

const count = (value) =>
  new Intl.NumberFormat("en", value >= 1e6 ? { notation: "compact", maximumFractionDigits: 1 } : {}).format(value);
const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");
const fixed = (value, digits = 2) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const label = (text, x, y, anchor = "middle") => shape("text", { x, y, "text-anchor": anchor }, text);

function duration(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (minutes < 120) return `${minutes} min`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h` : `${Math.floor(minutes / 1440)} days`;
}

// --- Sections -------------------------------------------------------------------------------------------------------

function drawState(status) {
  const detail = status.reason ?? (status.state === "starting" ? status.phase : null);
  at("state").dataset.state = status.state;
  say("state", detail ? `${status.state}: ${detail}` : status.state);
  const names = status.models ?? [status.profile];
  say("model", `${names.join(" · ")}, ${status.state} for ${duration(status.seconds)}`);
  document.title = `${status.state} · ${names[0]} · dspark-serve`;
}

function drawMode({ mode, configured, switchable, reason, engines }) {
  for (const button of document.querySelectorAll("[data-mode]")) {
    button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
    button.setAttribute("aria-disabled", String(!switchable || switching));
  }
  if (failure?.mode !== mode) failure = null;
  if (!switching) {
    const differing = engines.map((engine) => `engine ${engine.engine}: ${engine.mode ?? "not confirmed"}`).join(", ");
    say("mode-said", failure?.text ?? (mode === null ? differing : `In force: ${mode}.`));
  }
  const lasting = "A switch reaches this server only and does not outlive a restart.";
  say("mode-note", `Configured: ${configured}. ${switchable ? lasting : `${upper(reason)}.`}`);
}

const upper = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function drawTiles(status) {
  const minute = status.last_minute;
  facts("tiles", [
    ["Acceptance length, last minute", fixed(minute.mean_acceptance_length)],
    ["Accepted of verified", share(minute.accepted, minute.verified)],
    ["Verified of proposed", share(minute.verified, minute.proposed)],
    ["Requests under way", count(status.requests_under_way)],
  ]);
}

function drawHistory(points, longest) {
  const lengths = points.map((point) => point.acceptance_length).filter((length) => length !== null);
  const text = lengths.length
    ? `Latest ${fixed(lengths.at(-1))}, between ${fixed(Math.min(...lengths))} and ${fixed(Math.max(...lengths))}. ` +
      "Tokens per request and step, the bonus token included."
    : "Nothing was verified yet.";
  say("history-text", text);
  chart("history", 200, `Acceptance length over the last 15 minutes. ${text}`, (svg, width) => {
    const [left, right, top, bottom] = [28, width - 8, 10, 172];
    const x = (secondsAgo) => right - ((right - left) * Math.min(secondsAgo, SPAN_SECONDS)) / SPAN_SECONDS;
    const y = (length) => bottom - ((bottom - top) * (length - 1)) / (longest - 1);
    for (const [from, to] of fixedSpans(points)) {
      svg.append(shape("rect", { x: x(from), y: top, width: x(to) - x(from), height: bottom - top, class: "shade" }));
    }
    const every = Math.ceil((longest - 1) / 6);
    for (let length = 1; length <= longest; length += every) {
      svg.append(shape("line", { x1: left, x2: right, y1: y(length), y2: y(length), class: "grid" }));
      svg.append(label(String(length), left - 8, y(length) + 4, "end"));
    }
    for (const minutes of [15, 10, 5, 0]) {
      const anchor = minutes === 15 ? "start" : minutes === 0 ? "end" : "middle";
      svg.append(label(minutes ? `−${minutes} min` : "now", x(60 * minutes), bottom + 20, anchor));
    }
    let run = [];
    const finish = () => {
      if (run.length === 1) svg.append(shape("circle", { cx: run[0][0], cy: run[0][1], r: 2.5, class: "dot" }));
      if (run.length > 1) svg.append(shape("path", { d: `M${run.map((p) => p.join(" ")).join("L")}`, class: "curve" }));
      run = [];
    };
    for (const point of points) {
      if (point.acceptance_length === null) finish();
      else run.push([x(point.seconds_ago).toFixed(1), y(point.acceptance_length).toFixed(1)]);
    }
    finish();
  });
  if (points.some((point) => point.mode === "fixed")) at("history").append(legend(["fixed mode", swatch("shade")]));
}

// The spans in which the mode was fixed, as [seconds ago at the start, at the end].
function fixedSpans(points) {
  const spans = [];
  points.forEach((point, i) => {
    if (point.mode !== "fixed") return;
    if (i && points[i - 1].mode === "fixed") spans.at(-1)[1] = point.seconds_ago;
    else spans.push([i ? points[i - 1].seconds_ago : point.seconds_ago, point.seconds_ago]);
  });
  return spans;
}

function drawPositions(positions) {
  const expects = positions.some((row) => row.expected !== null);
  if (!positions.length) {
    say("positions-text", "Nothing is drafted on this server.");
    at("positions-chart").replaceChildren();
    at("positions").replaceChildren();
    return;
  }
  say("positions-text", "Since the engine was started. Positions count from 0, as in the metrics.");
  const most = Math.max(1, ...positions.map((row) => row.proposed));
  const described = positions.map((row) => `${row.position}: ${share(row.accepted, row.verified)}`).join(", ");
  chart("positions-chart", 180, `Accepted of verified drafts by position: ${described}`, (svg, width) => {
    const [left, right, top, bottom] = [4, width - 4, 6, 156];
    const step = (right - left) / positions.length;
    const y = (value) => bottom - ((bottom - top) * value) / most;
    positions.forEach((row, i) => {
      const bar = Math.min(56, step * 0.7);
      const x = left + step * (i + 0.5) - bar / 2;
      for (const what of ["proposed", "verified", "accepted"]) {
        const inset = { proposed: 0, verified: 0, accepted: bar * 0.18 }[what];
        svg.append(
          shape("rect", {
            x: x + inset,
            y: y(row[what]),
            width: bar - 2 * inset,
            height: bottom - y(row[what]),
            class: what,
          }),
        );
      }
      if (row.expected !== null) {
        svg.append(shape("line", { x1: x, x2: x + bar, y1: y(row.expected), y2: y(row.expected), class: "expected" }));
      }
      svg.append(label(String(row.position), x + bar / 2, bottom + 18));
    });
    svg.append(shape("line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "grid" }));
  });
  const marks = ["proposed", "verified", "accepted"].map((what) => [what, swatch(what)]);
  if (expects) marks.push(["expected", shape("line", { x1: 0, x2: 14, y1: 7, y2: 7, class: "expected" })]);
  at("positions-chart").append(legend(...marks));
  at("positions").replaceChildren(
    table(
      ["Position", "Proposed", "Verified", "Accepted", ...(expects ? ["Expected"] : []), "Of verified"],
      positions.map((row) => [
        String(row.position),
        count(row.proposed),
        count(row.verified),
        count(row.accepted),
        ...(expects ? [count(Math.round(row.expected))] : []),
        share(row.accepted, row.verified),
      ]),
    ),
  );
}

function drawCalibration(bins) {
  const known = (bins ?? []).filter((bin) => bin.predictions > 0);
  at("calibration-details").hidden = !known.length;
  if (!known.length) {
    say("calibration-text", bins ? "No confidence was judged yet." : "Nothing predicts acceptance on this server.");
    at("calibration-chart").replaceChildren();
    return;
  }
  const middle = (bin) => (bin.from + bin.to) / 2;
  const total = known.reduce((sum, bin) => sum + bin.predictions, 0);
  const error = known.reduce((sum, bin) => sum + Math.abs(bin.predictions * middle(bin) - bin.accepted), 0) / total;
  const text = `A calibrated confidence lies on the dashed line. Mean distance ${fixed(error, 3)}, from ${count(total)} drafts.`;
  say("calibration-text", text);
  chart("calibration-chart", 240, `Share accepted by predicted confidence. ${text}`, (svg, width) => {
    const [left, right, top, bottom] = [36, Math.min(width - 12, 420), 10, 196];
    const x = (value) => left + (right - left) * value;
    const y = (value) => bottom - (bottom - top) * value;
    for (const value of [0, 0.25, 0.5, 0.75, 1]) {
      svg.append(shape("line", { x1: left, x2: right, y1: y(value), y2: y(value), class: "grid" }));
      svg.append(label(String(value), left - 8, y(value) + 4, "end"), label(String(value), x(value), bottom + 18));
    }
    svg.append(label("confidence", (left + right) / 2, bottom + 38), label("accepted", left + 4, top + 12, "start"));
    svg.append(shape("line", { x1: x(0), y1: y(0), x2: x(1), y2: y(1), class: "diagonal" }));
    const points = known.map((bin) => [x(middle(bin)).toFixed(1), y(bin.accepted / bin.predictions).toFixed(1)]);
    svg.append(shape("path", { d: `M${points.map((point) => point.join(" ")).join("L")}`, class: "curve" }));
    known.forEach((bin, i) => {
      const radius = 3 + 6 * Math.sqrt(bin.predictions / total);
      svg.append(shape("circle", { cx: points[i][0], cy: points[i][1], r: radius.toFixed(1), class: "dot" }));
    });
  });
  at("calibration").replaceChildren(
    table(
      ["Confidence", "Drafts", "Accepted", "Share"],
      known.map((bin) => [
        `${bin.from.toFixed(1)} to ${bin.to.toFixed(1)}`,
        count(bin.predictions),
        count(bin.accepted),
        share(bin.accepted, bin.predictions),
      ]),
    ),
  );
}

function drawServer(status) {
  const pairs = [
    ["Version", status.version],
    ["vLLM", status.vllm_version],
    ["Hardware", status.hardware],
    ["Profile", status.profile],
    ["Calibration", status.calibration],
  ];
  for (const [plan, steps] of Object.entries(status.steps)) pairs.push([`Steps, ${plan}`, count(steps)]);
  const { speculative, ...engine } = status.engine ?? {};
  const { model: draft, ...drafting } = speculative ?? {};
  const known = { ...engine, ...(speculative ? { draft_model: draft, ...drafting } : {}) };
  for (const [name, value] of Object.entries(known)) pairs.push([name, value ?? "–"]);
  facts("server", pairs);
}

function draw(status) {
  drawState(status);
  drawMode(status.mode);
  drawTiles(status);
  drawHistory(status.history, 1 + Math.max(1, status.positions.length));
  drawPositions(status.positions);
  drawCalibration(status.reliability);
  const rows = status.patches.map((patch) => [patch.id, [patch.status, patch.reason].filter(Boolean).join(": ")]);
  at("patches").replaceChildren(table(["Patch", "What became of it"], rows, true));
  drawServer(status);
}

// --- Talking to the server ------------------------------------------------------------------------------------------

class Refused extends Error {}

async function ask(path, options, patience) {
  const headers = { ...(options.headers ?? {}), ...(key === null ? {} : { Authorization: `Bearer ${key}` }) };
  const signal = AbortSignal.timeout(patience);
  const response = await fetch(path, { ...options, headers, signal, cache: "no-store", credentials: "same-origin" });
  if (response.status === 401) throw new Refused();
  return response;
}

function askForKey() {
  at("content").hidden = true;
  at("problem").hidden = true;
  at("key-form").hidden = false;
  at("state").dataset.state = "locked";
  say("state", "locked");
  say("key-problem", key === null ? "" : "The server does not accept this key.");
  key = null;
  at("key").focus();
}

function show(status) {
  const unlocked = !at("key-form").hidden;
  shown = status;
  answeredAt = new Date();
  at("problem").hidden = true;
  at("key-form").hidden = true;
  at("key").value = "";
  at("content").hidden = false;
  draw(status);
  say("updated", `Updated ${answeredAt.toLocaleTimeString()}, every ${POLL_MS / 1000} s while this page is visible.`);
  if (unlocked) at("title").focus();
}

function showProblem(problem) {
  at("state").dataset.state = "unreachable";
  say("state", "unreachable");
  say("problem", problem + (answeredAt ? ` What is shown is from ${answeredAt.toLocaleTimeString()}.` : ""));
  at("problem").hidden = false;
}

const locked = () => !at("key-form").hidden && key === null;

async function poll() {
  clearTimeout(timer);
  if (polling || document.hidden || locked()) return;
  polling = true;
  try {
    const response = await ask("status", {}, PATIENCE_MS);
    if (response.ok) show(await response.json());
    else showProblem(`The server answered ${response.status}.`);
  } catch (error) {
    if (error instanceof Refused) askForKey();
    else if (error instanceof TypeError || error instanceof DOMException) showProblem("The server does not answer.");
    else throw error;
  } finally {
    polling = false;
    if (!locked()) timer = setTimeout(poll, POLL_MS);
  }
}

async function switchTo(mode) {
  if (switching || shown === null || !shown.mode.switchable || shown.mode.mode === mode) return;
  switching = true;
  failure = null;
  drawMode(shown.mode);
  say("mode-said", `Switching to ${mode} …`);
  let problem = null;
  try {
    const body = JSON.stringify({ mode });
    const options = { method: "PUT", headers: { "Content-Type": "application/json" }, body };
    const response = await ask("mode", options, SWITCH_PATIENCE_MS);
    const answer = await response.json();
    if (!response.ok) problem = answer.error.message;
    // What is not confirmed is answered with what is known.
    if (response.ok || answer.error.engines) shown.mode = response.ok ? answer : answer.error;
  } catch (error) {
    if (error instanceof Refused) askForKey();
    else problem = "the server does not answer";
  }
  switching = false;
  if (problem !== null) failure = { text: `Not switched: ${problem}.`, mode: shown.mode.mode };
  drawMode(shown.mode);
  poll();
}

// --- Beginning ------------------------------------------------------------------------------------------------------

for (const button of document.querySelectorAll("[data-mode]")) {
  button.addEventListener("click", () => switchTo(button.dataset.mode));
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = at("key").value;
  if ([...typed].some((letter) => letter.charCodeAt(0) > 255)) {
    say("key-problem", "A header cannot carry this key.");
    return;
  }
  key = typed;
  poll();
});

document.addEventListener("visibilitychange", poll);

let width = 0;
new ResizeObserver(() => {
  if (shown === null || at("content").hidden || document.body.clientWidth === width) return;
  width = document.body.clientWidth;
  draw(shown);
}).observe(document.body);

poll();
