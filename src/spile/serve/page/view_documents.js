// Documents: found, and read token by token.

import { Moot, ask, handIn } from './api.js';
import { besides, hasBesides } from './besides.js';
import { choice, h, say, select } from './dom.js';
import { legend, spans, token } from './tokens.js';
import { count, percent, short } from './words.js';

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
  const latents = h('section', { className: 'token-latents', ariaLabel: 'Latents of a token' });
  const beside = h('section', { ariaLabel: 'Next tokens and attention' });
  const panel = h('div', { className: 'token-side' }, latents, beside);
  const body = h('div', {}, h('div', {}, text, told), panel);
  const reading = h('article', {}, tools, about, body);
  const element = h('section', { className: 'view split', ariaLabel: 'Documents' }, side, reading);
  const file = h('input', { type: 'file', accept: '.npy,.json', className: 'unseen', tabIndex: -1, ariaLabel: 'A direction, as .npy or JSON', onchange: upload });
  let documents = [];
  let more = null; // how to list further
  let shown = null;
  let drawn = null; // what of the address the text was drawn for
  let picked = -1; // the token whose latents are listed
  let timer = null;

  function later() {
    clearTimeout(timer);
    timer = setTimeout(() => find().catch(page.fault), 180);
  }

  async function find() {
    documents = [];
    more = { start: 0, after: 0 };
    await further();
    if (documents.length && !page.state.doc && element.isConnected) open(documents.find((each) => each.rows)?.doc ?? documents[0].doc);
  }

  async function further() {
    const q = search.value.trim();
    const before = documents.length;
    const answer = await ask('documents', q ? { q, after: more.after, count: LISTED } : { start: more.start, count: LISTED });
    documents = documents.concat(answer.documents);
    more = q ? answer.next !== null && { after: answer.next } : documents.length < answer.total && { start: documents.length };
    // In a large dataset a search stops when its time is up: continue until a page is full.
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
    page.set({ doc, start: null, token: offset ?? null });
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
    const { doc, start, token: wanted, channel = 0, direction, latent = 0 } = page.state;
    const { tap } = page;
    const by = colouring();
    if (by === 'direction' && !direction) return;
    text.classList.add('waiting');
    shown = await ask('document', { doc, start, token: wanted, count: PAGE, tap, by, ...{ channel: { channel }, direction: { direction }, latent: { latent } }[by] });
    text.classList.remove('waiting');
    drawText();
  }

  /** What tokens are coloured by: of latents, and of dense rows, not the same can be asked. */
  function colouring() {
    const { by, latent } = page.state;
    if (page.latents(page.tap)) return ['latent', 'active'].includes(by) ? by : latent ? 'latent' : 'active';
    const [usual, also] = summed() ? ['sum', 'norm'] : ['norm', 'norm'];
    return [also, 'channel', 'direction'].includes(by) ? by : usual;
  }

  /** Whether a tap holds attributions (of each token, or of each head), whose signs matter. */
  function summed() {
    return /_attr(\.|$)/.test(page.tap);
  }

  function drawTools() {
    const { channel = 0, direction, latent = 0 } = page.state;
    const { tap } = page;
    const by = colouring();
    const total = page.latents(tap);
    if (total) {
      const own = h('input', { type: 'number', min: 0, max: total - 1, value: latent, ariaLabel: 'Latent', onchange: () => page.set({ latent: own.value }) });
      tools.replaceChildren(...[
        select('Tap', page.dataset.taps.map((each) => [each.name, each.name]), page.tap, (value) => page.set({ tap: value })),
        choice('Coloured by', [['latent', 'Latent', 'how strongly one latent fires'], ['active', 'Active latents', 'how many fire']], by, (value) => page.set({ by: value }), true),
        by === 'latent' ? own : null,
        by === 'latent' ? h('a', { href: page.link('latents', { tap, latent }) }, 'Its top rows') : null].filter(Boolean));
      return;
    }
    const known = page.dataset.directions.filter((each) => each.width === page.width(tap));
    const number = h('input', { type: 'number', min: 0, max: page.width(tap) - 1, value: channel, ariaLabel: 'Channel', onchange: () => page.set({ channel: number.value }) });
    tools.replaceChildren(...[
      select('Tap', page.dataset.taps.map((each) => [each.name, each.name]), page.tap, (value) => page.set({ tap: value })),
      choice('Coloured by', [...(summed() ? [['sum', 'Attribution', 'the sum of its values']] : []), ['norm', 'Norm', 'length of the row'], ['channel', 'Channel', 'one of its values'], ['direction', 'Direction', 'projection on a vector']], by,
        (value) => (value === 'direction' && !known.length ? file.click() : page.set({ by: value, direction: value === 'direction' ? direction ?? known[known.length - 1].id : direction })), true),
      by === 'channel' ? number : null,
      by === 'direction' ? select('', known.map((each) => [String(each.id), each.name]), String(direction), (value) => page.set({ direction: value })) : null,
      h('button', { type: 'button', className: 'plain', title: 'A vector as .npy or JSON', onclick: () => file.click() }, 'Add a direction…'), file].filter(Boolean));
  }

  function drawText() {
    const ids = Boolean(page.dataset.no_text);
    const { channel = 0, latent = 0 } = page.state;
    const naming = { norm: 'norm', sum: 'attribution', channel: `channel ${channel}`, direction: 'projection', latent: `latent ${latent}`, active: 'latents that fire' }[colouring()];
    const kept = Object.entries(shown.about).filter(([name]) => !['doc', 'tokens', 'rows', 'first_row', 'skipped', 'preview'].includes(name));
    about.replaceChildren(h('h2', {}, `Document ${count(shown.doc)}`),
      h('p', { className: 'quiet' }, `${count(shown.about.tokens)} tokens, ${count(shown.about.rows)} rows`,
        kept.map(([name, value]) => [' · ', h('span', { className: 'kept' }, `${name} ${value ?? '–'}`)])),
      shown.gaps.length ? h('p', { className: 'quiet' }, leftOut()) : '',
      legend(shown.scale, naming));
    const tokens = shown.pieces.map((piece, at) => token(piece, shown.values[at], shown.scale, {
      special: shown.flags[at].some((flag) => ['bos', 'eos', 'special'].includes(flag)), ids, 'data-at': at, tabIndex: at ? -1 : 0,
    }));
    const pages = [];
    if (shown.start > 0) pages.push(h('button', { type: 'button', onclick: () => page.set({ start: Math.max(0, shown.start - PAGE), token: null }) }, '← Before'));
    if (shown.start + tokens.length < shown.tokens) pages.push(h('button', { type: 'button', onclick: () => page.set({ start: shown.start + tokens.length, token: null }) }, 'After →'));
    const range = `Rows ${count(shown.start)} to ${count(shown.start + tokens.length - 1)} of ${count(shown.tokens)}`;
    text.replaceChildren(h('div', { className: 'tokens', lang: '', translate: false }, spans(tokens, shown.gaps)),
      h('p', { className: 'pages' }, pages, pages.length ? h('span', { className: 'quiet' }, range) : null));
    const wanted = page.state.token === null || page.state.token === undefined ? -1 : shown.offsets.indexOf(Number(page.state.token));
    inspect(Math.max(0, wanted));
    const place = JSON.stringify([shown.doc, shown.start, wanted]);
    if (wanted >= 0) {
      tokens[wanted].classList.add('wanted');
      if (place !== drawn) tokens[wanted].scrollIntoView({ block: 'center' });
    }
    drawn = place;
    picked = -1;
    latents.hidden = !page.latents(page.tap);
    beside.hidden = !hasBesides(page);
    panel.hidden = latents.hidden && beside.hidden;
    body.className = panel.hidden ? '' : 'with-side';
    if (!panel.hidden && tokens.length) pick(Math.max(0, wanted));
  }

  /** Why tokens are missing, and how that looks. */
  function leftOut() {
    const { where, every } = page.dataset;
    const flags = [where && `--where "${where}"`, every && `--every ${every}`].filter(Boolean);
    const known = shown.gaps.some((each) => each.pieces);
    const unknown = shown.gaps.some((each) => !each.pieces);
    const looks = [known && 'Grey underlined tokens have no stored row.', unknown && `⋯ n ⋯ marks n ${known ? 'more ' : ''}tokens without a stored row.`];
    return [looks.filter(Boolean).join(' '), ...(flags.length ? [' The dataset was made with ', h('code', {}, flags.join(' ')), '.'] : [])];
  }

  /** Lists what is stored of a token beside the values that colour the text. */
  async function pick(at) {
    if (at === picked || panel.hidden) return;
    picked = at;
    for (const each of text.querySelectorAll('.token.wanted')) each.classList.remove('wanted');
    text.querySelectorAll('.token')[at]?.classList.add('wanted');
    await Promise.all([latents.hidden ? null : listLatents(at), beside.hidden ? null : listBesides(at)]);
  }

  /** The likeliest next tokens; and the tokens that a head looks at, which are marked in the text. */
  async function listBesides(at) {
    const asked = shown;
    const answer = await besides(page, shown, at).catch(page.fault);
    if (!answer || shown !== asked || picked !== at) return;
    beside.replaceChildren(...answer.parts);
    const tokens = text.querySelectorAll('.token');
    for (const each of text.querySelectorAll('.token.looked')) each.classList.remove('looked');
    for (const offset of answer.looked) tokens[shown.offsets.indexOf(offset)]?.classList.add('looked');
  }

  async function listLatents(at) {
    const asked = shown;
    const answer = await ask('token', { tap: page.tap, doc: shown.doc, token: shown.offsets[at] }).catch(page.fault);
    // The tap may have changed since: a dense one has no latents, and its tokens are drawn soon.
    if (!answer?.latents || shown !== asked) return;
    const chosen = colouring() === 'latent' ? Number(page.state.latent ?? 0) : -1;
    const rows = answer.latents.map((each) => h('tr', { className: each.latent === chosen ? 'chosen' : '' },
      h('td', {}, h('button', { type: 'button', className: 'link', title: 'Colour the document by it', onclick: () => page.set({ by: 'latent', latent: each.latent, token: shown.offsets[at] }) }, each.latent)),
      h('td', { className: 'number' }, short(each.value)), h('td', { className: 'number', title: 'of the rows read so far' }, percent(each.share)),
      h('td', {}, h('a', { href: page.link('latents', { tap: page.tap, latent: each.latent }), title: `Top rows of latent ${each.latent}`, ariaLabel: `Top rows of latent ${each.latent}` }, '→'))));
    latents.replaceChildren(h('h3', {}, 'Latents of ', h('span', {}, shown.pieces[at] || '·')),
      h('p', { className: 'quiet' }, rows.length ? `${count(rows.length)} fire; at most ${count(answer.kept)} are stored` : 'None fires.'),
      rows.length ? h('table', {}, h('thead', {}, h('tr', {}, ['Latent', 'Value', 'Fires', ''].map((head) => h('th', { scope: 'col' }, head)))), h('tbody', {}, rows)) : '');
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
  text.addEventListener('focusin', (event) => {
    const at = tokenOf(event);
    if (at < 0) return;
    inspect(at);
    if (panel.hidden) return;
    page.note({ token: shown.offsets[at] });
    drawn = JSON.stringify([shown.doc, shown.start, at]);
    pick(at).catch(page.fault);
  });
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
