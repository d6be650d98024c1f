// Elements of the page. Text of the data becomes text nodes only, so it can never become markup.

/** Returns an element. Functions become listeners, other properties attributes. Null, undefined and false are left
 * out. */
function make(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === 'function') element.addEventListener(key, value);
    else element.setAttribute(key, value === true ? '' : value);
  }
  return add(element, children);
}

function add(element, children) {
  element.append(...[children].flat(Infinity).filter((child) => child !== null && child !== undefined
    && child !== false));
  return element;
}

/** Returns an element of a drawing. */
function svg(tag, properties, ...children) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [key, value] of Object.entries(properties)) element.setAttribute(key, value);
  return add(element, children);
}

const paragraph = (content, className) => make('p', { class: className }, content);
const alarm = (content) => make('strong', { class: 'bad' }, content);
const tools = (...controls) => make('div', { class: 'tools' }, controls);
const legendOf = (...items) => make('div', { class: 'legend' }, items.map((item) => item && make('span', {}, item)));

/** Returns a list, or null if it is empty. */
function list(items, show) {
  return items && items.length ? make('ul', {}, items.map((item) => make('li', {}, show(item)))) : null;
}

function button(label, action, properties) {
  return make('button', { type: 'button', click: action, ...properties }, label);
}

/** Returns a button that looks like a link. */
function link(label, action) {
  return button(label, action, { class: 'plain' });
}

function field(label, control) {
  return make('label', { class: 'field' }, make('span', {}, label), control);
}

/** Returns a label with a select. `choices` has pairs of a value and its text. */
function choice(label, choices, current, action) {
  const options = choices.map(([value, text]) => make('option', { value, selected: value === current }, text));
  return field(label, make('select', { change: (event) => action(event.target.value) }, options));
}

/** Returns a label with an input for a part of a name. The action runs once typing pauses. */
function nameFilter(action) {
  let timer = 0;
  const changed = (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(event.target.value), 120);
  };
  return field('Filter', make('input', {
    type: 'search', placeholder: 'part of a name, or a pattern with *', spellcheck: 'false', autocomplete: 'off',
      input: changed,
  }));
}

/** Returns a button that shows and hides what `content` returns. The content is made when it is shown. */
function disclosure(label, content) {
  const body = make('div', { hidden: true });
  const toggle = button(label, () => {
    body.hidden = !body.hidden;
    body.replaceChildren(...(body.hidden ? [] : [content()]));
    toggle.setAttribute('aria-expanded', String(!body.hidden));
  }, { 'aria-expanded': 'false', class: 'disclosure' });
  return [toggle, body];
}

/** Returns a list of terms and values. Pairs without a value are left out. */
function definitions(pairs, className = 'facts') {
  const isPresent = (pair) => pair && pair[1] !== null && pair[1] !== undefined;
  return make('dl', { class: className }, pairs.filter(isPresent)
    .map(([term, value]) => make('div', {}, make('dt', {}, term), make('dd', {}, value))));
}

/** Returns a part of a section with its heading, or null without content. */
function part(title, ...content) {
  const present = content.flat(Infinity).filter(Boolean);
  return present.length ? make('section', { class: 'part' }, make('h3', {}, title), present) : null;
}

/** Returns a remark with a command that can be copied. */
function commandNote(remark, text) {
  const state = make('span', { role: 'status', class: 'faint' });
  const code = make('code', {}, text);
  const select = () => {
    getSelection().selectAllChildren(code);
    state.textContent = 'Selected. Press Ctrl+C to copy it.';
  };
  const copy = () => {
    // A page in a sandbox may not use the clipboard.
    if (!navigator.clipboard) select();
    else navigator.clipboard.writeText(text).then(() => { state.textContent = 'Copied.'; }, select);
  };
  return make('div', { class: 'note' }, paragraph(remark),
    make('div', { class: 'command' }, code, button('Copy', copy, { 'aria-label': 'Copy the command' }), state));
}

/** Scrolls to an element and gives it the focus, without a change of the address. */
function visit(element) {
  if (!element.hasAttribute('tabindex')) element.setAttribute('tabindex', '-1');
  element.scrollIntoView({ block: 'start' });
  element.focus({ preventScroll: true });
}
