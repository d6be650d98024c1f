// The distribution of one tensor: a small drawing in the table, and a chart in its details.

/** Returns a drawing of a histogram in the size of a line of text. Heights are square roots, so small counts show. */
function sparkline(histogram) {
  if (!histogram || !histogram.length) return '';
  const largest = Math.sqrt(Math.max(...histogram, 1));
  const step = 64 / histogram.length;
  const path = histogram.map((value, index) => {
    const top = 16 - Math.max(16 * (Math.sqrt(value) / largest), value > 0 ? 1 : 0);
    return `M${(index * step).toFixed(1)} 16V${top.toFixed(1)}h${step.toFixed(1)}V16z`;
  });
  return svg('svg', { viewBox: '0 0 64 16', width: 64, height: 16, class: 'spark', 'aria-hidden': 'true' },
    svg('path', { d: path.join('') }));
}

/** Returns the chart of a row, or null if it has no finite values. */
function histogramChart(row) {
  if (!row.histogram || !row.histogram.length || row.minimum === null) return null;
  const width = (row.maximum - row.minimum) / row.histogram.length;
  const bins = row.histogram.map((value, index) => ({
    value, low: row.minimum + width * index, high: index + 1 === row.histogram.length ? row.maximum : row.minimum
      + width * (index + 1),
  }));
  const range = (bin) => `${short(bin.low)} to ${short(bin.high)}`;
  const largest = bins.reduce((best, bin) => (bin.value > best.value ? bin : best));
  let isLog = false;
  const chart = new Chart({
    title: 'Histogram',
    help: 'Keys: arrows to move between the bins.',
    tools: choice('Counts', [['linear', 'linear'], ['log', 'logarithmic']], 'linear', (picked) => {
      isLog = picked === 'log';
      chart.update();
    }),
    message: () => `${plural(sum(bins, 'value'), 'finite value')} in ${plural(bins.length, 'bin')}. `
      + `The fullest bin, ${range(largest)}, has ${plural(largest.value, 'value')}.`,
    height: () => 200,
    items: { count: () => bins.length, describe: (index) => [['Values', range(bins[index])],
      ['Count', count(bins[index].value)]] },
    option: (colours) => ({
      grid: { left: 8, right: 16, top: 12, bottom: 24, containLabel: true },
      xAxis: axis(colours, { type: 'category', data: bins.map((bin) => short(bin.low / 2 + bin.high / 2)),
        axisLabel: { hideOverlap: true } }),
      yAxis: axis(colours, {
        type: isLog ? 'log' : 'value', min: isLog ? 0.5 : 0, splitLine: gridLine(colours),
        axisLabel: { formatter: (value) => (value === 0.5 ? '' : value >= 1e5 ? short(value) : count(value)) },
      }),
      series: [{
        type: 'bar', data: bins.map((bin) => (isLog && bin.value === 0 ? null : bin.value)), barCategoryGap: '6%',
        itemStyle: { color: colours.accent }, emphasis: { itemStyle: { color: colours.text } },
      }],
    }),
    table: () => simpleTable('Histogram', bins, [['From', 'low', 'value'], ['To', 'high', 'value'],
      ['Count', 'value', 'number']]),
  });
  return chart.element;
}

const outlierReasons = {
  nan: 'has NaN', infinite: 'has infinities', zero: 'all values are zero', largest: 'has the largest magnitude',
};

/** Returns everything that is known about a row of a model. */
function tensorDetails(row, section) {
  const file = section.files[row.file];
  const isPattern = row.tensors !== 1;
  return [
    make('p', { class: 'fullname' }, say(row.name)),
    make('div', { class: 'columns' }, definitions([
      isPattern && ['Tensors', count(row.tensors)], ['Dtype', row.dtype === null ? 'various' : say(row.dtype)],
      ['Shape', shapeText(row.shape)], ['Bytes', count(row.bytes)], file && ['File', say(file.path)],
      ...(section.has_values ? [
        ['Values', count(row.values)], ['Minimum', exact(row.minimum)], ['Maximum', exact(row.maximum)],
        ['Mean', exact(row.mean)], ['Standard deviation', exact(row.deviation)],
        ['Zeros', `${count(row.zeros)}${row.values ? ` (${percent(row.zeros / row.values)})` : ''}`],
        ['NaN', count(row.nans)], ['Infinities', count(row.infinities)],
      ] : []),
    ]), section.has_values && histogramChart(row)),
    row.outliers && row.outliers.length > 0 && [make('h4', {}, 'Tensors that differ from the others'),
      list(row.outliers, ({ name: tensor, reason }) => [name(tensor), `: ${outlierReasons[reason] || reason}`])],
    isPattern && commandNote(`This row represents ${plural(row.tensors, 'tensor')}. To see each of them, run this `
      + 'command with your other options:', reportCommand(section.path, row.name)),
  ];
}
