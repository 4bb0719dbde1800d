// Requests to the server, and settings of the page that the browser stores.

const ATTEMPTS = 4;
const RETRY_MS = 500;

export async function get(path, query = {}) {
  const pairs = Object.entries(query).flatMap(([name, value]) =>
    (Array.isArray(value) ? value : [value]).filter((each) => each !== undefined).map((each) => [name, each]),
  );
  const text = new URLSearchParams(pairs).toString();
  const response = await retryingFetch(`/api/${path}${text ? `?${text}` : ""}`);
  if (!response.ok) throw new Error((await response.text()).trim());
  return response.json();
}

// Retries network errors: a browser drops all of its requests when its machine changes networks.
async function retryingFetch(url) {
  for (let attempt = 1; ; attempt += 1) {
    try {
      return await fetch(url);
    } catch (error) {
      if (attempt === ATTEMPTS) throw error;
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
}

// Shows the response to the newest request only: older ones may arrive later. `cancel` drops the newest one, too.
export function newestOnly() {
  let newest = 0;
  const show = async (response, draw, fail) => {
    const mine = (newest += 1);
    try {
      const found = await response;
      if (mine === newest) draw(found);
    } catch (error) {
      if (mine === newest) fail(error);
    }
    return mine === newest;
  };
  return { show, cancel: () => (newest += 1) };
}

// Calls `show` with each new state of a run, or of the list of runs; returns a function that stops this. A hidden tab
// is not connected: a browser opens six connections to a server, and the seventh tab would wait.
export function live(run, show, gone = () => {}) {
  const query = run === null ? "" : `?${new URLSearchParams({ run })}`;
  const status = document.getElementById("connection");
  const setStatus = (text, name) => {
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
      setStatus("live", "on");
      show(JSON.parse(event.data));
    };
    source.onerror = () => setStatus("not connected: is headway web still running?", "off");
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
    setStatus("", "");
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
    // a private window may have no storage
  }
};
