// Elements, made of nothing but texts and attributes: no text ever becomes markup.

const SVG = 'http://www.w3.org/2000/svg';

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'style') for (const [k, v] of Object.entries(value)) element.style.setProperty(k, v);
    else if (name in element && !(element instanceof SVGElement) && name !== 'list') element[name] = value;
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function h(tag, properties, ...children) {
  return filled(document.createElement(tag), properties, children);
}

export function s(tag, properties, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

/** Says something to those who do not see the page. */
export function say(text) {
  document.getElementById('said').textContent = text;
}

export function select(label, options, value, onchange) {
  const choices = options.map(([key, text]) => h('option', { value: key }, text));
  const element = h('select', { onchange: () => onchange(element.value) }, choices);
  element.value = value;
  return h('label', { className: 'field' }, h('span', {}, label), element);
}

/** A row of buttons of which one is pressed. */
export function choice(label, options, value, onchange, shown = false) {
  const buttons = options.map(([key, text, title]) =>
    h('button', { type: 'button', ariaPressed: String(key === value), title: title ?? '', onclick: () => onchange(key) }, text));
  const group = h('div', { className: 'choice', role: 'group', ariaLabel: label }, buttons);
  return shown ? h('div', { className: 'field' }, h('span', {}, label), group) : group;
}
