// Server-sent events by fetch, which can send a token where EventSource cannot; it comes back by itself.
const SILENT_MS = 25000, MOST_WAIT_MS = 15000;

export class Stream {
  // on: {hello, news, end, out, lost, refused}, each called with the event's data or a text.
  constructor(on) { this.on = on; this.last = ""; this.turn = 0; }

  open(run, token) {
    this.close();
    this.#follow(++this.turn, run, token);
  }

  close() {
    this.turn++;
    this.aborter?.abort();
  }

  async #follow(turn, run, token) {
    let wait = 500;
    while (turn === this.turn) {
      const aborter = this.aborter = new AbortController();
      let ended = false;
      try {
        const headers = token ? {Authorization: `Bearer ${token}`} : {};
        if (this.last) headers["Last-Event-ID"] = this.last;
        const answer = await fetch(`events?run=${encodeURIComponent(run)}`,
          {headers, signal: aborter.signal, cache: "no-store"});
        if (turn !== this.turn) return;
        if (answer.status === 401 || answer.status === 429)
          return this.on.refused((await answer.json()).detail);
        if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).detail ?? `HTTP ${answer.status}`);
        await this.#read(answer.body, turn, aborter, (name, data) => {
          wait = 500;
          ended ||= name === "end";
          if (name === "out") this.close();
          this.on[name]?.(data);
        });
        if (turn === this.turn && !ended) this.on.lost("");
      } catch (error) {
        if (turn !== this.turn) return;
        if (!this.over) this.on.lost(error instanceof TypeError || error.name === "AbortError" ? "" : error.message);
      }
      this.over = ended || this.over;
      if (turn !== this.turn) return;
      await new Promise(resolve => setTimeout(resolve, this.over ? 2000 : wait));
      wait = Math.min(2 * wait, MOST_WAIT_MS);
    }
  }

  async #read(body, turn, aborter, told) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    while (turn === this.turn) {
      const timer = setTimeout(() => aborter.abort(), SILENT_MS);
      const {value, done} = await reader.read().finally(() => clearTimeout(timer));
      if (done) return;
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        if (turn !== this.turn) return;
        const fields = {};
        for (const line of part.split("\n")) {
          const colon = line.indexOf(": ");
          if (colon > 0) fields[line.slice(0, colon)] = line.slice(colon + 2);
        }
        if (fields.id) this.last = fields.id;
        if (fields.event === "hello") this.over = false;
        if (fields.event) told(fields.event, JSON.parse(fields.data));
      }
    }
  }
}
