// The section of a model or of any other source of tensors.

const figures = (pairs) => definitions(pairs, 'figures');
const magnitude = (pool) => (pool.minimum === null ? null : Math.max(Math.abs(pool.minimum), Math.abs(pool.maximum)));
const zeroShare = (pool) => (pool.values ? pool.zeros / pool.values : null);

const modelValues = [
  { title: 'Standard deviation', of: (pool) => pool.deviation, text: short, steps: true },
  { title: 'Mean', of: (pool) => pool.mean, text: short, both: true },
  { title: 'Minimum', of: (pool) => pool.minimum, text: short, both: true },
  { title: 'Maximum', of: (pool) => pool.maximum, text: short, both: true },
  { title: 'Largest magnitude', of: magnitude, text: short, steps: true },
  { title: 'Share of zeros', of: zeroShare, text: percent },
  { title: 'NaN and infinities', of: (pool) => pool.nans + pool.infinities, text: count, steps: true },
  { title: 'Bytes', of: (pool) => pool.bytes, text: bytes, steps: true },
];

/** Returns the mark of a cell with NaN, or without different values. */
function modelMark(pool) {
  if (pool.values === undefined) return null;
  if (pool.nans + pool.infinities > 0) return { sign: '!', text: 'NaN or infinities', bad: true };
  if (pool.values === 0) return { sign: '∅', text: 'no values' };
  if (pool.zeros === pool.values) return { sign: '0', text: 'all values are zero' };
  return pool.deviation === 0 ? { sign: '=', text: 'all values are equal' } : null;
}

function modelColumns(section) {
  const fileOf = (row) => (row.file === null ? null : section.files[row.file].path);
  const elementsOf = (row) => row.shape && row.shape.reduce((all, extent) => all * extent, 1);
  return tensorColumns(poolModel, [
    ['Tensors', 'tensors', 'number', { cell: (pool) => (pool.tensors === 1 ? '' : count(pool.tensors)) }],
    ['Dtype', 'dtype', 'name', { leaf: true }],
    ['Shape', 'shape', 'number', { leaf: true, cell: (row) => shapeText(row.shape), value: elementsOf,
      hint: 'Sorts by the number of elements' }],
    ['Bytes', 'bytes', 'bytes'],
    ...(section.has_values ? [
      ['Distribution', 'deviation', 'text',
        { leaf: true, cell: (row) => sparkline(row.histogram),
          hint: 'Histogram from the minimum to the maximum. Sorts by the standard deviation' }],
      ['Min', 'minimum', 'value'], ['Max', 'maximum', 'value'], ['Mean', 'mean', 'value'],
        ['Std. deviation', 'deviation', 'value'],
      ['Zeros', 'zeros', 'share', { value: zeroShare }], ['NaN', 'nans', 'alarm'], ['Inf', 'infinities', 'alarm'],
    ] : []),
    section.files.length > 1 && ['File', 'file', 'name', { leaf: true, value: fileOf }],
  ]);
}

function modelSection(section) {
  const rows = rowsOf(section.rows);
  const bad = section.has_values ? rows.filter((row) => row.nans + row.infinities > 0) : [];
  const several = rows.filter((row) => row.tensors !== 1);
  const problems = problemsOf(section.verify);
  const dtypes = Object.entries(section.dtypes);
  const table = tensorTable({
    label: 'Tensors', rows, columns: modelColumns(section), details: (row) => tensorDetails(row, section),
    select: dtypes.length > 1 && { title: 'Dtype', choices: dtypes.map(([dtype]) => dtype), test: (row, dtype) =>
      row.dtype === dtype },
  });
  const values = section.has_values ? modelValues : modelValues.slice(-1);
  const barOf = (label, sums) => [label, sums.bytes, plural(sums.tensors, 'tensor')];
  return [
    figures([
      ['Tensors', count(section.tensors)], ['Bytes', bytesCell(section.bytes)],
      ['Dtypes', dtypes.map(([dtype], index) => [index ? ', ' : '', say(dtype)])],
        section.files.length > 0 && ['Files', count(section.files.length)],
      section.has_values && ['With NaN or infinities', bad.length
        ? link(plural(bad.length, several.length ? 'row' : 'tensor'), () => table.pick(bad, 'with NaN or infinities')) : 'none'],
      section.verify && ['Problems', problems ? alarm(count(problems)) : '0'],
      ['Issues', count(section.issues.length + section.issues_left_out)],
      section.not_readable > 0 && ['Cannot be read', plural(section.not_readable, 'tensor')],
      section.not_selected > 0 && ['Not selected', plural(section.not_selected, 'tensor')],
    ]),
    !section.has_values && paragraph('This report has no statistics. Write it again without --no-values to see them.',
      'note'),
    part('Findings', findings(section)),
    rows.length > 0 && part('Sizes', rows.length > 1 && treemap(moduleTree(rows), (row) =>
      table.pick([row], name(row.name, 60))),
      make('div', { class: 'columns' }, byteBars('By dtype', dtypes.map(([dtype, sums]) => barOf(say(dtype), sums))),
        section.files.length > 0 && byteBars('By file', section.files.map((file) =>
          barOf(name(file.path, 60), file))))),
    part('Layers', heatMap({ title: 'Layers and kinds', rows, pool: poolModel, values, marks: modelMark, perKind: true,
      table })),
    part('Tensors', several.length > 0 && commandNote(
      `Rows with * in the name: ${count(several.length)}. They represent several tensors, ${count(sum(several, 'tensors'))} in all. `
      + 'To see each tensor of a row, run this command with its pattern and your other options:', reportCommand(section.path, several[0].name)), table.element),
    section.parts && part('Parts of the ranks', partsView(section.parts)),
    part('Facts', factsOf(section)),
  ];
}

/** Returns the command for a detailed report of some tensors. */
function reportCommand(path, pattern) {
  return `muster report ${shellQuoted(path)} --select ${shellQuoted(pattern)} --out details.html`;
}
