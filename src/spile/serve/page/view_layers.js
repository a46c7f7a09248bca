// Layers: how large activations are, how heavy their tails, and where in a context.

import { ask } from './api.js';
import { bars, lines } from './charts.js';
import { h, select } from './dom.js';
import { count, layerOf, short } from './words.js';

export function view(page) {
  const element = h('section', { className: 'view', ariaLabel: 'Layers' });

  async function update() {
    const [layers, positions] = await Promise.all([ask('layers'), ask('positions', { tap: page.tap })]);
    element.replaceChildren(
      h('div', { className: 'pair' },
        figure('Mean norm', 'The length of a row, on average', lines(bySite(layers.taps, 'norm'), { label: 'Mean norm by layer' })),
        figure('Kurtosis', 'Over a row’s channels, on average; 3 is a normal distribution’s', page.taps('dense').length ? lines(bySite(layers.taps.filter((each) => !page.latents(each.tap)), 'kurtosis'), { label: 'Kurtosis by layer', log: true }) : h('p', { className: 'empty' }, 'Latents have no channels, and no kurtosis over them.'))),
      h('div', { className: 'pair' },
        figure('Largest value', 'Absolute, of any channel of any row', lines(bySite(layers.taps, 'largest'), { label: 'Largest value by layer', log: true })),
        h('figure', {},
          h('figcaption', {}, 'Norm by position', h('small', {}, 'Attention sinks stand out at the beginning'),
            select('', page.dataset.taps.map((each) => [each.name, each.name]), page.tap, (value) => page.set({ tap: value }))),
          bars(positions.bins.map((bin) => ({
            name: bin.from === bin.to ? String(bin.from) : `${bin.from}`, value: bin.norm,
            title: `${bin.from === bin.to ? `position ${bin.from}` : `positions ${bin.from} to ${bin.to}`}: ${short(bin.norm)} (${count(bin.rows)} rows)`,
          })), { label: `Norm of ${page.tap} by position`, height: 220, log: true }))),
      table(layers.taps));
  }

  return { element, update, changed: () => update().catch(page.fault), read: () => update().catch(page.fault) };
}

function figure(title, more, drawing) {
  return h('figure', {}, h('figcaption', {}, title, h('small', {}, more)), drawing);
}

function bySite(taps, what) {
  const sites = new Map();
  for (const each of taps) {
    const { site, layer } = layerOf(each.tap);
    if (!sites.has(site)) sites.set(site, []);
    sites.get(site).push([layer ?? 0, each[what], `${each.tap}: ${short(each[what])}`]);
  }
  return [...sites].map(([name, points]) => ({ name, points: points.sort((a, b) => a[0] - b[0]) }));
}

function table(taps) {
  const heads = ['Tap', 'Mean norm', 'Deviation', 'Kurtosis', 'Largest', 'Not finite'];
  return h('div', { className: 'scroll' }, h('table', {}, h('caption', {}, 'The same as numbers'),
    h('thead', {}, h('tr', {}, heads.map((head, at) => h('th', { scope: 'col', className: at ? 'number' : '' }, head)))),
    h('tbody', {}, taps.map((each) => h('tr', {}, h('td', { className: 'name' }, each.tap),
      [each.norm, each.deviation, each.kurtosis, each.largest].map((value) => h('td', { className: 'number' }, short(value))),
      h('td', { className: each.nonfinite ? 'number fault' : 'number' }, count(each.nonfinite)))))));
}
