// The data of the report: rows, modules, layers and kinds of matrices, and sums over several tensors.

/** Returns a number of the data: JSON writes nan, inf and -inf as texts. */
function number(value) {
  if (typeof value !== 'string') return value === undefined ? null : value;
  return { nan: NaN, inf: Infinity, '-inf': -Infinity }[value] ?? null;
}

const reals = new Set(['minimum', 'maximum', 'mean', 'deviation', 'absolute', 'relative']);

/** Turns lists of equal length into one object per row. */
function rowsOf(columns) {
  const keys = Object.keys(columns);
  return columns.name.map((_, index) => {
    const row = {};
    for (const key of keys) row[key] = reals.has(key) ? number(columns[key][index]) : columns[key][index];
    return row;
  });
}

/** Returns the layer and the kind of a tensor: the first number that is a whole part of the name, otherwise the first
 * number, is the layer. The kind is the name with `*` for all numbers. */
function placeOf(text) {
  const found = /(?<=^|[./])(?:\d+|\*)(?=$|[./])/.exec(text) || /\d+|\*(?!\*)/.exec(text);
  return { layer: found ? found[0] : '', kind: text.replace(/\d+/g, '*') };
}

const natural = new Intl.Collator('en', { numeric: true });

/** Compares texts or numbers. Missing values and NaN come last in both directions. */
function compare(a, b, descending) {
  const missing = (value) => value === null || value === undefined || Number.isNaN(value);
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  const order = typeof a === 'string' || typeof b === 'string' ? natural.compare(a, b) : a - b;
  return descending ? -order : order;
}

function sum(rows, key) {
  return rows.reduce((total, row) => total + (row[key] || 0), 0);
}

function extreme(rows, key, better) {
  let best = null;
  for (const row of rows) {
    const value = row[key];
    if (value === null || value === undefined) continue;
    if (best === null || Number.isNaN(value) || better(value, best)) best = value;
    if (Number.isNaN(best)) break;
  }
  return best;
}

/** Returns the statistics of several rows of a model as if they were one tensor. */
function poolModel(rows) {
  if (rows.length === 1) return rows[0];
  const pool = { tensors: sum(rows, 'tensors'), bytes: sum(rows, 'bytes') };
  for (const key of ['values', 'nans', 'infinities', 'zeros']) pool[key] = sum(rows, key);
  pool.minimum = extreme(rows, 'minimum', (a, b) => a < b);
  pool.maximum = extreme(rows, 'maximum', (a, b) => a > b);
  pool.mean = pool.deviation = null;
  const finite = rows.map((row) => [(row.values || 0) - (row.nans || 0) - (row.infinities || 0), row])
    .filter(([values, row]) => values > 0 && row.mean !== null && row.mean !== undefined);
  const total = finite.reduce((all, [values]) => all + values, 0);
  if (total > 0) {
    pool.mean = finite.reduce((all, [values, row]) => all + row.mean * (values / total), 0);
    pool.deviation = Math.sqrt(finite.reduce((all, [values, row]) =>
      all + (row.deviation ** 2 + (row.mean - pool.mean) ** 2) * (values / total), 0));
  }
  return pool;
}

/** Returns a test of names: a text with `*` or `?` is a pattern of the whole name, any other text is a part of it. */
function nameTest(text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return () => true;
  let test = (candidate) => candidate.includes(wanted);
  if (/[*?]/.test(wanted)) {
    const source = wanted.replace(/[.+^${}()|[\]\\]/g, '\\$&').replace(/\*+/g, '.*').replace(/\?/g, '.');
    const pattern = new RegExp(`^${source}$`, 's');
    // Names of several tensors have stars themselves.
    test = (candidate) => candidate === wanted || pattern.test(candidate);
  }
  return (candidate) => test(candidate.toLowerCase()) || test(printable(candidate).toLowerCase());
}

/** Returns the label or the path of a module or a tensor. That of a module ends without its separator. */
function labelOf(node, key = 'label') {
  return node.children ? node[key].replace(/(.)[./]$/, '$1') : node[key];
}

/** Returns the tree of modules: names are split at `.` and `/`, and chains without a branch become one node. A node has
 * its rows; a leaf is one row. */
function moduleTree(rows) {
  const group = (label, path) => ({ label, path, rows: [], groups: new Map(), leaves: [], children: [] });
  const root = group('', '');
  root.allLeaves = rows.map((row) => ({ label: row.name, path: row.name, row, rows: [row], children: null }));
  for (const row of rows) {
    const parts = row.name.match(/[^./]*[./]|[^./]+$/g) || [row.name];
    if (parts.length > 40) parts.splice(39, parts.length, parts.slice(39).join(''));
    let node = root;
    node.rows.push(row);
    for (const part of parts.slice(0, -1)) {
      if (!node.groups.has(part)) node.groups.set(part, group(part, node.path + part));
      node = node.groups.get(part);
      node.rows.push(row);
    }
    node.leaves.push({ label: parts[parts.length - 1], path: row.name, row, rows: [row], bytes: row.bytes,
      children: null });
  }
  const fold = (node) => {
    node.children = [...[...node.groups.values()].map(fold), ...node.leaves];
    node.bytes = sum(node.rows, 'bytes');
    if (node.children.length !== 1 || node === root) return node;
    const [only] = node.children;
    return { ...only, label: node.label + only.label };
  };
  return fold(root);
}
