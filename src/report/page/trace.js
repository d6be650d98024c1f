// The section of a trace: which rank waits for which.

function traceSection(section) {
  const columns = Object.entries(section.spans);
  const length = columns.length ? columns[0][1].length : 0;
  const spans = Array.from({ length }, (_, index) => {
    const span = Object.fromEntries(columns.map(([key, list]) => [key, list[index]]));
    return { ...span, name: section.names[span.name] ?? '' };
  }).sort((a, b) => a.begin - b.begin || b.end - a.end);
  const timeline = section.ranks.length && spans.length ? traceTimeline(section, spans) : null;
  const waiting = sum(section.ranks, 'waiting');
  const blamed = section.ranks.reduce((best, rank) => (rank.caused > (best ? best.caused : 0) ? rank : best), null);
  const { imbalance } = section;
  const seconds = (key) => [(item) => item[key], 'right', (item) => durationCell(item[key])];
  const rankBar = (rank) => {
    const largest = Math.max(...section.ranks.map((other) => Math.max(other.waiting, other.caused)), 1e-12);
    return make('span', { class: 'pair', 'aria-hidden': 'true' }, make('i', { style: `width: ${(100 * rank.waiting) / largest}%` }),
      make('i', { class: 'caused', style: `width: ${(100 * rank.caused) / largest}%` }));
  };
  return [
    figures([
      ['Ranks', count(section.ranks.length)], ['Operations of several ranks', count(section.operations)], ['Time', duration(section.seconds)],
      ['Waiting, all ranks', duration(waiting)], blamed && ['Most waits for', `rank ${blamed.rank} (${duration(blamed.caused)})`],
      imbalance && ['Load imbalance', `${duration(imbalance.waiting)} per ${duration(imbalance.useful)}`],
      section.missed.length > 0 && ['Missed operations', make('span', { class: 'bad' }, count(section.missed.length))],
    ]),
    section.notes.length > 0 && labelled('Notes', make('ul', {}, section.notes.map((note) => make('li', {}, say(note))))),
    section.missed.length > 0 && labelled('Missed operations', [make('p', {}, 'Some ranks of the group never began these operations. The other ranks waited for them.'),
      simpleTable('Missed operations', section.missed, [['Operation', (item) => item.operation, 'left', (item) => name(String(item.operation))],
        ['Missing', (item) => item.missing.length, 'left', (item) => make('strong', { class: 'bad' }, ranksText(item.missing))],
        ['Waiting', (item) => item.waiting.length, 'left', (item) => ranksText(item.waiting)]])]),
    timeline && labelled('Timeline', timeline.element),
    section.ranks.length > 0 && labelled('Ranks', [make('p', {}, 'A rank that caused long waits delays the others. In calls is the time in operations of Muster.'),
      simpleTable('Ranks', section.ranks, [
        ['Rank', (rank) => rank.rank, 'right'], ['Host', (rank) => rank.host, 'left', (rank) => name(rank.host)], ['PID', (rank) => rank.pid, 'right', (rank) => String(rank.pid)],
        ['In calls', ...seconds('seconds')], ['Waiting', ...seconds('waiting')], ['Caused', ...seconds('caused')], ['Waiting and caused', (rank) => rank.waiting + rank.caused, 'left', rankBar],
        ['Longest wait', ...seconds('longest_wait')], ['In', (rank) => rank.longest_operation, 'left', (rank) => (rank.longest_operation === null ? '–' : name(rank.longest_operation))],
        ['For rank', (rank) => rank.longest_for, 'right'], ['Spans', (rank) => rank.spans, 'right'], ['Open', (rank) => rank.open, 'right'],
        ['Clock ahead', ...seconds('clock_offset')],
      ], { sort: 0 })]),
    section.slowest.length > 0 && labelled('Slowest operations', [timeline && make('p', {}, 'A click on an operation shows it in the timeline.'),
      simpleTable('Slowest operations', section.slowest, [
        ['Operation', (item) => item.operation, 'left', (item) => (timeline ? button(name(String(item.operation)), () => timeline.zoom(item.begin, item.begin + item.seconds), { class: 'plain' }) : name(String(item.operation)))],
        ['Kind', (item) => item.kind], ['Route', (item) => item.route, 'left', (item) => (item.route ? name(item.route) : '–')],
        ['Begin', ...seconds('begin')], ['Duration', ...seconds('seconds')], ['Bytes', (item) => item.bytes, 'right', (item) => bytesCell(item.bytes)],
        ['Longest wait', ...seconds('wait')], ['For rank', (item) => item.awaited, 'right'],
      ], { sort: 4, descending: true })]),
    section.routes.length > 0 && labelled('Routes', simpleTable('Routes', section.routes, [
      ['Kind', (route) => route.kind], ['Route', (route) => route.route, 'left', (route) => (route.route ? name(route.route) : '–')], ['Operations', (route) => route.operations, 'right'],
      ['Bytes', (route) => route.bytes, 'right', (route) => bytesCell(route.bytes)], ['Time', ...seconds('seconds')],
      ['Bytes per second', (route) => (route.seconds ? route.bytes / route.seconds : null), 'right', (route) => (route.seconds ? `${bytes(Math.round(route.bytes / route.seconds))}/s` : '–')]])),
    imbalance && imbalance.steps.length > 0 && labelled('Load imbalance', [
      make('p', {}, 'Useful is the mean time of the ranks. Waiting is the time by which the slowest rank exceeds it.'),
      simpleTable('Load imbalance', imbalance.steps, [
        ['Step', (step) => step.step, 'left', (step) => name(String(step.step))], ['Iterations', (step) => step.iterations, 'right'],
        ['Useful', ...seconds('useful')], ['Waiting', ...seconds('waiting')],
        ['Share', (step) => step.waiting / (step.useful + step.waiting), 'right', (step) => percent(step.waiting / (step.useful + step.waiting))]], { sort: 3, descending: true }),
      imbalance.times.length > 0 && disclosure('Show times by rank', () => simpleTable('Times of the steps by rank',
        imbalance.times.flatMap((step) => step.mean.map((mean, rank) => ({ step: step.step, rank, mean, total: step.total[rank], iterations: step.iterations[rank] }))),
        [['Step', (item) => item.step, 'left', (item) => name(String(item.step))], ['Rank', (item) => item.rank, 'right'], ['Iterations', (item) => item.iterations, 'right'],
          ['Mean', ...seconds('mean')], ['Total', ...seconds('total')]])),
      imbalance.warnings.length > 0 && make('ul', {}, imbalance.warnings.map((warning) => make('li', {}, say(warning)))),
    ]),
  ];
}
