// How alike the taps are.

import { ask } from './api.js';
import { heatmap } from './charts.js';
import { choice, h } from './dom.js';
import { count } from './words.js';

const KINDS = {
  cka: ['Linear CKA', 'Whether the same tokens lie near one another: 1 if one is the other, turned and scaled.'],
  cosine: ['Cosine', 'Between the rows of the same token, on average. Of taps of the same width.'],
};

export function view(page) {
  const element = h('section', { className: 'view', ariaLabel: 'Similarity' });
  let timer = null;

  async function update() {
    clearTimeout(timer);
    const told = await ask('similarity');
    if (told.making) timer = setTimeout(() => update().catch(page.fault), 700);
    const kind = page.state.kind ?? 'cka';
    const head = h('header', { className: 'about' }, h('h2', {}, 'Similarity across taps'),
      choice('Kind', Object.entries(KINDS).map(([key, [name]]) => [key, name]), kind, (value) => page.set({ kind: value })),
      h('p', { className: 'quiet' }, KINDS[kind][1]));
    if (!told.value || !told.value.rows) {
      element.replaceChildren(head, h('p', { className: 'empty' }, told.error ?? 'Being made…'));
      return;
    }
    const { taps, rows } = told.value;
    const table = told.value[kind];
    const low = kind === 'cka' ? 0 : Math.min(0, ...table.flat().filter((each) => each !== null));
    const output = h('output', { className: 'quiet', ariaLive: 'off' }, `Of ${count(rows)} sampled rows.`);
    element.replaceChildren(head, heatmap(taps, table, { label: `${KINDS[kind][0]} of all taps`, low,
      onhover: (a, b, value) => output.replaceChildren(`${a} and ${b}: ${value === null ? 'of other widths' : value.toFixed(4)}`) }), output);
  }

  return { element, update, changed: () => update().catch(page.fault), read: () => update().catch(page.fault), themed: () => update().catch(page.fault), close: () => clearTimeout(timer) };
}
