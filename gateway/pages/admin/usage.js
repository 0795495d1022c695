// The usage of keys and teams: bars by day, and sums.

import { amount, bar, byId, make } from "../shared/elements.js";

const TOKENS = ["prompt_tokens", "completion_tokens", "guessed_tokens"];
// Colours that differ for most eyes; the keys beyond share the last one.
const SHADES = 5;
const DAY_MS = 86_400_000;

const tokens = (counts) => TOKENS.reduce((sum, name) => sum + counts[name], 0);
const sum = (numbers) => numbers.reduce((all, number) => all + number, 0);

// Show a report of the API; `names` maps the ids of keys to their names.
export function showUsage({ from, to, rows, keys, teams }, names) {
  byId("usage-days").textContent = `${from} to ${to}`;
  const used = Object.entries(keys).sort(([, one], [, other]) => tokens(other) - tokens(one));
  byId("usage-csv").hidden = !used.length;
  if (!used.length) {
    byId("usage").replaceChildren(make("p", { class: "empty" }, "No usage in this period."));
    return;
  }
  const nameOf = (id) => names.get(id) ?? (id || "Without a key");
  const named = Object.entries(teams).filter(([team]) => team);
  byId("usage").replaceChildren(
    byDay(from, to, rows, used.map(([id]) => id), nameOf),
    table("Key", used, nameOf),
    named.length ? table("Team", named, (team) => team) : "",
  );
}

// A bar for each day, with a part for each key; the tables hold the sums as text.
function byDay(from, to, rows, ids, nameOf) {
  const shadeOf = (id) => Math.min(ids.indexOf(id), SHADES - 1);
  const days = [];
  for (let day = Date.parse(from); day <= Date.parse(to); day += DAY_MS) days.push(new Date(day).toISOString().slice(0, 10));
  const parts = days.map((day) => {
    const ofDay = Array(SHADES).fill(0);
    for (const row of rows) if (row.day === day) ofDay[shadeOf(row.key)] += tokens(row);
    return ofDay;
  });
  const most = Math.max(1, ...parts.map(sum));
  const bars = days.map((day, index) => {
    const segments = parts[index].map((count, shade) => count > 0 && segment(count / most, shade));
    return make("span", { class: "day", title: `${day}: ${amount(sum(parts[index]))} tokens` }, segments.reverse());
  });
  const busiest = days[parts.findIndex((part) => sum(part) === most)] ?? to;
  const shown = ids.slice(0, SHADES).map((id, shade) => {
    const name = shade === SHADES - 1 && ids.length > SHADES ? `${ids.length - shade} other keys` : nameOf(id);
    return make("li", {}, make("span", { class: `swatch shade-${shade}`, "aria-hidden": "true" }), name);
  });
  return make(
    "figure",
    { class: "by-day" },
    make("figcaption", {}, "Tokens a day, the busiest ", make("strong", {}, amount(most)), ` on ${busiest}`),
    make("div", { class: "days", role: "img", "aria-label": `Bars: tokens of each day from ${from} to ${to}` }, bars),
    make("div", { class: "day-names muted small", "aria-hidden": "true" }, make("span", {}, days[0]), make("span", {}, days.at(-1))),
    make("ul", { class: "legend" }, shown),
  );
}

// Some engines do not tell how much of a prompt they had cached: that is unknown, and not zero.
function cached({ requests, cached_tokens, cached_unknown_requests: unknown }) {
  if (unknown && unknown === requests) return "unknown";
  return `${unknown ? "at least " : ""}${amount(cached_tokens)}`;
}

function segment(share, shade) {
  const part = make("span", { class: `shade-${shade}` });
  part.style.blockSize = `${100 * share}%`;
  return part;
}

function table(kind, entries, nameOf) {
  const sorted = [...entries].sort(([, one], [, other]) => tokens(other) - tokens(one));
  const most = tokens(sorted[0][1]);
  const head = [kind, "Requests", "Tokens", "Of them cached"].map((name) => make("th", { scope: "col" }, name));
  const rows = sorted.map(([id, counts]) =>
    make(
      "tr",
      {},
      make("td", {}, nameOf(id)),
      make("td", { class: "number" }, amount(counts.requests)),
      make("td", { class: "bars" }, bar(tokens(counts), most, "calm"), amount(tokens(counts))),
      make("td", { class: "number" }, cached(counts)),
    ),
  );
  return make("table", { class: "moves" }, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows));
}
