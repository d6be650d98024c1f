// The section of a workspace: the states of its jobs, and its other files.

function workspaceSection(section) {
  const { jobs } = section;
  const states = jobs.flatMap((job) => [
    ...job.states.map((state) => ({ ...state, job: job.job, form: state.complete ? 'complete' : 'incomplete' })),
    ...job.kept.map((state) => ({ ...state, job: job.job, form: 'kept' })),
  ]);
  const grouped = (files, group) => files.map((file) => ({ ...file, group }));
  const others = [...grouped(jobs.flatMap((job) => job.in_use), 'in use'), ...grouped(section.temporary, 'temporary'),
    ...grouped(section.unknown_files, 'not written by Muster')];
  const alarming = (value) => (value ? alarm(count(value)) : '0');
  return [
    figures([
      ['Jobs', count(jobs.length)], ['States', count(states.length)], ['Files', count(section.files)],
        ['Bytes', bytesCell(section.bytes)],
      ['Incomplete states', alarming(states.filter((state) => state.form === 'incomplete').length)],
      ['Missing ranks', alarming(jobs.reduce((all, job) => all + job.missing_ranks.length, 0))],
      section.is_workspace === 'names' && ['Marker', 'missing; recognised by file names'],
    ]),
    section.model_error && make('p', { class: 'note' }, 'The newest states are not shown as a model: ',
      say(section.model_error)),
    jobs.length > 0 && part('Timeline', stateTimeline(jobs, states)),
    part('Jobs', simpleTable('Jobs', jobs, [
      ['Job', 'job', 'name'], ['Ranks', 'world_size', 'number'], ['Newest step of all ranks', 'common_step', 'number'],
      ['States', (job) => job.states.length, 'number'], ['Kept for inspection', (job) => job.kept.length, 'number'],
      ['Ranks without a complete state', (job) => job.missing_ranks.length, 'text', ({ missing_ranks: ranks }) =>
        (ranks.length ? alarm(ranksText(ranks)) : 'none')],
      ['Bytes', 'bytes', 'bytes'], ['Age', 'age_seconds', 'seconds'],
    ], { sort: 7 })),
    part('States', statesTable(states)),
    part('Other files', simpleTable('Other files', others, [
      ['File', 'file', 'name'], ['Use', 'group'], ['Kind', 'kind', 'name'],
        ['Writer', (file) => (file.writer === '-' ? null : file.writer)],
      ['Files', 'files', 'number'], ['Bytes', 'bytes', 'bytes'], ['Changed', 'changed', 'time']])),
  ];
}

function statesTable(states) {
  return simpleTable('States', states, [
    ['File', 'file', 'name'], ['Job', (state) => state.job.slice(0, 8), 'name'], ['Rank', 'rank', 'number'],
      ['Step', 'step', 'number'],
    ['State', 'form', 'text', (state) => (state.form === 'incomplete' ? alarm('✕ incomplete') : state.form)],
    ['Problem', 'problem', 'message'], ['Tensors', 'tensors', 'number'], ['Compressed', 'compressed'],
    ['Bytes', 'bytes', 'bytes'], ['Changed', 'changed', 'time'],
  ], { sort: 9, descending: true });
}

const ranksDrawn = 1024;

function stateTimeline(jobs, states) {
  let lines = [];
  let placed = [];
  const key = (state) => `${state.job}/${state.rank}`;
  const select = (wanted) => {
    lines = jobs.filter((job) => !wanted || job.job === wanted).flatMap((job) =>
      Array.from({ length: Math.min(job.world_size, ranksDrawn) },
      (_, rank) => ({ job: job.job, rank, missing: job.missing_ranks.includes(rank) })));
    const lineOf = new Map(lines.map((line, index) => [key(line), index]));
    placed = states.filter((state) => lineOf.has(key(state)) && state.changed !== null)
      .map((state) => ({ ...state, line: lineOf.get(key(state)) })).sort((a, b) => a.line - b.line
        || a.changed - b.changed);
  };
  select('');
  const cross = 'path://M0 2 L2 0 L5 3 L8 0 L10 2 L7 5 L10 8 L8 10 L5 7 L2 10 L0 8 L3 5Z';
  const symbols = { complete: ['circle', 'accent'], incomplete: [cross, 'bad'], kept: ['diamond', 'faint'] };
  const lineText = ({ job, rank, missing }) =>
    `${missing ? '▢ ' : ''}${rank === 0 || lines.length < 12 ? `${printable(job.slice(0, 8))} ` : ''}rank ${rank}`;
  const chart = new Chart({
    title: 'States by time of the last change',
    help: 'Keys: arrows to move between the states.',
    tools: jobs.length > 1 && choice('Job', [['', 'all'], ...jobs.map(({ job }) => [job, printable(job.slice(0, 8))])],
      '', (job) => {
      select(job);
      chart.update();
    }),
    legend: legendOf('● complete', '✕ incomplete', '◆ kept for inspection', '▢ rank without a complete state'),
    message: () => {
      const missing = lines.filter((line) => line.missing).length;
      const hidden = jobs.some((job) => job.world_size > ranksDrawn);
      return `${plural(placed.length, 'state')} of ${plural(lines.length, 'rank')}. `
        + (hidden ? `Only the first ${count(ranksDrawn)} ranks of each job are drawn. ` : '')
        + (missing ? `${plural(missing, 'rank')} without a complete state.` : 'Each rank has a complete state.');
    },
    leastWidth: 480,
    height: () => lines.length * 26 + 64,
    items: {
      count: () => placed.length,
      describe: (index) => {
        const state = placed[index];
        return [['', shorten(printable(state.file), 80)],
          ['Job', `${printable(state.job.slice(0, 8))}, rank ${state.rank}`], ['Step', count(state.step)],
          ['State', state.form], state.problem && ['Problem', shorten(printable(state.problem), 160)],
            ['Changed', time(state.changed)],
          ['Bytes', bytes(state.bytes)]];
      },
    },
    option: (colours) => ({
      grid: { left: 124, right: 40, top: 34, bottom: 12 },
      xAxis: timeAxis(colours, { position: 'top', splitLine: gridLine(colours) }),
      yAxis: axis(colours, {
        type: 'category', inverse: true, data: lines.map((_, index) => String(index)), splitLine: gridLine(colours),
        axisLabel: {
          interval: 0, formatter: (index) => lineText(lines[Number(index)]),
          color: (index) => (lines[Number(index)].missing ? colours.bad : colours.text),
        },
      }),
      series: [{
        type: 'scatter', labelLayout: { hideOverlap: true }, emphasis: { itemStyle: { borderColor: colours.text,
          borderWidth: 2 } },
        data: placed.map((state) => ({
          value: [state.changed * 1000, state.line], symbol: symbols[state.form][0], symbolSize: 10,
          itemStyle: { opacity: 1, color: colours[symbols[state.form][1]] },
          label: { show: true, position: 'top', distance: 1, formatter: () => String(state.step), color: colours.text,
            fontSize: 10 },
        })),
      }],
    }),
    table: () => statesTable(placed),
  });
  return chart.element;
}
