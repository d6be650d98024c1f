// The section of two models that were compared.

const diffValues = [
  { title: 'Relative difference', of: (pool) => pool.relative, text: short, steps: true },
  { title: 'Absolute difference', of: (pool) => pool.absolute, text: short, steps: true },
  { title: 'Share of differing values', of: (pool) => (pool.compared ? pool.differing / pool.compared : pool.differing === 0 ? 0 : null), text: percent, steps: true },
];

const kindTexts = { same: 'same', values: 'values differ', type: 'type differs', 'only in A': 'only in A', 'only in B': 'only in B' };

function diffMark(pool) {
  if (pool.nans > 0) return { sign: '!', text: 'NaN on one side only', bad: true };
  if (pool.kind === 'type') return { sign: 'T', text: 'different dtype or shape', bad: true };
  if (pool.kind === 'only in A') return { sign: 'A', text: 'only in A', bad: true };
  if (pool.kind === 'only in B') return { sign: 'B', text: 'only in B', bad: true };
  if (pool.different === 0) return { sign: '=', text: 'no difference', usual: true };
  return null;
}

function diffDetails(row, section) {
  return [
    make('p', { class: 'fullname' }, make('bdi', {}, printable(row.name))),
    definitions([
      ['Result', kindTexts[row.kind]], ['Tensors', row.tensors === 1 ? null : count(row.tensors)],
      ['Different tensors', row.tensors === 1 ? null : count(row.different)],
      ['A', row.a === null ? (row.kind === 'only in B' ? 'does not exist' : 'various') : say(row.a)],
      ['B', row.b === null ? (row.kind === 'only in A' ? 'does not exist' : 'various') : say(row.b)],
      ['Bytes', count(row.bytes)], ['Compared values', count(row.compared)], ['Differing values', count(row.differing)],
      ['NaN on one side only', count(row.nans)], ['Largest absolute difference', exact(row.absolute)],
      ['Largest relative difference', exact(row.relative)],
    ]),
    row.tensors !== 1 && make('div', { class: 'note' }, make('p', {}, `This row represents ${plural(row.tensors, 'tensor')}. This command prints each difference:`),
      command(`muster diff ${shellQuoted(section.a)} ${shellQuoted(section.b)} --json`)),
  ];
}

function diffSection(section) {
  const rows = rowsOf(section.rows);
  const kinds = Object.keys(kindTexts).filter((kind) => rows.some((row) => row.kind === kind));
  const table = rows.length ? tensorTable({
    label: 'Compared tensors', rows, details: (row) => diffDetails(row, section),
    selects: [{ title: 'Result', choices: ['different', ...kinds], initial: rows.some((row) => row.different) ? 'different' : '',
      test: (row, wanted) => (wanted === 'different' ? row.different > 0 : row.kind === wanted) }],
    columns: tensorColumns(poolDiff, [
      ['Result', 'kind', 'text', { cell: (pool) => (pool.tensors === 1 ? kindTexts[pool.kind] : `${count(pool.different)} of ${count(pool.tensors)} different`) }],
      ['A', 'a', 'name', { leaf: true }], ['B', 'b', 'name', { leaf: true }], ['Bytes', 'bytes', 'bytes'], ['Compared', 'compared', 'number'], ['Differing', 'differing', 'number'],
      ['Share', 'differing', 'share', { value: diffValues[2].of }],
      ['NaN', 'nans', 'number', { cell: (pool) => (pool.nans ? make('strong', { class: 'bad' }, count(pool.nans)) : count(pool.nans)) }],
      ['Absolute', 'absolute', 'value'], ['Relative', 'relative', 'value'],
    ]),
  }) : null;
  const map = rows.some((row) => row.different) && heatMap({ title: 'Differences by layer and kind', rows, pool: poolDiff, values: diffValues, marks: diffMark,
    pick: (cell) => table.pick(cell.rows, [name(cell.kind, 60), cell.layer === '' ? '' : `, layer ${cell.layer}`]) });
  const leftOut = ['a', 'b'].flatMap((side) => (section[`left_out_${side}`] || []).map((item) => ({ ...item, side: side.toUpperCase() })));
  const files = section.file_differences || [];
  const configs = section.config_differences || [];
  const side = (value) => (value === null ? make('em', {}, 'missing') : make('code', {}, say(typeof value === 'string' ? value : JSON.stringify(value))));
  return [
    definitions([['A', say(section.a)], ['B', say(section.b)]]),
    make('p', { class: section.same ? 'good' : 'bad' }, make('strong', {}, section.same ? '✓ A and B are the same.' : '✕ A and B differ.')),
    figures([
      ['Compared tensors', count(section.tensors)], ['Different tensors', count(section.different_tensors)], ['Bytes', bytesCell(section.bytes)],
      ['Differing files', `${count(files.length)} of ${count(section.files)}`],
      ['Config', section.config ? plural(section.config_differences_in_all ?? configs.length, 'difference') : 'not compared'],
      ['Metadata', section.metadata_differs ? 'differs' : 'same'],
      section.not_compared > 0 && ['Not compared', plural(section.not_compared, 'item')],
    ]),
    map && labelled('Layers', map),
    table && labelled('Tensors', table.element),
    files.length > 0 && labelled('Files', simpleTable('Differing files', files,
      [['Name', 'name', 'name'], ['Difference', 'kind'], ['Detail', 'detail', 'message']])),
    configs.length > 0 && labelled('Config', [simpleTable('Differences of the configs', configs,
      [['Place', 'place', 'name'], ['A', (item) => JSON.stringify(item.a), 'text', (item) => side(item.a)], ['B', (item) => JSON.stringify(item.b), 'text', (item) => side(item.b)]]),
    section.config_differences_in_all > configs.length && make('p', {}, `${count(section.config_differences_in_all - configs.length)} further differences are not listed.`)]),
    (section.not_compared > 0 || leftOut.length > 0) && labelled('Not compared', [
      section.not_compared > 0 && make('p', {}, say(section.not_compared_message)),
      leftOut.length > 0 && simpleTable('Data that was not compared', leftOut,
        [['Side', 'side'], ['Name', 'name', 'name'], ['Reason', 'reason', 'message'], ['Can be read', (item) => (item.lost ? 'no' : 'yes')]])]),
  ];
}
