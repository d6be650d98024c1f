// The section of a trace: which rank waits for which.

function traceSection(section) {
  const { ranks, imbalance } = section;
  const spans = section.spans.name.map((_, index) => {
    const span = Object.fromEntries(Object.entries(section.spans).map(([key, values]) => [key, values[index]]));
    return { ...span, name: section.names[span.name] ?? '' };
  }).sort((a, b) => a.begin - b.begin || b.end - a.end);
  const timeline = ranks.length && spans.length ? traceTimeline(section, spans) : null;
  const blamed = mostWaitedFor(ranks);
  const largest = Math.max(...ranks.map((rank) => Math.max(rank.waiting, rank.caused)), 1e-12);
  const bar = (value, className) => make('i', { class: className, style: `width: ${(100 * value) / largest}%` });
  const zoomTo = (item) => link(name(item.operation), () => timeline.zoom(item.begin, item.begin + item.seconds));
  const timesByRank = imbalance ? imbalance.times.flatMap((step) => step.mean.map((mean, rank) =>
    ({ step: step.step, rank, mean, total: step.total[rank], iterations: step.iterations[rank] }))) : [];
  return [
    figures([
      ['Ranks', count(ranks.length)], ['Operations of several ranks', count(section.operations)],
        ['Time', duration(section.seconds)],
      ['Waiting, all ranks', duration(sum(ranks, 'waiting'))], blamed
        && ['Caused most waiting', `rank ${blamed.rank} (${duration(blamed.caused)})`],
      imbalance && ['Load imbalance', `${duration(imbalance.waiting)} per ${duration(imbalance.useful)}`],
      section.missed.length > 0 && ['Missed operations', alarm(count(section.missed.length))],
    ]),
    part('Notes', list(section.notes, say)),
    section.missed.length > 0 && part('Missed operations',
      paragraph('Some ranks of the group never began these operations. The other ranks waited for them.'),
      simpleTable('Missed operations', section.missed, [['Operation', 'operation', 'name'],
        ['Missing', (item) => item.missing.length, 'text', (item) => alarm(ranksText(item.missing))],
          ['Waiting', (item) => ranksText(item.waiting)]])),
    timeline && part('Timeline', timeline.element),
    ranks.length > 0 && part('Ranks',
      paragraph('A rank that caused long waits delays the others. The column “In calls” has the time in operations of Muster.'),
      simpleTable('Ranks', ranks, [
        ['Rank', 'rank', 'number'], ['Host', 'host', 'name'], ['PID', 'pid'], ['In calls', 'seconds', 'seconds'],
        ['Waiting', 'waiting', 'seconds'], ['Waits caused', 'caused', 'seconds'],
        ['Waiting and caused', (rank) => rank.waiting + rank.caused, 'text',
          (rank) => make('span', { class: 'pair', 'aria-hidden': 'true' }, bar(rank.waiting),
            bar(rank.caused, 'caused'))],
        ['Longest wait', 'longest_wait', 'seconds'], ['In operation', 'longest_operation', 'name'],
          ['Waited for rank', 'longest_for', 'number'],
        ['Spans', 'spans', 'number'], ['Not ended', 'open', 'number'], ['Clock ahead', 'clock_offset', 'seconds'],
      ], { sort: 0 })),
    section.slowest.length > 0 && part('Slowest operations',
      timeline && paragraph('A click on an operation shows it in the timeline.'),
      simpleTable('Slowest operations', section.slowest, [
        ['Operation', 'operation', 'name', timeline && zoomTo], ['Kind', 'kind'], ['Route', 'route', 'name'],
          ['Begin', 'begin', 'seconds'],
        ['Duration', 'seconds', 'seconds'], ['Bytes', 'bytes', 'bytes'], ['Longest wait', 'wait', 'seconds'],
          ['Waited for rank', (item) => ranks[item.awaited].rank, 'number'],
      ], { sort: 4, descending: true })),
    part('Routes', simpleTable('Routes', section.routes, [
      ['Kind', 'kind'], ['Route', 'route', 'name'], ['Operations', 'operations', 'number'],
        ['Bytes', 'bytes', 'bytes'], ['Time', 'seconds', 'seconds'],
      ['Bytes per second', (route) => (route.seconds ? Math.round(route.bytes / route.seconds) : null), 'bytes']])),
    imbalance && imbalance.steps.length > 0 && part('Load imbalance',
      paragraph('“Useful” is the mean time of all ranks. “Waiting” is how much longer the slowest rank took.'),
      simpleTable('Load imbalance', imbalance.steps, [
        ['Step', 'step', 'name'], ['Iterations', 'iterations', 'number'], ['Useful', 'useful', 'seconds'],
          ['Waiting', 'waiting', 'seconds'],
        ['Waiting share', (step) => step.waiting / (step.useful + step.waiting), 'share'],
      ], { sort: 3, descending: true }),
      timesByRank.length > 0 && disclosure('Show times by rank', () =>
        simpleTable('Times of the steps by rank', timesByRank, [
        ['Step', 'step', 'name'], ['Rank', 'rank', 'number'], ['Iterations', 'iterations', 'number'],
          ['Mean', 'mean', 'seconds'], ['Total', 'total', 'seconds']])),
      list(imbalance.warnings, say)),
  ];
}

/** Returns the rank for which the others waited longest, or null. */
function mostWaitedFor(ranks) {
  return ranks.reduce((best, rank) => (rank.caused > (best ? best.caused : 0) ? rank : best), null);
}
