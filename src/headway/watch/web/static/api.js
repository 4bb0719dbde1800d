// Questions to the server, and what the page remembers.

export async function get(path, query = {}) {
  const pairs = Object.entries(query).flatMap(([name, value]) =>
    (Array.isArray(value) ? value : [value]).filter((each) => each !== undefined).map((each) => [name, each]),
  );
  const text = new URLSearchParams(pairs).toString();
  const answer = await fetch(`/api/${path}${text ? `?${text}` : ""}`);
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}

// Calls `show` with each new state of a run, or of the list of runs; returns what ends that. A hidden tab is not
// connected: a browser has six connections to a server, and the seventh tab would get no answer.
export function live(run, show, gone = () => {}) {
  const query = run === null ? "" : `?${new URLSearchParams({ run })}`;
  const status = document.getElementById("connection");
  const say = (text, name) => {
    status.textContent = text;
    status.className = name;
  };
  let source = null;
  const close = () => {
    source?.close();
    source = null;
  };
  const open = () => {
    source = new EventSource(`/api/live${query}`);
    source.onmessage = (event) => {
      say("live", "on");
      show(JSON.parse(event.data));
    };
    source.onerror = () => say("not connected: is headway web still running?", "off");
    source.addEventListener("gone", () => {
      stop();
      gone();
    });
  };
  const follow = () => {
    if (document.hidden) close();
    else if (source === null) open();
  };
  const stop = () => {
    document.removeEventListener("visibilitychange", follow);
    close();
    say("", "");
  };
  document.addEventListener("visibilitychange", follow);
  follow();
  return stop;
}

export const remembered = (name, usual) => {
  try {
    return JSON.parse(localStorage.getItem(`headway.${name}`)) ?? usual;
  } catch {
    return usual;
  }
};

export const remember = (name, value) => {
  try {
    localStorage.setItem(`headway.${name}`, JSON.stringify(value));
  } catch {
    // a private window may forbid it: then nothing is remembered
  }
};
