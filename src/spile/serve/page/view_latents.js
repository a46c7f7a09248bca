// Latents, by their ids: how often each fires, and the rows in which one is largest.

import { ask } from './api.js';
import { bars } from './charts.js';
import { choice, h, select } from './dom.js';
import { hits, readOf } from './hits.js';
import { legend } from './tokens.js';
import { count, percent, short } from './words.js';

const COLUMNS = [['fires', 'Fires', (each) => percent(each.share)], ['mean', 'Mean', (each) => short(each.mean)], ['largest', 'Largest', (each) => short(each.largest)]];

export function view(page) {
  const chart = h('figure', {});
  const rows = h('tbody', {});
  const order = h('div', { className: 'toolbar' });
  const about = h('div', { className: 'quiet' });
  const found = h('div', { className: 'hits' });
  const element = h('section', { className: 'view split', ariaLabel: 'Latents' },
    h('aside', { className: 'wide' }, order, chart, about, h('div', { className: 'scroll tall' }, h('table', { className: 'pick' },
      h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'Latent'), COLUMNS.map(([, name]) => h('th', { scope: 'col' }, name)))), rows))),
    h('article', {}, found));
  let latents = [];

  const tap = () => page.chosen('latents');
  const chosen = () => Number(page.state.latent ?? latents[0]?.latent ?? 0);

  async function update() {
    const told = await ask('latents', { tap: tap(), by: page.state.sort ?? 'largest' });
    latents = told.latents;
    order.replaceChildren(
      select('Tap', page.taps('latents').map((each) => [each.name, each.name]), tap(), (value) => page.set({ tap: value, latent: null })),
      choice('Ordered by', COLUMNS.map(([key, name]) => [key, name]), told.by, (value) => page.set({ sort: value, latent: null }), true));
    chart.replaceChildren(h('figcaption', {}, 'How often latents fire', h('small', {}, 'Latents, by the share of rows in which they do')),
      bars(told.shares.map((each, at) => ({
        name: at % 4 ? '' : percent(each.from), value: each.latents, title: `${count(each.latents)} latents fire in ${percent(each.from)} to ${percent(each.to)} of rows`,
      })), { label: `Latents of ${tap()} by how often they fire`, height: 150 }));
    about.replaceChildren(said(told));
    rows.replaceChildren(...latents.map((each) => h('tr', { className: each.latent === chosen() ? 'chosen' : '' },
      h('td', {}, h('button', { type: 'button', className: 'link', ariaCurrent: each.latent === chosen() ? 'true' : null, onclick: () => page.set({ latent: each.latent }) }, each.latent)),
      COLUMNS.map(([, , text]) => h('td', { className: 'number' }, text(each))))));
    rows.querySelector('.chosen')?.scrollIntoView({ block: 'nearest' });
    await top();
  }

  async function top() {
    const told = await ask('top', { tap: tap(), latent: chosen() });
    const total = page.latents(tap());
    const number = h('input', { type: 'number', min: 0, max: total - 1, value: chosen(), ariaLabel: 'Latent', onchange: () => page.set({ latent: number.value }) });
    const fires = told.fires
      ? `Fires in ${percent(told.share)} of rows (${count(told.fires)}), with ${short(told.mean)} on average and ${short(told.largest)} at most`
      : 'Among the stored latents of no row';
    found.replaceChildren(
      h('header', { className: 'about' }, h('h2', {}, 'Top rows of latent ', number),
        h('p', { className: 'fires' }, `${fires}.`),
        h('p', { className: 'quiet' }, `${told.tap}, latents 0 to ${count(total - 1)}, ${readOf(told)}`),
        legend(told.scale, `latent ${told.latent}`)),
      hits(page, told, { by: 'latent', latent: told.latent }));
  }

  function move(step) {
    const at = latents.findIndex((each) => each.latent === chosen());
    const next = latents[Math.min(latents.length - 1, Math.max(0, at + step))];
    if (next) page.set({ latent: next.latent });
  }

  return { element, kind: 'latents', update, changed: () => update().catch(page.fault), read: () => update().catch(page.fault), keys: { j: () => move(1), k: () => move(-1) } };
}

/** Of all latents, what no list shows. */
function said(told) {
  const parts = [`${count(told.total - told.silent)} of ${count(told.total)} latents fire in some row`, `${short(told.active)} fire in a row on average; ${count(told.stored)} are stored at most`];
  if (told.truncated) parts.push(`in ${count(told.truncated)} rows more were active, and the smallest are not stored`);
  return `${parts.join('. ')}.`;
}
