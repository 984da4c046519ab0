// Numbers as people read them, each with its unit. What is null or undefined is not known: a dash.

export const UNKNOWN = "–";
const SPACE = "\u202f"; // narrow, and no line ends there

const known = (value) => value !== null && value !== undefined;
const grouped = new Intl.NumberFormat("en", {maximumFractionDigits: 0});

/** Three digits or so, of a number that is not negative. */
function digits(value) {
  if (value >= 9.95 || value === 0) return grouped.format(value);
  return value.toFixed(value >= 0.0995 ? 1 : 2);
}

function scaled(value, units) {
  let index = 0;
  while (value >= 999.5 && index < units.length - 1) {
    value /= 1000;
    index += 1;
  }
  return `${value > 0 && value < 99.95 ? value.toFixed(1) : grouped.format(value)}${SPACE}${units[index]}`;
}

/** 7, 1,234, 12.3 k, 4.5 M */
export function count(value) {
  if (!known(value)) return UNKNOWN;
  return value < 10_000 ? grouped.format(value) : scaled(value / 1000, ["k", "M", "G"]);
}

/** Of something per second: 0, 0.3, 14, 1,668, 12.3 k */
export function rate(value) {
  if (!known(value)) return UNKNOWN;
  return value >= 99.5 ? count(value) : digits(value);
}

/** Number and unit: ["4.9", "ms"] */
export function secondsParts(value) {
  if (!known(value)) return [UNKNOWN, ""];
  if (value < 0.9995) return [digits(value * 1000), "ms"];
  return value < 9.995 ? [value.toFixed(2), "s"] : ageParts(value);
}

function ageParts(value) {
  if (value < 119.5) return [Math.max(1, value).toFixed(0), "s"];
  return value < 7170 ? [grouped.format(value / 60), "min"] : [grouped.format(value / 3600), "h"];
}

/** Of whole seconds, at least one, or minutes, or hours. */
export function age(value) {
  return ageParts(value).join(SPACE);
}

export function seconds(value) {
  const [number, unit] = secondsParts(value);
  return unit ? `${number}${SPACE}${unit}` : number;
}

export function bytesPerSecond(value) {
  return known(value) ? scaled(value, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]) : UNKNOWN;
}

export function percent(share) {
  if (!known(share)) return UNKNOWN;
  if (share > 0 && share < 0.01) return `<1${SPACE}%`;
  return `${Math.floor(share * 100 + 0.5)}${SPACE}%`;
}
