// Charts, drawn by hand: lines and bars in SVG, tables of colour and clouds of points on canvas.

import { h, s } from './dom.js';
import { short } from './words.js';

const WIDTH = 640;
const LEFT = 52;
const RIGHT = 14;
const TOP = 12;
const BOTTOM = 30;

/** Round numbers that span a range. */
export function ticks(low, high, wanted = 4) {
  if (!(high > low)) return [low];
  const raw = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}

/** `log`: a logarithmic scale, if the values span enough for one. */
function scaleOf(values, { log = false, zero = true }) {
  let known = values.filter((value) => value !== null && Number.isFinite(value));
  log &&= Math.max(...known) > 20 * Math.min(...known.filter((value) => value > 0));
  known = known.filter((value) => !log || value > 0);
  let low = known.length ? Math.min(...known) : log ? 1 : 0;
  let high = known.length ? Math.max(...known) : 1;
  if (log) {
    low = 10 ** Math.floor(Math.log10(low) + 1e-9);
    high = 10 ** Math.ceil(Math.log10(high) - 1e-9);
    if (high <= low) high = low * 10;
    const span = Math.log10(high / low);
    const marks = [];
    for (let at = low; at <= high * 1.0001; at *= 10) marks.push(at);
    return { to: (value) => Math.log10(Math.max(value, low) / low) / span, marks, log };
  }
  if (zero) low = Math.min(0, low);
  if (high <= low) high = low + 1;
  const marks = ticks(low, high);
  const step = marks.length > 1 ? marks[1] - marks[0] : 1;
  high = Math.max(high, marks[marks.length - 1]);
  if (high > marks[marks.length - 1] + step * 1e-9) { marks.push(marks[marks.length - 1] + step); high = marks[marks.length - 1]; }
  return { to: (value) => (value - low) / (high - low), marks };
}

function frame({ height, y, label, xMarks }) {
  const bottom = height - BOTTOM;
  const place = (value) => bottom - y.to(value) * (bottom - TOP);
  const marks = y.marks.map((mark) => s('g', {},
    s('line', { class: 'grid', x1: LEFT, x2: WIDTH - RIGHT, y1: place(mark), y2: place(mark) }),
    s('text', { class: 'tick', x: LEFT - 8, y: place(mark) + 3.5, 'text-anchor': 'end' }, short(mark))));
  const below = xMarks.map(([at, text]) =>
    s('text', { class: 'tick', x: at, y: height - 10, 'text-anchor': 'middle' }, text));
  const drawing = s('svg', { class: 'chart', viewBox: `0 0 ${WIDTH} ${height}`, role: 'img', 'aria-label': label }, marks, below);
  return { drawing, place };
}

function thinned(marks, most) {
  const step = Math.ceil(marks.length / most);
  return marks.filter((_, at) => at % step === 0);
}

/**
 * Lines of points. series: [{name, points: [[x, y, title?]]}]; x is a number, shown by xText.
 */
export function lines(series, { label, height = 220, log = false, zero = true, xText = short, dots = true, area = false }) {
  const all = series.flatMap((each) => each.points);
  if (!all.length) return h('p', { className: 'empty' }, 'Nothing yet.');
  const xs = [...new Set(all.map((point) => point[0]))].sort((a, b) => a - b);
  const first = xs[0];
  const span = xs[xs.length - 1] - first || 1;
  const named = series.length > 1;
  const right = named ? 96 : RIGHT;
  const across = (x) => (xs.length === 1 ? (LEFT + WIDTH - right) / 2 : LEFT + ((x - first) / span) * (WIDTH - LEFT - right));
  const y = scaleOf(all.map((point) => point[1]), { log, zero });
  const xMarks = (xs.length <= 12 ? xs : ticks(first, first + span, 6)).map((x) => [across(x), xText(x)]);
  const { drawing, place } = frame({ height, y, label, xMarks: thinned(xMarks, 12) });
  const ends = [];
  series.forEach((each, number) => {
    const known = each.points.filter((point) => point[1] !== null && (!y.log || point[1] > 0));
    if (!known.length) return;
    const path = known.map((point, at) => `${at ? 'L' : 'M'}${across(point[0]).toFixed(1)} ${place(point[1]).toFixed(1)}`).join('');
    if (area) {
      const floor = height - BOTTOM;
      drawing.append(s('path', { class: 'area', d: `${path}L${across(known[known.length - 1][0])} ${floor}L${across(known[0][0])} ${floor}Z` }));
    }
    drawing.append(s('path', { class: `line c${number % 6}`, d: path }));
    if (dots) for (const point of known) {
      drawing.append(s('circle', { class: `dot c${number % 6}`, cx: across(point[0]), cy: place(point[1]), r: 3 },
        s('title', {}, point[2] ?? `${each.name} ${xText(point[0])}: ${short(point[1])}`)));
    }
    const last = known[known.length - 1];
    if (named) ends.push({ name: each.name, number, y: place(last[1]), x: across(last[0]) });
  });
  ends.sort((a, b) => a.y - b.y);
  ends.forEach((end, at) => {
    if (at) end.y = Math.max(end.y, ends[at - 1].y + 14);
    drawing.append(s('text', { class: `name c${end.number % 6}`, x: end.x + 8, y: end.y + 4 }, end.name));
  });
  return drawing;
}

/** Bars. items: [{name, value, title, chosen}]. */
export function bars(items, { label, height = 200, log = false, onpick }) {
  if (!items.length) return h('p', { className: 'empty' }, 'Nothing yet.');
  const y = scaleOf(items.map((item) => item.value), { log });
  const step = (WIDTH - LEFT - RIGHT) / items.length;
  const xMarks = thinned(items.map((item, at) => [LEFT + (at + 0.5) * step, item.name]), 16);
  const { drawing, place } = frame({ height, y, label, xMarks });
  const floor = height - BOTTOM;
  items.forEach((item, at) => {
    if (item.value === null) return;
    const top = Math.min(place(item.value), floor - 0.5);
    drawing.append(s('rect', {
      class: item.chosen ? 'bar chosen' : 'bar', x: LEFT + at * step + step * 0.1, width: Math.max(0.6, step * 0.8),
      y: top, height: floor - top, onclick: onpick ? () => onpick(item) : null,
    }, s('title', {}, item.title)));
  });
  return drawing;
}

/** Colours of the page, as the canvas knows them: variables, each within a class of elements. */
function resolved(names) {
  const probe = document.body.appendChild(h('span', {}));
  const found = names.map(([name, within]) => {
    probe.className = `unseen ${within}`;
    probe.style.setProperty('color', `var(${name})`);
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    canvas.fillStyle = getComputedStyle(probe).color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  });
  probe.remove();
  return found;
}

/** A scale of colours from 0 to 1. */
export function ramp(names) {
  const found = resolved(names.map((name) => [name, '']));
  return (t) => {
    const at = Math.min(0.9999, Math.max(0, t)) * (found.length - 1);
    const low = Math.floor(at);
    const mix = found[low].map((each, channel) => Math.round(each + (found[low + 1][channel] - each) * (at - low)));
    return `rgb(${mix.join(' ')})`;
  };
}

/** A square table of numbers from low to 1, as colours. */
export function heatmap(names, table, { label, low, onhover }) {
  const side = Math.max(10, Math.floor(560 / names.length));
  const room = 96;
  const size = room + side * names.length;
  const colour = ramp(['--ramp-0', '--ramp-1', '--ramp-2']);
  const drawing = s('svg', { class: 'chart heat', viewBox: `0 0 ${size} ${size}`, role: 'img', 'aria-label': label });
  names.forEach((row, i) => {
    names.forEach((column, j) => {
      const value = table[i][j];
      drawing.append(s('rect', {
        x: room + j * side, y: i * side, width: side - 1, height: side - 1,
        class: value === null ? 'none' : 'cell', fill: value === null ? null : colour((value - low) / (1 - low)),
        onmouseenter: () => onhover(row, column, value),
      }, s('title', {}, `${row} and ${column}: ${value === null ? 'of other widths' : value.toFixed(3)}`)));
      if (side >= 30 && value !== null) {
        const shade = (value - low) / (1 - low) > 0.62 ? 'number on' : 'number';
        drawing.append(s('text', { class: shade, x: room + (j + 0.5) * side - 0.5, y: (i + 0.5) * side + 3, 'text-anchor': 'middle' }, value.toFixed(2)));
      }
    });
    if (names.length <= 40 || i % 4 === 0) {
      drawing.append(s('text', { class: 'tick', x: room - 8, y: (i + 0.5) * side + 3.5, 'text-anchor': 'end' }, row));
      const x = room + (i + 0.5) * side;
      const y = side * names.length + 8;
      drawing.append(s('text', { class: 'tick', transform: `translate(${x} ${y}) rotate(-52)`, 'text-anchor': 'end' }, row));
    }
  });
  return drawing;
}

/** A cloud of points. value: from 0 to 1, for each; or classes: the number of its series. */
export function cloud({ x, y, value, classes, label, onhover, onpick }) {
  const canvas = h('canvas', { className: 'cloud', role: 'img', ariaLabel: label, width: 1400, height: 1000 });
  const pen = canvas.getContext('2d');
  const colour = ramp(['--ramp-0', '--ramp-1', '--ramp-2']);
  const series = resolved([0, 1, 2, 3, 4, 5].map((number) => ['--series', `c${number}`]));
  const span = (list) => {
    let low = Infinity;
    let high = -Infinity;
    for (const each of list) { low = Math.min(low, each); high = Math.max(high, each); }
    return [low, high > low ? high - low : 1];
  };
  const [left, wide] = span(x);
  const [bottom, tall] = span(y);
  const places = x.map((each, at) => [
    30 + ((each - left) / wide) * (canvas.width - 60),
    canvas.height - 30 - ((y[at] - bottom) / tall) * (canvas.height - 60)]);
  const radius = x.length > 2000 ? 4 : 5.5;
  pen.globalAlpha = 0.78;
  places.forEach(([across, down], at) => {
    pen.fillStyle = classes ? `rgb(${series[classes[at]].join(' ')})` : colour(value[at]);
    pen.beginPath();
    pen.arc(across, down, radius, 0, 7);
    pen.fill();
  });
  const nearest = (event) => {
    const box = canvas.getBoundingClientRect();
    const across = ((event.clientX - box.left) / box.width) * canvas.width;
    const down = ((event.clientY - box.top) / box.height) * canvas.height;
    let best = -1;
    let least = 900;
    places.forEach(([px, py], at) => {
      const far = (px - across) ** 2 + (py - down) ** 2;
      if (far < least) { least = far; best = at; }
    });
    return best;
  };
  canvas.addEventListener('mousemove', (event) => onhover(nearest(event)));
  canvas.addEventListener('click', (event) => { const at = nearest(event); if (at >= 0) onpick(at); });
  return canvas;
}
