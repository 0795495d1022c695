// History: the gateway sends a window, and the page keeps the points that leave it.

const KEPT_S = 3600;
// Curves bridge gaps without requests up to this length.
const HOLE_S = 30;

export class Past {
  constructor() {
    this.points = [];
  }

  // Replace the points of the window of a state by its history.
  take({ unix_s: now, history }) {
    const recent = history.filter(isWhole).map((point) => ({ ...point, end_s: now - point.age_s }));
    if (!recent.length) return;
    const from = recent[0].end_s - recent[0].interval_s / 2;
    this.points = [...this.points.filter(({ end_s }) => end_s < from && end_s > now - KEPT_S), ...recent];
  }

  // Return columns for a chart: the times, then one column of values for each of `readings`.
  columns(...readings) {
    return [this.points.map(({ end_s }) => end_s), ...readings.map((read) => bridged(this.points.map(read), this.points))];
  }
}

// The newest interval has just begun; its few requests would make each curve jump.
const isWhole = ({ interval_s }, index, all) => !index || interval_s >= all[index - 1].interval_s / 2;

// Replace null by undefined in short gaps, which curves bridge.
function bridged(values, points) {
  let last = null;
  values.forEach((value, index) => {
    if (value === null) return;
    if (last !== null && points[index].end_s - points[last].end_s <= HOLE_S) values.fill(undefined, last + 1, index);
    last = index;
  });
  return values;
}
