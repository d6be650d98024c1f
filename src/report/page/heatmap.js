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

function exactText(value) {
  return Number.isInteger(value) ? count(value) : exact(value);
}

/** Marks cells far from the other layers of their kind: more than 8 times the median distance from the median. */
function findOutliers(entry, valueOf) {
  const values = [...entry.cells.values()].map((cell) => [cell, valueOf(cell)]).filter(([, value]) => Number.isFinite(value));
  const median = (list) => [...list].sort((a, b) => a - b)[Math.floor(list.length / 2)];
  for (const cell of entry.cells.values()) cell.outlier = false;
  if (values.length < 6) return;
  const positive = values.every(([, value]) => value > 0);
  const scaled = values.map(([cell, value]) => [cell, positive ? Math.log(value) : value]);
  const middle = median(scaled.map(([, value]) => value));
  const spread = median(scaled.map(([, value]) => Math.abs(value - middle)));
  // Kinds whose layers are nearly equal have no outliers that matter.
  const least = positive ? 0.1 : 1e-6 * Math.abs(middle) || Number.MIN_VALUE;
  for (const [cell, value] of scaled) cell.outlier = Math.abs(value - middle) > 8 * Math.max(spread, least);
}

/** Options: `values` lists what a cell can show: `title`, `of(pool)`, `text(value)`, and `both` if zero is the middle, or
 * `steps` if the scale may be logarithmic. `marks(pool)` returns null, or a sign with its text, and whether it is `bad` or
 * `usual`. `perKind` gives each kind its own colours, and marks outliers. `pick(cell)` is called for a chosen cell. */
function heatMap({ title, rows, pool, values, marks, perKind, pick }) {
  const all = cellsOf(rows, pool);
  const usual = all.layers.filter((layer) => layer !== '');
  if (!usual.length || all.kinds.length === 0) return null;
  const state = { value: values[0], perKind: Boolean(perKind), scale: 'automatic', first: 0 };
  const ordered = [...all.kinds].sort((a, b) => b.cells.size - a.cells.size || b.bytes - a.bytes).slice(0, kindsShown)
    .sort((a, b) => (a.cells.has('') - b.cells.has('')) || natural.compare(a.kind, b.kind));
  const prefix = commonPrefix(ordered.filter((entry) => !entry.cells.has('')).map((entry) => entry.kind));
  const kindText = (entry) => printable(entry.kind.startsWith(prefix) ? entry.kind.slice(prefix.length) : entry.kind);
  const layers = () => {
    const page = usual.slice(state.first, state.first + layersPerPage);
    return all.layers.length > usual.length ? ['', ...page] : page;
  };
  const valueOf = (cell) => state.value.of(cell.pool);
  let shown = [];
  let scales = new Map();
  let isLog = false;

  // Computes the cells of the map, and for each kind the range of its colours.
  const prepare = () => {
    const numbers = (cells) => cells.map(valueOf).filter((value) => Number.isFinite(value));
    const everything = numbers(ordered.flatMap((entry) => [...entry.cells.values()]));
    const positive = everything.filter((value) => value > 0);
    const allowed = !state.value.both;
    isLog = allowed && (state.scale === 'logarithmic'
      || (state.scale === 'automatic' && state.value.steps && Math.max(...positive) > 30 * Math.min(...positive)));
    const rangeOf = (list) => {
      const used = isLog ? list.filter((value) => value > 0) : list;
      if (state.value.both) {
        const reach = Math.max(...used.map(Math.abs), 0);
        return [-reach, reach];
      }
      return [Math.min(...used), Math.max(...used)];
    };
    const whole = rangeOf(everything);
    scales = new Map(ordered.map((entry) => [entry.kind, state.perKind ? rangeOf(numbers([...entry.cells.values()])) : whole]));
    scales.whole = whole;
    if (perKind) for (const entry of ordered) findOutliers(entry, valueOf);
    const columns = new Map(layers().map((layer, index) => [layer, index]));
    shown = ordered.flatMap((entry, y) => [...entry.cells.values()].filter((cell) => columns.has(cell.layer))
      .map((cell) => ({ ...cell, cell, x: columns.get(cell.layer), y, mark: marks(cell.pool) })))
      .sort((a, b) => a.y - b.y || a.x - b.x);
  };
  const placeOn = (cell) => {
    const value = valueOf(cell);
    if (!Number.isFinite(value)) return null;
    const scale = isLog ? (number) => Math.log(Math.max(number, scales.get(cell.kind)[0])) : (number) => number;
    const [low, high] = scales.get(cell.kind).map(scale);
    return high > low ? (scale(value) - low) / (high - low) : 0.5;
  };
  const colourOf = (cell, colours) => {
    const place = placeOn(cell);
    return place === null || Number.isNaN(place) ? colours.ground : mixed(state.value.both ? colours.both : colours.rising, place);
  };
  const layerText = (layer) => (layer === '' ? 'no layer' : layer === '*' ? 'all layers' : `layer ${layer}`);

  const legend = make('div', { class: 'legend' });
  const renderLegend = () => {
    const stops = palette()[state.value.both ? 'both' : 'rising'];
    const [low, high] = scales.whole;
    const text = state.value.text;
    legend.replaceChildren(...[
      make('span', {}, state.perKind ? 'lowest of the kind' : text(low)),
      make('span', { class: 'ramp', style: `background: linear-gradient(to right, ${stops.join(', ')})`, 'aria-hidden': 'true' }),
      make('span', {}, `${state.perKind ? 'highest of the kind' : text(high)}${isLog ? ' (logarithmic)' : ''}`),
      ...[...new Map(shown.filter((cell) => cell.mark).map((cell) => [cell.mark.sign, cell.mark])).values()]
        .map((mark) => make('span', {}, make('b', { class: mark.bad ? 'sign bad' : 'sign' }, mark.sign), ` ${mark.text}`)),
      shown.some((cell) => cell.outlier) && make('span', {}, make('b', { class: 'sign ring' }, ''), ' far from the other layers'),
    ].filter(Boolean));
  };
  const notable = make('div', { class: 'notable' });
  const notableCells = () => {
    const groups = new Map();
    const put = (text, cell) => groups.set(text, [...(groups.get(text) || []), cell]);
    for (const cell of shown) {
      if (cell.mark && !cell.mark.usual) put(cell.mark.text, cell);
      if (cell.outlier) put('far from the other layers', cell);
    }
    return [...groups];
  };
  const renderNotable = () => {
    notable.replaceChildren(...notableCells().map(([meaning, cells]) => make('p', {}, `${plural(cells.length, 'cell')}: ${meaning}. `,
      cells.slice(0, 8).map((cell) => [button([`${layerText(cell.layer)}, `, name(cell.kind.replace(prefix, ''), 60)],
        () => pick(cell.cell), { class: 'plain' }), ' ']), cells.length > 8 && `and ${cells.length - 8} more`)));
  };
  const refresh = () => {
    prepare();
    renderLegend();
    renderNotable();
    chart.update();
  };
  prepare();
  const pages = Array.from({ length: Math.ceil(usual.length / layersPerPage) }, (_, page) => page * layersPerPage);
  const marginOf = (width) => Math.min(Math.max(...ordered.map((entry) => kindText(entry).length)) * 6.2 + 14, width * 0.38);
  const chart = new Chart({
    title,
    help: 'Click a cell to list its tensors. Keys: arrows to move, Enter to list.',
    tools: [
      choice('Value', values.map((value) => [value.title, value.title]), state.value.title, (picked) => {
        state.value = values.find((value) => value.title === picked);
        refresh();
      }),
      choice('Colours', [['kind', 'for each kind'], ['map', 'for the whole map']], perKind ? 'kind' : 'map', (picked) => {
        state.perKind = picked === 'kind';
        refresh();
      }),
      choice('Scale', ['automatic', 'linear', 'logarithmic'].map((scale) => [scale, scale]), state.scale, (picked) => {
        state.scale = picked;
        refresh();
      }),
      pages.length > 1 && choice('Layers', pages.map((first) => [String(first),
        `${usual[first]} to ${usual[Math.min(first + layersPerPage, usual.length) - 1]}`]), '0', (picked) => {
        state.first = Number(picked);
        refresh();
      }),
    ],
    legend: [legend, notable],
    message: () => {
      return `${state.value.title} of ${plural(ordered.length, 'kind')} of tensors in ${plural(usual.length, 'layer')}`
        + (all.kinds.length > ordered.length ? ` (${count(all.kinds.length - ordered.length)} further kinds are only in the table)` : '')
        + notableCells().map(([text, cells]) => `; ${plural(cells.length, 'cell')}: ${text}`).join('');
    },
    leastWidth: 480,
    height: () => ordered.length * 20 + 46,
    items: {
      count: () => shown.length,
      describe: (index) => {
        const cell = shown[index];
        return [['', shorten(printable(cell.kind), 120)], ['', layerText(cell.layer)], [state.value.title, exactText(valueOf(cell))],
          ['Tensors', count(sum(cell.rows, 'tensors'))], ...(cell.mark ? [['', cell.mark.text]] : []),
          ...(cell.outlier ? [['', 'far from the other layers']] : [])];
      },
      target: (index) => ({ seriesIndex: 0, dataIndex: index }),
      step: (index, key) => {
        if (key === 'ArrowLeft' || key === 'ArrowRight') return index + (key === 'ArrowLeft' ? -1 : 1);
        const down = key === 'ArrowDown' ? 1 : -1;
        const { x, y } = shown[index];
        const next = shown.findIndex((cell) => cell.y === y + down && cell.x >= x);
        return next < 0 ? index : next;
      },
      choose: (index) => pick(shown[index].cell),
    },
    option: (colours, width) => ({
      grid: { left: marginOf(width), right: 8, top: 26, bottom: 8 },
      xAxis: axis(colours, {
        type: 'category', axisLine: { show: false }, data: layers().map((layer) => (layer === '' ? '–' : layer)), position: 'top',
        axisLabel: { interval: 'auto', hideOverlap: true },
      }),
      yAxis: axis(colours, {
        type: 'category', axisLine: { show: false }, inverse: true, data: ordered.map(kindText),
        axisLabel: { interval: 0, formatter: (text) => shorten(text, Math.floor((marginOf(width) - 14) / 6.2)) },
      }),
      series: [{
        type: 'custom', data: shown.map((cell) => [cell.x, cell.y]),
        renderItem: (params, api) => {
          const cell = shown[params.dataIndex];
          const [x, y] = api.coord([cell.x, cell.y]);
          const [cellWidth, cellHeight] = api.size([1, 1]);
          const gap = cellWidth > 6 ? 1 : 0;
          const shape = { x: x - cellWidth / 2, y: y - cellHeight / 2, width: Math.max(cellWidth - gap, 0.5), height: cellHeight - 1 };
          const bad = cell.mark && cell.mark.bad;
          const fill = bad ? colours.bad : colourOf(cell, colours);
          const inner = { x: shape.x + 1, y: shape.y + 1, width: Math.max(shape.width - 2, 0.5), height: shape.height - 2 };
          return {
            type: 'group',
            children: [
              { type: 'rect', shape, style: { fill }, emphasis: { style: { stroke: colours.text, lineWidth: 2 } } },
              ...(cell.outlier ? [{ type: 'rect', shape: inner, style: { fill: 'none', stroke: inkOn(fill), lineWidth: 2 }, silent: true }] : []),
              ...(cell.mark && cellWidth > 7 ? [{
                type: 'text', silent: true,
                style: { text: cell.mark.sign, x, y, align: 'center', verticalAlign: 'middle', fill: inkOn(fill), font: 'bold 11px sans-serif' },
              }] : []),
            ],
          };
        },
      }],
    }),
    table: () => simpleTable(`${title}: ${state.value.title}`, ordered, [['Kind', 'kind', 'name'], ...layers().map((layer) => {
      const at = (entry) => entry.cells.get(layer);
      return [layer === '' ? 'No layer' : layer, (entry) => (at(entry) ? valueOf(at(entry)) : null), 'value', (entry) => {
        const mark = at(entry) && marks(at(entry).pool);
        return at(entry) ? make('span', { title: exactText(valueOf(at(entry))) }, state.value.text(valueOf(at(entry))), mark && ` ${mark.sign}`) : '';
      }];
    })]),
  });
  renderLegend();
  renderNotable();
  darkScheme.addEventListener('change', renderLegend);
  return chart.element;
}

/** Returns the longest common beginning that ends at a separator. */
function commonPrefix(texts) {
  if (texts.length < 2) return '';
  let prefix = texts[0];
  for (const text of texts) while (!text.startsWith(prefix)) prefix = prefix.slice(0, -1);
  return prefix.slice(0, Math.max(prefix.lastIndexOf('.'), prefix.lastIndexOf('/')) + 1);
}
