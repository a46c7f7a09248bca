// Tokens, coloured by a number each.

import { h } from './dom.js';
import { short } from './words.js';

const STEPS = 10;

/** The class that colours a number: paler to deeper, and of another hue under zero. */
export function shade(value, scale) {
  if (value === null || value === undefined) return 'odd';
  if (scale.signed) {
    const t = Math.min(1, Math.abs(value) / (scale.high || 1));
    return `${value < 0 ? 'n' : 'p'}${Math.round(t * STEPS)}`;
  }
  const t = (value - scale.low) / (scale.high - scale.low || 1);
  return `p${Math.round(Math.min(1, Math.max(0, t)) * STEPS)}`;
}

/** One token: its text alone, as text. */
export function token(piece, value, scale, { special = false, ids = false, ...more } = {}) {
  const text = piece === '' ? '·' : piece.replaceAll('\n', '↵\n').replaceAll('\t', '⇥\t');
  const names = ['token', shade(value, scale)];
  if (special) names.push('special');
  if (ids) names.push('id');
  if (piece === '') names.push('part');
  return h('span', { className: names.join(' '), ...more }, text);
}

export function legend(scale, text) {
  const steps = [...Array(STEPS + 1).keys()];
  const names = scale.signed ? [...steps.slice(1).reverse().map((step) => `n${step}`), ...steps.map((step) => `p${step}`)] : steps.map((step) => `p${step}`);
  return h('div', { className: 'legend', ariaLabel: `${text} from ${short(scale.low)} to ${short(scale.high)}` },
    h('span', {}, short(scale.low)), h('span', { className: 'steps' }, names.map((name) => h('i', { className: name }))),
    h('span', {}, short(scale.high)), h('em', {}, text));
}
