// What is stored of one token beside its rows: the likeliest next tokens, and where a head looks.

import { ask } from './api.js';
import { h, select } from './dom.js';
import { count, percent } from './words.js';

export const hasBesides = (page) => page.dataset.next || page.dataset.attended.length > 0;

/** Lists for the token at a place of the page; `looked`: the offsets that a head weighs. */
export async function besides(page, shown, at) {
  const asked = { doc: shown.doc, token: shown.offsets[at] };
  const [likely, looks] = await Promise.all([page.dataset.next ? ask('next', asked) : null, page.dataset.attended.length ? keysOf(page, asked) : null]);
  const parts = [likely && nextOf(likely, shown.pieces[at]), looks?.part].filter(Boolean);
  return { parts, looked: looks?.told.keys.map((each) => each.offset) ?? [] };
}

const named = (piece) => h('span', { className: 'piece' }, piece === null ? '⋯' : piece || '·');

function table(head, rows) {
  return h('table', {}, h('thead', {}, h('tr', {}, head.map((name) => h('th', { scope: 'col' }, name)))), h('tbody', {}, rows));
}

function nextOf(told, piece) {
  const rank = told.rank === null ? '' : told.rank ? `The next token has rank ${count(told.rank)}. ` : 'The next token is the likeliest. ';
  const own = told.likely.length ? [h('p', { className: 'quiet' }, `${rank}All others: ${percent(told.rest)}.`),
    table(['Next token', 'Probability'], told.likely.map((each) => h('tr', { className: each.id === told.next ? 'own' : '', title: each.id === told.next ? 'the token that follows' : `id ${each.id}` },
      h('td', {}, named(each.piece)), h('td', { className: 'number' }, percent(each.share)))))] : [];
  return h('div', { className: 'next' }, h('h3', {}, 'After ', named(piece)), own, told.lens.length ? lensOf(told) : []);
}

/** What a lens says is next, layer by layer. */
function lensOf(told) {
  return table(['Layer', 'A lens says', 'Probability'], told.lens.map(({ layer, likely: [first, ...others] }) => h('tr', { className: first.id === told.next ? 'own' : '', title: others.map((each) => each.piece ?? '⋯').join(' · ') },
    h('td', { className: 'number' }, layer), h('td', {}, named(first.piece)), h('td', { className: 'number' }, percent(first.share)))));
}

async function keysOf(page, asked) {
  const heads = page.dataset.attended.flatMap(({ tap, heads: numbers }) => numbers.map((head) => [`${tap} ${head}`, `${tap.split('.')[1]}, head ${head}`]));
  const chosen = heads.some(([key]) => key === page.state.head) ? page.state.head : heads[0][0];
  const [tap, head] = chosen.split(' ');
  const told = await ask('keys', { ...asked, tap, head });
  const part = h('div', { className: 'keys' }, h('h3', {}, 'Where a head looks'),
    select('Layer', heads, chosen, (value) => page.set({ head: value, token: asked.token })),
    table(['Token', 'Offset', 'Weight'], told.keys.map((each) => h('tr', {},
      h('td', {}, named(each.piece)), h('td', { className: 'number' }, each.offset), h('td', { className: 'number' }, percent(each.weight))))));
  return { part, told };
}
