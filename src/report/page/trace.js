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
      simpleTable('Missed operations', section.missed, [['Operation', 'operation', 'name'],
        ['Missing', (item) => item.missing.length, 'text', (item) => make('strong', { class: 'bad' }, ranksText(item.missing))], ['Waiting', (item) => ranksText(item.waiting)]])]),
    timeline && labelled('Timeline', timeline.element),
    section.ranks.length > 0 && labelled('Ranks', [make('p', {}, 'A rank that caused long waits delays the others. In calls is the time in operations of Muster.'),
      simpleTable('Ranks', section.ranks, [
        ['Rank', 'rank', 'number'], ['Host', 'host', 'name'], ['PID', 'pid'], ['In calls', 'seconds', 'seconds'], ['Waiting', 'waiting', 'seconds'], ['Caused', 'caused', 'seconds'],
        ['Waiting and caused', (rank) => rank.waiting + rank.caused, 'text', rankBar], ['Longest wait', 'longest_wait', 'seconds'], ['In', 'longest_operation', 'name'],
        ['For rank', 'longest_for', 'number'], ['Spans', 'spans', 'number'], ['Open', 'open', 'number'], ['Clock ahead', 'clock_offset', 'seconds'],
      ], { sort: 0 })]),
    section.slowest.length > 0 && labelled('Slowest operations', [timeline && make('p', {}, 'A click on an operation shows it in the timeline.'),
      simpleTable('Slowest operations', section.slowest, [
        ['Operation', 'operation', 'name', timeline && ((item) => button(name(item.operation), () => timeline.zoom(item.begin, item.begin + item.seconds), { class: 'plain' }))],
        ['Kind', 'kind'], ['Route', 'route', 'name'], ['Begin', 'begin', 'seconds'], ['Duration', 'seconds', 'seconds'], ['Bytes', 'bytes', 'bytes'],
        ['Longest wait', 'wait', 'seconds'], ['For rank', 'awaited', 'number'],
      ], { sort: 4, descending: true })]),
    section.routes.length > 0 && labelled('Routes', simpleTable('Routes', section.routes, [
      ['Kind', 'kind'], ['Route', 'route', 'name'], ['Operations', 'operations', 'number'], ['Bytes', 'bytes', 'bytes'], ['Time', 'seconds', 'seconds'],
      ['Bytes per second', (route) => (route.seconds ? Math.round(route.bytes / route.seconds) : null), 'bytes']])),
    imbalance && imbalance.steps.length > 0 && labelled('Load imbalance', [
      make('p', {}, 'Useful is the mean time of the ranks. Waiting is the time by which the slowest rank exceeds it.'),
      simpleTable('Load imbalance', imbalance.steps, [['Step', 'step', 'name'], ['Iterations', 'iterations', 'number'], ['Useful', 'useful', 'seconds'],
        ['Waiting', 'waiting', 'seconds'], ['Waiting share', (step) => step.waiting / (step.useful + step.waiting), 'share']], { sort: 3, descending: true }),
      imbalance.times.length > 0 && disclosure('Show times by rank', () => simpleTable('Times of the steps by rank',
        imbalance.times.flatMap((step) => step.mean.map((mean, rank) => ({ step: step.step, rank, mean, total: step.total[rank], iterations: step.iterations[rank] }))),
        [['Step', 'step', 'name'], ['Rank', 'rank', 'number'], ['Iterations', 'iterations', 'number'], ['Mean', 'mean', 'seconds'], ['Total', 'total', 'seconds']])),
      imbalance.warnings.length > 0 && make('ul', {}, imbalance.warnings.map((warning) => make('li', {}, say(warning)))),
    ]),
  ];
}
