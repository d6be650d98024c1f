// Sortable tables. Rows may contain rows, and may open details.

const firstLines = 500;

/** A table with a button in each header. Options:
 * - `label`: the name of the table
 * - `columns`: `title`, `value(row)` for sorting, `cell(row)` for the contents, and optionally `align` and `hint`
 * - `children(row)`: the rows of a group, otherwise null. A group has a `path` that identifies it
 * - `details(row)`: the contents that a row opens
 * - `sort`, `descending`: the index of the column by which the rows are sorted, and the direction */
class DataTable {
  constructor({ label, columns, rows, children, details, sort, descending, empty }) {
    Object.assign(this, { label, columns, children, details, empty: empty || 'Nothing to show.' });
    this.order = { column: sort ?? -1, descending: Boolean(descending) };
    this.unfolded = new Set();
    this.opened = new Map();  // from rows to their details
    this.headers = columns.map((column, index) => {
      const sorter = button([column.title, make('span', { class: 'arrow', 'aria-hidden': 'true' })],
        () => this.sortBy(index), { title: column.hint });
      return make('th', { scope: 'col', class: column.align || 'left' }, sorter);
    });
    this.body = make('tbody');
    this.note = make('p', { class: 'faint', role: 'status' });
    this.more = button('Show more rows', () => this.showMore(), { hidden: true });
    this.element = make('div', { class: 'table' },
      make('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': label },
        make('table', { class: children ? 'tree' : null }, make('caption', { class: 'hidden' }, label),
          make('thead', {}, make('tr', {}, this.headers)),
          this.body)), make('div', { class: 'tools' }, this.note, this.more));
    this.setRows(rows);
  }

  setRows(rows, unfoldAll = false) {
    if (unfoldAll !== this.unfoldAll) this.unfolded.clear();
    Object.assign(this, { rows, unfoldAll, limit: firstLines });
    if (this.children && !unfoldAll && this.unfolded.size === 0) this.unfoldFew();
    this.render();
  }

  /** Unfolds the outer groups, as long as the table remains short. */
  unfoldFew() {
    let lines = this.rows.length;
    for (const queue = [...this.rows]; queue.length;) {
      const row = queue.shift();
      const inner = this.children(row);
      if (!inner || lines + inner.length > 45) continue;
      this.unfolded.add(row.path);
      lines += inner.length;
      queue.push(...inner);
    }
  }

  sortBy(index) {
    const same = this.order.column === index;
    this.order = { column: index, descending: same ? !this.order.descending : this.columns[index].align === 'right' };
    this.render();
  }

  showMore() {
    this.limit += firstLines;
    this.render();
    if (this.more.hidden) this.element.querySelector('.scroll').focus();
  }

  isOpen(row) {
    return this.unfoldAll !== this.unfolded.has(row.path ?? row);
  }

  toggleGroup(row) {
    const key = row.path ?? row;
    if (!this.unfolded.delete(key)) this.unfolded.add(key);
    this.render(row);
  }

  toggleDetails(row) {
    const key = row.row ?? row;
    if (!this.opened.delete(key)) this.opened.set(key, make('div', { class: 'details' }, this.details(row)));
    this.render(row);
  }

  /** Returns the visible rows with their depths, in order. */
  lines() {
    const column = this.columns[this.order.column];
    const lines = [];
    const walk = (rows, depth) => {
      const sorted = column ? rows.map((row) => [column.value(row), row])
        .sort((a, b) => compare(a[0], b[0], this.order.descending)).map(([, row]) => row) : rows;
      for (const row of sorted) {
        lines.push([row, depth]);
        const inner = this.children && this.children(row);
        if (inner && this.isOpen(row)) walk(inner, depth + 1);
      }
    };
    walk(this.rows, 0);
    return lines;
  }

  render(focused) {
    this.headers.forEach((header, index) => {
      const { column, descending } = this.order;
      header.setAttribute('aria-sort', index !== column ? 'none' : descending ? 'descending' : 'ascending');
    });
    const lines = this.lines();
    const shown = lines.slice(0, this.limit);
    let button = null;
    this.body.replaceChildren(...shown.flatMap(([row, depth]) => {
      const parts = this.rowElements(row, depth);
      if (row === focused) button = parts[0].querySelector('button');
      return parts;
    }));
    if (!lines.length) this.body.append(make('tr', {}, make('td', { colspan: this.columns.length, class: 'faint' },
      this.empty)));
    this.more.hidden = shown.length === lines.length;
    this.note.textContent = this.more.hidden ? '' : `Showing ${count(shown.length)} of ${count(lines.length)} rows.`;
    if (button) button.focus();
  }

  rowElements(row, depth) {
    const inner = this.children && this.children(row);
    const act = inner ? () => this.toggleGroup(row) : this.details ? () => this.toggleDetails(row) : null;
    const isOpen = inner ? this.isOpen(row) : this.opened.has(row.row ?? row);
    const cells = this.columns.map((column, index) => {
      const content = column.cell(row);
      if (index > 0) return make('td', { class: column.align || 'left' }, content);
      if (!act) return make('th', { scope: 'row', class: column.align || 'left' }, content);
      return make('th', { scope: 'row', style: `--depth: ${Math.min(depth, 8)}` },
        make('button', { type: 'button', class: inner ? 'fold' : 'open', 'aria-expanded': String(isOpen) }, content));
    });
    const line = make('tr', { class: inner ? 'group' : act ? 'row' : null, click: act && ((event) => {
      // A click at the end of a selection of text is not meant for the row.
      if (String(getSelection()) === '' || event.target.closest('button')) act();
    }) }, cells);
    if (inner || !isOpen) return [line];
    return [line, make('tr', { class: 'opened' }, make('td', { colspan: this.columns.length },
      this.opened.get(row.row ?? row)))];
  }
}

/** How columns show their values. */
const forms = {
  text: { align: 'left', show: (value) => (typeof value === 'boolean' ? (value ? 'yes' : 'no') : String(value)) },
  name: { align: 'left', show: (value) => name(value, 90) },
  message: { align: 'text', show: say },
  number: { align: 'right', show: count },
  alarm: { align: 'right', show: (value) => (value ? alarm(count(value)) : '0') },
  value: { align: 'right', show: valueCell },
  bytes: { align: 'right', show: bytesCell },
  seconds: { align: 'right', show: durationCell },
  share: { align: 'right', show: percent },
  time: { align: 'left', show: time },
};

function shown(value, form) {
  return value === null || value === undefined ? '–' : forms[form].show(value);
}

/** Returns a table, or null without rows. Columns are [title, key, form, cell]: the key is one of the row, or a
 * function of it, and `cell(row)` replaces the usual contents. */
function simpleTable(label, rows, columns, more) {
  const columnOf = ([title, key, form = 'text', cell = null]) => {
    const value = typeof key === 'function' ? key : (row) => row[key];
    return { title, value, align: forms[form].align, cell: cell || ((row) => shown(value(row), form)) };
  };
  return rows.length ? new DataTable({ label, rows, columns: columns.map(columnOf), ...more }).element : null;
}
