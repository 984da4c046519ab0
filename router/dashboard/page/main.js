// Asks the router each second while the page can be seen, and shows what it says.

import {Charts} from "./charts.js";
import {announce, find, mark, offer, say} from "./dom.js";
import {age} from "./format.js";
import {showNodes} from "./nodes.js";
import {showModels, showTiles} from "./tiles.js";

const PERIOD = 1000; // milliseconds
const PATIENCE = 4000; // milliseconds that an answer may take
const KEY = "pdserve-api-key"; // in the storage of this tab

const charts = new Charts();
let epoch = "";
let heardAt = null; // milliseconds, of performance.now
let turns = 0; // only the latest one goes on
let timer = 0;
let asking = null; // ends the request under way

async function ask() {
  const url = new URL("dashboard/state", document.baseURI);
  url.search = new URLSearchParams({epoch, second: charts.second});
  const key = sessionStorage.getItem(KEY);
  asking = new AbortController();
  const signal = AbortSignal.any([asking.signal, AbortSignal.timeout(PATIENCE)]);
  const response = await fetch(url, {headers: key ? {Authorization: `Bearer ${key}`} : {}, cache: "no-store", signal});
  if (response.status === 401) throw new NeedsKey(key !== null);
  if (response.status === 404) throw new Error("This router shows no dashboard any more (--no-dashboard).");
  if (!response.ok) throw new Error(`The router answered with status ${response.status}.`);
  return response.json();
}

class NeedsKey extends Error {
  constructor(refused) {
    super();
    this.refused = refused;
  }
}

async function turn() {
  const mine = turns += 1;
  const began = performance.now();
  try {
    const report = await ask();
    if (mine !== turns) return; // another one has begun meanwhile
    show(report);
  } catch (error) {
    if (mine !== turns) return;
    if (error instanceof NeedsKey) {
      wantKey(error.refused);
      return;
    }
    lose(error);
  }
  timer = setTimeout(turn, Math.max(0, began + PERIOD - performance.now()));
}

function show({epoch: reported, now, history}) {
  if (reported !== epoch) charts.clear(); // another router, or this one started anew
  epoch = reported;
  heardAt = performance.now();
  charts.add(history);
  showTiles(now);
  showModels(now.models);
  showNodes(now);
  say(find("version"), `pdserve ${now.version}, router ${epoch}`);
  const ready = now.nodes.filter((node) => node.state === "ready").length;
  document.title = `${ready}/${now.nodes.length} ready · ${now.traffic.running} running · pdserve`;
  find("door").hidden = find("trouble").hidden = true;
  find("shown").hidden = false;
  find("shown").className = "";
  if (find("link").className !== "state good") announce("The router answers.");
  mark(find("link"), "good", "Live");
}

function lose(error) {
  const silent = error instanceof TypeError || error.name === "TimeoutError"; // fetch's words differ by browser
  const why = silent ? "The router does not answer." : error.message;
  const old = heardAt === null ? "" : " What you see is what it said last.";
  say(find("trouble"), `${why}${old} This page tries again each second.`);
  find("trouble").hidden = false;
  find("shown").className = heardAt === null ? "waiting" : "stale";
  const since = heardAt === null ? "" : ` for ${age((performance.now() - heardAt) / 1000)}`;
  mark(find("link"), "gone", `No answer${since}`);
  document.title = "no answer · pdserve";
}

// ---------------------------------------------------------------- a router with API keys

function wantKey(refused) {
  sessionStorage.removeItem(KEY);
  find("door").hidden = false;
  find("shown").hidden = find("trouble").hidden = true;
  if (refused) say(find("door-why"), "The router does not know this key.");
  mark(find("link"), "leaving", "Key required");
  find("key").focus();
}

find("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, find("key").value.trim());
  find("key").value = "";
  restart();
});

// ---------------------------------------------------------------- only while the page is visible

function restart() {
  clearTimeout(timer);
  asking?.abort();
  turns += 1;
  if (document.hidden) mark(find("link"), "paused", "Paused");
  else if (find("door").hidden || sessionStorage.getItem(KEY)) turn();
}

document.addEventListener("visibilitychange", restart);
say(find("where"), `router ${location.host}`);
offer(find("chat"));
restart();
