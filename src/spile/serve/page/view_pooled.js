// Pooled rows: what each stands for, beside the labels of its document, and the rows nearest to one.

import { ask } from './api.js';
import { h, select } from './dom.js';
import { count, short } from './words.js';

const LISTED = 50;

export function view(page) {
  const body = h('tbody', {});
  const foot = h('p', { className: 'quiet' });
  const tools = h('div', { className: 'toolbar' });
  const found = h('div', { className: 'hits' });
  const head = h('tr', {});
  const element = h('section', { className: 'view split', ariaLabel: 'Pooled' },
    h('aside', { className: 'wide' }, tools, h('div', { className: 'scroll tall' }, h('table', { className: 'pick rows' }, h('thead', {}, head), body)), foot),
    h('article', {}, found));
  let rows = [];

  const tap = () => page.chosen('dense');
  const key = (each) => `${each.unit}.${each.row}`;
  const chosen = () => page.state.row ?? (rows.length ? key(rows[0]) : null);
  const preview = (each) => (each.preview ?? '').trim().slice(0, 80) || `document ${each.doc}`;
  const labels = (each) => page.dataset.columns.map((name) => h('td', {}, h('span', { className: 'kept' }, each.labels[name] ?? '–')));
  const spans = () => rows.some((each) => each.span);

  async function further() {
    const told = await ask('rows', { start: rows.length, count: LISTED });
    rows = rows.concat(told.rows);
    foot.replaceChildren(`${count(told.total)} rows, by --pool ${page.dataset.pool}`,
      rows.length < told.total ? h('button', { type: 'button', className: 'link', onclick: () => further().then(draw).catch(page.fault) }, 'More') : '');
  }

  function draw() {
    tools.replaceChildren(select('Tap', page.taps('dense').map((each) => [each.name, each.name]), tap(), (value) => page.set({ tap: value })));
    const heads = ['Row', ...(spans() ? ['Span'] : []), 'Text', 'Tokens', ...page.dataset.columns];
    head.replaceChildren(...heads.map((name) => h('th', { scope: 'col' }, name)));
    body.replaceChildren(...rows.map((each) => h('tr', { className: key(each) === chosen() ? 'chosen' : '' },
      h('td', {}, h('button', { type: 'button', className: 'link', ariaCurrent: key(each) === chosen() ? 'true' : null, title: `document ${each.doc}`, onclick: () => page.set({ row: key(each) }) }, each.doc)),
      spans() ? h('td', { className: 'number' }, each.span) : null, h('td', {}, preview(each)),
      h('td', { className: 'number' }, count(each.count)), labels(each))));
    body.querySelector('.chosen')?.scrollIntoView({ block: 'nearest' });
  }

  async function near() {
    if (!chosen()) return;
    const [unit, row] = chosen().split('.');
    const told = await ask('nearest', { tap: tap(), unit, row });
    const { row: own } = told;
    found.replaceChildren(
      h('header', { className: 'about' }, h('h2', {}, `Document ${count(own.doc)}${own.span || spans() ? `, span ${own.span}` : ''}`),
        h('p', { className: 'quiet' }, `${count(own.count)} tokens from offset ${count(own.start)} to ${count(own.offset)}; its row of ${told.tap} is ${short(told.length)} long`,
          Object.entries(own.labels).map(([name, value]) => [' · ', h('span', { className: 'kept' }, `${name} ${value ?? '–'}`)])),
        h('p', {}, (own.preview ?? '').trim())),
      h('h3', {}, 'Nearest rows'),
      h('p', { className: 'quiet' }, `By cosine, less the mean row, among ${count(told.of)} sampled rows.`),
      h('div', { className: 'scroll' }, h('table', { className: 'ends near' }, h('tbody', {}, told.near.map((each) => h('tr', {},
        h('td', { className: 'number' }, each.cosine.toFixed(3)),
        h('td', {}, h('a', { href: page.link('pooled', { ...page.state, tap: told.tap, row: key(each) }), title: `document ${each.doc}, span ${each.span}` }, preview(each))), labels(each)))))),
      h('h3', {}, 'Values that stand out'),
      h('div', { className: 'scroll' }, h('table', { className: 'values' }, h('thead', {}, h('tr', {}, ['Channel', 'Value', 'Mean of all', 'Deviations'].map((name) => h('th', { scope: 'col', className: 'number' }, name)))),
        h('tbody', {}, told.channels.map((each) => h('tr', {}, [each.channel, short(each.value), short(each.mean), short(each.beyond)].map((value) => h('td', { className: 'number' }, value))))))));
  }

  async function update() {
    if (!rows.length) await further();
    draw();
    await near();
  }

  function move(step) {
    const at = rows.findIndex((each) => key(each) === chosen());
    const next = rows[Math.min(rows.length - 1, Math.max(0, at + step))];
    if (next) page.set({ row: key(next) });
  }

  return { element, kind: 'dense', update, changed: () => update().catch(page.fault), read: () => near().catch(page.fault), keys: { j: () => move(1), k: () => move(-1) } };
}
