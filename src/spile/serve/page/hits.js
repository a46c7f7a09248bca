// Rows in which a channel or a latent is largest, each in its context.

import { h } from './dom.js';
import { spans, token } from './tokens.js';
import { count, short } from './words.js';

/** `chosen`: what the document is coloured by once a hit is opened. */
export function hits(page, told, chosen) {
  if (!told.hits.length) return h('p', { className: 'empty' }, told.read.at_work ? 'Nothing yet.' : 'No row.');
  const ids = Boolean(page.dataset.no_text);
  return h('ol', { className: 'top' }, told.hits.map((hit) => {
    const tokens = hit.pieces.map((piece, at) => token(piece, hit.values[at], told.scale, { ids, ...(at === hit.at ? { ariaCurrent: 'true' } : {}) }));
    return h('li', {},
      h('span', { className: 'number' }, short(hit.value)),
      h('a', { href: page.link('documents', { doc: hit.doc, token: hit.offset, tap: told.tap, ...chosen }), title: `document ${hit.doc}, offset ${hit.offset}` },
        h('span', { className: 'tokens', lang: '' }, spans(tokens, hit.gaps)),
        h('span', { className: 'where' }, `document ${count(hit.doc)}, position ${count(hit.position)}`)));
  }));
}

/** Of how many rows an answer speaks. */
export function readOf(told) {
  const { rows_read: read } = told;
  return told.read.rows < told.read.all ? `of ${count(read)} of ${count(told.read.all)} rows` : `of all ${count(read)} rows`;
}
