// The run: how far it is, how fast, who is at work, and what it makes.

import { ask } from './api.js';
import { lines } from './charts.js';
import { h } from './dom.js';
import { bytes, clock, count, duration, short } from './words.js';

const STATES = { complete: 'complete', empty: 'no rows', running: 'running', unfinished: 'unfinished' };
const isOver = (told) => told.state === 'complete' || told.state === 'empty';

export function view() {
  const element = h('section', { className: 'view run', ariaLabel: 'Run' });
  let timer = null;
  let open = null; // the recipe's details: of a run that is over, at first

  async function update() {
    clearTimeout(timer);
    const told = await ask('run');
    open = element.querySelector('details')?.open ?? open;
    element.replaceChildren(headline(told), tiles(told), charts(told), workers(told.workers), passes(told), recipe(told, open ?? isOver(told)));
    timer = setTimeout(() => update().catch(() => { timer = setTimeout(update, 4000); }), isOver(told) && told.passes.every(isOver) ? 10000 : 2000);
  }

  return { element, update, close: () => clearTimeout(timer) };
}

function headline(told) {
  const share = told.tokens_estimated ? Math.min(1, told.tokens / told.tokens_estimated) : 0;
  const shown = isOver(told) ? 1 : Math.min(share, 0.999);
  const bar = h('div', { className: 'progress', role: 'progressbar', ariaLabel: 'Tokens read', ariaValueNow: String(Math.round(shown * 100)), ariaValueMin: '0', ariaValueMax: '100' },
    h('div', { style: { width: `${(shown * 100).toFixed(2)}%` } }));
  return h('div', { className: 'headline' },
    h('h1', {}, h('span', { className: `state ${told.state}` }, STATES[told.state] ?? told.state),
      h('span', { className: 'share' }, isOver(told) ? '' : `${(shown * 100).toFixed(1)} %`)),
    bar, told.error ? h('p', { className: 'fault' }, told.error) : null);
}

function tiles(told) {
  const left = Object.entries(told.skipped).map(([why, number]) => `${count(number)} ${why}`).join(', ');
  const over = isOver(told);
  const items = [
    ['Tokens', count(told.tokens), over ? 'read' : `of about ${short(told.tokens_estimated)}`],
    ...(over ? [] : [['Rate', short(told.rate), 'tokens a second, of late'], ['Left', duration(told.eta), 'at that rate']]),
    ['Units', count(told.units_done), `of ${count(told.units)}`],
    ['Documents', count(told.documents), left ? `left out: ${left}` : `of ${count(told.documents_total)}`],
    ['Rows', count(told.rows), 'of each tap'],
    ['Size', bytes(told.bytes), `${Object.keys(told.taps).length} taps`],
  ];
  return h('dl', { className: 'tiles' }, items.map(([name, value, more]) =>
    h('div', {}, h('dt', {}, name), h('dd', {}, value), h('dd', { className: 'more' }, more))));
}

function charts(told) {
  const done = told.made.length > 1 ? told.made : told.seen;
  if (done.length < 2 || (done === told.seen && done[0].tokens === done[done.length - 1].tokens && isOver(told))) return '';
  const total = done.map((each) => [each.at, each.tokens]);
  const rates = rateOf(done);
  return h('div', { className: 'pair' },
    h('figure', {}, h('figcaption', {}, 'Tokens done'), lines([{ name: 'tokens', points: total }], { label: 'Tokens done over time', xText: clock, dots: false, area: true })),
    h('figure', {}, h('figcaption', {}, 'Tokens a second'), lines([{ name: 'rate', points: rates }], { label: 'Rate over time', xText: clock, dots: false, area: true })));
}

/** Differences over windows that are long enough for a unit to end in them. */
function rateOf(points) {
  const found = [];
  const window = Math.max(1, Math.floor(points.length / 40));
  for (let at = window; at < points.length; at += 1) {
    const seconds = (points[at].at - points[at - window].at) / 1000;
    if (seconds > 0) found.push([points[at].at, (points[at].tokens - points[at - window].tokens) / seconds]);
  }
  return found;
}

function workers(all) {
  if (!all.length) return h('p', { className: 'quiet' }, 'No worker has left a record.');
  const rows = all.map((worker) => h('tr', {},
    h('td', { className: 'name' }, worker.name),
    h('td', {}, worker.share ?? '', worker.world ? ` process ${worker.world.process}` : ''),
    h('td', {}, h('span', { className: `badge ${stateOf(worker)}` }, stateOf(worker))),
    h('td', { className: 'number' }, (worker.units ?? []).join(', ')),
    h('td', { className: 'number' }, count(worker.units_done)),
    h('td', { className: 'number' }, count(worker.progress?.tokens ?? worker.tokens)),
    h('td', { className: 'number' }, short(worker.progress?.rate ?? null)),
    h('td', { className: 'number' }, ['running', 'starting', 'silent'].includes(stateOf(worker)) ? duration(worker.silent) : ''),
    h('td', { className: 'why' }, worker.error ?? '')));
  const heads = ['Worker', 'Share', 'State', 'Units held', 'Done', 'Tokens', 'tok/s', 'Last beat', 'Error'];
  return h('div', { className: 'scroll' }, h('table', {}, h('caption', {}, 'Slices and processes'),
    h('thead', {}, h('tr', {}, heads.map((head, at) => h('th', { scope: 'col', className: at > 2 && at < 8 ? 'number' : '' }, head)))), h('tbody', {}, rows)));
}

/** Taps that were added to the dataset, or are being added, and who adds them. */
function passes(told) {
  if (!told.passes.length) return '';
  const heads = ['Added taps', 'State', 'Units', 'Size', 'tok/s', 'Left'];
  const rows = told.passes.map((each) => h('tr', {},
    h('td', { className: 'name' }, Object.keys(each.taps).join(', ')),
    h('td', {}, STATES[each.state] ?? each.state),
    h('td', { className: 'number' }, `${count(each.units_done)} of ${count(each.units)}`),
    h('td', { className: 'number' }, bytes(each.bytes)),
    h('td', { className: 'number' }, short(each.rate)),
    h('td', { className: 'number' }, isOver(each) ? '' : duration(each.eta_seconds))));
  return h('div', {}, h('div', { className: 'scroll' }, h('table', {}, h('caption', {}, 'Taps added later'),
    h('thead', {}, h('tr', {}, heads.map((head, at) => h('th', { scope: 'col', className: at > 1 ? 'number' : '' }, head)))), h('tbody', {}, rows))),
  told.passes.filter((each) => !isOver(each) && each.workers.length).map((each) => workers(each.workers)));
}

function stateOf(worker) {
  return worker.state === 'running' && worker.silent > 30 ? 'silent' : worker.state;
}

function recipe(told, open) {
  const shown = Object.entries(told.recipe).filter(([, value]) => value !== null && !(Array.isArray(value) && !value.length));
  return h('details', { open }, h('summary', {}, 'Recipe'),
    h('dl', { className: 'recipe' },
      h('div', {}, h('dt', {}, 'fingerprint'), h('dd', {}, told.fingerprint)),
      shown.map(([name, value]) => h('div', {}, h('dt', {}, name.replaceAll('_', ' ')),
        h('dd', {}, Array.isArray(value) ? value.join(', ') : typeof value === 'object' ? JSON.stringify(value) : String(value))))));
}
