// The section of a workspace: the states of its jobs, and its other files.

function workspaceSection(section) {
  const states = section.jobs.flatMap((job) => [
    ...job.states.map((state) => ({ ...state, job: job.job, form: state.complete ? 'complete' : 'incomplete' })),
    ...(job.kept || []).map((state) => ({ ...state, job: job.job, form: 'kept' })),
  ]);
  const others = [...section.jobs.flatMap((job) => (job.in_use || []).map((file) => ({ ...file, group: 'in use' }))),
    ...(section.temporary || []).map((file) => ({ ...file, group: 'temporary' })),
    ...(section.unknown_files || []).map((file) => ({ ...file, group: 'not written by Muster' }))];
  const missing = section.jobs.reduce((all, job) => all + job.missing_ranks.length, 0);
  const incomplete = states.filter((state) => state.form === 'incomplete').length;
  return [
    figures([
      ['Jobs', count(section.jobs.length)], ['States', count(states.length)], ['Files', count(section.files)], ['Bytes', bytesCell(section.bytes)],
      ['Incomplete states', make('span', { class: incomplete ? 'bad' : '' }, count(incomplete))],
      ['Missing ranks', make('span', { class: missing ? 'bad' : '' }, count(missing))],
      section.is_workspace === 'names' && ['Marker', 'missing: recognized by names'],
    ]),
    section.model_error && make('p', { class: 'note' }, 'The newest states are not shown as a model: ', say(section.model_error)),
    section.jobs.length > 0 && labelled('Timeline', stateTimeline(section, states)),
    section.jobs.length > 0 && labelled('Jobs', simpleTable('Jobs', section.jobs, [
      ['Job', 'job', 'name'], ['Ranks', 'world_size', 'number'], ['Step of all ranks', 'common_step', 'number'], ['States', (job) => job.states.length, 'number'],
      ['Kept', (job) => (job.kept || []).length, 'number'],
      ['Missing', (job) => job.missing_ranks.length, 'text', (job) => (job.missing_ranks.length ? make('strong', { class: 'bad' }, ranksText(job.missing_ranks)) : 'none')],
      ['Bytes', 'bytes', 'bytes'], ['Age', 'age_seconds', 'seconds'],
    ], { sort: 7 })),
    states.length > 0 && labelled('States', statesTable(states)),
    others.length > 0 && labelled('Other files', simpleTable('Other files', others, [
      ['File', 'file', 'name'], ['Group', 'group'], ['Kind', 'kind', 'name'], ['Writer', (file) => (file.writer === '-' ? null : file.writer)],
      ['Files', 'files', 'number'], ['Bytes', 'bytes', 'bytes'], ['Changed', 'changed', 'time']])),
  ];
}

function statesTable(states) {
  return simpleTable('States', states, [
    ['File', 'file', 'name'], ['Job', (state) => state.job.slice(0, 8), 'name'], ['Rank', 'rank', 'number'], ['Step', 'step', 'number'],
    ['State', 'form', 'text', (state) => (state.form === 'incomplete' ? make('strong', { class: 'bad' }, '✕ incomplete') : state.form)],
    ['Problem', 'problem', 'message'], ['Tensors', 'tensors', 'number'],
    ['Compressed', (state) => (typeof state.compressed === 'boolean' ? (state.compressed ? 'yes' : 'no') : null)],
    ['Bytes', 'bytes', 'bytes'], ['Changed', 'changed', 'time'],
  ], { sort: 9, descending: true });
}

function stateTimeline(section, states) {
  let lines = [];
  let lineOf = new Map();
  let placed = [];
  const select = (wanted) => {
    lines = section.jobs.filter((job) => !wanted || job.job === wanted)
      .flatMap((job) => Array.from({ length: Math.min(job.world_size, 1024) }, (_, rank) => ({ job, rank })));
    lineOf = new Map(lines.map((line, index) => [`${line.job.job}/${line.rank}`, index]));
    placed = states.filter((state) => lineOf.has(`${state.job}/${state.rank}`) && state.changed !== null)
      .sort((a, b) => lineOf.get(`${a.job}/${a.rank}`) - lineOf.get(`${b.job}/${b.rank}`) || a.changed - b.changed);
  };
  select('');
  const isMissing = (line) => line.job.missing_ranks.includes(line.rank);
  const missing = lines.filter(isMissing).length;
  const symbols = { complete: 'circle', incomplete: 'path://M0 2 L2 0 L5 3 L8 0 L10 2 L7 5 L10 8 L8 10 L5 7 L2 10 L0 8 L3 5Z', kept: 'diamond' };
  const describe = (state) => [['', shorten(printable(state.file), 80)], ['Job', `${state.job.slice(0, 8)}, rank ${state.rank}`], ['Step', count(state.step)],
    ['State', state.form], ...(state.problem ? [['Problem', shorten(printable(state.problem), 160)]] : []), ['Changed', time(state.changed)], ['Bytes', bytes(state.bytes)]];
  const chart = new Chart({
    title: 'States by time of the last change',
    help: 'Keys: arrows to move between the states.',
    tools: section.jobs.length > 1 && choice('Job', [['', 'all'], ...section.jobs.map((job) => [job.job, job.job.slice(0, 8)])], '', (job) => {
      select(job);
      chart.update();
    }),
    legend: make('div', { class: 'legend' }, make('span', {}, '● complete'), make('span', { class: 'bad' }, '✕ incomplete'),
      make('span', {}, '◆ kept for inspection'), missing > 0 && make('span', { class: 'bad' }, '▢ rank without a complete state')),
    message: () => `${plural(placed.length, 'state')} of ${plural(lines.length, 'rank')}`
      + (lines.some(isMissing) ? `; ${plural(lines.filter(isMissing).length, 'rank')} without a complete state.` : '; each rank has a complete state.'),
    leastWidth: 480,
    height: () => lines.length * 26 + 64,
    items: { count: () => placed.length, describe: (index) => describe(placed[index]), target: (index) => ({ seriesIndex: 0, dataIndex: index }) },
    option: (colours) => ({
      grid: { left: 124, right: 40, top: 34, bottom: 12 },
      xAxis: axis(colours, { type: 'time', position: 'top', splitLine: { show: true, lineStyle: { color: colours.line } }, axisLabel: { hideOverlap: true },
        min: ({ min, max }) => min - (max - min || 6e4) * 0.03, max: ({ min, max }) => max + (max - min || 6e4) * 0.05 }),
      yAxis: axis(colours, { type: 'category', inverse: true, data: lines.map((_, index) => String(index)), splitLine: { show: true, lineStyle: { color: colours.line } },
        axisLabel: { interval: 0, formatter: (index) => {
          const line = lines[Number(index)];
          return `${isMissing(line) ? '▢ ' : ''}${line.rank === 0 || lines.length < 12 ? `${line.job.job.slice(0, 8)} ` : ''}rank ${line.rank}`;
        }, color: (value, index) => (isMissing(lines[index] || lines[Number(value)]) ? colours.bad : colours.text) } }),
      series: [{
        type: 'scatter', data: placed.map((state) => ({
          value: [state.changed * 1000, lineOf.get(`${state.job}/${state.rank}`)], symbol: symbols[state.form], symbolSize: state.form === 'kept' ? 12 : 10,
          itemStyle: { opacity: 1, color: state.form === 'incomplete' ? colours.bad : state.form === 'kept' ? colours.faint : colours.accent },
          label: { show: true, position: 'top', distance: 1, formatter: () => String(state.step), color: colours.text, fontSize: 10 },
        })),
        labelLayout: { hideOverlap: true }, emphasis: { itemStyle: { borderColor: colours.text, borderWidth: 2 } },
      }],
    }),
    table: () => statesTable(placed),
  });
  return chart.element;
}
