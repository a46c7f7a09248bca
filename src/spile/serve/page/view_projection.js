// Sampled rows in the plane.

import { ask } from './api.js';
import { cloud } from './charts.js';
import { choice, h, select } from './dom.js';
import { count, short } from './words.js';

export function view(page) {
  const element = h('section', { className: 'view', ariaLabel: 'Projection' });
  let timer = null;

  async function update() {
    clearTimeout(timer);
    const { method = 'pca', colour = 'position', first = 'without' } = page.state;
    const tools = h('div', { className: 'toolbar' },
      select('Tap', page.taps('dense').map((each) => [each.name, each.name]), page.chosen('dense'), (value) => page.set({ tap: value })),
      choice('Method', [['pca', 'PCA'], ['umap', 'UMAP', page.dataset.umap ? '' : 'needs umap-learn: pip install umap-learn']], method, (value) => page.set({ method: value })),
      choice('Coloured by', [['position', 'Position'], ['norm', 'Norm'], ['token', 'Token']], colour, (value) => page.set({ colour: value }), true),
      choice('First tokens', [['without', 'Left out', 'Position 0 is often far from all others'], ['with', 'Shown']], first, (value) => page.set({ first: value }), true));
    if (method === 'umap' && !page.dataset.umap) {
      element.replaceChildren(tools, h('p', { className: 'empty' }, 'UMAP needs umap-learn where the server runs: pip install umap-learn'));
      return;
    }
    const told = await ask('projection', { tap: page.chosen('dense'), method, first });
    if (told.making) timer = setTimeout(() => update().catch(page.fault), 700);
    if (!told.value || !told.value.x.length) {
      element.replaceChildren(tools, h('p', { className: 'empty' }, told.error ?? 'Being made…'));
      return;
    }
    const made = told.value;
    const output = h('output', { className: 'inspector', ariaLive: 'off' }, `${count(made.x.length)} sampled rows. Point at one; a click opens its document.`);
    const axes = made.shares.length ? made.shares.slice(0, 2).map((share, at) => `axis ${at + 1} holds ${(100 * share).toFixed(1)} %`).join(', ') + ' of the variance' : 'distances are UMAP’s own';
    element.replaceChildren(tools, cloud({
      x: made.x, y: made.y, value: colours(made, colour), label: `${told.tap} in the plane`,
      onhover: (at) => {
        if (at >= 0) output.replaceChildren(...[['token', JSON.stringify(made.piece[at])], ['position', made.position[at]], ['norm', short(made.norm[at])], ['document', made.doc[at]]].map(([name, value]) => h('span', {}, h('b', {}, name), ` ${value}`)));
      },
      onpick: (at) => page.go('documents', { doc: made.doc[at], token: made.offset[at], by: 'norm', tap: told.tap }),
    }), output, h('p', { className: 'quiet' }, `${axes}.`));
  }

  return { element, kind: 'dense', update, changed: () => update().catch(page.fault), read: () => update().catch(page.fault), themed: () => update().catch(page.fault), close: () => clearTimeout(timer) };
}

/** By rank, so that no outlier takes all colours; tokens by their id, spread. */
function colours(made, by) {
  if (by === 'token') return made.id.map((id) => (id * 0.6180339887) % 1);
  const values = by === 'norm' ? made.norm : made.position;
  const order = [...values.keys()].sort((a, b) => values[a] - values[b]);
  const found = new Array(values.length);
  order.forEach((at, rank) => { found[at] = rank && values[at] === values[order[rank - 1]] ? found[order[rank - 1]] : rank / Math.max(1, values.length - 1); });
  return found;
}
