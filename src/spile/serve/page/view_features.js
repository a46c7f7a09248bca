// Features: what `spile features` has counted of every latent or direction.

import { ask } from './api.js';
import { bars } from './charts.js';
import { choice, h, select } from './dom.js';
import { hits } from './hits.js';
import { legend, token } from './tokens.js';
import { count, percent, short } from './words.js';

const ORDERS = [['density', 'Density'], ['largest', 'Largest'], ['mean', 'Mean'], ['id', 'Number']];
const SEARCHES = [['token', 'Token'], ['text', 'Text'], ['document', 'Document']];
const WAIT = 400;

export function view(page) {
  const toolbar = h('div', { className: 'toolbar' });
  const search = h('form', { className: 'toolbar', role: 'search', onsubmit: (event) => { event.preventDefault(); page.set({ q: field.value || null, start: null, feature: null }); } });
  const field = h('input', { type: 'search', name: 'q', placeholder: 'find features', ariaLabel: 'Find features' });
  const chart = h('figure', {});
  const about = h('div', { className: 'quiet' });
  const head = h('thead', {});
  const rows = h('tbody', {});
  const pages = h('div', { className: 'toolbar' });
  const shown = h('div', { className: 'hits' });
  const element = h('section', { className: 'view split', ariaLabel: 'Features' },
    h('aside', { className: 'wide' }, toolbar, search, chart, about, h('div', { className: 'scroll tall' }, h('table', { className: 'pick' }, head, rows)), pages),
    h('article', {}, shown));
  let listed = [];
  let ended = false;

  const sets = () => page.dataset.features;
  const set = () => (sets().find((each) => each.name === page.state.set) ?? sets()[0]).name;
  const other = () => (page.state.other && page.state.other !== set() && sets().some((each) => each.name === page.state.other) ? page.state.other : null);
  const how = () => page.state.how ?? 'token';
  const chosen = () => Number(page.state.feature ?? listed[0]?.feature ?? 0);
  const label = (each) => each.name ?? count(each.feature);

  async function update() {
    draw();
    if (other()) await compare();
    else if (page.state.q) await find();
    else await list();
    await show();
  }

  function draw() {
    const names = sets().map((each) => [each.name, `${each.tap}, ${count(each.features)} ${each.directions ? 'directions' : 'latents'} (${each.name})`]);
    const others = sets().filter((each) => each.name !== set() && !each.directions).map((each) => [each.name, each.name]);
    const comparable = others.length && !sets().find((each) => each.name === set()).directions;
    toolbar.replaceChildren(
      select('Features', names, set(), (value) => page.set({ set: value, feature: null, start: null })),
      comparable ? select('Compared with', [['', 'nothing'], ...others], other() ?? '', (value) => page.set({ other: value || null, feature: null })) : '',
      other() || page.state.q ? '' : choice('Ordered by', ORDERS, page.state.by ?? 'density', (value) => page.set({ by: value, start: null, feature: null }), true));
    field.value = page.state.q ?? '';
    search.hidden = Boolean(other()) || sets().find((each) => each.name === set()).directions;
    search.replaceChildren(choice('Found by', SEARCHES, how(), (value) => page.set({ how: value, feature: null })), field);
  }

  async function list() {
    const told = await ask('features', { set: set(), by: page.state.by ?? 'density', start: page.state.start });
    chart.replaceChildren(h('figcaption', {}, 'Density', h('small', {}, 'Features, by the share of rows in which they are active')),
      bars(told.shares.map((each, at) => ({
        name: at % 4 ? '' : percent(each.from), value: each.latents, title: `${count(each.latents)} features are active in ${percent(each.from)} to ${percent(each.to)} of rows`,
      })), { label: `Features of ${told.tap} by density`, height: 150 }));
    about.replaceChildren(`${count(told.active)} of ${count(told.total)} features are active in some of ${count(told.rows)} rows.`,
      told.behind ? ` ${count(told.behind)} later units are not counted: run spile features again.` : '');
    table(told.features, [['Density', (each) => percent(each.density)], ['Mean', (each) => short(each.mean)], ['Largest', (each) => short(each.largest)]]);
    const last = Math.max(0, told.listed - 1);
    const step = told.features.length;
    pages.replaceChildren(
      h('button', { type: 'button', disabled: !told.start, onclick: () => page.set({ start: Math.max(0, told.start - 60), feature: null }) }, 'Previous'),
      h('span', { className: 'quiet' }, told.listed ? `${count(told.start + 1)} to ${count(told.start + step)} of ${count(told.listed)}` : 'none'),
      h('button', { type: 'button', disabled: told.start + step > last, onclick: () => page.set({ start: told.start + step, feature: null }) }, 'Next'));
  }

  async function find() {
    chart.replaceChildren();
    pages.replaceChildren();
    const told = await ask('feature-search', { set: set(), how: how(), q: page.state.q });
    about.replaceChildren(`${count(told.features.length)} features, the most fitting first; score: ${told.told}.`);
    table(told.features, [['Score', (each) => percent(each.score)], ['Density', (each) => percent(each.density)], ['Largest', (each) => short(each.largest)]]);
  }

  async function compare() {
    pages.replaceChildren();
    const answer = await ask('feature-comparison', { set: set(), other: other() });
    if (answer.error) throw new Error(answer.error);
    if (!answer.value) {
      chart.replaceChildren();
      about.replaceChildren('Comparing …');
      if (!ended) setTimeout(() => !ended && other() && update().catch(page.fault), WAIT);
      return;
    }
    const told = answer.value;
    chart.replaceChildren(h('figcaption', {}, 'Nearest in the other', h('small', {}, `Features of ${told.set}, by the cosine of activity with the nearest of ${told.other.set}`)),
      bars(told.bins.map((each, at) => ({ name: at % 4 ? '' : short(each.from), value: each.latents, title: `${count(each.latents)} features: ${short(each.from)} to ${short(each.from + 0.05)}` })),
        { label: `How near features of ${told.set} are to those of ${told.other.set}`, height: 150 }));
    about.replaceChildren(`${percent(told.shared)} of the ${count(told.seen)} features that are active in a sample of ${count(told.sampled)} rows have one of ${told.other.set} at a cosine of 0.5 or more there. Those without a near one come first.`);
    table(told.apart, [['Cosine', (each) => short(each.near)], ['Nearest', (each) => (each.nearest === null ? '–' : count(each.nearest))], ['Density', (each) => percent(each.density)]]);
  }

  function table(features, columns) {
    listed = features;
    head.replaceChildren(h('tr', {}, h('th', { scope: 'col' }, 'Feature'), h('th', { scope: 'col', className: 'top' }, 'Top'), columns.map(([name]) => h('th', { scope: 'col' }, name))));
    rows.replaceChildren(...features.map((each) => h('tr', { className: each.feature === chosen() ? 'chosen' : '' },
      h('td', {}, h('button', { type: 'button', className: 'link', ariaCurrent: each.feature === chosen() ? 'true' : null, onclick: () => page.set({ feature: each.feature }) }, label(each))),
      h('td', { lang: '' }, each.piece === null ? '' : token(each.piece, 0, { low: 0, high: 1 })),
      columns.map(([, text]) => h('td', { className: 'number' }, text(each))))));
    rows.querySelector('.chosen')?.scrollIntoView({ block: 'nearest' });
  }

  async function show() {
    if (!listed.length && page.state.feature === undefined) { shown.replaceChildren(h('p', { className: 'empty' }, 'No feature.')); return; }
    const told = await ask('feature', { set: set(), feature: chosen() });
    const number = h('input', { type: 'number', min: 0, max: told.total - 1, value: told.feature, ariaLabel: 'Feature', onchange: () => page.set({ feature: number.value }) });
    const read = { at_work: false };
    const rank = told.drawn < told.count ? `, from ${count(told.drawn)} drawn rows` : '';
    shown.replaceChildren(
      h('header', { className: 'about' }, h('h2', {}, 'Feature ', number, told.name ? ` ${told.name}` : ''),
        h('p', { className: 'fires' }, told.count ? `Active in ${percent(told.density)} of ${count(told.rows)} rows (${count(told.count)}), with ${short(told.mean)} on average and ${short(told.largest)} at most.` : 'Active in no row.'),
        h('p', { className: 'quiet' }, `Quantiles${rank}: ${told.quantiles.map((each) => `${Math.round(100 * each.q)} % ${short(each.value)}`).join(', ')}`),
        legend(told.scale, told.name ?? `feature ${told.feature}`)),
      h('div', { className: 'cards' },
        h('figure', {}, h('figcaption', {}, 'Activations', h('small', {}, 'Rows, by activation; four bins for each power of two')),
          bars(told.histogram.map((each, at) => ({ name: at % 4 ? '' : short(each.from), value: each.rows, title: `${count(each.rows)} rows from ${short(each.from)} to ${short(each.to)}` })), { label: 'Activations', height: 150 })),
        told.logits ? logits(told.logits) : '',
        told.neighbours.length ? neighbours(told) : ''),
      h('h3', {}, 'Top rows'), hits(page, { ...told, hits: told.top, read }, { by: 'latent', latent: told.feature }),
      ...told.bands.flatMap((each, at) => [
        h('h3', {}, `${at === 0 ? 'Highest' : at === told.bands.length - 1 ? 'Lowest' : 'Band'}: ${short(each.low)} to ${short(each.high)}, ${percent(each.share)} of active rows, drawn at random`),
        hits(page, { ...told, hits: each.hits, read }, { by: 'latent', latent: told.feature })]));
  }

  function logits(told) {
    const side = (name, of) => h('table', { className: 'logits' }, h('caption', {}, name), h('tbody', {}, of.map((each) => h('tr', {},
      h('td', { lang: '' }, token(each.piece, 0, { low: 0, high: 1 })), h('td', { className: 'number' }, short(each.value))))));
    return h('figure', { className: 'logits' }, h('figcaption', {}, 'Logits', h('small', {}, 'Tokens that it raises and lowers most, directly')),
      h('div', { className: 'pair' }, side('raised', told.raised), side('lowered', told.lowered)));
  }

  function neighbours(told) {
    return h('figure', {}, h('figcaption', {}, 'Neighbours', h('small', {}, `Active in the same rows: cosine over ${count(told.sampled)} drawn rows`)),
      h('table', { className: 'logits' }, h('tbody', {}, told.neighbours.map((each) => h('tr', {},
        h('td', {}, h('button', { type: 'button', className: 'link', onclick: () => page.set({ feature: each.feature }) }, label(each))),
        h('td', { lang: '' }, each.piece === null ? '' : token(each.piece, 0, { low: 0, high: 1 })),
        h('td', { className: 'number' }, short(each.near)))))));
  }

  function move(step) {
    const at = listed.findIndex((each) => each.feature === chosen());
    const next = listed[Math.min(listed.length - 1, Math.max(0, at + step))];
    if (next) page.set({ feature: next.feature });
  }

  return { element, update, changed: () => update().catch(page.fault), close: () => { ended = true; }, keys: { j: () => move(1), k: () => move(-1), '/': () => field.focus() } };
}
