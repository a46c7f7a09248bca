// Labels: two values of a kept column, the direction between them, and how well layers tell them apart.

import { ask } from './api.js';
import { lines } from './charts.js';
import { h, select } from './dom.js';
import { count, layerOf, percent, short } from './words.js';

export function view(page) {
  const element = h('section', { className: 'view', ariaLabel: 'Labels' });
  const tools = h('div', { className: 'toolbar' });
  const along = h('div', {});
  const layers = h('figure', {});
  const ends = h('div', { className: 'pair' });
  let timer = null;

  async function update() {
    clearTimeout(timer);
    const told = await ask('labels');
    if (told.making) again();
    if (!told.value?.length) {
      element.replaceChildren(h('p', { className: 'empty' }, told.error ?? (told.making ? 'Being made…' : 'No kept column has two values that occur in several documents.')));
      return;
    }
    const column = told.value.find((each) => each.name === page.state.column) ?? told.value[0];
    const names = column.values.map((each) => each.value);
    const positive = names.includes(page.state.positive) ? page.state.positive : names[0];
    const negative = names.includes(page.state.negative) && page.state.negative !== positive ? page.state.negative : names.find((each) => each !== positive);
    const values = column.values.map((each) => [each.value, `${each.value} (${count(each.documents)})`]);
    tools.replaceChildren(
      select('Tap', page.taps('dense').map((each) => [each.name, each.name]), page.chosen('dense'), (value) => page.set({ tap: value })),
      select('Column', told.value.map((each) => [each.name, each.name]), column.name, (value) => page.set({ column: value, positive: null, negative: null })),
      select('From', values, negative, (value) => page.set({ negative: value, positive: value === positive ? negative : positive })),
      select('To', values, positive, (value) => page.set({ positive: value, negative: value === negative ? positive : negative })));
    if (!element.contains(tools)) element.replaceChildren(tools, h('div', { className: 'pair' }, along, layers), ends);
    const asked = { column: column.name, positive, negative };
    const [direction, probe] = await Promise.all([ask('direction', { tap: page.chosen('dense'), ...asked }), ask('probe', asked)]);
    if (direction.making || probe.making) again();
    page.dataset.directions = direction.directions;
    drawDirection(direction, asked);
    drawProbe(probe, asked);
  }

  function again() { timer = setTimeout(() => update().catch(page.fault), 700); }

  function drawDirection({ value: made, error, tap }, { positive, negative }) {
    if (!made) {
      along.replaceChildren(h('p', { className: 'empty' }, error ?? 'Being made…'));
      ends.replaceChildren();
      return;
    }
    const series = [[positive, 0], [negative, 1]].map(([name, side]) => ({
      name, points: made.centres.map((x, at) => [x, made.counts[side][at], `${name}: ${count(made.counts[side][at])} documents at ${short(x)}`]),
    }));
    const colour = (doc) => page.link('documents', { doc, tap, by: 'direction', direction: made.id });
    along.replaceChildren(h('figure', {},
      h('figcaption', {}, 'Documents along the direction', h('small', {}, `Mean rows of ${tap}; 0 is half way between the labels`)),
      lines(series, { label: `Documents along the direction from ${negative} to ${positive}`, dots: false, xText: short }),
      h('p', { className: 'quiet' }, `The means of ${count(made.documents[0])} and ${count(made.documents[1])} documents${made.of > made.documents[0] + made.documents[1] ? `, drawn from ${count(made.of)},` : ''} lie ${short(made.length)} apart, where a mean row is ${short(made.row)} long. ${percent(made.right)} of them lie on the side of their label. `,
        made.first ? '' : 'The first token of each context is left out.')));
    const listed = (name, documents) => h('figure', {}, h('figcaption', {}, name),
      h('div', { className: 'scroll' }, h('table', { className: 'ends' }, h('tbody', {}, documents.map((each) => h('tr', {},
        h('td', { className: 'number' }, short(each.value)),
        h('td', {}, h('span', { className: each.positive ? 'label c0' : 'label c1' }, each.positive ? positive : negative)),
        h('td', {}, h('a', { href: colour(each.doc), title: `document ${each.doc}, coloured by the direction` }, (each.preview ?? '').trim().slice(0, 90) || `document ${each.doc}`))))))));
    ends.replaceChildren(listed(`Furthest towards ${positive}`, made.high), listed(`Furthest towards ${negative}`, made.low));
  }

  function drawProbe({ value: made, error }, { positive, negative }) {
    const head = h('figcaption', {}, 'A linear probe on each tap', h('small', {}, `The share of held-out documents that it tells apart: ${positive} or ${negative}`));
    if (!made) {
      layers.replaceChildren(head, h('p', { className: 'empty' }, error ?? 'Being made…'));
      return;
    }
    const sites = new Map();
    for (const { tap, accuracy } of made.taps) {
      const { site, layer } = layerOf(tap);
      sites.set(site, [...(sites.get(site) ?? []), [layer ?? 0, accuracy, `${tap}: ${percent(accuracy)}`]]);
    }
    const shown = [...sites].map(([name, points]) => ({ name, points: points.sort((a, b) => a[0] - b[0]) }));
    layers.replaceChildren(head, lines(shown, { label: 'Accuracy of a probe by layer' }),
      h('p', { className: 'quiet' }, `Ridge regression on the mean rows of ${count(made.trained)} documents, tested on ${count(made.held)} others. Always the more frequent label: ${percent(made.usual)}.`));
  }

  return { element, kind: 'dense', update, changed: () => update().catch(page.fault), grown: () => update().catch(page.fault), close: () => clearTimeout(timer) };
}
