// Starts the page: the key, the numbers once a second, the chat.

import {Dashboard} from "./charts.js";
import {Chat} from "./chat.js";

const POLL_MS = 1000;
const KEY = "sonar-api-key";
const keyField = document.getElementById("key");
const server = document.getElementById("server");
let refusedKey = null;  // asked again only with another one

keyField.value = sessionStorage.getItem(KEY) ?? "";
keyField.addEventListener("input", () => {
  if (keyField.value) sessionStorage.setItem(KEY, keyField.value);
  else sessionStorage.removeItem(KEY);
  refusedKey = null;
});

// Headers cannot hold every character; a key that they cannot hold is no key of a server.
const headers = () => (/^[\x21-\x7e]+$/.test(keyField.value) ? {Authorization: `Bearer ${keyField.value}`} : {});

const dashboard = new Dashboard(document.getElementById("charts"));
const chat = new Chat(headers);

function tell(text) {
  if (server.textContent !== text) server.textContent = text;  // said aloud only when it changes
}

async function poll() {
  const key = keyField.value;
  if (document.hidden || key === refusedKey) return;
  const response = await fetch("dashboard/data", {headers: headers(), cache: "no-store"});
  if (response.status === 401) {
    refusedKey = key;
    tell(key ? "This API key is not right" : "This server wants an API key");
    return;
  }
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  const data = await response.json();
  tell(data.model === null ? `The server is ${data.phase}` : `${data.model}, ${data.phase}, drafter: ${data.drafter}`);
  if (data.model !== null) chat.setMaxDrafts(data.drafter === "none" ? 0 : data.num_speculative_tokens);
  if (data.stats !== null) dashboard.add(data);
}

for (;;) {
  await poll().catch(() => tell("The server does not answer"));
  await new Promise((resolve) => setTimeout(resolve, POLL_MS));
}
