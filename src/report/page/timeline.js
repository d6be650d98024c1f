// The timeline of a trace: one row per rank, with lanes for nested spans.

/** Assigns a lane to each span: spans of one thread that enclose each other are in successive lanes. */
function lanesOf(spans, processes) {
  const lanes = [];  // for each lane: its process and whether it is the first one
  const threads = new Map();
  for (const span of spans) {
    const key = `${span.process}/${span.thread}`;
    if (!threads.has(key)) threads.set(key, []);
    threads.get(key).push(span);
  }
  for (let process = 0; process < processes; ++process) {
    const first = lanes.length;
    for (const [key, list] of threads) {
      if (!key.startsWith(`${process}/`)) continue;
      const base = lanes.length;
      const open = [];
      for (const span of list) {
        while (open.length && open[open.length - 1].end <= span.begin) open.pop();
        span.lane = base + Math.min(open.length, 7);
        open.push(span);
        while (lanes.length <= span.lane) lanes.push({ process, first: lanes.length === first });
      }
    }
    if (lanes.length === first) lanes.push({ process, first: true });
  }
  return lanes;
}

const kindHues = { exchange: 210, stream: 180, collective: 265, message: 45, file: 95, export: 135, program: null, phase: null };

function traceTimeline(section, spans) {
  const total = Math.max(section.seconds, ...spans.map((span) => span.end), 1e-9);
  const state = { kinds: 'operations', from: 0, to: total };
  const rankName = (process) => (section.ranks[process] ? `rank ${section.ranks[process].rank ?? process}` : `process ${process}`);
  let shown = [];
  let lanes = [];
  const select = () => {
    shown = spans.filter((span) => state.kinds === 'all' || span.kind !== 'phase');
    lanes = lanesOf(shown, section.ranks.length);
  };
  select();
  const zoom = (from, to) => {
    const length = Math.min(Math.max(to - from, total * 1e-7), total);
    state.from = Math.min(Math.max(from, 0), total - length);
    state.to = state.from + length;
    chart.draw();
    chart.view.dispatchAction({ type: 'dataZoom', startValue: state.from, endValue: state.to });
  };
  const scaled = (factor) => {
    const half = ((state.to - state.from) * factor) / 2;
    const middle = (state.from + state.to) / 2;
    return zoom(middle - half, middle + half);
  };
  const moved = (part) => {
    const length = state.to - state.from;
    return zoom(state.from + part * length, state.to + part * length);
  };
  const awaited = [...new Set(spans.filter((span) => span.wait > 0).map((span) => span.awaited))].sort((a, b) => a - b);
  const kindsUsed = () => [...new Set(shown.map((span) => span.kind))];
  const fillOf = (kind, colours) => (kindHues[kind] === null || kindHues[kind] === undefined ? colours.line : colours.tint(kindHues[kind]));
  const legend = make('div', { class: 'legend' });
  const renderLegend = () => legend.replaceChildren(
    ...kindsUsed().map((kind) => make('span', {}, make('i', { class: 'swatch', style: `background: ${fillOf(kind, palette())}` }), ` ${kind}`)),
    ...(awaited.length ? [make('span', {}, make('strong', {}, 'Waits (low, hatched) for:'))] : []),
    ...awaited.slice(0, 16).map((process) => make('span', {},
      make('i', { class: 'swatch wait', style: `background: ${palette().strong(hueOf(process))}` }), ` ${rankName(process)}`)),
    ...(awaited.length > 16 ? [make('span', {}, `and ${awaited.length - 16} more ranks`)] : []));
  renderLegend();
  darkScheme.addEventListener('change', renderLegend);
  const describe = (span) => [
    ['', shorten(printable(span.name), 80)], ['', `${rankName(span.process)}, ${span.kind}${span.operation ? `, operation ${span.operation}` : ''}`],
    ['Begin', duration(span.begin)], ['Duration', duration(span.end - span.begin)],
    ...(span.wait ? [['Wait', `${duration(span.wait)} for ${rankName(span.awaited)}`]] : []),
    ...(span.bytes ? [['Bytes', bytes(span.bytes)]] : []), ...(span.route ? [['Route', printable(span.route)]] : []),
    ...(span.state === 'done' ? [] : [['State', span.state === 'open' ? 'not ended' : 'failed']]),
  ];
  const fullest = section.ranks.reduce((best, rank) => ((rank.caused || 0) > ((best && best.caused) || 0) ? rank : best), null);
  const chart = new Chart({
    title: 'Timeline of the ranks',
    help: 'Wheel with Ctrl, or after a click into the chart: zoom. Drag: move. Keys: + and - to zoom, arrows to move, 0 for all.',
    tools: [
      choice('Spans', [['operations', 'operations and program'], ['all', 'all, with phases']], state.kinds, (picked) => {
        state.kinds = picked;
        select();
        renderLegend();
        chart.update();
      }),
      button('Zoom in', () => scaled(0.5)), button('Zoom out', () => scaled(2)),
      button('Earlier', () => moved(-0.5)), button('Later', () => moved(0.5)), button('All', () => zoom(0, total)),
    ],
    legend,
    message: () => `${plural(shown.length, 'span')} of ${plural(section.ranks.length, 'rank')} in ${duration(total)}`
      + (fullest ? `. The other ranks waited most for rank ${fullest.rank}: ${duration(fullest.caused)}.` : '.')
      + (section.spans_left_out ? ` The ${plural(section.spans_left_out, 'shortest span')} are not in this file.` : ''),
    leastWidth: 480,
    height: () => lanes.length * 18 + 84,
    keys: {
      '+': () => scaled(0.5), '=': () => scaled(0.5), '-': () => scaled(2), 0: () => zoom(0, total),
      ArrowLeft: () => moved(-0.25), ArrowRight: () => moved(0.25),
    },
    items: { count: () => shown.length, describe: (index) => describe(shown[index]), target: (index) => ({ seriesIndex: 0, dataIndex: index }) },
    drawn: (view) => {
      view.on('dataZoom', () => {
        const [{ startValue, endValue }] = view.getOption().dataZoom;
        Object.assign(state, { from: startValue, to: endValue });
      });
      const wheel = (plain) => () => view.setOption({ dataZoom: [{ id: 'inside', zoomOnMouseWheel: plain ? true : 'ctrl' }] });
      chart.plot.addEventListener('focus', wheel(true));
      chart.plot.addEventListener('blur', wheel(false));
    },
    option: (colours) => ({
      grid: { left: 74, right: 14, top: 66, bottom: 8 },
      xAxis: axis(colours, {
        type: 'value', min: 0, max: total, position: 'top', splitLine: { show: true, lineStyle: { color: colours.line } },
        axisLabel: { hideOverlap: true, formatter: (value) => tickText(value, state.to - state.from) },
      }),
      yAxis: axis(colours, {
        type: 'category', inverse: true, data: lanes.map((lane) => lane.process),
        axisLabel: { interval: (index) => lanes[index].first, formatter: (process) => rankName(Number(process)) },
        splitLine: { show: true, interval: (index) => Boolean(lanes[index] && lanes[index].first), lineStyle: { color: colours.line } },
      }),
      dataZoom: [
        { id: 'inside', type: 'inside', filterMode: 'none', zoomOnMouseWheel: 'ctrl', startValue: state.from, endValue: state.to },
        { id: 'slider', type: 'slider', filterMode: 'none', top: 8, height: 22, showDataShadow: false, moveHandleSize: 0, startValue: state.from, endValue: state.to,
          labelFormatter: (value) => duration(value), textStyle: { color: colours.text }, borderColor: colours.line,
          fillerColor: `${colours.accent}33`, handleStyle: { color: colours.ground, borderColor: colours.accent } },
      ],
      series: [{
        type: 'custom', clip: true, encode: { x: [1, 2], y: 0 }, data: shown.map((span) => [span.lane, span.begin, span.end]),
        renderItem: (params, api) => {
          const span = shown[params.dataIndex];
          const [left, middle] = api.coord([span.begin, span.lane]);
          const right = api.coord([span.end, span.lane])[0];
          const area = params.coordSys;
          // Spans outside the window, and those that another span in the same pixel covers, are not drawn.
          if (right < area.x || left > area.x + area.width) return null;
          const last = params.context.last || (params.context.last = []);
          const end = Math.max(right, left + 1);
          if (end < (last[span.lane] || -1) + 0.7) return null;
          last[span.lane] = end;
          const x = Math.max(left, area.x);
          const width = Math.max(Math.min(end, area.x + area.width) - x, 1);
          const failed = span.state !== 'done';
          const children = [{
            type: 'rect', shape: { x, y: middle - 8, width, height: 15 },
            style: { fill: fillOf(span.kind, colours), stroke: failed ? colours.bad : 'none', lineWidth: failed ? 1.5 : 0, lineDash: span.state === 'open' ? [3, 3] : null },
          }];
          const waits = span.wait > 0 ? api.coord([span.begin + span.wait, span.lane])[0] : left;
          const waitWidth = Math.min(waits, area.x + area.width) - x;
          if (waitWidth > 0.5) {
            children.push({
              type: 'rect', shape: { x, y: middle - 1, width: waitWidth, height: 8 },
              style: { fill: colours.strong(hueOf(span.awaited)),
                decal: { symbol: 'rect', color: colours.ground, dashArrayX: [1, 0], dashArrayY: [1.5, 3], rotation: -Math.PI / 4 } },
            });
          }
          const label = `${span.state === 'failed' ? '✕ ' : ''}${printable(span.name)}`;
          const room = waitWidth > 0.5 ? Math.max(width, 0) : width;
          if (room > 34) {
            children.push({
              type: 'text', style: { text: shorten(label, Math.max(3, Math.floor((room - 6) / 6.2))), x: x + 3, y: waitWidth > 0.5 ? middle - 4 : middle,
                verticalAlign: 'middle', fill: colours.text, font: waitWidth > 0.5 ? '9px sans-serif' : '11px sans-serif' },
            });
          }
          return { type: 'group', children };
        },
      }],
    }),
    table: () => spansTable(shown, rankName),
  });
  chart.element.classList.add('timeline');
  return { element: chart.element, zoom: (from, to) => {
    zoom(from - (to - from) * 0.1, to + (to - from) * 0.1);
    visit(chart.element);
  } };
}

/** Returns the text of a mark on an axis of time, with as many digits as `range` needs. */
function tickText(seconds, range) {
  const [unit, size] = range < 2e-3 ? ['µs', 1e-6] : range < 2 ? ['ms', 1e-3] : ['s', 1];
  const digits = Math.max(0, Math.ceil(1 - Math.log10(range / size)));
  return `${counts.format(Number((seconds / size).toFixed(digits)))} ${unit}`;
}

function spansTable(spans, rankName) {
  return simpleTable('Spans', spans, [
    ['Name', 'name', 'name'], ['Rank', (span) => rankName(span.process)], ['Kind', 'kind'], ['Operation', 'operation', 'number'],
    ['Begin', 'begin', 'seconds'], ['Duration', (span) => span.end - span.begin, 'seconds'], ['Wait', 'wait', 'seconds'],
    ['Waited for', (span) => (span.wait ? rankName(span.awaited) : null)], ['Bytes', 'bytes', 'bytes'], ['Route', 'route', 'name'],
    ['State', (span) => (span.state === 'open' ? 'not ended' : span.state)],
  ]);
}
