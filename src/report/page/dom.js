// Elements of the page. Text of the data becomes text nodes only, so it can never become markup.

/** Returns an element. Functions become listeners, other properties attributes; null, undefined and false are left out. */
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
  for (const child of [children].flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

/** Returns a button. */
function button(label, action, properties) {
  return make('button', { type: 'button', click: action, ...properties }, label);
}

/** Returns a label with a select. `choices` has pairs of a value and its text. */
function choice(label, choices, current, action) {
  const select = make('select', { change: () => action(select.value) },
    choices.map(([value, text]) => make('option', { value, selected: value === current }, text)));
  return make('label', { class: 'field' }, make('span', {}, label), select);
}

/** Returns a label with a text input. The action runs once typing pauses. */
function textField(label, hint, action) {
  let timer = 0;
  const input = make('input', {
    type: 'search', placeholder: hint, spellcheck: 'false', autocomplete: 'off',
    input: () => {
      clearTimeout(timer);
      timer = setTimeout(() => action(input.value), 120);
    },
  });
  return make('label', { class: 'field' }, make('span', {}, label), input);
}

/** Returns a button that shows and hides what `content` returns. The content is made when it is first shown. */
function disclosure(label, content, properties) {
  const body = make('div', { class: 'disclosed', hidden: true });
  const toggle = button(label, () => {
    if (!body.firstChild) add(body, [content()]);
    body.hidden = !body.hidden;
    toggle.setAttribute('aria-expanded', String(!body.hidden));
  }, { 'aria-expanded': 'false', class: 'disclosure', ...properties });
  return [toggle, body];
}

/** Returns a list of terms and values. Pairs without a value are left out. */
function definitions(pairs, className) {
  return make('dl', { class: className || 'facts' }, pairs.filter(([, value]) => value !== null && value !== undefined)
    .map(([term, value]) => make('div', {}, make('dt', {}, term), make('dd', {}, value))));
}

/** Returns a command with a button that copies it. */
function command(text) {
  const state = make('span', { role: 'status', class: 'faint' });
  const code = make('code', {}, text);
  const select = () => {
    const range = document.createRange();
    range.selectNodeContents(code);
    const selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    state.textContent = 'Selected. Press Ctrl+C to copy it.';
  };
  const copy = button('Copy', () => {
    // A page in a sandbox may not use the clipboard.
    try {
      navigator.clipboard.writeText(text).then(() => { state.textContent = 'Copied.'; }, select);
    } catch {
      select();
    }
  }, { 'aria-label': 'Copy the command' });
  return make('div', { class: 'command' }, code, copy, state);
}

/** Scrolls to an element and gives it the focus, without a change of the address. */
function visit(element) {
  if (!element.hasAttribute('tabindex')) element.setAttribute('tabindex', '-1');
  element.scrollIntoView({ block: 'start' });
  element.focus({ preventScroll: true });
}

/** Returns an SVG element. */
function svg(tag, properties, ...children) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [key, value] of Object.entries(properties)) element.setAttribute(key, value);
  return add(element, children);
}
