"use strict";
// The page: receives the data, updates the texts and tables, and has the charts drawn.

const at = (id) => document.getElementById(id);
const about = document.body.dataset, live = about.mode === "live";
const dark = matchMedia("(prefers-color-scheme: dark)"), narrowly = matchMedia("(max-width: 34rem)");
const SIGNS = { live: "●", held: "◐", straggler: "▲", cut: "⊠", away: "○", left: "✕" };
const OUT = ["straggler", "cut", "away", "left"];
const LOST_AFTER_MS = 12000, RETRY_MS = 5000;
let data = null, chosen = "", heardAt = Date.now(), drawn = {}, waiting = false, drawMs = 0, source = null;

function make(tag, about, ...children) {
  const made = Object.assign(document.createElement(tag), about);
  made.append(...children);
  return made;
}
const number = (x, digits = 4) => x === null || x === undefined ? "–"
  : Math.abs(x) >= 1e4 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(digits)));
const percent = (x) => x === null || x === undefined ? "–" : `${Math.round(x * 100)} %`;

function span(seconds) {
  if (seconds === null || seconds === undefined) return "unknown";
  const s = Math.round(seconds), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return h ? `${h} h ${String(m).padStart(2, "0")} min` : m ? `${m} min ${String(s % 60).padStart(2, "0")} s` : `${s} s`;
}

const isOver = () => !["", "waiting", "running", "stopping"].includes(data.head.state);

// -- text

function write() {
  const head = data.head;
  document.title = `${head.state === "running" ? percent(head.progress) : head.state} · lsgd ${head.algorithm}`;
  at("title").textContent = head.run ? `${head.algorithm}, run ${head.run}` : "";
  at("state").textContent = head.state;
  at("state").dataset.state = head.state;
  at("reason").textContent = head.reason;
  at("share").value = head.progress;
  at("percent").textContent = percent(head.progress);
  at("share").parentElement.hidden = !head.iterations && !head.progress;  // a run without an end
  const late = head.delay ? ` with a delay of ${head.delay}` : "";
  at("period").textContent = head.period ? `period ${head.period}${late}: ${head.period_reason}` : "";
  const { workers, out, done, sent_nbytes: sent, bytes_per_s: perSecond } = data.sums;
  const there = isOver() || !out ? workers : `${workers - out} of ${workers}`;
  const nodes = new Set(data.workers.filter((w) => isOver() || !OUT.includes(w.state)).map((w) => w.node)).size;
  tiles({
    iterations: number(head.count) + (head.iterations ? ` of ${number(head.iterations)}` : ""),
    rate: head.rate === null ? "–" : `${number(head.rate, 3)}/s`,
    time: span(head.seconds),
    ...(live ? { "time left": span(head.left_s) } : {}),
    loss: number(head.loss),
    rounds: `${number(head.rounds_global)} global, ${number(head.rounds_local)} local`,
    workers: `${there} on ${nodes} node${nodes === 1 ? "" : "s"}`,
    generation: head.generation,
    ...(sent === null ? {} : { sent: live ? `${charts.bytes(perSecond)}/s` : charts.bytes(sent),
      "sent per iteration": done ? charts.bytes(sent / done) : "–" }),
  });
  at("turns").replaceChildren(...data.turns.map(([time, words]) => make("li", {}, make("time", {}, charts.clock(time)), words)));
  at("leaders").textContent = data.loss.leader_changes ? `leader changes: ${data.loss.leader_changes}` : "";
  table();
  log();
  show();
  at("names").replaceChildren(...data.names.map((name) => make("option", { value: name })));
  const changes = Object.entries(data.settings).map(([name, value]) => `${name} = ${value}`);
  at("changed").textContent = changes.length ? `Changed so far: ${changes.join(", ")}` : "";
}

// Show the parts that have something in them, and the controls while they work.
function show() {
  document.querySelector("main").hidden = !data.head.run;
  at("nothing").hidden = Boolean(data.head.run);
  at("loss-section").hidden = !Object.values(data.loss.workers).some((losses) => losses.some((x) => x !== null));
  at("agreement-section").hidden = !data.agreement.counts.length;
  at("workers-section").hidden = !data.workers.length;
  at("log-section").hidden = !data.log.length;
  at("change-section").hidden = !live || isOver();
  at("stop").disabled = data.head.state === "stopping" || !data.connected;
}

function tiles(values) {
  const list = at("tiles"), names = Object.keys(values);
  if (list.dataset.names !== names.join()) {
    list.dataset.names = names.join();
    list.replaceChildren(...names.map((name) => make("div", {}, make("dt", {}, name), make("dd"))));
  }
  [...list.querySelectorAll("dd")].forEach((cell, i) => { cell.textContent = values[names[i]]; });
}

const COLUMNS = {
  worker: (w) => w.worker, state: (w) => `${SIGNS[w.state] || ""} ${w.state}`, rank: (w) => w.rank < 0 ? "–" : w.rank,
  iterations: (w) => number(w.done), "per second": (w) => number(w.rate, 3),
  "ms per step": (w) => w.compute_s === null ? "–" : number(w.compute_s * 1000, 3),
  compute: (w) => percent(w.compute), waiting: (w) => percent(w.waiting), exchange: (w) => percent(w.exchange),
  loss: (w) => number(w.loss), "times leader": (w) => w.times_leader, sent: (w) => charts.bytes(w.sent_nbytes),
  "last heard": (w) => w.heard_s === null ? "–" : `${w.heard_s.toFixed(1)} s ago`,
};

function table() {
  const names = Object.keys(COLUMNS).filter((name) => name !== "times leader" || data.head.elects), body = at("workers");
  if (at("columns").children.length !== names.length) {
    at("columns").replaceChildren(...names.map((name) => make("th", { scope: "col" }, name)));
  }
  const key = [names.length, ...data.workers.map((w) => w.worker)].join();
  if (body.dataset.key !== key) {  // rows stay, so the focus does too
    body.dataset.key = key;
    body.replaceChildren(...data.workers.map((w) => {
      const row = make("tr", {}, ...names.map(() => make("td")));
      const button = make("button", { type: "button" }, w.worker);
      button.addEventListener("click", () => { chosen = chosen === w.worker ? "" : w.worker; drawn = {}; write(); draw(); });
      row.firstChild.append(button, make("small"));
      return row;
    }));
  }
  data.workers.forEach((w, i) => {
    const row = body.children[i];
    row.classList.toggle("out", OUT.includes(w.state) && !isOver());
    row.classList.toggle("chosen", w.worker === chosen);
    row.dataset.state = w.state;
    row.querySelector("button").setAttribute("aria-pressed", String(w.worker === chosen));
    row.querySelector("small").textContent = OUT.includes(w.state) ? w.reason || w.code : "";
    names.forEach((name, k) => { if (k) row.children[k].textContent = COLUMNS[name](w); });
  });
  const more = data.sums.workers - data.workers.length;
  at("more-workers").textContent = more > 0 ? `… and ${more} more: lsgd status lists all` : "";
}

function log() {
  const lines = data.log, last = lines.at(-1), key = lines.length ? `${lines.length} ${last[0]} ${last[2]}` : "";
  if (at("log").dataset.key === key) return;
  at("log").dataset.key = key;
  const rows = lines.map(([time, code, words]) => make("li", { title: code }, make("time", {}, charts.clock(time)), words));
  at("log").replaceChildren(...rows.reverse());
}

function banner() {
  const late = Date.now() - heardAt > LOST_AFTER_MS;
  const over = data && isOver();
  let text = "";
  if (live && (late || !source || source.readyState !== EventSource.OPEN)) {
    text = over ? "The run is over and its dashboard has ended; this is the last state." :
      `Disconnected: the dashboard at ${location.host} does not answer${data ? "; this is the last state" : ""}. Trying again.`;
  } else if (live && data && data.problem) text = data.problem;
  else if (live && data && !data.connected && !over) {
    text = `Disconnected: the global server at ${about.address} does not answer. Trying again.`;
  }
  if (at("banner").textContent !== text) at("banner").textContent = text;
  at("banner").hidden = !text;
}

// -- charts

function draw() {
  if (waiting || !data || document.hidden) return;
  waiting = true;  // drawing takes at most a quarter of the time, however much there is to draw
  setTimeout(() => requestAnimationFrame(() => {
    waiting = false;
    const begin = performance.now();
    drawAll();
    drawMs = performance.now() - begin;
  }), Math.min(4000, 3 * drawMs));
}

function drawAll() {
  const t = charts.theme(dark.matches), which = document.querySelector("[name=span]:checked").value;
  const look = { chosen, narrow: narrowly.matches, logarithmic: at("log-scale").checked };
  if (!at("loss-section").hidden) plot("loss", JSON.stringify([data.loss, look, dark.matches]), () => charts.loss(data.loss, t, look), look);
  if (!at("agreement-section").hidden) plot("agreement", JSON.stringify([data.agreement, look, dark.matches]), () => charts.agreement(data.agreement, t, look), look);
  const shown = data[which] && { ...data[which], name: which };
  at("timeline-section").hidden = !data.recent && !data.whole;
  if (!shown) return;
  plot("timeline", JSON.stringify([shown, data.gaps, look, dark.matches]), () => charts.timeline(shown, data.gaps, t, look), look);
  plot("traffic", JSON.stringify([shown, look, dark.matches]), () => charts.traffic(shown, t, look), look);
}

function plot(id, key, chart, look) {
  if (drawn[id] === key) return;
  drawn[id] = key;
  const [traces, layout] = chart();
  if (layout.height) at(id).style.height = `${layout.height}px`;
  const config = { displaylogo: false, responsive: true, displayModeBar: look.narrow ? false : "hover",
    modeBarButtonsToRemove: ["lasso2d", "select2d"] };
  Plotly.react(at(id), traces, layout, config);
  if (at(id).dataset.ready) return;
  at(id).dataset.ready = "yes";
  if (id === "timeline") {
    at(id).on("plotly_hover", ({ points: [p] }) => {
      const which = document.querySelector("[name=span]:checked").value;
      if (p.data.type !== "heatmap" || !data[which]) return;
      at("under").textContent = charts.column(data[which], data.gaps, ...p.pointNumber) || "…";
    });
  }
}

function key(event) {
  const chart = event.currentTarget, axis = chart._fullLayout && chart._fullLayout.xaxis;
  if (!axis || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "0") {
    event.preventDefault();
    Plotly.relayout(chart, { "xaxis.autorange": true, "yaxis.autorange": ["timeline", "agreement"].includes(chart.id) ? "reversed" : true });
    return;
  }
  const [from, to] = axis.range.map((x) => axis.r2l(x)), size = to - from;
  const moves = { "+": [0.2, -0.2], "=": [0.2, -0.2], "-": [-0.25, 0.25], ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2] };
  const move = moves[event.key];
  if (!move) return;
  event.preventDefault();
  Plotly.relayout(chart, { "xaxis.range": [axis.l2r(from + move[0] * size), axis.l2r(to + move[1] * size)] });
}

// -- changes of the run

async function question(words, answer) {
  const dialog = at("question");
  at("asked").textContent = words;
  at("yes").textContent = answer;
  dialog.returnValue = "no";
  dialog.showModal();
  await new Promise((done) => {
    dialog.onclose = () => dialog.open || done();  // the event of the question before may come late
  });
  return dialog.returnValue === "yes";
}

async function change(what, body, said) {
  at("answer").textContent = "…";
  try {
    const response = await fetch(what, {
      method: "POST", body: JSON.stringify(body), signal: AbortSignal.timeout(15000),
      headers: { "Content-Type": "application/json", "X-Lsgd-Csrf": about.csrf },
    });
    const text = await response.text();
    const answer = text.startsWith("{") ? JSON.parse(text) : { error: text };
    at("answer").textContent = response.ok ? `${said}, after ${answer.count} iterations` : answer.error;
  } catch (error) {
    at("answer").textContent = `the dashboard did not answer: ${error.message}`;
  }
}

function controls() {
  if (about.control !== "yes") {
    at("set").hidden = true;
    at("answer").textContent = "This page only shows the run. To change it from here, start lsgd dashboard --private, or use lsgd set and lsgd stop.";
  }
  at("set").addEventListener("submit", async (event) => {
    event.preventDefault();
    const { name, value } = Object.fromEntries(new FormData(at("set")));
    if (await question(`Set ${name} = ${value} for all workers, from the next global round?`, "Set")) {
      await change("set", { [name.trim()]: value.trim() }, `${name} = ${value}`);
    }
  });
  at("stop").addEventListener("click", async () => {
    if (await question("Stop the run? Its workers form the consensus model and leave.", "Stop the run")) {
      await change("stop", {}, "the run is stopping");
    }
  });
}

// -- start

function take(text) {
  data = JSON.parse(text);
  write();
  banner();
  draw();
}

function listen() {
  source = new EventSource("events");
  source.onmessage = (event) => { heardAt = Date.now(); take(event.data); };
  source.addEventListener("alive", () => { heardAt = Date.now(); });
  source.onopen = () => { heardAt = Date.now(); banner(); };
  source.onerror = () => {
    banner();
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, RETRY_MS);
  };
}

function legend() {
  const t = charts.theme(dark.matches);
  const acts = charts.ACTS.map((act, i) => {
    const swatch = make("i");
    swatch.style.background = t.acts[i];
    return make("li", {}, swatch, OUT.includes(act) ? `${SIGNS[act]} ${act}` : act);
  });
  const blank = make("li", {}, make("i"), "not reported");
  const rounds = [["◆", "global round"], ["•", "local round"]];
  at("legend").replaceChildren(...acts, blank, ...rounds.map(([sign, words]) => make("li", {}, make("b", {}, sign), words)));
}

const redraw = () => { drawn = {}; legend(); draw(); };
for (const media of [dark, narrowly]) media.addEventListener("change", redraw);
document.addEventListener("visibilitychange", draw);
at("log-scale").addEventListener("change", draw);
for (const radio of document.querySelectorAll("[name=span]")) radio.addEventListener("change", draw);
for (const chart of document.querySelectorAll(".chart")) chart.addEventListener("keydown", key);
controls();
legend();
if (live) {
  listen();
  setInterval(banner, 1000);
} else {
  take(at("data").textContent);
  if (data.whole) { document.querySelector("[value=whole]").checked = true; draw(); }
}
