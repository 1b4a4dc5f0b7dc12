// The chat: streams answers and tints what was drafted. Text reaches the page as text nodes only.

const byId = (id) => document.getElementById(id);

// The JSON objects of a stream of server-sent events
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith("data: ") && block !== "data: [DONE]") yield JSON.parse(block.slice(6));
    }
  }
}

// [text, drafted] pieces; `ranges` count code points
function pieces(text, ranges) {
  const points = Array.from(text), found = [];
  let last = 0;
  for (const [start, end] of ranges ?? []) {
    found.push([points.slice(last, start).join(""), false], [points.slice(start, end).join(""), true]);
    last = end;
  }
  found.push([points.slice(last).join(""), false]);
  return found.filter(([piece]) => piece);
}

function append(turn, text, drafted) {
  const last = turn.lastChild;
  if (last.drafted === drafted) {
    last.textContent += text;
    return;
  }
  const span = document.createElement("span");
  span.drafted = drafted;
  if (drafted) span.className = "drafted";
  span.textContent = text;
  turn.append(span);
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `the server answered ${response.status}`);
}

function summary(answer) {
  const {metrics, usage, finish} = answer;
  if (!metrics || !usage) return `Done (${finish ?? "no end"}).`;
  const parts = [`${usage.completion_tokens} tokens`];
  if (metrics.tokens_per_second) parts.push(`${metrics.tokens_per_second.toFixed(1)} tokens a second`);
  const length = metrics.speculative_decoding.mean_acceptance_length;
  if (length) parts.push(`acceptance length ${length.toFixed(2)}`);
  return `Done (${finish}): ${parts.join(", ")}.`;
}

export class Chat {
  // `headers` gives the headers of a request
  constructor(headers) {
    this.headers = headers;
    this.messages = [];
    this.running = null;  // the AbortController of the answer under way
    this.maxDrafts = 0;
    byId("chat").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("clear").addEventListener("click", () => this.clear());
    byId("message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("chat").requestSubmit();
    });
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.running?.abort(); });
    for (const id of ["temperature", "drafts"]) byId(id).addEventListener("input", () => this.showSettings());
    this.showSettings();
  }

  // What the server can draft; the slider starts at the most.
  setMaxDrafts(most) {
    if (most === this.maxDrafts) return;
    const slider = byId("drafts");
    this.maxDrafts = most;
    slider.max = String(most);
    slider.value = slider.max;
    slider.disabled = most === 0;
    this.showSettings();
  }

  showSettings() {
    const drafts = byId("drafts").valueAsNumber;
    const words = this.maxDrafts === 0 ? "off, the server has no drafter" : drafts === 0 ? "off" : String(drafts);
    byId("temperature-value").textContent = byId("temperature").valueAsNumber.toFixed(1);
    byId("drafts-value").textContent = words;
    byId("drafts").setAttribute("aria-valuetext", words);
  }

  tell(text, error = false) {
    byId("status").textContent = text;
    byId("status").className = error ? "error" : "";
  }

  clear() {
    this.running?.abort();
    this.running = null;
    this.messages = [];
    byId("log").replaceChildren();
    this.setBusy(false);
    this.tell("");
    byId("message").focus();
  }

  addTurn(who, text) {
    const turn = document.createElement("div"), label = document.createElement("span");
    turn.className = "turn";
    label.className = "who";
    label.textContent = who;
    turn.append(label);
    if (text) append(turn, text, false);
    byId("log").append(turn);
    turn.scrollIntoView({block: "nearest"});
    return turn;
  }

  request(messages) {
    const drafts = byId("drafts").valueAsNumber;
    return {
      messages,
      temperature: byId("temperature").valueAsNumber,
      max_tokens: byId("max-tokens").valueAsNumber,
      speculative: drafts === 0 ? {enabled: false} : {num_speculative_tokens: drafts},
      return_drafted: true,
      return_metrics: true,
      stream: true,
      stream_options: {include_usage: true},
    };
  }

  async send() {
    const text = byId("message").value;
    if (this.running || !text.trim()) return;
    const messages = [...this.messages, {role: "user", content: text}];
    const running = this.running = new AbortController();
    byId("message").value = "";
    this.setBusy(true);
    this.addTurn("You", text);
    const answer = {text: "", turn: this.addTurn("Model", "")};
    const failure = await this.stream(messages, answer, running.signal).then(() => null, (error) => error);
    if (this.running !== running) return;  // another chat has begun
    this.running = null;
    this.setBusy(false);
    if (answer.text) this.messages = [...messages, {role: "assistant", content: answer.text}];
    if (failure === null) this.tell(summary(answer));
    else if (running.signal.aborted) this.tell("Stopped.");
    else this.tell(`Failed: ${failure.message}`, true);
  }

  async stream(messages, answer, signal) {
    const response = await fetch("v1/chat/completions", {
      method: "POST", signal, body: JSON.stringify(this.request(messages)),
      headers: {"Content-Type": "application/json", ...this.headers()},
    });
    if (!response.ok) throw await refusal(response);
    const log = byId("log");
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      answer.usage = event.usage ?? answer.usage;
      answer.metrics = event.metrics ?? answer.metrics;
      const choice = event.choices[0];
      answer.finish = choice?.finish_reason ?? answer.finish;
      const text = choice?.delta.content;
      if (!text) continue;
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      answer.text += text;
      for (const [piece, drafted] of pieces(text, choice.drafted)) append(answer.turn, piece, drafted);
      if (atEnd) log.scrollTop = log.scrollHeight;
    }
  }

  setBusy(busy) {
    byId("log").setAttribute("aria-busy", String(busy));  // readers wait for the whole answer
    byId("send").disabled = busy;
    byId("stop").disabled = !busy;
    if (busy) this.tell("Answering");
  }
}
