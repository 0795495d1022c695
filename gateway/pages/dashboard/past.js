// What was seen: the gateway tells of a window, and the page keeps what leaves it.

const KEPT_S = 3600;
// For so long without a request a curve goes on; longer, and it is broken.
const HOLE_S = 30;

export class Past {
  constructor() {
    this.points = [];
  }

  // Put the window that a state tells of in place of what is known of that time.
  take({ unix_s: now, history }) {
    const told = history.filter(isWhole).map((point) => ({ ...point, end_s: now - point.age_s }));
    if (!told.length) return;
    const from = told[0].end_s - told[0].interval_s / 2;
    this.points = [...this.points.filter(({ end_s }) => end_s < from && end_s > now - KEPT_S), ...told];
  }

  // Columns for a chart: the time of each point, then what each of `readings` takes from it, or null.
  columns(...readings) {
    return [this.points.map(({ end_s }) => end_s), ...readings.map((read) => bridged(this.points.map(read), this.points))];
  }
}

// The newest step has only just begun: what little it says would make each curve jump.
const isWhole = ({ interval_s }, index, all) => !index || interval_s >= all[index - 1].interval_s / 2;

// In place of null write undefined, through which curves go on, where the hole is short.
function bridged(values, points) {
  let last = null;
  values.forEach((value, index) => {
    if (value === null) return;
    if (last !== null && points[index].end_s - points[last].end_s <= HOLE_S) values.fill(undefined, last + 1, index);
    last = index;
  });
  return values;
}
