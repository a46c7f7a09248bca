// Documents: found, and read token by token.

import { Moot, ask, handIn } from './api.js';
import { choice, h, say, select } from './dom.js';
import { legend, token } from './tokens.js';
import { count, short } from './words.js';

const LISTED = 50;
const PAGE = 1024;

export function view(page) {
  const list = h('ol', { className: 'documents', tabIndex: -1, ariaLabel: 'Documents' });
  const search = h('input', { type: 'search', placeholder: 'Search text, or a number', ariaLabel: 'Search documents', autocomplete: 'off', spellcheck: false, oninput: later });
  const foot = h('p', { className: 'quiet' });
  const side = h('aside', {}, h('div', { className: 'search' }, search, h('kbd', {}, '/')), list, foot);
  const tools = h('div', { className: 'toolbar' });
  const text = h('div', { className: 'text' });
  const about = h('header', { className: 'about' });
  const told = h('output', { className: 'inspector', ariaLive: 'off' });
  const reading = h('article', {}, tools, about, text, told);
  const element = h('section', { className: 'view split', ariaLabel: 'Documents' }, side, reading);
  const file = h('input', { type: 'file', accept: '.npy,.json', className: 'unseen', tabIndex: -1, ariaLabel: 'A direction, as .npy or JSON', onchange: upload });
  let documents = [];
  let more = null; // how to list further
  let shown = null;
  let timer = null;

  function later() {
    clearTimeout(timer);
    timer = setTimeout(() => find().catch(page.fault), 180);
  }

  async function find() {
    documents = [];
    more = { start: 0, after: 0 };
    await further();
    if (documents.length && !page.state.doc) open(documents.find((each) => each.rows)?.doc ?? documents[0].doc);
  }

  async function further() {
    const q = search.value.trim();
    const before = documents.length;
    const answer = await ask('documents', q ? { q, after: more.after, count: LISTED } : { start: more.start, count: LISTED });
    documents = documents.concat(answer.documents);
    more = q ? answer.next !== null && { after: answer.next } : documents.length < answer.total && { start: documents.length };
    // Of a large dataset a search stops when its time is up: it goes on until a page is full.
    if (q && more && documents.length - before < LISTED && search.value.trim() === q) return further();
    drawList(q, answer);
    return undefined;
  }

  function drawList(q, answer) {
    list.replaceChildren(...documents.map((each) => h('li', {},
      h('button', { type: 'button', className: each.rows ? '' : 'left-out', disabled: !each.rows, ariaCurrent: String(each.doc) === String(page.state.doc) ? 'true' : null, onclick: () => open(each.doc, each.offset) },
        h('span', { className: 'number' }, each.doc),
        h('span', { className: 'preview' }, each.skipped ? `left out: ${each.skipped}` : (each.snippet ?? each.preview ?? '').trim() || '(no preview)'),
        h('span', { className: 'length' }, short(each.rows))))));
    const said = q ? `${documents.length}${more ? '+' : ''} found` : `${count(answer.total)} documents`;
    foot.replaceChildren(said, more ? h('button', { type: 'button', className: 'link', onclick: () => further().catch(page.fault) }, 'More') : '');
    say(said);
  }

  function open(doc, offset) {
    page.set({ doc, start: offset ? Math.floor(offset / PAGE) * PAGE : null, token: offset ?? null });
  }

  function move(step) {
    const usable = documents.filter((each) => each.rows);
    const at = usable.findIndex((each) => String(each.doc) === String(page.state.doc));
    const next = usable[Math.min(usable.length - 1, Math.max(0, at + step))];
    if (next) open(next.doc);
  }

  async function draw() {
    drawTools();
    for (const button of list.querySelectorAll('button')) {
      const own = button.querySelector('.number').textContent === String(page.state.doc);
      if (own) { button.setAttribute('aria-current', 'true'); button.scrollIntoView({ block: 'nearest' }); } else button.removeAttribute('aria-current');
    }
    if (page.state.doc === undefined || page.state.doc === null) return;
    const { doc, start, by = 'norm', channel = 0, direction } = page.state;
    const { tap } = page;
    if (by === 'direction' && !direction) return;
    text.classList.add('waiting');
    shown = await ask('document', { doc, start: start ?? 0, count: PAGE, tap, by, channel: by === 'channel' ? channel : null, direction: by === 'direction' ? direction : null });
    text.classList.remove('waiting');
    drawText();
  }

  function drawTools() {
    const { by = 'norm', channel = 0, direction } = page.state;
    const { tap } = page;
    const known = page.dataset.directions.filter((each) => each.width === page.width(tap));
    const number = h('input', { type: 'number', min: 0, max: page.width(tap) - 1, value: channel, ariaLabel: 'Channel', onchange: () => page.set({ channel: number.value }) });
    tools.replaceChildren(...[
      select('Tap', page.dataset.taps.map((each) => [each.name, each.name]), page.tap, (value) => page.set({ tap: value })),
      choice('Coloured by', [['norm', 'Norm', 'length of the row'], ['channel', 'Channel', 'one of its values'], ['direction', 'Direction', 'projection on a vector']], by,
        (value) => (value === 'direction' && !known.length ? file.click() : page.set({ by: value, direction: value === 'direction' ? direction ?? known[known.length - 1].id : direction })), true),
      by === 'channel' ? number : null,
      by === 'direction' ? select('', known.map((each) => [String(each.id), each.name]), String(direction), (value) => page.set({ direction: value })) : null,
      h('button', { type: 'button', className: 'plain', title: 'A vector as .npy or JSON', onclick: () => file.click() }, 'Add a direction…'), file].filter(Boolean));
  }

  function drawText() {
    const ids = Boolean(page.dataset.no_text);
    const { by = 'norm', channel = 0 } = page.state;
    const naming = by === 'norm' ? 'norm' : by === 'channel' ? `channel ${channel}` : 'projection';
    const kept = Object.entries(shown.about).filter(([name]) => !['doc', 'tokens', 'rows', 'first_row', 'skipped', 'preview'].includes(name));
    about.replaceChildren(h('h2', {}, `Document ${count(shown.doc)}`),
      h('p', { className: 'quiet' }, `${count(shown.about.tokens)} tokens, ${count(shown.about.rows)} rows`,
        kept.map(([name, value]) => [' · ', h('span', { className: 'kept' }, `${name} ${value ?? '–'}`)])),
      legend(shown.scale, naming));
    const tokens = shown.pieces.map((piece, at) => token(piece, shown.values[at], shown.scale, {
      special: shown.flags[at].some((flag) => ['bos', 'eos', 'special'].includes(flag)), ids, 'data-at': at, tabIndex: at ? -1 : 0,
    }));
    const pages = [];
    if (shown.start > 0) pages.push(h('button', { type: 'button', onclick: () => page.set({ start: Math.max(0, shown.start - PAGE), token: null }) }, '← Before'));
    if (shown.start + tokens.length < shown.tokens) pages.push(h('button', { type: 'button', onclick: () => page.set({ start: shown.start + tokens.length, token: null }) }, 'After →'));
    const range = `Tokens ${count(shown.start)} to ${count(shown.start + tokens.length - 1)} of ${count(shown.tokens)}`;
    text.replaceChildren(h('div', { className: 'tokens', lang: '', translate: false }, tokens),
      h('p', { className: 'pages' }, pages, pages.length ? h('span', { className: 'quiet' }, range) : null));
    const wanted = page.state.token === null || page.state.token === undefined ? -1 : shown.offsets.indexOf(Number(page.state.token));
    inspect(Math.max(0, wanted));
    if (wanted >= 0) { tokens[wanted].classList.add('wanted'); tokens[wanted].scrollIntoView({ block: 'center' }); }
  }

  function inspect(at) {
    if (!shown || at >= shown.pieces.length) return;
    const fields = [['token', JSON.stringify(shown.pieces[at])], ['id', shown.ids[at]], ['offset', shown.offsets[at]], ['position', shown.positions[at]],
      ['value', shown.values[at] === null ? 'not finite' : shown.values[at].toPrecision(5)], ['', shown.flags[at].join(' ')]];
    told.replaceChildren(...fields.filter(([, value]) => value !== '').map(([name, value]) => h('span', {}, name ? h('b', {}, name) : null, ` ${value}`)));
  }

  function tokenOf(event) {
    const found = event.target.closest?.('.token');
    return found ? Number(found.dataset.at) : -1;
  }

  text.addEventListener('mouseover', (event) => { const at = tokenOf(event); if (at >= 0) inspect(at); });
  text.addEventListener('focusin', (event) => { const at = tokenOf(event); if (at >= 0) inspect(at); });
  text.addEventListener('keydown', (event) => {
    const at = tokenOf(event);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (at < 0 || !step) return;
    const next = text.querySelectorAll('.token')[at + step];
    if (next) { event.preventDefault(); event.target.tabIndex = -1; next.tabIndex = 0; next.focus(); }
  });

  async function upload() {
    if (!file.files.length) return;
    try {
      const answer = await handIn(file.files[0]);
      page.dataset.directions = answer.directions;
      const own = answer.directions.find((each) => each.id === answer.id);
      if (own.width !== page.width(page.tap)) throw new Error(`${own.name} has ${own.width} values; choose a tap as wide`);
      page.set({ by: 'direction', direction: answer.id });
    } catch (error) { page.fault(error); }
    file.value = '';
  }

  return {
    element,
    update: async () => {
      if (!more && !documents.length) await find();
      try { await draw(); } catch (error) { if (!(error instanceof Moot)) throw error; }
    },
    changed: () => draw().catch(page.fault),
    grown: () => { if (!search.value && documents.length < LISTED) find().catch(page.fault); },
    keys: { j: () => move(1), k: () => move(-1), '/': () => search.focus() },
    close: () => clearTimeout(timer),
  };
}
