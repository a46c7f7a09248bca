// Sampled rows in the plane.

import { ask } from './api.js';
import { cloud } from './charts.js';
import { choice, h, select } from './dom.js';
import { count, short } from './words.js';

const OWN = [['position', 'Position'], ['norm', 'Norm'], ['token', 'Token']];
const KEPT = 'column:'; // before the name of a kept column, in `colour`
const CLASSES = 6; // colours of classes; with more, the last is of all others

export function view(page) {
  const element = h('section', { className: 'view', ariaLabel: 'Projection' });
  let timer = null;

  async function update() {
    clearTimeout(timer);
    const { method = 'pca', colour = 'position', first = 'without' } = page.state;
    const tools = h('div', { className: 'toolbar' },
      select('Tap', page.taps('dense').map((each) => [each.name, each.name]), page.chosen('dense'), (value) => page.set({ tap: value })),
      choice('Method', [['pca', 'PCA'], ['umap', 'UMAP', page.dataset.umap ? '' : 'needs umap-learn: pip install umap-learn']], method, (value) => page.set({ method: value })),
      select('Coloured by', [...OWN, ...page.dataset.columns.map((each) => [KEPT + each, each])], colour, (value) => page.set({ colour: value })),
      choice('First tokens', [['without', 'Left out', 'Position 0 is often far from all others'], ['with', 'Shown']], first, (value) => page.set({ first: value }), true));
    if (method === 'umap' && !page.dataset.umap) {
      element.replaceChildren(tools, h('p', { className: 'empty' }, 'UMAP needs umap-learn where the server runs: pip install umap-learn'));
      return;
    }
    const column = colour.startsWith(KEPT) ? colour.slice(KEPT.length) : null;
    const told = await ask('projection', { tap: page.chosen('dense'), method, first, column });
    if (told.making || told.kept?.making) timer = setTimeout(() => update().catch(page.fault), 700);
    if (!told.value || !told.value.x.length) {
      element.replaceChildren(tools, h('p', { className: 'empty' }, told.error ?? 'Being made…'));
      return;
    }
    const made = told.value;
    const kept = column && told.kept?.value;
    const classes = kept ? classesOf(kept) : null;
    if (told.kept?.error) page.fault(new Error(told.kept.error));
    const output = h('output', { className: 'inspector', ariaLive: 'off' }, `${count(made.x.length)} sampled rows. Point at one; a click opens its document.`);
    const axes = made.shares.length ? made.shares.slice(0, 2).map((share, at) => `axis ${at + 1} holds ${(100 * share).toFixed(1)} %`).join(', ') + ' of the variance' : 'distances are UMAP’s own';
    element.replaceChildren(tools, cloud({
      x: made.x, y: made.y, classes: classes?.of, value: kept ? ranks(kept) : colours(made, colour), label: `${told.tap} in the plane`,
      onhover: (at) => {
        if (at >= 0) output.replaceChildren(...[['token', JSON.stringify(made.piece[at])], ['position', made.position[at]], ['norm', short(made.norm[at])], ['document', made.doc[at]], ...(kept ? [[column, String(kept[at] ?? 'none')]] : [])].map(([name, value]) => h('span', {}, h('b', {}, name), ` ${value}`)));
      },
      onpick: (at) => page.go('documents', { doc: made.doc[at], token: made.offset[at], by: 'norm', tap: told.tap }),
    }), classes && legend(column, classes.names), output, h('p', { className: 'quiet' }, `${axes}.`));
  }

  return { element, kind: 'dense', update, changed: () => update().catch(page.fault), read: () => update().catch(page.fault), themed: () => update().catch(page.fault), close: () => clearTimeout(timer) };
}

/** By rank, so that no outlier takes all colours; tokens by their id, spread. */
function colours(made, by) {
  if (by === 'token') return made.id.map((id) => (id * 0.6180339887) % 1);
  return ranks(by === 'norm' ? made.norm : made.position);
}

/** From 0 to 1, by order; equal values share a rank. */
function ranks(values) {
  const order = [...values.keys()].sort((a, b) => values[a] - values[b]);
  const found = new Array(values.length);
  order.forEach((at, rank) => { found[at] = rank && values[at] === values[order[rank - 1]] ? found[order[rank - 1]] : rank / Math.max(1, values.length - 1); });
  return found;
}

/** Few values, or texts, as classes: the class of each point, and their names with counts, the largest first. */
function classesOf(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  if (counts.size > CLASSES && values.every((value) => value === null || typeof value === 'number')) return null;
  const sorted = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a));
  const own = sorted.slice(0, counts.size > CLASSES ? CLASSES - 1 : CLASSES);
  const names = own.map((value) => [value === null ? 'none' : String(value), counts.get(value)]);
  const others = sorted.slice(own.length);
  if (others.length) names.push([`${count(others.length)} others`, others.reduce((sum, value) => sum + counts.get(value), 0)]);
  const place = new Map(own.map((value, at) => [value, at]));
  return { names, of: values.map((value) => place.get(value) ?? own.length) };
}

function legend(column, names) {
  return h('p', { className: 'legend classes' }, h('b', {}, column),
    names.map(([name, number], at) => h('span', {}, h('i', { className: `c${at}` }), ` ${name} (${count(number)})`)));
}
