// The page: which view is shown, what is chosen in it, and the keys.

import { Moot, ask } from './api.js';
import { h } from './dom.js';
import { count } from './words.js';
import { view as run } from './view_run.js';
import { view as documents } from './view_documents.js';
import { view as layers } from './view_layers.js';
import { view as channels } from './view_channels.js';
import { view as similarity } from './view_similarity.js';
import { view as projection } from './view_projection.js';
import { view as latents } from './view_latents.js';
import { view as labels } from './view_labels.js';
import { view as pooled } from './view_pooled.js';
import { view as features } from './view_features.js';

const VIEWS = { run, documents, layers, channels, similarity, projection, latents, labels, pooled, features };
const KINDS = { channels: 'dense', similarity: 'dense', projection: 'dense', latents: 'latents', labels: 'dense', pooled: 'dense' }; // of the taps that a view is of
const NAMES = Object.keys(VIEWS);
const POLL = 2000;

const main = document.getElementById('main');
const strip = document.getElementById('strip');
const keys = document.getElementById('keys');
let current = null;
let name = null;
let fault = null;

/** What views know of the page. */
const page = {
  state: {},
  dataset: null,
  /** Taps of a kind: `dense`, `latents`, or all. */
  taps: (kind) => page.dataset.taps.filter((each) => !kind || Boolean(each.latents) === (kind === 'latents')),
  /** The tap that is chosen, if it is of the kind, else the first that is. */
  chosen(kind) {
    const taps = page.taps(kind);
    return (taps.find((each) => each.name === page.state.tap) ?? taps[0])?.name;
  },
  get tap() { return page.chosen(); },
  /** How many latents the encoder of a tap has; null of a dense tap. */
  latents: (tap) => page.dataset.taps.find((each) => each.name === tap)?.latents ?? null,
  width: (tap) => (page.dataset.taps.find((each) => each.name === tap) ?? page.dataset.taps[0]).width,
  link(view, state) {
    const kept = Object.entries(state).filter(([, value]) => value !== null && value !== undefined && value !== '');
    return `#${view}${kept.length ? `?${new URLSearchParams(kept)}` : ''}`;
  },
  go(view, state) { location.hash = page.link(view, state); },
  set(changes) {
    if (leaving()) return;
    // At once: keys may come faster than the browser says that the address has changed.
    page.state = { ...page.state, ...changes };
    page.go(name, page.state);
  },
  /** Keeps a choice in the address that changes nothing else. */
  note(changes) {
    if (leaving()) return;
    page.state = { ...page.state, ...changes };
    history.replaceState(null, '', page.link(name, page.state));
  },
  fault(error) {
    if (error instanceof Moot) return;
    fault = error.message;
    drawStrip();
  },
};

/** Whether the address names another view already, of which the browser has not said so yet. */
function leaving() {
  const wanted = location.hash.slice(1).split('?')[0];
  return NAMES.includes(wanted) && wanted !== name;
}

function drawStrip() {
  const read = page.dataset?.read;
  const parts = [];
  if (fault) parts.push(h('span', { className: 'fault', role: 'alert' }, fault));
  if (page.dataset) {
    parts.push(h('span', { className: 'where', title: page.dataset.url }, page.dataset.url));
    parts.push(h('span', {}, `${count(page.dataset.rows)} rows`));
    if (read.at_work) {
      const share = read.wanted ? read.rows / read.wanted : 0;
      parts.push(h('span', { className: 'reading' }, h('span', { className: 'meter' }, h('i', { style: { width: `${100 * share}%` } })), `${Math.floor(100 * share)} % read for plots`));
    } else if (read.rows < read.all) parts.push(h('span', {}, `plots are of ${count(read.rows)} of them`));
    if (read.error) parts.push(h('span', { className: 'fault' }, read.error));
    if (page.dataset.no_text) parts.push(h('span', { className: 'warning' }, `token ids only: ${page.dataset.no_text}`));
    if (page.dataset.note) parts.push(h('span', { className: 'warning' }, page.dataset.note));
  }
  strip.replaceChildren(...parts);
}

/** Why a view has nothing to show of this dataset; null if it has. */
function missing(view) {
  const { dataset } = page;
  if (!dataset) return null;
  if (KINDS[view] && !page.taps(KINDS[view]).length) return KINDS[view] === 'latents' ? 'No tap of this dataset holds latents.' : 'Every tap of this dataset holds latents; this view is of dense rows.';
  if (dataset.pool?.startsWith('reduce') && ['labels', 'pooled'].includes(view)) return 'This dataset holds sums by label, and no rows: read them with ds.reduced.';
  if (view === 'labels' && !dataset.columns.length) return 'No column was kept of the corpus: extract with --keep.';
  if (view === 'features' && !dataset.features.length) return 'No features were counted here: run spile features.';
  if (view === 'pooled' && !dataset.pool) return 'The rows of this dataset are tokens, not pooled.';
  return null;
}

const offered = (view) => missing(view) === null;

/** What stands in for a view that no tap of the dataset is for. */
function nothing(view) {
  return { element: h('section', { className: 'view', ariaLabel: view }, h('p', { className: 'empty' }, missing(view))), update: () => {} };
}

async function poll() {
  try {
    const before = page.dataset;
    page.dataset = await ask('dataset');
    if (fault === 'the server does not answer') fault = null;
    drawStrip();
    for (const link of document.querySelectorAll('#views a')) link.hidden = !offered(link.dataset.view);
    if (before && before.rows !== page.dataset.rows) current?.grown?.();
    if (before && before.read.rows !== page.dataset.read.rows) current?.read?.();
  } catch (error) {
    if (!(error instanceof Moot)) page.fault(new Error(error instanceof TypeError ? 'the server does not answer' : error.message));
  }
  setTimeout(poll, POLL);
}

/** The view to begin with: a dataset's documents once it is finished, before that its progress. */
const home = () => (page.dataset?.finished ? 'documents' : 'run');

async function route() {
  const [wanted, query] = location.hash.slice(1).split('?');
  const next = NAMES.includes(wanted) ? wanted : home();
  fault = null;
  const before = page.state;
  page.state = Object.fromEntries(new URLSearchParams(query ?? ''));
  if (next === name) {
    current.changed?.();
  } else {
    // A tap that was chosen stays chosen.
    if (name && !page.state.tap && before.tap) page.state.tap = before.tap;
    current?.close?.();
    name = next;
    current = (offered(name) ? VIEWS[name] : () => nothing(name))(page);
    main.replaceChildren(current.element);
    document.title = `${name[0].toUpperCase()}${name.slice(1)} · Spile`;
    for (const link of document.querySelectorAll('#views a')) {
      if (link.dataset.view === name) link.setAttribute('aria-current', 'page');
      else link.removeAttribute('aria-current');
    }
    try { await current.update(); } catch (error) { page.fault(error); }
  }
  drawStrip();
}

function themed() {
  const dark = matchMedia('(prefers-color-scheme: dark)').matches;
  const shown = document.documentElement.dataset.theme ?? (dark ? 'dark' : 'light');
  const next = shown === 'dark' ? 'light' : 'dark';
  document.documentElement.dataset.theme = next;
  localStorage.setItem('theme', next);
  current?.themed?.();
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const field = event.target.closest('input, select, textarea');
  if (event.key === 'Escape' && field) { field.blur(); return; }
  if (field || keys.open) return;
  const taps = page.dataset ? page.taps(current?.kind).map((each) => each.name) : [];
  const shift = (step) => taps.length && page.set({ tap: taps[(taps.indexOf(page.chosen(current?.kind)) + step + taps.length) % taps.length] });
  const known = {
    ...Object.fromEntries(NAMES.map((each, at) => [String((at + 1) % 10), () => offered(each) && page.go(each, {})])),
    t: themed, '?': () => keys.showModal(), '[': () => shift(-1), ']': () => shift(1),
    '/': () => { page.go('documents', {}); setTimeout(() => current.keys?.['/']?.(), 50); }, ...current?.keys,
  };
  if (known[event.key]) { event.preventDefault(); known[event.key](); }
}

const chosen = localStorage.getItem('theme');
if (chosen === 'light' || chosen === 'dark') document.documentElement.dataset.theme = chosen;
document.getElementById('views').append(...NAMES.map((each, at) =>
  h('a', { href: `#${each}`, 'data-view': each, accessKey: String((at + 1) % 10) }, h('kbd', { ariaHidden: 'true' }, (at + 1) % 10), `${each[0].toUpperCase()}${each.slice(1)}`)));
document.getElementById('theme').addEventListener('click', themed);
document.getElementById('help').addEventListener('click', () => keys.showModal());
document.addEventListener('keydown', pressed);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => current?.themed?.());
addEventListener('hashchange', route);

await poll();
await route();
