// The section of a directory of versions of weights.

function changedShare(version) {
  return version.kind === 'full' ? 1 : version.elements ? version.changed_elements / version.elements : null;
}

function versionsSection(section) {
  const { versions, local } = section;
  const problems = section.problems.length + versions.reduce((all, version) => all + version.problems.length, 0);
  const ofKind = (kind) => count(versions.filter((version) => version.kind === kind).length);
  const table = () => simpleTable('Versions', versions, [
    ['Version', 'version', 'number'], ['Kind', 'kind', 'text', (version) => version.kind ?? alarm('✕ cannot be read')],
    ['Base', 'base_version', 'number'], ['Chain begins at', 'begins_at', 'number'], ['Tensors', 'tensors', 'number'],
      ['Files', 'files', 'number'],
    ['Bytes', 'bytes', 'bytes'], ['Changed', changedShare, 'share'], ['Elements', 'elements', 'number'],
      ['Changed elements', 'changed_elements', 'number'],
    ['Encoding', 'encoding'], ['Published', 'published', 'time'], ['Publisher', 'publisher', 'name'],
      ['Ranks', 'ranks', 'number'], ['Digest', 'digest', 'name'],
    ['Problems', (version) => version.problems.length, 'message', (version) =>
      list(version.problems, (text) => alarm(say(text))) || 'none'],
  ], { sort: 0, descending: true });
  return [
    figures([
      ['Versions', count(versions.length)], ['Full', ofKind('full')], ['Deltas', ofKind('delta')],
        ['Bytes', bytesCell(sum(versions, 'bytes'))],
      ['Problems', problems ? alarm(count(problems))
        : '0'],
      local && ['Local copy', local.version === null ? 'no version' : `version ${local.version}`],
    ]),
    verdict(section.sound, 'No problem was found. The checksums were not compared.', 'Problems were found.'),
    part('Problems', list(section.problems, say)),
    versions.length > 0 && part('Timeline', versionTimeline(versions, table)),
    part('Versions', table()),
    local && part('Local copy', definitions([['Path', say(local.path)],
      ['Version', local.version === null ? 'none' : count(local.version)],
      ['A pull can continue from it', local.has_record ? 'yes' : 'no'], ['Reason why not', local.reason && say(local.reason)]])),
    part('Unfinished versions', list(section.unfinished, name)),
    part('Other names', list(section.other_names, name)),
  ];
}

function versionTimeline(versions, table) {
  const placed = versions.filter((version) => version.published !== null).sort((a, b) => a.published - b.published);
  const symbols = { full: ['rect', 'accent'], delta: ['triangle', 'faint'], bad: ['diamond', 'bad'] };
  const symbolOf = (version) => symbols[version.kind === null || version.problems.length ? 'bad' : version.kind];
  const meanText = (kind, noun) => {
    const some = placed.filter((version) => version.kind === kind);
    return `${plural(some.length, noun)}${some.length ? ` with ${bytes(Math.round(sum(some, 'bytes') / some.length))} on average` : ''}`;
  };
  return new Chart({
    title: 'Versions by time',
    help: 'Keys: arrows to move between the versions.',
    legend: legendOf('■ full', '▲ delta', '◆ with problems'),
    message: () => `${meanText('full', 'full version')}; ${meanText('delta', 'delta')}.`,
    leastWidth: 420,
    height: () => 340,
    items: {
      count: () => placed.length,
      describe: (index) => {
        const version = placed[index];
        return [['', `Version ${version.version}`], ['Kind', version.kind ?? 'cannot be read'],
          ['Bytes', bytes(version.bytes)], ['Changed', percent(changedShare(version))],
          ['Published', time(version.published)], version.problems.length > 0
            && ['Problems', count(version.problems.length)]];
      },
    },
    option: (colours) => {
      const sides = [{ name: 'Bytes', type: 'log', axisLabel: { formatter: bytes } },
        { name: 'Changed share', min: 0, max: 1, axisLabel: { formatter: percent } }];
      const values = [(version) => version.bytes || null, changedShare];
      return {
        grid: [{ left: 70, right: 24, top: 30, height: 140 }, { left: 70, right: 24, top: 214, height: 84 }],
        xAxis: [0, 1].map((gridIndex) => timeAxis(colours, { gridIndex,
          axisLabel: { show: gridIndex === 1, hideOverlap: true } })),
        yAxis: sides.map((side, gridIndex) => axis(colours, { gridIndex, splitLine: gridLine(colours),
          nameTextStyle: { align: 'left', color: colours.faint }, ...side })),
        series: values.map((valueOf, index) => ({
          type: 'scatter', xAxisIndex: index, yAxisIndex: index, labelLayout: { hideOverlap: true },
            emphasis: { itemStyle: { borderColor: colours.text, borderWidth: 2 } },
          label: { show: index === 0, position: 'top', color: colours.text, fontSize: 10, formatter: ({ dataIndex }) =>
            String(placed[dataIndex].version) },
          data: placed.map((version) => ({
            value: [version.published * 1000, valueOf(version)], symbol: symbolOf(version)[0], symbolSize: 10,
            itemStyle: { opacity: 1, color: colours[symbolOf(version)[1]] },
          })),
        })),
      };
    },
    table,
  }).element;
}
