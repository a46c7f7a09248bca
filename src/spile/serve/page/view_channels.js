// Channels: those that stand out, and the tokens at which one is largest.

import { ask } from './api.js';
import { bars } from './charts.js';
import { choice, h, select } from './dom.js';
import { hits as listed, readOf } from './hits.js';
import { legend } from './tokens.js';
import { short } from './words.js';

const COLUMNS = [['largest', 'Largest'], ['mean', 'Mean'], ['deviation', 'Deviation'], ['kurtosis', 'Kurtosis']];
const CHARTED = 60;

export function view(page) {
  const chart = h('figure', {});
  const rows = h('tbody', {});
  const order = h('div', { className: 'toolbar' });
  const hits = h('div', { className: 'hits' });
  const element = h('section', { className: 'view split', ariaLabel: 'Channels' },
    h('aside', { className: 'wide' }, order, chart, h('div', { className: 'scroll tall' }, h('table', { className: 'pick' },
      h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'Channel'), COLUMNS.map(([, name]) => h('th', { scope: 'col' }, name)))), rows))),
    h('article', {}, hits));
  let channels = [];

  const tap = () => page.chosen('dense');
  const chosen = () => Number(page.state.channel ?? channels[0]?.channel ?? 0);

  async function update() {
    const told = await ask('channels', { tap: tap(), by: page.state.sort ?? 'largest' });
    channels = told.channels;
    order.replaceChildren(
      select('Tap', page.taps('dense').map((each) => [each.name, each.name]), tap(), (value) => page.set({ tap: value, channel: null })),
      choice('Ordered by', COLUMNS, told.by, (value) => page.set({ sort: value, channel: null }), true));
    chart.replaceChildren(h('figcaption', {}, 'Channels that stand out', h('small', {}, `The typical channel’s largest value is ${short(told.typical)}`)),
      bars(channels.slice(0, CHARTED).map((each) => ({
        name: String(each.channel), value: each[told.by] === null ? null : Math.abs(each[told.by]), title: `channel ${each.channel}: ${short(each[told.by])}`, channel: each.channel, chosen: each.channel === chosen(),
      })), { label: `Channels of ${tap()} by ${told.by}`, height: 170, log: told.by !== 'mean', onpick: (item) => page.set({ channel: item.channel }) }));
    rows.replaceChildren(...channels.map((each) => h('tr', { className: each.channel === chosen() ? 'chosen' : '' },
      h('td', {}, h('button', { type: 'button', className: 'link', ariaCurrent: each.channel === chosen() ? 'true' : null, onclick: () => page.set({ channel: each.channel }) }, each.channel)),
      COLUMNS.map(([name]) => h('td', { className: 'number' }, short(each[name]))))));
    rows.querySelector('.chosen')?.scrollIntoView({ block: 'nearest' });
    await top();
  }

  async function top() {
    const end = page.state.end ?? 'high';
    const told = await ask('top', { tap: tap(), channel: chosen(), end });
    const number = h('input', { type: 'number', min: 0, max: page.width(tap()) - 1, value: chosen(), ariaLabel: 'Channel', onchange: () => page.set({ channel: number.value }) });
    hits.replaceChildren(
      h('header', { className: 'about' }, h('h2', {}, 'Top tokens of channel ', number), h('p', { className: 'quiet' }, `${told.tap}, ${readOf(told)}`),
        choice('End', [['high', 'Highest'], ['low', 'Lowest']], end, (value) => page.set({ end: value })), legend(told.scale, `channel ${told.channel}`)),
      listed(page, told, { by: 'channel', channel: told.channel }));
  }

  function move(step) {
    const at = channels.findIndex((each) => each.channel === chosen());
    const next = channels[Math.min(channels.length - 1, Math.max(0, at + step))];
    if (next) page.set({ channel: next.channel });
  }

  return { element, kind: 'dense', update, changed: () => update().catch(page.fault), read: () => update().catch(page.fault), keys: { j: () => move(1), k: () => move(-1) } };
}
