// Text forms of names and numbers.

const dangerous = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\\\u{e0000}-\u{10ffff}\ud800-\udfff]/gu;

/** Escapes control characters and characters that reorder or hide text, as printable() in src/inspect/output.hpp. */
function printable(text) {
  return String(text).replace(dangerous, (character) => {
    const code = character.codePointAt(0);
    if (character === '\\') return '\\\\';
    if (character === '\n') return '\\n';
    if (character === '\t') return '\\t';
    return code < 0x80 ? `\\x${code.toString(16).padStart(2, '0')}` : `\\u${code.toString(16).padStart(4, '0')}`;
  });
}

/** Shortens printable text in its middle. Its end says more than its beginning. */
function shorten(text, width) {
  const characters = [...text];
  if (characters.length <= width) return text;
  const head = Math.floor((width - 1) / 3);
  return `${characters.slice(0, head).join('')}…${characters.slice(characters.length - (width - 1 - head)).join('')}`;
}

/** Returns text of the data as an element that keeps its direction to itself. A very long text is shortened. */
function name(text, width = 160) {
  const shown = printable(text) || '(empty name)';
  const short = shorten(shown, width);
  return make('bdi', { title: short === shown ? null : shown }, short);
}

/** Returns a message, whole and escaped. */
function say(text) {
  return make('bdi', {}, printable(text));
}

const counts = new Intl.NumberFormat('en');

function count(value) {
  return value === null || value === undefined ? '–' : counts.format(value);
}

/** Returns "1 tensor" or "2 tensors". */
function plural(value, noun, several = `${noun}s`) {
  return `${count(value)} ${value === 1 ? noun : several}`;
}

/** Returns bytes as human_bytes() does: powers of 1000. */
function bytes(value) {
  if (value === null || value === undefined) return '–';
  if (value < 1000) return `${value} B`;
  const units = ['kB', 'MB', 'GB', 'TB', 'PB', 'EB'];
  let unit = 0;
  let scaled = value / 1000;
  for (; scaled >= 999.95 && unit + 1 < units.length; ++unit) scaled /= 1000;
  return `${scaled.toFixed(1)} ${units[unit]}`;
}

/** Returns bytes with the exact number as a hint. */
function bytesCell(value) {
  return make('span', { title: `${count(value)} bytes` }, bytes(value));
}

/** Returns a value with 5 significant digits. */
function short(value) {
  if (value === null || value === undefined) return '–';
  if (!Number.isFinite(value)) return exact(value);
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size < 1e-4 || size >= (Number.isInteger(value) ? 1e6 : 1e5)) return value.toExponential(4).replace(/\.?0+e/,
    'e').replace('e+', 'e');
  return String(Number(value.toPrecision(Number.isInteger(value) ? 6 : 5)));
}

/** Returns the shortest text that reads back as the same value. */
function exact(value) {
  if (value === null || value === undefined) return '–';
  if (Number.isNaN(value)) return 'NaN';
  if (!Number.isFinite(value)) return value > 0 ? '+inf' : '−inf';
  return String(value);
}

function valueCell(value) {
  return value === null || value === undefined ? '–' : make('span', { title: exact(value) }, short(value));
}

function percent(part) {
  if (part === null || part === undefined || !Number.isFinite(part)) return '–';
  if (part === 0) return '0 %';
  if (part < 0.0001) return '< 0.01 %';
  if (part > 0.9999 && part < 1) return '> 99.99 %';
  return `${Number((part * 100).toPrecision(4))} %`;
}

/** Returns a duration or an age with 3 significant digits. */
function duration(seconds) {
  if (!Number.isFinite(seconds)) return '–';
  const size = Math.abs(seconds);
  const form = (value, unit) => `${Number(value.toPrecision(3))} ${unit}`;
  if (size === 0) return '0 s';
  if (size < 1e-3) return form(seconds * 1e6, 'µs');
  if (size < 1) return form(seconds * 1e3, 'ms');
  if (size < 120) return form(seconds, 's');
  if (size < 7200) return form(seconds / 60, 'min');
  if (size < 172800) return form(seconds / 3600, 'h');
  return form(seconds / 86400, 'days');
}

function durationCell(seconds) {
  return make('span', { title: `${exact(seconds)} s` }, duration(seconds));
}

/** Returns a time such as "2026-03-01 12:30:05 UTC". */
function time(seconds) {
  const date = new Date(seconds * 1000);
  return seconds === null || seconds === undefined || Number.isNaN(date.getTime()) ? '–'
    : `${date.toISOString().slice(0, 19).replace('T', ' ')} UTC`;
}

function shapeText(shape) {
  return shape ? `[${shape.join(', ')}]` : 'various';
}

/** Returns ranks as "rank 1" or "ranks 0, 2-5". */
function ranksText(ranks) {
  const parts = [];
  for (let i = 0; i < ranks.length;) {
    let end = i + 1;
    while (end < ranks.length && ranks[end] === ranks[end - 1] + 1) ++end;
    parts.push(end - i > 1 ? `${ranks[i]}-${ranks[end - 1]}` : String(ranks[i]));
    i = end;
  }
  return `rank${ranks.length === 1 ? '' : 's'} ${parts.join(', ')}`;
}

/** Quotes text for the shell. Characters that a reader cannot see are escaped as Bash reads them. */
function shellQuoted(text) {
  if (/^[\w./:=@%+,-]+$/.test(text)) return text;
  const shown = printable(text).replace(/\\u([0-9a-f]{5,6})/g, (_, digits) => `\\U${digits.padStart(8, '0')}`);
  return shown === text ? `'${text.replace(/'/g, "'\\''")}'` : `$'${shown.replace(/'/g, "\\'")}'`;
}
