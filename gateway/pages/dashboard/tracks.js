// Pools as tracks: a mark for each running request, a ring for each queued one.

import { make, several } from "../shared/elements.js";
import { busyIn, place } from "./numbers.js";

const MARKS_SHOWN = 48;
const RINGS_SHOWN = 6;
const ROWS = 4;
const FASTEST_LAP_MS = 4000;
const SLOWEST_LAP_MS = 16000;
const RARE_LANES = ["embeddings", "rerank"];

const still = matchMedia("(prefers-reduced-motion: reduce)");
const tracks = new Map();

export function showTracks(root, { pools }) {
  const names = Object.keys(pools).filter((name) => !unused(pools[name]));
  const fastest = Math.max(...Object.values(pools).map(speed));
  for (const name of tracks.keys()) {
    if (!names.includes(name)) {
      tracks.get(name).element.remove();
      tracks.delete(name);
    }
  }
  for (const name of names) {
    if (!tracks.has(name)) tracks.set(name, new Track(name));
    const track = tracks.get(name);
    if (track.element.parentElement !== root) root.append(track.element);
    track.show(pools[name], fastest);
  }
}

const speed = ({ recent }) => recent.request_tokens_per_s.p50;

// Most fleets have no embedder and no reranker, and the shipped policy has pools for both.
const unused = ({ lanes, slots, waiting, recent }) => !slots && !waiting && !recent.requests && lanes.every((lane) => RARE_LANES.includes(lane));

class Track {
  constructor(name) {
    this.marks = [];
    this.rows = 1;
    this.kind = make("p", { class: "muted small" });
    this.line = make("div", { class: "waiting" });
    this.strip = make("div", { class: "strip" });
    const of = (path, kind) => place(`pools/${name}/${path}`, kind);
    this.name = name;
    this.busy = of("in_flight", "count");
    this.busy.classList.add("busy");
    this.waiting = make("span", { class: "waiting-line" }, of("waiting", "count"), " queued");
    this.writes = make("span", {}, of("recent/request_tokens_per_s/p50", "rate"), " tokens/s per request");
    this.element = make(
      "article",
      { class: "track", "aria-label": name },
      make("div", { class: "track-name" }, make("h3", {}, name), this.kind),
      make("div", { class: "road", "aria-hidden": "true" }, this.line, this.strip),
      make(
        "div",
        { class: "track-load" },
        make("p", { class: "load" }, this.busy, make("span", { class: "of" }, " of ", of("slots", "count"))),
        make("p", { class: "muted small" }, this.waiting, this.writes),
      ),
    );
  }

  show(pool, fastest) {
    const { slots, waiting, mtp, recent } = pool;
    const busy = pool[busyIn(pool)];
    this.busy.dataset.of = `pools/${this.name}/${busyIn(pool)}`;
    // Rows are never removed, so marks on them stay visible.
    const rows = (this.rows = Math.max(this.rows, Math.min(ROWS, slots)));
    this.element.classList.toggle("drafts", mtp.enabled);
    this.element.classList.toggle("closed", slots === 0);
    this.element.classList.toggle("full", slots > 0 && busy >= slots);
    this.kind.textContent = kindOf(pool);
    this.waiting.hidden = waiting === 0;
    this.writes.hidden = recent.request_tokens_per_s.count === 0 || waiting > 0 || slots === 0;
    this.strip.style.setProperty("--rows", rows);
    this.wait(waiting);
    this.ride(Math.min(MARKS_SHOWN, busy), rows, lap(speed(pool), fastest));
  }

  wait(count) {
    const shown = Math.min(count, RINGS_SHOWN);
    const rest = count - shown;
    if (this.line.dataset.count === String(count)) return;
    this.line.dataset.count = count;
    this.line.replaceChildren(...Array.from({ length: shown }, () => make("i")), rest ? make("b", {}, `+${rest}`) : "");
  }

  ride(count, rows, lapMs) {
    while (this.marks.length > count) this.leave(this.marks.shift());
    while (this.marks.length < count) this.marks.push(this.join(rows));
    for (const { going } of this.marks) going?.updatePlaybackRate(FASTEST_LAP_MS / lapMs);
  }

  join(rows) {
    const { row, begun } = freest(this.marks, rows);
    const element = make("span", { class: "ride" }, make("i", { class: "mark" }));
    this.strip.append(element);
    element.animate([{ opacity: 0 }, { opacity: 1 }], 300);
    element.style.setProperty("--row", row);
    if (still.matches) {
      element.style.transform = `translateX(${10 + 80 * begun}%)`;
      return { element, row, begun };
    }
    const across = [{ transform: "translateX(0)" }, { transform: "translateX(100%)" }];
    const going = element.animate(across, { duration: FASTEST_LAP_MS, iterations: Infinity });
    going.currentTime = begun * FASTEST_LAP_MS;
    return { element, going, row, begun };
  }

  leave({ element }) {
    element.animate([{ opacity: 1 }, { opacity: 0 }], { duration: 300, fill: "forwards" }).onfinish = () => element.remove();
  }
}

// Return where the next mark has most room: the row with the fewest marks, and its widest gap.
function freest(marks, rows) {
  const inRow = Array.from({ length: rows }, (_, row) => marks.filter((mark) => mark.row === row));
  const row = inRow.indexOf(inRow.reduce((one, other) => (other.length < one.length ? other : one)));
  const places = inRow[row].map(whereIs).sort((one, other) => one - other);
  if (!places.length) return { row, begun: Math.random() };
  const gaps = places.map((from, index) => ({ from, wide: (places[index + 1] ?? places[0] + 1) - from }));
  const { from, wide } = gaps.reduce((one, other) => (other.wide > one.wide ? other : one));
  return { row, begun: (from + wide / 2) % 1 };
}

const whereIs = ({ going, begun }) => going?.effect.getComputedTiming().progress ?? begun;

// The fastest lane takes the shortest lap; other laps are longer in proportion.
function lap(tokensPerS, fastest) {
  if (!tokensPerS || !fastest) return (FASTEST_LAP_MS + SLOWEST_LAP_MS) / 2;
  return Math.min(SLOWEST_LAP_MS, (FASTEST_LAP_MS * fastest) / tokensPerS);
}

function kindOf({ slots, mtp, unreported }) {
  if (slots === 0) return "no available worker";
  if (!mtp.enabled && unreported.drafts) return "drafts unknown: the engines do not report them";
  if (!mtp.enabled || !mtp.requested_draft_tokens) return "no drafts";
  const ahead = mtp.effective_draft_tokens;
  return ahead ? `drafts ${several(ahead, "token")} ahead` : "drafting would be slower now";
}
