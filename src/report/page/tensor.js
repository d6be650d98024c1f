// The distribution of one tensor: a small drawing in the table, and a chart in its details.

/** Returns a drawing of a histogram in the size of a line of text. Heights are square roots, so small counts show. */
function sparkline(counts) {
  if (!counts || !counts.length) return '';
  const largest = Math.sqrt(Math.max(...counts, 1));
  const step = 64 / counts.length;
  const path = counts.map((value, index) => {
    const top = 16 - Math.max(16 * (Math.sqrt(value) / largest), value > 0 ? 1 : 0);
    return `M${(index * step).toFixed(1)} 16V${top.toFixed(1)}h${step.toFixed(1)}V16z`;
  }).join('');
  return svg('svg', { viewBox: '0 0 64 16', width: 64, height: 16, class: 'spark', 'aria-hidden': 'true' }, svg('path', { d: path }));
}

/** Returns the bounds of a bin. */
function binOf(row, index) {
  const bins = row.histogram.length;
  const width = row.maximum - row.minimum;
  return [row.minimum + (width * index) / bins, index === bins - 1 ? row.maximum : row.minimum + (width * (index + 1)) / bins];
}

function histogram(row) {
  const counts = row.histogram;
  if (!counts || !counts.length || row.minimum === null) return null;
  const state = { log: false };
  const range = (index) => binOf(row, index).map(short).join(' to ');
  const chart = new Chart({
    title: 'Histogram',
    help: 'Keys: arrows to move between the bins.',
    tools: choice('Counts', [['linear', 'linear'], ['log', 'logarithmic']], 'linear', (picked) => {
      state.log = picked === 'log';
      chart.update();
    }),
    message: () => {
      const largest = counts.indexOf(Math.max(...counts));
      return `${plural(counts.reduce((all, value) => all + value, 0), 'finite value')} in ${plural(counts.length, 'bin')}. `
        + `The largest bin is ${range(largest)} with ${count(counts[largest])}.`;
    },
    height: () => 200,
    items: {
      count: () => counts.length,
      describe: (index) => [['Values', range(index)], ['Count', count(counts[index])]],
      target: (index) => ({ seriesIndex: 0, dataIndex: index }),
    },
    option: (colours) => ({
      grid: { left: 8, right: 16, top: 12, bottom: 24, containLabel: true },
      xAxis: axis(colours, {
        type: 'category', data: counts.map((_, index) => short((binOf(row, index)[0] + binOf(row, index)[1]) / 2)),
        axisLabel: { hideOverlap: true },
      }),
      yAxis: axis(colours, {
        type: state.log ? 'log' : 'value', min: state.log ? 0.5 : 0, splitLine: { lineStyle: { color: colours.line } },
        axisLabel: { formatter: (value) => (value < 1 && value > 0 ? '' : value >= 1e5 ? short(value) : count(value)) },
      }),
      series: [{ type: 'bar', data: counts.map((value) => (state.log && value === 0 ? null : value)), barCategoryGap: '6%', itemStyle: { color: colours.accent },
        emphasis: { itemStyle: { color: colours.text } } }],
    }),
    table: () => simpleTable('Histogram', counts.map((value, index) => ({ value, index })), [
      ['From', (bin) => binOf(row, bin.index)[0], 'value'], ['To', (bin) => binOf(row, bin.index)[1], 'value'], ['Count', 'value', 'number'],
    ]),
  });
  return chart.element;
}

/** Returns everything that is known about a row of a model. */
function tensorDetails(row, section) {
  const file = row.file === null || row.file === undefined ? null : section.files[row.file];
  const elements = row.shape ? row.shape.reduce((all, extent) => all * extent, 1) : null;
  const isPattern = row.tensors !== 1;
  return [
    make('p', { class: 'fullname' }, make('bdi', {}, printable(row.name))),
    make('div', { class: 'columns' },
      definitions([
        ['Tensors', isPattern ? count(row.tensors) : null],
        ['Dtype', row.dtype === null ? 'various' : say(row.dtype)], ['Shape', shapeText(row.shape)],
        ['Elements', elements === null ? null : count(elements)],
        ['Bytes', count(row.bytes)], ['File', file ? say(file.path) : null],
        ...(section.has_values ? [
          ['Values', count(row.values)], ['Minimum', exact(row.minimum)], ['Maximum', exact(row.maximum)],
          ['Mean', exact(row.mean)], ['Deviation', exact(row.deviation)],
          ['Zeros', `${count(row.zeros)}${row.values ? ` (${percent(row.zeros / row.values)})` : ''}`],
          ['NaN', count(row.nans)], ['Infinities', count(row.infinities)],
        ] : []),
      ]),
      section.has_values && histogram(row)),
    isPattern && detailHint(section.path, row.name, row.tensors),
  ];
}

/** Returns the remark for rows of several tensors, with the command for a detailed report. */
function detailHint(path, pattern, tensors) {
  return make('div', { class: 'note' },
    make('p', {}, `This row represents ${plural(tensors, 'tensor')}. This command writes a report with each of them:`),
    command(`muster report ${shellQuoted(path)} --select ${shellQuoted(pattern)} --out details.html`));
}
