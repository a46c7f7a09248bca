// Tokens, coloured by a number each.

import { h } from './dom.js';
import { count, short } from './words.js';

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
  const names = ['token', shade(value, scale)];
  if (special) names.push('special');
  if (ids) names.push('id');
  if (piece === '') names.push('part');
  return h('span', { className: names.join(' '), ...more }, visible(piece));
}

/**
 * Tokens in reading order, with whatever is missing between them: greyed where its text is known,
 * else by its number. gaps: [{at, count, pieces?}], before the token at a place.
 */
export function spans(tokens, gaps) {
  const before = new Map(gaps.map((each) => [each.at, each]));
  const found = [];
  for (let at = 0; at <= tokens.length; at += 1) {
    if (before.has(at)) found.push(missing(before.get(at)));
    if (at < tokens.length) found.push(tokens[at]);
  }
  return found;
}

function missing({ count: number, pieces }) {
  const title = `${count(number)} ${number === 1 ? 'token' : 'tokens'} of which no row is stored`;
  if (!pieces) return h('span', { className: 'gap', title, ariaLabel: title }, `⋯ ${count(number)} ⋯`);
  return h('span', { className: 'gap known', title }, pieces.map((piece) => h('span', { className: 'dropped' }, visible(piece))));
}

function visible(piece) {
  return piece === '' ? '·' : piece.replaceAll('\n', '↵\n').replaceAll('\t', '⇥\t');
}

export function legend(scale, text) {
  const steps = [...Array(STEPS + 1).keys()];
  const names = scale.signed ? [...steps.slice(1).reverse().map((step) => `n${step}`), ...steps.map((step) => `p${step}`)] : steps.map((step) => `p${step}`);
  return h('div', { className: 'legend', ariaLabel: `${text} from ${short(scale.low)} to ${short(scale.high)}` },
    h('span', {}, short(scale.low)), h('span', { className: 'steps' }, names.map((name) => h('i', { className: name }))),
    h('span', {}, short(scale.high)), h('em', {}, text));
}
