// The section of two models that were compared.

const differingShare = (pool) => (pool.compared ? pool.differing / pool.compared : pool.differing === 0 ? 0 : null);
const diffValues = [
  { title: 'Relative difference', of: (pool) => pool.relative, text: short, steps: true },
  { title: 'Absolute difference', of: (pool) => pool.absolute, text: short, steps: true },
  { title: 'Share of differing values', of: differingShare, text: percent, steps: true },
];
const diffKinds = ['type', 'only in A', 'only in B', 'values', 'same'];

function diffMark(pool) {
  if (pool.nans > 0) return { sign: '!', text: 'NaN on one side only', bad: true };
  if (pool.kind === 'type') return { sign: 'T', text: 'different dtype or shape', bad: true };
  if (pool.kind === 'only in A') return { sign: 'A', text: 'only in A', bad: true };
  if (pool.kind === 'only in B') return { sign: 'B', text: 'only in B', bad: true };
  return pool.different === 0 ? { sign: '=', text: 'no difference', usual: true } : null;
}

/** Returns the differences of several rows as if they were one tensor. */
function poolDiff(rows) {
  if (rows.length === 1) return rows[0];
  const compared = rows.filter((row) => row.compared !== null);
  const pool = { kind: diffKinds.find((kind) => rows.some((row) => row.kind === kind)) };
  for (const key of ['tensors', 'bytes', 'different']) pool[key] = sum(rows, key);
  for (const key of ['compared', 'differing', 'nans']) pool[key] = compared.length ? sum(compared, key) : null;
  for (const key of ['absolute', 'relative']) pool[key] = extreme(rows, key, (a, b) => a > b);
  return pool;
}

function diffDetails(row, section) {
  const isPattern = row.tensors !== 1;
  const side = (text, other) => (text !== null ? say(text) : row.kind === other ? 'does not exist' : 'various');
  return [
    make('p', { class: 'fullname' }, say(row.name)),
    definitions([
      ['Result', row.kind], ['Tensors', isPattern ? count(row.tensors) : null],
        ['Different tensors', isPattern ? count(row.different) : null],
      ['A', side(row.a, 'only in B')], ['B', side(row.b, 'only in A')],
      ['Bytes', count(row.bytes)], ['Compared values', count(row.compared)], ['Differing values', count(row.differing)],
      ['NaN on one side only', count(row.nans)], ['Largest absolute difference', exact(row.absolute)],
      ['Largest relative difference', exact(row.relative)],
    ]),
    isPattern && commandNote(`This row represents ${plural(row.tensors, 'tensor')}. This command prints the differences of all tensors:`,
      `muster diff ${shellQuoted(section.a)} ${shellQuoted(section.b)} --json`),
  ];
}

function diffSection(section) {
  const rows = rowsOf(section.rows);
  const differs = rows.some((row) => row.different);
  const table = tensorTable({
    label: 'Compared tensors', rows, details: (row) => diffDetails(row, section),
    select: {
      title: 'Result', choices: ['different', ...diffKinds.filter((kind) => rows.some((row) => row.kind === kind))],
      initial: differs ? 'different' : '', test: (row, wanted) => (wanted === 'different' ? row.different > 0
        : row.kind === wanted),
    },
    columns: tensorColumns(poolDiff, [
      ['Result', 'kind', 'text',
        { cell: (pool) => (pool.tensors === 1 ? pool.kind
          : `${count(pool.different)} of ${count(pool.tensors)} different`) }],
      ['A', 'a', 'name', { leaf: true }], ['B', 'b', 'name', { leaf: true }], ['Bytes', 'bytes', 'bytes'],
      ['Compared', 'compared', 'number'], ['Differing', 'differing', 'number'],
        ['Share', 'differing', 'share', { value: differingShare }],
      ['NaN', 'nans', 'alarm'], ['Largest absolute', 'absolute', 'value'], ['Largest relative', 'relative', 'value'],
    ]),
  });
  const map = differs && heatMap({ title: 'Differences by layer and kind', rows, pool: poolDiff, values: diffValues,
    marks: diffMark, table });
  const leftOut = ['a', 'b'].flatMap((side) => (section[`left_out_${side}`] || []).map((item) =>
    ({ ...item, side: side.toUpperCase() })));
  const files = section.file_differences;
  const configs = section.config_differences;
  const further = section.config_differences_in_all - configs.length;
  const text = (value) => (value === null || typeof value === 'string' ? value : JSON.stringify(value));
  return [
    definitions([['A', say(section.a)], ['B', say(section.b)]]),
    verdict(section.same, 'A and B are the same.', section.not_compared > 0 && !section.different_tensors && !files.length
      && !configs.length ? 'The compared data is the same, but some data cannot be read.' : 'A and B differ.'),
    figures([
      ['Compared tensors', count(section.tensors)], ['Different tensors', count(section.different_tensors)],
      ['Bytes', bytesCell(section.bytes)], ['Differing files', `${count(files.length)} of ${count(section.files)}`],
      ['Config', section.config ? plural(section.config_differences_in_all, 'difference') : 'not compared'],
      ['Metadata', section.metadata_differs ? 'differs' : 'same'],
      section.not_compared > 0 && ['Not compared', plural(section.not_compared, 'item')],
    ]),
    part('Layers', map),
    part('Tensors', table.element),
    part('Files', simpleTable('Differing files', files, [['Name', 'name', 'name'], ['Difference', 'kind'],
      ['Detail', 'detail', 'message']])),
    part('Config', simpleTable('Differences of the configs', configs, [['Place', 'place', 'name'],
      ['A', (item) => text(item.a), 'message'], ['B', (item) => text(item.b), 'message']]),
    further > 0 && paragraph(`${plural(further, 'further difference')} not listed.`)),
    part('Not compared', section.not_compared > 0 && paragraph(say(section.not_compared_message)),
      simpleTable('Data that was not compared', leftOut, [['Side', 'side'], ['Name', 'name', 'name'],
        ['Reason', 'reason', 'message'],
        ['Can be read', (item) => (item.lost ? 'no' : 'yes')]])),
  ];
}
