// SPDX-License-Identifier: Apache-2.0
// The page /mmcache: reads summaries of requests, follows new ones, shows one record. Every value is set as text,
// never as HTML. Addresses are relative, so that a proxy may put the server below a prefix.
"use strict";

const KEPT = 1000; // requests in the list; older ones go
const WAIT_S = 2; // how long the server holds a question about newer requests
const PAUSE_MS = 250; // between two questions, so that a busy server is asked four times a second at most
const RETRY_MS = 2000;
const BUCKETS = 40;
const COLOURS = 7; // of a chart; what is left is one more, "others"

const $ = (id) => document.getElementById(id);
const fromHash = () => {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return ""; // no address of ours
  }
};
takeKey();
const state = { key: sessionStorage.getItem("mmcache-key"), cursor: null, rows: new Map(), meanings: {}, open: null };
const number = (value) => Math.round(value).toLocaleString("en");
const percent = (part, whole) => {
  if (!whole) return "–";
  const floored = Math.floor((100 * part) / whole);
  return part && !floored ? "<1%" : `${floored}%`;
};
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
const NAMES = { tower: "vision tower", ram: "RAM", other_lora: "other LoRA" };
const words = (name) => NAMES[name] ?? name.replace("tower_faster", "vision tower: faster").replaceAll("_", " ");
const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (className) element.className = className;
  return element;
}

class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

class Gone extends Error {}

async function ask(path) {
  const headers = state.key ? { Authorization: `Bearer ${state.key}` } : {};
  let answer, body;
  try {
    answer = await fetch(`mmcache/${path}`, { headers, signal: AbortSignal.timeout((WAIT_S + 10) * 1000) });
    body = await answer.json();
  } catch {
    throw new Gone("The server does not answer");
  }
  if (!answer.ok) throw new Refusal(answer.status, body.error ?? `status ${answer.status}`);
  return body;
}

function say(text, kind) {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").className = kind;
}

// --- following the server ---------------------------------------------------------------------------------------

async function follow() {
  for (;;) {
    try {
      const first = state.cursor === null;
      const query = first
        ? `limit=${KEPT}`
        : `limit=${KEPT}&wait=${WAIT_S}&since=${encodeURIComponent(state.cursor)}`;
      const news = await ask(`records?${query}`);
      state.cursor = news.cursor;
      $("key-form").hidden = true;
      if (first || news.records.length) {
        add(news.records);
        await sums();
      }
      say(`Live. Newest request: ${newest()}`, "live");
      if (first && fromHash()) await open(fromHash());
      await pause(PAUSE_MS);
    } catch (error) {
      if (error instanceof Refusal && error.status === 401) {
        say(state.key ? "The admin key is wrong." : "This page asks for the admin key.", "gone");
        state.cursor = null;
        $("key-form").hidden = false;
        $("key").focus();
        return; // the form starts again
      }
      if (!(error instanceof Refusal || error instanceof Gone)) throw error;
      if (error instanceof Refusal) await ask("components").then(components, () => {}); // they are there without records, too
      say(`${error.message}. Trying again every ${RETRY_MS / 1000} s; what is shown may be old.`, "gone");
      await pause(RETRY_MS);
      if (error instanceof Gone) state.cursor = null; // it may be another server that comes back
    }
  }
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

function newest() {
  const last = [...state.rows.values()].at(-1);
  return last ? clock(last.time_s) : "none yet";
}

async function sums() {
  const { totals, meanings, ...report } = await ask("totals");
  state.meanings = meanings;
  components(report);
  const { requests, prompt_tokens: all, reused_tokens: reused } = totals;
  $("sums").textContent =
    `${plural(requests, "request")}, ${plural(all, "prompt token")}; ${number(reused)} (${percent(reused, all)}) were reused.`;
  shares($("by-reason"), { reused, ...totals.missed_tokens }, "tokens");
  shares($("by-tier"), totals.images, "images");
  explain([...Object.keys(totals.missed_tokens), ...Object.keys(totals.images)]);
}

function explain(names) {
  const known = names.filter((name) => state.meanings[name]);
  $("words").hidden = !known.length;
  $("meanings").replaceChildren(
    ...known.flatMap((name) => [make("dt", words(name)), make("dd", `${state.meanings[name]}.`)]),
  );
}

function components(report) {
  const told = Object.entries(report.components);
  const line = ["on", "mixed", "off", "unneeded"].map((kind) => {
    const names = told.filter(([, component]) => component.state === kind).map(([name]) => words(name));
    return names.length ? `${kind}: ${names.join(", ")}` : "";
  });
  $("components").textContent = told.length ? `Components ${line.filter(Boolean).join("; ")}.` : "";
  const reasons = told.filter(([, component]) => component.reason);
  $("why").hidden = !reasons.length;
  $("reasons").replaceChildren(
    ...reasons.map(([name, component]) => make("li", `${words(name)} is ${component.state}: ${component.reason}`)),
  );
}

function shares(list, counts, unit) {
  const whole = Object.values(counts).reduce((a, b) => a + b, 0);
  const entries = Object.entries(counts).filter(([, count]) => count).sort((a, b) => b[1] - a[1]);
  list.replaceChildren(
    ...entries.map(([name, count]) => {
      const item = make("li");
      const meter = make("meter");
      [meter.max, meter.value] = [whole, count];
      meter.setAttribute("aria-hidden", "true");
      const label = make("span", words(name));
      if (state.meanings[name]) label.title = state.meanings[name];
      item.append(label, meter, make("span", `${number(count)} ${unit}, ${percent(count, whole)}`));
      return item;
    }),
  );
  if (!entries.length) list.append(make("li", "none yet", "quiet"));
}

// --- the list ---------------------------------------------------------------------------------------------------

function add(summaries) {
  const list = $("list");
  const atTop = list.scrollTop < 4;
  const made = document.createDocumentFragment();
  for (const summary of summaries) {
    const known = state.rows.get(summary.id);
    if (known && known.time_s === summary.time_s && known.reused_tokens === summary.reused_tokens) continue;
    known?.row.remove(); // the same request looked up once more
    state.rows.delete(summary.id);
    summary.row = row(summary);
    state.rows.set(summary.id, summary);
    made.prepend(summary.row); // newest first
  }
  list.prepend(made);
  for (const [id, old] of state.rows) {
    if (state.rows.size <= KEPT) break;
    old.row.remove();
    state.rows.delete(id);
  }
  if (atTop) list.scrollTop = 0;
  options();
  filter();
  charts();
}

function row(summary) {
  const { prompt_tokens: all, reused_tokens: reused } = summary;
  const link = make("a");
  link.href = `#${encodeURIComponent(summary.id)}`;
  link.tabIndex = -1; // one stop for Tab in the whole list; the arrow keys do the rest
  const share = make("span", null, "share");
  share.append(part("reused", reused), part("computed", all - reused));
  const images = Object.values(summary.images).reduce((a, b) => a + b, 0);
  link.append(
    make("span", clock(summary.time_s)),
    make("span", summary.request_id || summary.id),
    share,
    make("span", `${percent(reused, all)} of ${number(all)}${images ? ` ▣${images}` : ""}`, "number"),
    make("span", summary.reason ? words(summary.reason) : "all reused", "why"),
  );
  link.setAttribute(
    "aria-label",
    `${clock(summary.time_s)}, ${summary.request_id || summary.id}: ${number(reused)} of ${plural(all, "token")} reused, ` +
      `${plural(images, "image")}; ${summary.reason ? `mostly ${words(summary.reason)}` : "all reused"}`,
  );
  const item = make("li");
  item.append(link);
  return item;
}

function part(kind, tokens) {
  const piece = make("i", null, kind);
  piece.style.flex = `${tokens} 0 0`;
  return piece;
}

function options() {
  const reasons = new Set([...state.rows.values()].map((summary) => summary.reason).filter(Boolean));
  const known = new Set([...$("filter").options].map((option) => option.value));
  for (const reason of [...reasons].sort()) {
    if (known.has(reason)) continue;
    const option = make("option", `mostly ${words(reason)}`);
    option.value = reason;
    $("filter").append(option);
  }
}

function filter() {
  const wanted = $("filter").value;
  const name = $("find").value.trim();
  let shown = 0;
  for (const summary of state.rows.values()) {
    const named = !name || summary.id === name || (summary.request_id ?? "").includes(name);
    summary.row.hidden = !named || (Boolean(wanted) && summary.reason !== wanted);
    shown += !summary.row.hidden;
  }
  $("count").textContent = `${plural(shown, "request")}${wanted || name ? ` of ${number(state.rows.size)}` : ""}`;
  const links = visibleLinks();
  if (links.length && !links.some((link) => link.tabIndex === 0)) links[0].tabIndex = 0;
}

const visibleLinks = () => [...document.querySelectorAll("#list li:not([hidden]) > a")];

function move(links, event, steps) {
  const at = links.indexOf(document.activeElement);
  const target = { ...steps, Home: 0, End: links.length - 1 }[event.key];
  if (at < 0 || target === undefined) return;
  const next = links[event.key === "Home" || event.key === "End" ? target : at + target];
  event.preventDefault();
  if (!next) return;
  links[at].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

// --- over time --------------------------------------------------------------------------------------------------

function charts() {
  const rows = [...state.rows.values()];
  chart("tokens", rows, (s) => ({ reused: s.reused_tokens, ...s.missed_tokens }), "prompt tokens");
  chart("images", rows, (s) => s.images, "images");
}

function chart(id, rows, counts, unit) {
  const from = Math.min(...rows.map((s) => s.time_s));
  const width = Math.max((Math.max(...rows.map((s) => s.time_s)) - from) / BUCKETS, 1);
  const sums = new Map();
  for (const summary of rows) {
    for (const [name, count] of Object.entries(counts(summary))) sums.set(name, (sums.get(name) ?? 0) + count);
  }
  const good = (name) => name === "reused" || name === "not_needed"; // always first, so always in the first colour
  const sorted = [...sums].filter(([, count]) => count).sort((a, b) => good(b[0]) - good(a[0]) || b[1] - a[1]);
  const kinds = sorted.slice(0, COLOURS).map(([name]) => name);
  if (sorted.length > COLOURS) kinds.push("others");
  const colour = (name) => (kinds.includes(name) ? kinds.indexOf(name) : COLOURS);
  const buckets = Array.from({ length: BUCKETS }, () => kinds.map(() => 0));
  for (const summary of rows) {
    const bucket = buckets[Math.min(BUCKETS - 1, Math.floor((summary.time_s - from) / width))];
    for (const [name, count] of Object.entries(counts(summary))) if (count) bucket[colour(name)] += count;
  }
  const total = (values) => values.reduce((a, b) => a + b, 0);
  const most = Math.max(1, ...buckets.map(total));
  $(`${id}-chart`).replaceChildren(
    ...buckets.map((bucket, index) => {
      const column = make("div");
      const told = bucket.map((count, kind) => count && `${number(count)} ${words(kinds[kind])}`).filter(Boolean);
      column.title = told.length ? `from ${clock(from + index * width)}: ${told.join(", ")}` : "";
      bucket.forEach((count, kind) => {
        const piece = make("i", null, `c${kind}`);
        piece.style.height = `${(100 * count) / most}%`;
        if (count) column.append(piece);
      });
      return column;
    }),
  );
  const caption = $(`${id}-caption`);
  if (!kinds.length) {
    caption.textContent = `No ${unit} yet.`;
    return;
  }
  const span = `${clock(from)} to ${clock(from + BUCKETS * width)}`;
  caption.replaceChildren(`${unit}, ${span}; the highest bar is ${number(most)} in ${number(width)} s. From the bottom: `);
  kinds.forEach((name, kind) => {
    const count = total(buckets.map((bucket) => bucket[kind]));
    const entry = make("span", null, "entry"); // a colour stays on one line with its name
    entry.append(make("i", null, `swatch c${kind}`), ` ${words(name)} ${number(count)}`);
    caption.append(entry, " ");
  });
}

// --- one request ------------------------------------------------------------------------------------------------

async function open(id) {
  for (const link of document.querySelectorAll('#list a[aria-current="true"]')) link.removeAttribute("aria-current");
  state.open = id;
  $("detail").hidden = !id;
  if (!id) return;
  state.rows.get(id)?.row.firstChild.setAttribute("aria-current", "true");
  try {
    const { records } = await ask(`records?full=1&id=${encodeURIComponent(id)}`);
    if (!records.length) throw new Refusal(404, `no record '${id}': it is unknown, or had to go for newer ones`);
    if (state.open === id) show(records[0], records.length);
  } catch (error) {
    if (state.open !== id) return;
    for (const part of ["facts", "bar", "segment", "misses", "segments", "groups"]) $(part).replaceChildren();
    $("detail-title").textContent = `Request ${id}`;
    if (!(error instanceof Refusal || error instanceof Gone)) throw error;
    $("facts").textContent = `${error.message}.`;
  }
  $("detail").focus();
  $("detail").scrollIntoView({ block: "start" });
}

function show(record, carriers) {
  const { prompt_tokens: all, reused_tokens: reused, nearest } = record;
  $("detail-title").textContent = `Request ${record.id}`;
  const facts = [
    `${new Date(record.time_s * 1000).toLocaleString("en-GB")}, ${record.model || "?"}, server ${record.server || "?"}, engine ${record.engine}.`,
    `${number(reused)} of ${plural(all, "prompt token")} reused (${percent(reused, all)}), in blocks of ${record.block_tokens}.`,
  ];
  if (record.request_id) facts.push(`The client's id is ${record.request_id}.`);
  if (carriers > 1) facts.push(`${number(carriers)} requests carry the id that was asked for; this is the newest.`);
  if (nearest) {
    facts.push(
      `Nearest earlier request: ${nearest.id}, ${nearest.age_s.toFixed(1)} s before, the same for ${plural(nearest.common_tokens, "token")}` +
        `${nearest.same_salt ? "" : ", under another salt"}${nearest.same_lora ? "" : ", under another LoRA"}.`,
    );
  }
  if (record.external_tokens) facts.push(`${number(record.external_tokens)} came by a KV connector.`);
  if (record.salt) facts.push(`Its cache_salt is shown as ${record.salt}.`);
  if (record.lora) facts.push(`LoRA ${record.lora}.`);
  $("facts").textContent = facts.join(" ");
  bar(record);
  $("misses").replaceChildren(
    ...record.misses.map((miss) => {
      const item = make("li");
      item.append(make("strong", words(miss.reason)), ` · ${plural(miss.tokens, "token")} from ${number(miss.start)}: ${miss.text}`);
      if (state.meanings[miss.reason]) item.append(make("div", state.meanings[miss.reason], "quiet"));
      return item;
    }),
  );
  if (!record.misses.length) $("misses").append(make("li", "Everything was reused."));
  table(
    $("segments"),
    ["segment", "tokens", "reused", "done for the image", "why not reused"],
    record.segments.map((segment) => [
      title(segment),
      segment.tokens,
      segment.reused_tokens,
      segment.image ? work(segment.image) : "",
      reason(record, segment),
    ]),
  );
  table(
    $("groups"),
    ["group", "tokens in a block", "tokens it could reuse", "state missing"],
    record.groups.map((g) => [`${g.index} ${words(g.kind)}`, g.block_tokens, g.hit_tokens, g.vetoed ? "yes" : "no"]),
  );
}

function bar(record) {
  $("bar").replaceChildren(
    ...record.segments.map((segment, index) => {
      const button = make("button");
      button.type = "button";
      button.tabIndex = index ? -1 : 0;
      button.style.flexGrow = segment.tokens;
      button.append(part("reused", segment.reused_tokens), part("computed", segment.tokens - segment.reused_tokens));
      button.append(make("b", `${segment.kind === "image" ? "▣" : ""}${mark(segment)}`));
      const told = describe(record, segment);
      button.title = told;
      button.setAttribute("aria-label", told);
      const tell = () => {
        for (const other of $("bar").children) other.classList.toggle("here", other === button);
        $("segment").textContent = told;
      };
      button.addEventListener("focus", tell);
      button.addEventListener("mouseenter", tell);
      button.addEventListener("click", tell);
      return button;
    }),
  );
  const first = record.segments.find((segment) => segment.reused_tokens < segment.tokens);
  $("segment").textContent = first ? describe(record, first) : "Everything was reused.";
}

const mark = (s) => (s.reused_tokens === s.tokens ? "✓" : s.reused_tokens ? "~" : "✗");

function title(segment) {
  const where = segment.turn === null ? "" : ` (turn ${segment.turn})`;
  if (segment.kind === "image") {
    const { index, width, height, digest } = segment.image ?? {};
    return `image ${index ?? "?"}${width ? `, ${width}×${height}` : ""}${digest ? `, ${digest}` : ""}${where}`;
  }
  if (segment.kind === "generation") return `opening of the answer${where}`;
  return `${segment.kind === "message" && segment.role ? segment.role : segment.kind}${where}`;
}

const WORK = {
  body: { lifted: "taken out of the body", left: "left in the body" },
  decode: { skipped: "not decoded", decoded: "decoded", late: "decoded late" },
  processor: { hit: "processed before", run: "processed now", deferred: "sent to the engine without pixels" },
};

function work(image) {
  const told = Object.entries(WORK).map(([step, outcomes]) => outcomes[image[step]]);
  if (image.features !== "unknown") told.push(`features: ${words(image.features)}`);
  return told.filter(Boolean).join(", ");
}

function reason(record, segment) {
  const miss = segment.miss === null ? null : record.misses[segment.miss];
  return miss ? `${words(miss.reason)}: ${miss.text}` : "";
}

function describe(record, segment) {
  const parts = [`${title(segment)}: ${number(segment.reused_tokens)} of ${plural(segment.tokens, "token")} reused.`];
  if (segment.image && work(segment.image)) parts.push(`The image: ${work(segment.image)}.`);
  const why = reason(record, segment);
  if (why) parts.push(`Not reused: ${why}`);
  return parts.join(" ");
}

function table(element, heads, rows) {
  const isNumber = (cell) => typeof cell === "number";
  const head = make("tr");
  head.append(...heads.map((text, column) => make("th", text, isNumber(rows[0]?.[column]) ? "number" : "")));
  const lines = rows.map((cells) => {
    const line = make("tr");
    line.append(...cells.map((cell) => make("td", isNumber(cell) ? number(cell) : cell, isNumber(cell) ? "number" : "")));
    return line;
  });
  element.replaceChildren(make("thead"), make("tbody"));
  element.firstChild.append(head);
  element.lastChild.append(...lines);
}

// --- what the user does -----------------------------------------------------------------------------------------

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = $("key").value;
  sessionStorage.setItem("mmcache-key", state.key);
  follow();
});
$("filter").addEventListener("change", filter);
$("find").addEventListener("input", filter);
$("list").addEventListener("keydown", (event) => move(visibleLinks(), event, { ArrowDown: 1, ArrowUp: -1 }));
$("bar").addEventListener("keydown", (event) => move([...$("bar").children], event, { ArrowRight: 1, ArrowLeft: -1 }));
$("close").addEventListener("click", close);
document.addEventListener("keydown", (event) => event.key === "Escape" && state.open && close());
addEventListener("hashchange", () => (takeKey() ? location.reload() : open(fromHash())));

// A link may bring the key behind "#", which no server sees; it does not stay in the address.
function takeKey() {
  const given = /^#key=(.+)$/.exec(location.hash);
  if (!given) return false;
  sessionStorage.setItem("mmcache-key", given[1]);
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

function close() {
  const row = state.rows.get(state.open)?.row.firstChild;
  history.replaceState(null, "", location.pathname + location.search);
  open("");
  row?.focus();
}

follow();
