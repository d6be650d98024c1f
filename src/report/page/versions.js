// The section of a directory of versions of weights.

function changedShare(version) {
  return version.kind === 'full' ? 1 : version.elements ? version.changed_elements / version.elements : null;
}

function versionsSection(section) {
  const { versions } = section;
  const problems = (section.problems || []).length + versions.reduce((all, version) => all + version.problems.length, 0);
  const { local } = section;
  const listed = (title, names) => names && names.length > 0 && [make('h4', {}, title), make('ul', {}, names.map((item) => make('li', {}, name(item))))];
  const table = () => simpleTable('Versions', versions, [
    ['Version', 'version', 'number'], ['Kind', 'kind', 'text', (version) => version.kind ?? make('strong', { class: 'bad' }, '✕ cannot be read')],
    ['Base', 'base_version', 'number'], ['Begins at', 'begins_at', 'number'], ['Tensors', 'tensors', 'number'], ['Files', 'files', 'number'], ['Bytes', 'bytes', 'bytes'],
    ['Changed', changedShare, 'share', (version) => make('span', { title: `${count(version.changed_elements)} of ${count(version.elements)}` }, percent(changedShare(version)))],
    ['Encoding', 'encoding'], ['Published', 'published', 'time'], ['Publisher', 'publisher', 'name'], ['Ranks', 'ranks', 'number'], ['Digest', 'digest', 'name'],
    ['Problems', (version) => version.problems.length, 'message', (version) => (version.problems.length ? make('ul', { class: 'bad' }, version.problems.map((text) => make('li', {}, say(text)))) : 'none')],
  ], { sort: 0, descending: true });
  return [
    figures([
      ['Versions', count(versions.length)], ['Full', count(versions.filter((version) => version.kind === 'full').length)],
      ['Deltas', count(versions.filter((version) => version.kind === 'delta').length)], ['Bytes', bytesCell(sum(versions, 'bytes'))],
      ['Checksums', section.verified ? 'verified' : 'not verified'], ['Problems', make('span', { class: problems ? 'bad' : 'good' }, count(problems))],
      local && ['Local copy', local.version === null ? 'no version' : `version ${local.version}`],
    ]),
    make('p', { class: section.sound ? 'good' : 'bad' }, make('strong', {}, section.sound ? '✓ No problem was found.' : '✕ Problems were found.')),
    (section.problems || []).length > 0 && labelled('Problems', make('ul', {}, section.problems.map((text) => make('li', {}, say(text))))),
    versions.length > 0 && labelled('Timeline', versionTimeline(versions, table)),
    versions.length > 0 && labelled('Versions', table()),
    local && labelled('Local copy', definitions([['Path', say(local.path)], ['Version', local.version === null ? 'none' : count(local.version)],
      ['A pull continues from it', local.has_record ? 'yes' : 'no'], ['Reason', local.reason ? say(local.reason) : null]])),
    ((section.unfinished || []).length > 0 || (section.other_names || []).length > 0) && labelled('Other names', [
      listed('Unfinished versions', section.unfinished), listed('Names that are not versions', section.other_names)]),
  ];
}

function versionTimeline(versions, table) {
  const placed = [...versions].filter((version) => version.published !== null && version.published !== undefined).sort((a, b) => a.published - b.published);
  const form = (version) => (version.kind === null || version.problems.length ? 'bad' : version.kind);
  const symbols = { full: 'rect', delta: 'triangle', bad: 'diamond' };
  const full = placed.filter((version) => version.kind === 'full');
  const deltas = placed.filter((version) => version.kind === 'delta');
  const mean = (list) => list.reduce((all, version) => all + (version.bytes || 0), 0) / list.length;
  const describe = (version) => [['', `Version ${version.version}`], ['Kind', version.kind ?? 'cannot be read'], ['Bytes', bytes(version.bytes)],
    ['Changed', percent(changedShare(version))], ['Published', time(version.published)], ...(version.problems.length ? [['Problems', count(version.problems.length)]] : [])];
  const points = (colours, valueOf) => placed.map((version) => ({
    value: [version.published * 1000, valueOf(version)], symbol: symbols[form(version)], symbolSize: 10,
    itemStyle: { opacity: 1, color: form(version) === 'bad' ? colours.bad : version.kind === 'full' ? colours.accent : colours.faint },
  }));
  return new Chart({
    title: 'Versions by time',
    help: 'Keys: arrows to move between the versions.',
    legend: make('div', { class: 'legend' }, make('span', {}, '■ full'), make('span', {}, '▲ delta'), make('span', { class: 'bad' }, '◆ with problems')),
    message: () => `${plural(full.length, 'full version')} and ${plural(deltas.length, 'delta')}.`
      + (full.length && deltas.length ? ` A delta has ${bytes(Math.round(mean(deltas)))} on average, a full version ${bytes(Math.round(mean(full)))}.` : ''),
    leastWidth: 420,
    height: () => 340,
    items: { count: () => placed.length, describe: (index) => describe(placed[index]), target: (index) => ({ seriesIndex: 0, dataIndex: index }) },
    option: (colours) => {
      const room = { min: ({ min, max }) => min - (max - min || 6e4) * 0.03, max: ({ min, max }) => max + (max - min || 6e4) * 0.05 };
      const side = { splitLine: { show: true, lineStyle: { color: colours.line } }, nameLocation: 'end', nameTextStyle: { align: 'left', color: colours.faint } };
      return {
        grid: [{ left: 70, right: 24, top: 30, height: 140 }, { left: 70, right: 24, top: 214, height: 84 }],
        xAxis: [axis(colours, { type: 'time', gridIndex: 0, axisLabel: { show: false }, ...room }), axis(colours, { type: 'time', gridIndex: 1, axisLabel: { hideOverlap: true }, ...room })],
        yAxis: [axis(colours, { ...side, type: 'log', name: 'Bytes', gridIndex: 0, axisLabel: { formatter: bytes } }),
          axis(colours, { ...side, type: 'value', name: 'Changed share', min: 0, max: 1, gridIndex: 1, axisLabel: { formatter: percent } })],
        series: [
          { type: 'scatter', xAxisIndex: 0, yAxisIndex: 0, data: points(colours, (version) => version.bytes || null), labelLayout: { hideOverlap: true },
            label: { show: true, position: 'top', color: colours.text, fontSize: 10, formatter: ({ dataIndex }) => String(placed[dataIndex].version) },
            emphasis: { itemStyle: { borderColor: colours.text, borderWidth: 2 } } },
          { type: 'scatter', xAxisIndex: 1, yAxisIndex: 1, data: points(colours, changedShare), emphasis: { itemStyle: { borderColor: colours.text, borderWidth: 2 } } },
        ],
      };
    },
    table,
  }).element;
}
