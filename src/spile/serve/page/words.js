// Numbers as they are read.

export function count(value) {
  if (value === null || value === undefined) return '–';
  return Math.round(value).toLocaleString('en');
}

/** Four digits at most, for tiles, axes and legends. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  const size = Math.abs(value);
  if (size >= 1e15 || (size < 1e-3 && size > 0)) return value.toExponential(1);
  for (const [unit, letter] of [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e4, 'k']]) {
    if (size >= unit) {
      const scale = letter === 'k' ? 1e3 : unit;
      return `${trimmed(value / scale)}${letter}`;
    }
  }
  return trimmed(value);
}

function trimmed(value) {
  const size = Math.abs(value);
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : 2;
  return value.toFixed(size < 0.1 ? 3 : digits).replace(/(\.\d*?)0+$/, '$1').replace(/\.$/, '');
}

/** A share as a percentage, to two digits. */
export function percent(share) {
  if (share === null || share === undefined) return '–';
  const value = 100 * share;
  if (value === 0 || value >= 10) return `${value.toFixed(value && value < 99.95 ? 1 : 0)} %`.replace('.0 ', ' ');
  return value < 1e-4 ? `${value.toExponential(0)} %` : `${Number(value.toPrecision(2))} %`;
}

export function bytes(value) {
  const units = ['B', 'kB', 'MB', 'GB', 'TB', 'PB'];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${at ? value.toFixed(value < 10 ? 2 : 1) : value} ${units[at]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return '–';
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

export function clock(milliseconds) {
  return new Date(milliseconds).toLocaleTimeString('en', { hour12: false });
}

export function layerOf(tap) {
  const match = /^(.*)\.(\d+)$/.exec(tap);
  return match ? { site: match[1], layer: Number(match[2]) } : { site: tap, layer: null };
}
