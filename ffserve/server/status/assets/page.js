"use strict";

// The status page draws the overview that each event brings (ffserve/server/status/page.py). It remembers
// the last five minutes for its graphs. Names come from clients and files: they become text nodes
// and nothing else.

const POINTS = 150;
const JOB_POINTS = 30;
const ENDED_SHOWN = 5;
const LATE_MS = 15000;
const CAUSES = ["disk", "queue", "taken", "decode", "memory", "origin"];
const WAITS_CAREFUL = 0.2;
const WAITS_WRONG = 0.5;
const SVG = "http://www.w3.org/2000/svg";

const past = { samples: [], hits: [], disk: [], memory: [] };
const pastOfJobs = new Map();
const once = location.search === "?once"; // for programs that wait until the page is loaded
let lastEvent = 0;
let allEnded = false;

// ---- texts ----

function size(bytes) {
  let value = bytes;
  let unit = 0;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[unit]}`;
}

function amount(number) {
  let value = number;
  let unit = 0;
  const units = ["", "k", "M", "G", "T"];
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return value.toFixed(digits) + units[unit];
}

function percent(share, digits = 1) {
  return share === null ? "–" : `${(100 * share).toFixed(digits)} %`;
}

function duration(seconds) {
  for (const [length, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= 2 * length) return `${(seconds / length).toFixed(0)} ${unit}`;
  }
  return `${seconds.toFixed(seconds > 0 && seconds < 9.95 ? 1 : 0)} s`;
}

function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

// ---- elements ----

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

function drawing(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function remember(points, value, most) {
  points.push(value);
  if (points.length > most) points.shift();
}

// Draws points from the right; where one is null the line has a gap.
function graph(svg, points, most, top) {
  const highest = top || Math.max(...points.map((value) => value || 0)) || 1;
  const parts = [[]];
  points.forEach((value, place) => {
    if (value === null) parts.push([]);
    else parts[parts.length - 1].push([most - points.length + place, 100 - (96 * value) / highest]);
  });
  svg.setAttribute("viewBox", `0 0 ${most - 1} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.replaceChildren();
  for (const part of parts.filter((points) => points.length > 0)) {
    const line = part.map((point) => point.join(",")).join(" ");
    const ends = `${part[part.length - 1][0]},100 ${part[0][0]},100`;
    svg.append(drawing("polygon", { points: `${line} ${ends}` }), drawing("polyline", { points: line }));
  }
}

function card(id, value, note, style = "") {
  const shown = document.getElementById(id);
  const line = shown.querySelector(".value");
  line.textContent = value;
  line.className = `value ${style}`;
  shown.querySelector(".note").textContent = note;
}

// Shows a list: columns are [head, class of its cells, row => what is in the cell].
function list(id, columns, rows) {
  const section = document.getElementById(id);
  section.hidden = rows.length === 0;
  const heads = columns.map(([head, className]) => element("th", className, head));
  section.querySelector("thead").replaceChildren(element("tr", "", ...heads));
  section.querySelector("tbody").replaceChildren(
    ...rows.map((row) =>
      element(
        "tr",
        "",
        ...columns.map(([head, className, cell], place) => {
          const made = element("td", place === 0 ? `${className} first` : className, element("span", "", cell(row)));
          made.dataset.head = head;
          return made;
        }),
      ),
    ),
  );
}

// ---- the parts of the page ----

function showTotals(totals) {
  const used = totals.arena_size ? totals.arena_used / totals.arena_size : 0;
  remember(past.samples, totals.per_s, POINTS);
  remember(past.hits, totals.hit_rate_now, POINTS);
  remember(past.disk, totals.read_per_s, POINTS);
  remember(past.memory, used, POINTS);
  for (const [id, top] of [["samples", 0], ["hits", 1], ["disk", 0], ["memory", 1]]) {
    graph(document.querySelector(`#${id} .graph`), past[id], POINTS, top);
  }
  document.getElementById("about").textContent =
    `${totals.version}, up ${duration(totals.uptime_s)}, engine ${totals.engine}`;
  card("samples", amount(totals.per_s), `${amount(totals.samples)} in all; ${size(totals.hit_size_per_s)}/s from memory`);
  card("hits", percent(totals.hit_rate_now), `${percent(totals.hit_rate)} in all`);
  card(
    "disk",
    `${size(totals.read_per_s)}/s`,
    `${amount(totals.in_flight)} in flight, ${amount(totals.queued)} queued; ${size(totals.read_size)} in all`,
  );
  const resizing = totals.arena_target === totals.arena_size ? "" : `; resizing to ${size(totals.arena_target)}`;
  card(
    "memory",
    percent(used),
    `${size(totals.arena_used)} of ${size(totals.arena_size)}${resizing}; ${amount(totals.evicted)} samples evicted`,
  );
  const blocked = totals.blocked ? `, ${totals.blocked} of them wait for memory` : "";
  const refused = totals.refused + totals.cut_off;
  card(
    "queue",
    `${totals.sessions.toLocaleString("en")} of ${totals.most_sessions.toLocaleString("en")}`,
    `${counted(totals.requests, "request")}${blocked}` + (refused ? `; ${counted(refused, "client")} refused or cut off` : ""),
    totals.sessions_short || totals.blocked ? "careful" : "",
  );
  card(
    "errors",
    totals.errors.toLocaleString("en"),
    `${counted(totals.failed, "block")} not read, ${counted(totals.checksum_failures, "checksum")} wrong`,
    totals.errors ? "wrong" : "",
  );
}

function jobName(job) {
  const style = job.errors ? "wrong" : job.at_work ? "name" : "name idle";
  const facts = [`uid ${job.user}`];
  if (job.pid !== null) facts.push(`pid ${job.pid}`);
  facts.push(counted(job.sessions, "session"));
  if (job.errors) facts.push(counted(job.errors, "error"));
  if (!job.at_work) facts.push(`idle for ${duration(job.idle_s)}`);
  return element(
    "span",
    "",
    element("span", style, job.label),
    element("span", "small", facts.join(", ")),
    element("span", "small", job.command),
    element("span", "small", job.data),
  );
}

function jobRate(job) {
  const svg = drawing("svg", { class: "graph spark", "aria-hidden": "true" });
  graph(svg, pastOfJobs.get(job.number), JOB_POINTS, 0);
  return element("span", "", amount(job.per_s), svg);
}

function jobEpoch(job) {
  if (job.done === null) return element("span", "", job.order);
  const bar = element("progress", "");
  bar.max = 1;
  bar.value = job.done;
  const number = job.epoch === null ? "" : `epoch ${job.epoch}, `;
  const end = job.ends_s === null ? "" : `, ends in ${duration(job.ends_s)}`;
  return element("span", "", bar, element("span", "small", `${number}${percent(job.done, 0)}${end}`));
}

function jobWaits(job) {
  const svg = drawing("svg", { class: "waits", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(drawing("rect", { class: "whole", width: 100, height: 10 }));
  let begin = 0;
  for (const cause of CAUSES) {
    const width = 100 * (job.waits[cause] || 0);
    svg.append(drawing("rect", { class: cause, x: begin, width, height: 10 }));
    begin += width;
  }
  const style = job.waited >= WAITS_WRONG ? "wrong" : job.waited >= WAITS_CAREFUL ? "careful" : "";
  const by = job.cause === "taken" && job.taken_by !== null ? ` by ${job.taken_by}` : "";
  const why = job.cause === null ? "" : ` ${job.cause}${by}`;
  return element("span", "", element("span", style, percent(job.waited, 0) + why), svg);
}

function showJobs(jobs) {
  list(
    "jobs",
    [
      ["Job", "text", jobName],
      ["Samples/s", "number", jobRate],
      ["Hits now", "number", (job) => percent(job.hit_rate_now)],
      ["in all", "number", (job) => percent(job.hit_rate)],
      ["Disk/s", "number", (job) => size(job.read_per_s)],
      ["Memory", "number", (job) => size(job.memory)],
      ["Epoch", "", jobEpoch],
      ["Waits", "", jobWaits],
    ],
    jobs,
  );
}

// The jobs that ended last, folded; a button shows all that the event has.
function showEnded(jobs, count) {
  list(
    "ended",
    [
      ["Job", "text", (job) => element("span", "", element("span", "name idle", job.label), element("span", "small", job.command))],
      ["Ended", "number", (job) => `${duration(job.idle_s)} ago`],
      ["Samples", "number", (job) => amount(job.samples)],
      ["Hits in all", "number", (job) => percent(job.hit_rate)],
      ["Errors", "number", (job) => (job.errors ? element("span", "wrong", String(job.errors)) : "")],
    ],
    allEnded ? jobs : jobs.slice(0, ENDED_SHOWN),
  );
  const section = document.getElementById("ended");
  section.querySelector("h2").textContent = counted(count, "ended job");
  section.querySelector("button").hidden = allEnded || jobs.length <= ENDED_SHOWN;
  const more = count - jobs.length;
  section.querySelector("p").textContent = more && allEnded ? `and ${more} more: ffserve status --all` : "";
}

function showLists(event) {
  showJobs(event.jobs.filter((job) => !job.has_ended));
  showEnded(event.jobs.filter((job) => job.has_ended), event.ended);
  list(
    "kept",
    [
      ["Jobs", "text", (row) => row.jobs.join(", ") || "(ended)"],
      ["Size", "number", (row) => size(row.used)],
      ["of the arena", "number", (row) => percent(row.used / Math.max(event.totals.arena_size, 1))],
      ["guaranteed", "number", (row) => size(row.floor)],
      ["Policy", "", (row) => row.rule],
    ],
    event.memory,
  );
  list(
    "files",
    [
      ["File", "text", (row) => row.path],
      ["Samples", "number", (row) => row.count.toLocaleString("en")],
      ["Size", "number", (row) => size(row.size)],
      ["in memory", "number", (row) => percent(row.cached)],
      ["Sessions", "number", (row) => String(row.sessions)],
      ["damaged", "number", (row) => (row.damaged ? element("span", "wrong", String(row.damaged)) : "")],
    ],
    event.files,
  );
  list(
    "slow",
    [
      ["File", "text", (row) => row.path],
      ["Slow reads", "number", (row) => row.reads.toLocaleString("en")],
      ["longest", "number", (row) => duration(row.longest_s)],
      ["last", "number", (row) => `${duration(row.last_s)} ago`],
    ],
    event.slow,
  );
  list(
    "preparations",
    [
      ["Preparation", "text", (row) => row.name],
      ["prepared", "number", (row) => amount(row.prepared)],
      ["found", "number", (row) => amount(row.found)],
      ["saved", "number", (row) => duration(row.saved_s)],
      ["shared", "", (row) => (row.shared ? "yes" : element("span", "careful", "no: not deterministic"))],
    ],
    event.preparations,
  );
  list(
    "lines",
    [
      ["Line", "text", (row) => element("span", row.level === "warning" ? "careful" : "wrong", row.text)],
      ["Time", "number", (row) => new Date(1000 * row.time).toLocaleString()],
    ],
    event.lines,
  );
}

function show(event) {
  lastEvent = Date.now();
  const numbers = new Set(event.jobs.map((job) => job.number));
  for (const job of event.jobs) {
    if (!pastOfJobs.has(job.number)) pastOfJobs.set(job.number, []);
    remember(pastOfJobs.get(job.number), job.per_s, JOB_POINTS);
  }
  for (const number of pastOfJobs.keys()) if (!numbers.has(number)) pastOfJobs.delete(number);
  showTotals(event.totals);
  document.getElementById("hidden").hidden = event.names;
  // What somebody is about to copy stays.
  if (document.getSelection().isCollapsed) showLists(event);
  state("live", "live");
}

function state(className, text) {
  const line = document.getElementById("state");
  if (line.textContent !== text) line.textContent = text;
  line.className = className;
}

function watch() {
  const events = new EventSource("events");
  events.addEventListener("overview", (message) => {
    show(JSON.parse(message.data));
    if (once) events.close();
  });
  events.addEventListener("error", () => {
    state("lost", "the daemon does not answer");
    if (events.readyState === EventSource.CLOSED) setTimeout(watch, 3000);
  });
}

document.querySelector("#ended button").addEventListener("click", (click) => {
  allEnded = true;
  click.target.hidden = true; // the next event brings the rows
});
setInterval(() => {
  if (!once && lastEvent && Date.now() - lastEvent > LATE_MS) state("lost", "the daemon does not answer");
}, 1000);
watch();
