// A browser starts no worker for a page opened from the disk. There the search runs in a frame that
// looks like a worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.started = new Promise(started => {
        const frame = document.createElement("iframe");
        frame.hidden = true;
        frame.srcdoc = "<!doctype html>";
        frame.onload = () => {
          const inside = frame.contentWindow;
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inside.document.createElement("script");
          script.src = url;
          script.onload = () => started(inside);
          inside.document.body.append(script);
        };
        document.body.append(frame);
      });
    }

    async postMessage(data) {
      (await this.started).dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
