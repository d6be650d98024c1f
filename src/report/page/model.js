// The section of a model or of any other source of tensors.

const remedies = {
  file: 'Copy the file again from its source. If the source is damaged as well, use another copy or an earlier step.',
  missing: 'Copy the missing file or the missing rank. If a job did not write it, use an earlier step (muster ls).',
  not_indexed: 'Add the tensor or the file to the index, or remove the file if it belongs to another model.',
  duplicate: 'Keep one of the copies, and remove the other one.',
  index: 'Copy the index again, or write the model anew with muster export.',
  numbering: 'Remove the files of the other set, or copy the complete set into an empty directory.',
  mismatch: 'Do not mix files of different jobs or models. Copy the files of one job, with its config.json.',
  checksum: 'The bytes have changed since they were written. Copy the file again, and run muster verify. After an intended change, run muster verify --write-checksums.',
  leftover: 'The process has ended. muster gc removes its files.',
  unreadable: 'Open the dataset with the program that wrote it. Muster does not read this kind.',
};

const figures = (pairs) => definitions(pairs.filter(Boolean), 'figures');

function labelled(title, content, id) {
  return make('section', { class: 'part', id }, make('h3', {}, title), content);
}

/** Shows a tree of objects, lists and values. Inner levels are made when they are opened. */
function treeView(value, key = null, depth = 0) {
  const label = key === null ? null : make('span', { class: 'key' }, say(key));
  if (value === null || typeof value !== 'object') {
    const shown = typeof value === 'string' ? make('bdi', { class: 'string' }, `"${printable(value)}"`) : String(value);
    return make('div', { class: 'leaf' }, label, label && ': ', shown);
  }
  const entries = Object.entries(value);
  const isList = Array.isArray(value);
  if (isList && entries.every(([, item]) => item === null || typeof item !== 'object') && JSON.stringify(value).length < 80) {
    return make('div', { class: 'leaf' }, label, label && ': ', say(JSON.stringify(value)));
  }
  const body = make('div', { class: 'branch' });
  const fill = () => {
    if (!body.firstChild) add(body, entries.slice(0, 2000).map(([inner, item]) => treeView(item, inner, depth + 1)));
    if (entries.length > 2000) add(body, [make('p', { class: 'faint' }, `${entries.length - 2000} more`)]);
  };
  const details = make('details', { open: depth === 0, toggle: () => details.open && fill() },
    make('summary', {}, label || (isList ? 'list' : 'object'), make('span', { class: 'faint' }, ` ${plural(entries.length, isList ? 'item' : 'key')}`)), body);
  if (depth === 0) fill();
  return details;
}

const modelValues = [
  { title: 'Deviation', of: (pool) => pool.deviation, text: short, steps: true },
  { title: 'Mean', of: (pool) => pool.mean, text: short, both: true },
  { title: 'Minimum', of: (pool) => pool.minimum, text: short, both: true },
  { title: 'Maximum', of: (pool) => pool.maximum, text: short, both: true },
  { title: 'Largest magnitude', of: (pool) => (pool.minimum === null ? null : Math.max(Math.abs(pool.minimum), Math.abs(pool.maximum))), text: short, steps: true },
  { title: 'Share of zeros', of: (pool) => (pool.values ? pool.zeros / pool.values : null), text: percent },
  { title: 'NaN and infinities', of: (pool) => pool.nans + pool.infinities, text: count, steps: true },
  { title: 'Bytes', of: (pool) => pool.bytes, text: bytes, steps: true },
];

/** Returns the mark of a cell with NaN, or without different values. */
function modelMark(pool) {
  if (pool.values === undefined || pool.values === null) return null;
  if (pool.nans + pool.infinities > 0) return { sign: '!', text: 'NaN or infinities', bad: true };
  if (pool.values === 0) return { sign: '∅', text: 'no values' };
  if (pool.zeros === pool.values) return { sign: '0', text: 'all values are zero' };
  if (pool.deviation === 0) return { sign: '=', text: 'all values are equal' };
  return null;
}

/** Returns controls for rows of tensors, and their table. */
function tensorTable({ label, rows, columns, details, selects, sort, descending }) {
  const tree = moduleTree(rows);
  const state = { text: '', picked: null, grouped: true };
  const leafOf = (row) => ({ label: row.name, path: row.name, row, rows: [row], bytes: row.bytes, children: null });
  const chip = make('span', {});
  const found = make('span', { class: 'faint', role: 'status' });
  const filters = selects.map(() => '');
  const table = new DataTable({
    label, rows: tree.children || [tree], sort: sort ?? 0, descending,
    children: (node) => node.children,
    details: (node) => details(node.row),
    empty: 'No tensor matches the filter.', columns,
  });
  const apply = () => {
    const test = nameTest(state.text);
    const isFiltered = state.text.trim() !== '' || state.picked !== null || filters.some(Boolean);
    const kept = rows.filter((row) => (!state.picked || state.picked.has(row)) && test(row.name)
      && selects.every((select, index) => !filters[index] || select.test(row, filters[index])));
    const shown = state.grouped ? moduleTree(kept) : null;
    table.setRows(!kept.length ? [] : shown ? shown.children || [shown] : kept.map(leafOf), isFiltered);
    found.textContent = isFiltered ? `${plural(kept.length, 'row')} of ${count(rows.length)} match.` : '';
  };
  const controls = make('div', { class: 'tools' },
    textField('Filter', 'part of a name, or a pattern with *', (text) => {
      state.text = text;
      apply();
    }),
    selects.map((select, index) => choice(select.title, [['', 'all'], ...select.choices.map((value) => [value, printable(value)])],
      select.initial || '', (value) => {
        filters[index] = value;
        apply();
      })),
    make('label', { class: 'check' }, make('input', { type: 'checkbox', checked: true, change: (event) => {
      state.grouped = event.target.checked;
      apply();
    } }), ' Group by module'), chip, found);
  selects.forEach((select, index) => { filters[index] = select.initial || ''; });
  if (filters.some(Boolean)) apply();
  const element = make('div', {}, controls, table.element);
  /** Shows only these rows. */
  const pick = (picked, text) => {
    state.picked = new Set(picked);
    chip.replaceChildren(button([text, ' ✕'], () => {
      state.picked = null;
      chip.replaceChildren();
      apply();
      controls.querySelector('input').focus();
    }, { class: 'chip', title: 'Remove this filter' }));
    for (const [index, select] of selects.entries()) {
      filters[index] = '';
      controls.querySelectorAll('select')[index].value = '';
    }
    apply();
    visit(element);
  };
  return { element, pick };
}

/** Returns the columns of a table of tensors. Each is [title, key, form, { leaf, cell, value, hint }]: the value is that of
 * the pooled rows of a group, or only that of single rows with `leaf`. `cell` and `value` are functions of it. */
function tensorColumns(pool, columns) {
  const pooled = (node) => (node.pool === undefined ? (node.pool = pool(node.rows)) : node.pool);
  const nameColumn = { title: 'Name', value: (node) => node.label, cell: (node) => name(labelOf(node), 70) };
  return [nameColumn, ...columns.filter(Boolean).map(([title, key, form, { leaf, cell, value, hint } = {}]) => {
    const { align, show } = forms[form];
    const valueOf = (node) => (leaf && node.children ? null : value ? value(pooled(node)) : pooled(node)[key]);
    return {
      title, align, hint, value: valueOf,
      cell: (node) => {
        if (leaf && node.children) return '';
        if (cell) return cell(pooled(node));
        const content = valueOf(node);
        return content === null || content === undefined ? '–' : show(content);
      },
    };
  })];
}

function modelColumns(section) {
  const bad = (key) => ({ cell: (pool) => (pool[key] ? make('strong', { class: 'bad' }, count(pool[key])) : count(pool[key])) });
  const fileOf = (row) => (row.file === null || row.file === undefined ? null : section.files[row.file].path);
  return tensorColumns(poolModel, [
    ['Tensors', 'tensors', 'number'],
    ['Dtype', 'dtype', 'text', { leaf: true, cell: (row) => (row.dtype === null ? 'various' : say(row.dtype)) }],
    ['Shape', 'shape', 'number', { leaf: true, cell: (row) => shapeText(row.shape), value: (row) => row.shape && row.shape.reduce((all, extent) => all * extent, 1), hint: 'Sorts by the number of elements' }],
    ['Bytes', 'bytes', 'bytes'],
    ...(section.has_values ? [
      ['Distribution', 'deviation', 'text', { leaf: true, cell: (row) => sparkline(row.histogram), hint: 'From the minimum to the maximum. Sorts by the deviation' }],
      ['Min', 'minimum', 'value'], ['Max', 'maximum', 'value'], ['Mean', 'mean', 'value'], ['Deviation', 'deviation', 'value'],
      ['Zeros', 'zeros', 'share', { value: (pool) => pool.zeros / pool.values, cell: (pool) => make('span', { title: count(pool.zeros) }, percent(pool.zeros / pool.values)) }],
      ['NaN', 'nans', 'number', bad('nans')], ['Inf', 'infinities', 'number', bad('infinities')],
    ] : []),
    section.files.length > 1 && ['File', 'file', 'name', { leaf: true, value: fileOf }],
  ]);
}

function findings(section) {
  const { verify } = section;
  const parts = [];
  const list = (title, items, line) => items && items.length && parts.push(make('h4', {}, title), make('ul', {}, items.map((item) => make('li', {}, line(item)))));
  if (verify) {
    const checked = verify.has_checksums ? verify.checked ? `${plural(verify.checked, 'tensor')} compared with checksums.` : 'Checksums exist; they were not checked.' : 'There are no checksums.';
    parts.push(make('p', { class: verify.good ? 'good' : 'bad' }, make('strong', {}, verify.good ? '✓ verify: no problem found.'
      : `✕ verify: ${plural(verify.problems.length + (verify.problems_left_out || 0), 'problem')}.`), ` ${checked}`));
    if (verify.problems.length) {
      parts.push(simpleTable('Problems', verify.problems, [['Defect', 'defect'], ['Message', 'message', 'message'],
        ['Remedy', (problem) => remedies[problem.defect], 'message'], ['File', 'file', 'name'], ['Tensor', 'tensor', 'name']]));
    }
    if (verify.problems_left_out) parts.push(make('p', {}, `${plural(verify.problems_left_out, 'further problem')} not listed. muster verify lists the first 10,000.`));
  } else if (section.verify_error) parts.push(make('p', {}, 'verify was not run: ', say(section.verify_error)));
  if (section.issues.length) {
    parts.push(make('h4', {}, 'Issues'), simpleTable('Issues', section.issues, [['Kind', 'kind'], ['Message', 'message', 'message'], ['Tensor', 'tensor', 'name']]));
    if (section.issues_left_out) parts.push(make('p', {}, `${plural(section.issues_left_out, 'further issue')} not listed. muster show --check lists all.`));
  }
  if (verify) {
    list('Notes', verify.notes, say);
    list('Data that does not belong to it', verify.left_out, (item) => [name(item.name), ': ', say(item.reason)]);
  }
  return parts;
}

function modelSection(section) {
  const rows = rowsOf(section.rows);
  const bad = section.has_values ? rows.filter((row) => row.nans + row.infinities > 0) : [];
  const several = rows.filter((row) => row.tensors !== 1);
  const problems = section.verify ? section.verify.problems.length + (section.verify.problems_left_out || 0) : 0;
  const table = rows.length ? tensorTable({
    label: 'Tensors', rows, columns: modelColumns(section), details: (row) => tensorDetails(row, section),
    selects: Object.keys(section.dtypes).length > 1 ? [{ title: 'Dtype', choices: Object.keys(section.dtypes), test: (row, dtype) => row.dtype === dtype }] : [],
  }) : null;
  const pickRow = (row) => table.pick([row], name(row.name, 60));
  const values = section.has_values ? modelValues : modelValues.slice(-1);
  const map = rows.length && heatMap({ title: 'Layers and kinds', rows, pool: poolModel, values, marks: modelMark, perKind: true,
    pick: (cell) => table.pick(cell.rows, [name(cell.kind, 60), cell.layer === '' ? '' : `, layer ${cell.layer}`]) });
  const found = findings(section);
  const facts = Object.entries(section.facts || {});
  const metadata = Object.entries(section.metadata || {});
  const dtypes = Object.entries(section.dtypes);
  return [
    figures([
      ['Tensors', count(section.tensors)], ['Bytes', bytesCell(section.bytes)],
      ['Dtypes', dtypes.map(([dtype], index) => [index ? ', ' : '', say(dtype)])], ['Files', count(section.files.length)],
      section.has_values && ['With NaN or infinities', bad.length
        ? button(plural(sum(bad, 'tensors'), 'tensor'), () => table.pick(bad, 'with NaN or infinities'), { class: 'plain bad' }) : 'none'],
      section.verify && ['Problems', make('span', { class: problems ? 'bad' : 'good' }, count(problems))],
      section.not_readable > 0 && ['Cannot be read', plural(section.not_readable, 'tensor')],
      section.not_selected > 0 && ['Not selected', plural(section.not_selected, 'tensor')],
    ]),
    !section.has_values && make('p', { class: 'note' }, 'The report has no values of tensors, because it was written with --no-values.'),
    found.length > 0 && labelled('Findings', found),
    rows.length > 0 && labelled('Sizes', [treemap(moduleTree(rows), pickRow), make('div', { class: 'columns' },
      byteBars('By dtype', dtypes.map(([dtype, part]) => [say(dtype), part.bytes, plural(part.tensors, 'tensor')])),
      section.files.length > 0 && byteBars('By file', section.files.map((file) => [name(file.path, 60), file.bytes, plural(file.tensors, 'tensor')])))]),
    map && labelled(section.has_values ? 'Layers' : 'Layers (bytes)', map),
    table && labelled('Tensors', [
      several.length > 0 && make('div', { class: 'note' },
        make('p', {}, `${plural(several.length, 'row')} with * in the name ${several.length === 1 ? 'represents' : 'represent'} several tensors, ${count(sum(several, 'tensors'))} in all. Choose some of them for a detailed report:`),
        command(`muster report ${shellQuoted(section.path)} --select ${shellQuoted(several[0].name)} --out details.html`)),
      table.element]),
    section.parts && labelled('Parts of the ranks', partsView(section.parts)),
    (facts.length > 0 || metadata.length > 0 || section.config_bytes > 0) && labelled('Facts', [
      facts.length > 0 && definitions(facts.map(([key, value]) => [say(key), say(typeof value === 'object' ? JSON.stringify(value) : value)])),
      metadata.length > 0 && [make('h4', {}, 'Metadata'), definitions(metadata.map(([key, value]) =>
        [say(key), value === null ? make('em', {}, 'more than 4,000 bytes, not in this file') : make('pre', {}, printableLines(value))]))],
      section.config_bytes > 0 && [make('h4', {}, 'Config'), section.config === null
        ? make('p', {}, `The config has ${count(section.config_bytes)} bytes and is not in this file. muster show --config prints it.`) : treeView(section.config)],
    ]),
  ];
}

/** Escapes a text but keeps its lines. */
function printableLines(text) {
  return text.split('\n').map(printable).join('\n');
}
