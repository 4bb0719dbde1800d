// A page that was opened as a file may start no worker: there, the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html><body></body>"; // of the same origin as this page
      this.ready = new Promise((opened) => (frame.onload = opened)).then(() => this.start(frame, url));
      document.body.append(frame);
    }

    start(frame, url) {
      this.inner = frame.contentWindow;
      this.inner.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)));
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      return this.load(url);
    }

    load(url) {
      const script = this.inner.document.createElement("script");
      script.src = url;
      return new Promise((done, failed) => {
        script.onload = done;
        script.onerror = failed;
        this.inner.document.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data })));
    }

    terminate() {}
  };
}
