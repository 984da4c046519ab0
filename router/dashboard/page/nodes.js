// The tables of nodes and of the ways between them.

import {announce, element, find, mark, newMark, say, set} from "./dom.js";
import {age, bytesPerSecond, count, percent, rate, seconds, UNKNOWN} from "./format.js";
import {column, Table} from "./table.js";

const KINDS = {
  ready: "good", loading: "coming", connecting: "coming", draining: "leaving", stuck: "ill", lost: "gone",
  unreachable: "gone", faulty: "gone", unused: "unused", asleep: "unused",
};
const kindOf = (node) => KINDS[node.state] ?? "ill";
const present = (node) => !["lost", "unreachable", "faulty"].includes(node.state);
const ifPresent = (text) => (node) => (present(node) ? text(node) : UNKNOWN);
const stat = (text) => ifPresent((node) => (node.stats ? text(node.stats) : UNKNOWN));

function stateOf(node) {
  if (node.lost_seconds === null) return node.state;
  return `${node.state} for ${age(node.lost_seconds)}`;
}

const NAME = {
  title: "Node",
  make: () => element("div", {class: "name"}, element("b"), element("small")),
  show(made, node) {
    const [name, more] = made.children;
    say(name, node.name || node.address);
    const parts = node.name && node.name !== node.address ? [node.address] : [];
    if (node.model && node.showsModel) parts.push(node.model);
    say(more, parts.join(" · "));
  },
};

const STATE = {title: "State", kind: "state-column", make: newMark, show: (made, node) => mark(made, kindOf(node), stateOf(node))};

const KV = {
  title: "KV in use",
  kind: "kv",
  make: () => element("div", {class: "use"},
    element("span", {class: "bar", "aria-hidden": "true"}, element("span")), element("b"), element("small")),
  show(made, node) {
    const [bar, text, more] = made.children;
    const known = present(node) && node.total_blocks > 0;
    const used = node.total_blocks - node.free_blocks;
    bar.firstChild.style.width = known ? `${(100 * used) / node.total_blocks}%` : "0";
    set(bar, "class", known && used > 0.9 * node.total_blocks ? "bar full" : "bar");
    say(text, percent(known ? used / node.total_blocks : null));
    const leased = node.stats?.leased_blocks ? `, ${count(node.stats.leased_blocks)} leased` : "";
    say(more, known ? `${count(used)} of ${count(node.total_blocks)} blocks${leased}` : "");
  },
};

const RUNNING = column("Running", ifPresent((node) => count(node.running)));
const WAITING = column("Waiting", ifPresent((node) => count(node.waiting)));
const CACHED = column("From cache", stat((its) => percent(its.cached_share)),
  ifPresent(({stats}) => [
    stats?.host_share ? `host ${percent(stats.host_share)}` : "",
    stats?.pulled_share ? `pulled ${percent(stats.pulled_share)}` : "",
    stats?.image_rate ? `${rate(stats.image_rate)} images/s, ${percent(1 - stats.encoded_share)} cached` : "",
  ].filter(Boolean).join(", ")));

const PREFILL = [
  NAME, STATE, RUNNING, WAITING, KV,
  column("Prompt tokens/s", stat((its) => rate(its.prompt_token_rate))),
  column("Backlog, tokens", ifPresent((node) => count(node.backlog_tokens)),
    ifPresent((node) => (node.backlog_tokens ? seconds(node.backlog_seconds) : ""))),
  CACHED,
];
const DECODE = [
  NAME, STATE, RUNNING, WAITING, KV,
  column("Output tokens/s", stat((its) => rate(its.output_token_rate)),
    ifPresent(({stats}) => (stats?.acceptance == null ? "" : `drafts ${percent(stats.acceptance)} right`))),
  column("Step", ifPresent((node) => seconds(node.step_seconds)),
    ifPresent(({stats}) => (stats?.acceptance == null ? "" : `${stats.tokens_per_drafted_decode.toFixed(1)} tokens`))),
  CACHED,
];
const BOTH = [...DECODE.slice(0, -1), PREFILL[5], PREFILL[6], CACHED];
const CONNECTIONS = [
  {
    title: "From → to", // an end is not broken unless it is wider than the column
    make: () => element("div", {class: "ends"}, element("span"), element("span")),
    show(made, connection) {
      say(made.firstChild, `${connection.prefill} →`);
      say(made.lastChild, connection.decode);
    },
  },
  {
    title: "Transport",
    kind: "state-column",
    make: newMark,
    show: (made, connection) => (connection.transport === "none"
      ? mark(made, "gone", "not connected")
      : mark(made, "good", connection.transport === "unknown" ? "connected" : connection.transport)),
  },
  column("Traffic", (connection) => bytesPerSecond(connection.byte_rate)),
  column("While reading", (connection) => bytesPerSecond(connection.throughput)),
  column("Failed reads/s", (connection) => rate(connection.read_failure_rate)),
];

const tables = {
  prefill: new Table(find("prefill-nodes"), "Prefill nodes", PREFILL,
    "No prefill node is listed: prompts are computed on decode nodes. --prefill says where some are."),
  decode: new Table(find("decode-nodes"), "Decode nodes", DECODE,
    "No decode node is listed: every request gets a 503. --decode says where some are."),
  both: new Table(find("both-nodes"), "Nodes of both roles", BOTH, ""),
};
const connections = new Table(find("connections"), "Handoffs between nodes", CONNECTIONS, "No decode node knows a prefill node yet.");

let states = new Map();

export function showNodes(now) {
  const several = now.models.length > 1;
  for (const [role, table] of Object.entries(tables)) {
    const nodes = now.nodes.filter((node) => node.role === role);
    const ready = nodes.filter((node) => node.state === "ready").length;
    const cached = role === "prefill" && now.traffic.cached_share !== null
      ? ` · ${percent(now.traffic.cached_share)} of all prompt tokens were cached` : "";
    const hidden = !nodes.length && (role === "both" || now.nodes.some((node) => node.role === "both"));
    find(`${role}-count`).parentElement.hidden = find(`${role}-nodes`).parentElement.hidden = hidden;
    say(find(`${role}-count`), nodes.length ? `${ready} of ${nodes.length} ready${cached}` : "");
    table.show(nodes.map((node) => [node.address, {...node, showsModel: several || node.state === "unused"}]), kindOf);
  }
  tell(now.nodes);
  showHandoffs(now);
}

/** What has changed of nodes since the last time, for those who do not see it. */
function tell(nodes) {
  const latest = new Map(nodes.map((node) => [`${node.role} ${node.address}`, node]));
  const changed = [...latest].filter(([key, node]) => states.size && states.get(key) !== node.state);
  if (changed.length) announce(changed.map(([, node]) => `${node.name || node.address}: ${node.state}`).join(", "));
  states = new Map([...latest].map(([key, node]) => [key, node.state]));
}

function showHandoffs(now) {
  const {handoffs} = now;
  const parts = handoffs === null ? [] : [
    `${count(handoffs.total)} so far`, `${rate(handoffs.rate)}/s`, bytesPerSecond(handoffs.byte_rate), `${rate(handoffs.failure_rate)}/s failed`,
    `${rate(handoffs.recompute_rate)}/s computed again`, `${rate(handoffs.local_rate)}/s not handed off`,
  ];
  if (now.num_connections) parts.push(`${now.num_connected} of ${now.num_connections} connected`);
  if (now.connections.length < now.num_connections) parts.push(`the busiest ${now.connections.length} are shown`);
  say(find("handoffs-count"), parts.join(" · "));
  connections.show(now.connections.map((connection) => [`${connection.prefill}\n${connection.decode}`, connection]),
    (connection) => (connection.transport === "none" ? "gone" : ""));
}
