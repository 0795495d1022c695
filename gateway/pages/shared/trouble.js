// Sentences about workers that get no requests.

// The time of a moment, and its day if that is not today.
function clock(unixS) {
  const date = new Date(1000 * unixS);
  const time = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  return date.toDateString() === new Date().toDateString() ? time : `${time} on ${date.toLocaleDateString()}`;
}

// The sentences about one worker.
export const SENTENCES = {
  restarting: (name, since) => `${name} stopped at ${since} and is being restarted.`,
  silent: (name, since) => `${name} has sent nothing since ${since}. It may be asleep, switched off or disconnected from the network.`,
};

export function sentences(workers) {
  return Object.entries(workers).flatMap(([name, { state, problem, absence, start, ejection }]) => {
    if (SENTENCES[absence.kind] && state !== "ready") return [SENTENCES[absence.kind](name, clock(absence.unix_s))];
    if (state === "unreachable") return [`This gateway cannot connect to ${name}. ${problem}`];
    if (problem) return [`${name}: ${problem}`];
    if (state === "ejected") return [`${name} gets no requests for now: ${ejection.reason}.`];
    if (state === "starting") return [`${name} is starting${start.description ? `: ${start.description}` : ""}.`];
    return [];
  });
}
