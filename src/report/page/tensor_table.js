// The table of all tensors of a section: a tree of modules with filters.

/** Returns the columns of a table of tensors. Each is [title, key, form, { leaf, cell, value, hint }]. The value is that
 * of the pooled rows of a group, or with `leaf` only that of single rows. `cell` and `value` are functions of it. */
function tensorColumns(pool, columns) {
  const pooled = (node) => (node.pool === undefined ? (node.pool = pool(node.rows)) : node.pool);
  const nameColumn = { title: 'Name', value: (node) => node.label, cell: (node) => name(labelOf(node), 70) };
  return [nameColumn, ...columns.filter(Boolean).map(([title, key, form, { leaf, cell, value, hint } = {}]) => {
    const isBlank = (node) => leaf && node.children;
    const valueOf = (node) => (isBlank(node) ? null : value ? value(pooled(node)) : pooled(node)[key]);
    const cellOf = (node) => (isBlank(node) ? '' : cell ? cell(pooled(node)) : shown(valueOf(node), form));
    return { title, hint, align: forms[form].align, value: valueOf, cell: cellOf };
  })];
}

/** Returns the element, and a function that shows only some rows. `select` is an optional filter with `title`,
 * `choices`, `initial` and `test(row, choice)`. */
function tensorTable({ label, rows, columns, details, select }) {
  const state = { text: '', picked: null, grouped: true, choice: (select && select.initial) || '' };
  const table = new DataTable({
    label, rows: [], columns, sort: 0, empty: 'No tensor matches the filter.',
    children: (node) => node.children, details: (node) => details(node.row),
  });
  const chip = make('span', {});
  const found = make('span', { class: 'faint', role: 'status' });
  const apply = () => {
    const test = nameTest(state.text);
    const kept = rows.filter((row) => (!state.picked || state.picked.has(row)) && test(row.name)
      && (!state.choice || select.test(row, state.choice)));
    const isFiltered = kept.length < rows.length;
    const tree = moduleTree(kept);
    table.setRows(state.grouped ? tree.children : tree.allLeaves, isFiltered);
    found.textContent = isFiltered ? `${plural(kept.length, 'row')} of ${count(rows.length)} match.` : '';
  };
  const set = (change) => (value) => {
    Object.assign(state, change(value));
    apply();
  };
  const choices = select && choice(select.title, [['', 'all'], ...select.choices.map((value) =>
    [value, printable(value)])], state.choice,
    set((value) => ({ choice: value })));
  const group = make('input', { type: 'checkbox', checked: true, change: (event) =>
    set((grouped) => ({ grouped }))(event.target.checked) });
  const controls = tools(nameFilter(set((text) => ({ text }))), choices,
    make('label', { class: 'check' }, group, ' Group by module'), chip, found);
  const element = rows.length ? make('div', {}, controls, table.element) : null;
  apply();
  const pick = (picked, text) => {
    chip.replaceChildren(button([text, ' ✕'], () => {
      chip.replaceChildren();
      set(() => ({ picked: null }))();
      controls.querySelector('input').focus();
    }, { class: 'chip', title: 'Remove this filter' }));
    if (choices) choices.querySelector('select').value = '';
    set(() => ({ picked: new Set(picked), choice: '' }))();
    visit(element);
  };
  return { element, pick };
}
