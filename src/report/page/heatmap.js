// The map of layers against kinds of matrices.

const layersPerPage = 200;
const kindsShown = 60;

/** Returns one cell per layer and kind with the pooled values of its rows. */
function cellsOf(rows, pool) {
  const kinds = new Map();
  const layers = new Set();
  for (const row of rows) {
    const { layer, kind } = placeOf(row.name);
    if (!kinds.has(kind)) kinds.set(kind, { kind, bytes: 0, cells: new Map() });
    const entry = kinds.get(kind);
    entry.bytes += row.bytes || 0;
    layers.add(layer);
    if (!entry.cells.has(layer)) entry.cells.set(layer, { kind, layer, rows: [] });
    entry.cells.get(layer).rows.push(row);
  }
  for (const entry of kinds.values()) for (const cell of entry.cells.values()) cell.pool = pool(cell.rows);
  return { kinds: [...kinds.values()], layers: [...layers].sort((a, b) => natural.compare(a, b)) };
}

/** Returns the cells that are far from the other layers of their kind: their distance from the median is more than 8
 * times the median distance. */
function outliersOf(entry, valueOf) {
  const values = [...entry.cells.values()].map((cell) => [cell, valueOf(cell)]).filter(([, value]) =>
    Number.isFinite(value));
  if (values.length < 6) return new Set();
  const median = (list) => list.sort((a, b) => a - b)[Math.floor(list.length / 2)];
  const isPositive = values.every(([, value]) => value > 0);
  const scaled = values.map(([cell, value]) => [cell, isPositive ? Math.log(value) : value]);
  const middle = median(scaled.map(([, value]) => value));
  const spread = median(scaled.map(([, value]) => Math.abs(value - middle)));
  // Kinds whose layers are nearly equal have no outliers that matter.
  const least = isPositive ? 0.1 : 1e-6 * Math.abs(middle) || Number.MIN_VALUE;
  return new Set(scaled.filter(([, value]) => Math.abs(value - middle) > 8 * Math.max(spread, least)).map(([cell]) =>
    cell));
}

/** Options:
 * - `values`: the values that a cell can show, with `title`, `of(pool)`, `text(value)`, `both` if zero is the middle, and
 *   `steps` if the scale may be logarithmic
 * - `marks(pool)`: null, or a `sign` with its `text`, and whether it is `bad` or `usual`
 * - `perKind`: gives each kind its own colours, and marks outliers
 * - `table`: lists the tensors of a chosen cell */
function heatMap({ title, rows, pool, values, marks, perKind = false, table }) {
  const all = cellsOf(rows, pool);
  const numbered = all.layers.filter((layer) => layer !== '');
  if (!numbered.length) return null;
  const state = { value: values[0], perKind, first: 0 };
  const ordered = [...all.kinds].sort((a, b) => b.cells.size - a.cells.size || b.bytes - a.bytes).slice(0, kindsShown)
    .sort((a, b) => (a.cells.has('') - b.cells.has('')) || natural.compare(a.kind, b.kind));
  const prefix = commonPrefix(ordered.filter((entry) => !entry.cells.has('')).map((entry) => entry.kind));
  const shortKind = (kind) => printable(kind.startsWith(prefix) ? kind.slice(prefix.length) : kind);
  const layerText = (layer) => (layer === '' ? 'no layer' : layer === '*' ? 'all layers' : `layer ${layer}`);
  const valueOf = (cell) => state.value.of(cell.pool);
  const pick = (cell) => table.pick(cell.rows, [name(cell.kind, 60), `, ${layerText(cell.layer)}`]);
  let layers = [];
  let shown = [];  // the visible cells
  let whole = [];  // the range of the values of all cells
  let isLog = false;

  // Computes the visible cells, and the places of their values in the range of the colours.
  const prepare = () => {
    const page = numbered.slice(state.first, state.first + layersPerPage);
    layers = all.layers.length > numbered.length ? ['', ...page] : page;
    const numbersOf = (entry) => [...entry.cells.values()].map(valueOf).filter(Number.isFinite);
    const everything = ordered.flatMap(numbersOf);
    const positive = everything.filter((value) => value > 0);
    isLog = Boolean(state.value.steps) && Math.max(...positive) > 30 * Math.min(...positive);
    const rangeOf = (numbers) => {
      const used = isLog ? numbers.filter((value) => value > 0) : numbers;
      const reach = Math.max(...used.map(Math.abs));
      return state.value.both ? [-reach, reach] : [Math.min(...used), Math.max(...used)];
    };
    whole = rangeOf(everything);
    const columns = new Map(layers.map((layer, index) => [layer, index]));
    shown = ordered.flatMap((entry, y) => {
      const range = state.perKind ? rangeOf(numbersOf(entry)) : whole;
      const outliers = perKind ? outliersOf(entry, valueOf) : new Set();
      const scaled = (value) => (isLog ? Math.log(Math.max(value, range[0])) : value);
      const [low, high] = range.map(scaled);
      return [...entry.cells.values()].filter((cell) => columns.has(cell.layer)).sort((a, b) =>
        columns.get(a.layer) - columns.get(b.layer))
        .map((cell) => {
          const place = high > low ? (scaled(valueOf(cell)) - low) / (high - low) : 0.5;
          const notes = [marks(cell.pool), outliers.has(cell) && { ring: true,
            text: 'differs strongly from the other layers of its kind' }].filter(Boolean);
          return { ...cell, x: columns.get(cell.layer), y, place: Number.isFinite(valueOf(cell)) ? place : null,
            notes };
        });
    });
  };

  const notesShown = () => {
    const groups = new Map();
    for (const cell of shown) for (const note of cell.notes) groups.set(note.text,
      { note, cells: [...(groups.get(note.text)?.cells || []), cell] });
    return [...groups.values()];
  };
  const legend = make('div', {});
  const renderLegend = () => {
    const { text, both } = state.value;
    const [low, high] = state.perKind ? ['lowest of the kind', 'highest of the kind'] : whole.map(text);
    const ramp = make('span', { class: 'ramp',
      style: `background: linear-gradient(to right, ${palette()[both ? 'both' : 'rising'].join(', ')})` });
    const className = (note) => (note.bad ? 'sign bad' : note.ring ? 'sign ring' : 'sign');
    const toCell = (cell) => [link([`${layerText(cell.layer)}, `, name(shortKind(cell.kind), 60)], () => pick(cell)),
      ' '];
    legend.replaceChildren(
      legendOf([low, ' ', ramp, ` ${high}${isLog ? ' (logarithmic)' : ''}`]),
      ...notesShown().map(({ note, cells }) => make('p', { class: 'notable' },
        make('b', { class: className(note) }, note.sign),
        ` ${note.text}, ${plural(cells.length, 'cell')}${note.usual ? '' : ': '}`,
        !note.usual && [cells.slice(0, 8).map(toCell), cells.length > 8 && `and ${count(cells.length - 8)} more`])));
  };
  const refresh = (change) => {
    Object.assign(state, change);
    prepare();
    renderLegend();
    chart.update();
  };
  const pages = Array.from({ length: Math.ceil(numbered.length / layersPerPage) }, (_, page) => page * layersPerPage);
  const pageText = (first) => `${numbered[first]} to ${numbered[Math.min(first + layersPerPage, numbered.length) - 1]}`;
  const marginOf = (width) => Math.min(Math.max(...ordered.map((entry) => shortKind(entry.kind).length)) * 6.2 + 14,
    width * 0.38);
  prepare();
  renderLegend();
  onColours(renderLegend);
  const chart = new Chart({
    title, legend,
    help: 'Click a cell to list its tensors. Keys: arrows to move, Enter to list.',
    tools: [
      choice('Value', values.map((value) => [value.title, value.title]), values[0].title,
        (picked) => refresh({ value: values.find((value) => value.title === picked) })),
      choice('Range of colours', [['kind', 'separate for each kind'], ['map', 'the same for all kinds']], perKind ? 'kind' : 'map',
        (picked) => refresh({ perKind: picked === 'kind' })),
      pages.length > 1 && choice('Layers', pages.map((first) => [first, pageText(first)]), 0, (first) =>
        refresh({ first: Number(first) })),
    ],
    message: () => {
      const hidden = all.kinds.length - ordered.length;
      return `${state.value.title} of ${plural(ordered.length, 'kind')} of tensors in ${plural(numbered.length, 'layer')}.`
        + (hidden ? ` The map shows the kinds with most layers; the table Tensors also has ${plural(hidden, 'further kind')}.` : '')
        + (pages.length > 1 ? ` Of the layers ${pageText(state.first)}:` : '')
        + notesShown().filter(({ note }) => !note.usual).map(({ note, cells }) =>
          ` ${plural(cells.length, 'cell')}: ${note.text}.`).join('');
    },
    leastWidth: 480,
    height: () => ordered.length * 20 + 46,
    items: {
      count: () => shown.length,
      describe: (index) => {
        const cell = shown[index];
        return [['', shorten(printable(cell.kind), 120)], ['', layerText(cell.layer)],
          [state.value.title, exact(valueOf(cell))],
          ['Tensors', count(sum(cell.rows, 'tensors'))], ...cell.notes.map((note) => ['', note.text])];
      },
      step: (index, key) => {
        if (key === 'ArrowLeft' || key === 'ArrowRight') return index + (key === 'ArrowLeft' ? -1 : 1);
        const { x, y } = shown[index];
        const next = shown.findIndex((cell) => cell.y === y + (key === 'ArrowDown' ? 1 : -1) && cell.x >= x);
        return next < 0 ? index : next;
      },
      choose: (index) => pick(shown[index]),
    },
    option: (colours, width) => ({
      grid: { left: marginOf(width), right: 8, top: 26, bottom: 8 },
      xAxis: axis(colours, { type: 'category', axisLine: { show: false }, data: layers.map((layer) => layer || '–'),
        position: 'top' }),
      yAxis: axis(colours, {
        type: 'category', axisLine: { show: false }, inverse: true, data: ordered.map((entry) => shortKind(entry.kind)),
        axisLabel: { interval: 0, formatter: (text) => shorten(text, Math.floor((marginOf(width) - 14) / 6.2)) },
      }),
      series: [{
        type: 'custom', data: shown.map((cell) => [cell.x, cell.y]),
        renderItem: ({ dataIndex }, api) => cellDrawing(shown[dataIndex], api, colours, state.value.both ? colours.both
          : colours.rising),
      }],
    }),
    table: () => simpleTable(`${title}: ${state.value.title}`, ordered,
      [['Kind', 'kind', 'name'], ...layers.map((layer) => {
      const at = (entry) => entry.cells.get(layer);
      return [layer || 'No layer', (entry) => (at(entry) ? valueOf(at(entry)) : null), 'value', (entry) => {
        const mark = at(entry) && marks(at(entry).pool);
        return at(entry) ? make('span', { title: exact(valueOf(at(entry))) }, state.value.text(valueOf(at(entry))),
          mark && ` ${mark.sign}`) : '';
      }];
    })]),
  });
  return chart.element;
}

function cellDrawing(cell, api, colours, ramp) {
  const [x, y] = api.coord([cell.x, cell.y]);
  const [width, height] = api.size([1, 1]);
  const shape = { x: x - width / 2, y: y - height / 2, width: Math.max(width - (width > 6 ? 1 : 0), 0.5),
    height: height - 1 };
  const inner = { x: shape.x + 1, y: shape.y + 1, width: Math.max(shape.width - 2, 0.5), height: shape.height - 2 };
  const mark = cell.notes.find((note) => note.sign);
  const fill = mark && mark.bad ? colours.bad : cell.place === null ? colours.ground : mixed(ramp, cell.place);
  const children = [{ type: 'rect', shape, style: { fill }, emphasis: { style: { stroke: colours.text,
    lineWidth: 2 } } }];
  if (cell.notes.some((note) => note.ring)) {
    children.push({ type: 'rect', shape: inner, silent: true, style: { fill: 'none', stroke: inkOn(fill),
      lineWidth: 2 } });
  }
  if (mark && width > 7) {
    const style = { text: mark.sign, x, y, align: 'center', verticalAlign: 'middle', fill: inkOn(fill),
      font: 'bold 11px sans-serif' };
    children.push({ type: 'text', silent: true, style });
  }
  return { type: 'group', children };
}

/** Returns the longest common beginning that ends at a separator. */
function commonPrefix(texts) {
  if (texts.length < 2) return '';
  let prefix = texts[0];
  for (const text of texts) while (!text.startsWith(prefix)) prefix = prefix.slice(0, -1);
  return prefix.slice(0, Math.max(prefix.lastIndexOf('.'), prefix.lastIndexOf('/')) + 1);
}
