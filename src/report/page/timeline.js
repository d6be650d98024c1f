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

const kindHues = { exchange: 210, stream: 180, collective: 265, message: 45, file: 95, export: 135 };

function traceTimeline(section, spans) {
  const total = Math.max(section.seconds, ...spans.map((span) => span.end), 1e-9);
  const window = { from: 0, to: total };
  const rankName = (process) => `rank ${section.ranks[process]?.rank ?? process}`;
  const shown = spans.filter((span) => span.kind !== 'phase');
  const lanes = lanesOf(shown, section.ranks.length);
  const zoom = (from, to) => {
    const length = Math.min(Math.max(to - from, total * 1e-7), total);
    window.from = Math.min(Math.max(from, 0), total - length);
    window.to = window.from + length;
    chart.draw();
    chart.view.dispatchAction({ type: 'dataZoom', startValue: window.from, endValue: window.to });
  };
  // Moves both ends of the window inwards by parts of its length.
  const shift = (left, right) => () => zoom(window.from + left * (window.to - window.from),
    window.to - right * (window.to - window.from));
  const whole = () => zoom(0, total);
  const awaited = [...new Set(shown.filter((span) => span.wait > 0).map((span) => span.awaited))].sort((a, b) => a - b);
  const fillOf = (kind, colours) => (kind in kindHues ? colours.tint(kindHues[kind]) : colours.line);
  const legend = make('div', {});
  const renderLegend = () => {
    const swatch = (colour, className) => make('i', { class: `swatch ${className}`, style: `background: ${colour}` });
    legend.replaceChildren(legendOf(
      ...[...new Set(shown.map((span) => span.kind))].map((kind) => [swatch(fillOf(kind, palette()), ''), ` ${kind}`]),
      awaited.length > 0 && make('strong', {}, 'A hatched bar is a wait for:'),
      ...awaited.slice(0, 16).map((process) => [swatch(palette().strong(hueOf(process)), 'wait'),
        ` ${rankName(process)}`]),
      awaited.length > 16 && `and ${plural(awaited.length - 16, 'more rank')}`));
  };
  renderLegend();
  onColours(renderLegend);
  const blamed = mostWaitedFor(section.ranks);
  const chart = new Chart({
    title: 'Timeline of the ranks', legend,
    help: 'Ctrl and the wheel zoom; after a click into the chart, the wheel alone zooms. Drag to move. '
      + 'Keys: + and - zoom, arrows move, 0 shows everything.',
    tools: [button('Zoom in', shift(0.25, 0.25)), button('Zoom out', shift(-0.5, -0.5)),
      button('Earlier', shift(-0.5, 0.5)),
      button('Later', shift(0.5, -0.5)), button('All', whole)],
    message: () => `${plural(shown.length, 'span')} of ${plural(section.ranks.length, 'rank')} in ${duration(total)}.`
      + (blamed ? ` The other ranks waited most for rank ${blamed.rank}: ${duration(blamed.caused)}.` : '')
      + (section.spans_left_out ? ` This file leaves out ${plural(section.spans_left_out, 'short span')}.` : ''),
    leastWidth: 480,
    height: () => lanes.length * 18 + 84,
    keys: {
      '+': shift(0.25, 0.25), '=': shift(0.25, 0.25), '-': shift(-0.5, -0.5), 0: whole,
      ArrowLeft: shift(-0.25, 0.25), ArrowRight: shift(0.25, -0.25),
    },
    items: {
      count: () => shown.length,
      describe: (index) => {
        const span = shown[index];
        return [
          ['', shorten(printable(span.name), 80)], ['', `${rankName(span.process)}, ${span.kind}`],
          span.operation !== null && ['Operation', count(span.operation)], ['Begin', duration(span.begin)],
            ['Duration', duration(span.end - span.begin)],
          span.wait > 0 && ['Wait', `${duration(span.wait)} for ${rankName(span.awaited)}`], span.bytes > 0
            && ['Bytes', bytes(span.bytes)],
          span.route && ['Route', printable(span.route)], span.state !== 'done' && ['State', stateText(span)],
        ];
      },
    },
    drawn: (view) => {
      view.on('dataZoom', () => {
        const [{ startValue, endValue }] = view.getOption().dataZoom;
        Object.assign(window, { from: startValue, to: endValue });
      });
      // Without the focus, the wheel scrolls the page.
      const wheel = (zoomOnMouseWheel) => () => view.setOption({ dataZoom: [{ id: 'inside', zoomOnMouseWheel }] });
      chart.plot.addEventListener('focus', wheel(true));
      chart.plot.addEventListener('blur', wheel('ctrl'));
    },
    option: (colours) => {
      const range = { filterMode: 'none', startValue: window.from, endValue: window.to };
      return {
        grid: { left: 74, right: 14, top: 66, bottom: 8 },
        xAxis: axis(colours, {
          type: 'value', min: 0, max: total, position: 'top', splitLine: gridLine(colours),
          axisLabel: { hideOverlap: true, formatter: (value) => tickText(value, window.to - window.from) },
        }),
        yAxis: axis(colours, {
          type: 'category', inverse: true, data: lanes.map((lane) => lane.process),
          axisLabel: { interval: (index) => lanes[index].first, formatter: (process) => rankName(Number(process)) },
          splitLine: { ...gridLine(colours), interval: (index) => Boolean(lanes[index] && lanes[index].first) },
        }),
        dataZoom: [{ id: 'inside', type: 'inside', zoomOnMouseWheel: 'ctrl', ...range }, {
          id: 'slider', type: 'slider', top: 8, height: 22, showDataShadow: false, moveHandleSize: 0,
            labelFormatter: duration, ...range,
          textStyle: { color: colours.text }, borderColor: colours.line, fillerColor: `${colours.accent}33`,
          handleStyle: { color: colours.ground, borderColor: colours.accent },
        }],
        series: [{
          type: 'custom', clip: true, encode: { x: [1, 2], y: 0 }, data: shown.map((span) =>
            [span.lane, span.begin, span.end]),
          renderItem: (params, api) => spanDrawing(shown[params.dataIndex], params, api, colours, fillOf),
        }],
      };
    },
    table: () => spansTable(spans, rankName),
  });
  chart.element.classList.add('timeline');
  const show = (from, to) => {
    zoom(from - (to - from) * 0.1, to + (to - from) * 0.1);
    visit(chart.element);
  };
  return { element: chart.element, zoom: show };
}

/** Returns the drawing of a span: its wait is low and hatched in the colour of the awaited rank. */
function spanDrawing(span, { coordSys: area, context }, api, colours, fillOf) {
  const [left, middle] = api.coord([span.begin, span.lane]);
  const [right] = api.coord([span.end, span.lane]);
  const edge = area.x + area.width;
  // Spans outside the window, and those that another span in the same pixel covers, are not drawn.
  const last = context.last || (context.last = []);
  const end = Math.max(right, left + 1);
  if (right < area.x || left > edge || end < (last[span.lane] ?? -1) + 0.7) return null;
  last[span.lane] = end;
  const x = Math.max(left, area.x);
  const width = Math.max(Math.min(end, edge) - x, 1);
  const waitWidth = span.wait > 0 ? Math.min(api.coord([span.begin + span.wait, span.lane])[0], edge) - x : 0;
  const isDone = span.state === 'done';
  const outline = { stroke: isDone ? 'none' : colours.bad, lineWidth: isDone ? 0 : 1.5, lineDash: span.state === 'open'
    ? [3, 3] : null };
  const children = [{ type: 'rect', shape: { x, y: middle - 8, width, height: 15 },
    style: { fill: fillOf(span.kind, colours), ...outline } }];
  if (waitWidth > 0.5) {
    const decal = { symbol: 'rect', color: colours.ground, dashArrayX: [1, 0], dashArrayY: [1.5, 3],
      rotation: -Math.PI / 4 };
    children.push({ type: 'rect', shape: { x, y: middle - 1, width: waitWidth, height: 8 },
      style: { fill: colours.strong(hueOf(span.awaited)), decal } });
  }
  if (width > 34) {
    const text = shorten(`${span.state === 'failed' ? '✕ ' : ''}${printable(span.name)}`,
      Math.max(3, Math.floor((width - 6) / 6.2)));
    const place = waitWidth > 0.5 ? { y: middle - 4, font: '9px sans-serif' } : { y: middle, font: '11px sans-serif' };
    children.push({ type: 'text', style: { text, x: x + 3, verticalAlign: 'middle', fill: colours.text, ...place } });
  }
  return { type: 'group', children };
}

function stateText(span) {
  return span.state === 'open' ? 'not ended' : span.state;
}

/** Returns the text of a mark on an axis of time, with as many digits as `range` needs. */
function tickText(seconds, range) {
  const [unit, size] = range < 2e-3 ? ['µs', 1e-6] : range < 2 ? ['ms', 1e-3] : ['s', 1];
  const digits = Math.max(0, Math.ceil(1 - Math.log10(range / size)));
  return `${counts.format(Number((seconds / size).toFixed(digits)))} ${unit}`;
}

function spansTable(spans, rankName) {
  return simpleTable('Spans', spans, [
    ['Name', 'name', 'name'], ['Rank', (span) => rankName(span.process)], ['Kind', 'kind'],
      ['Operation', 'operation', 'number'],
    ['Begin', 'begin', 'seconds'], ['Duration', (span) => span.end - span.begin, 'seconds'],
      ['Wait', 'wait', 'seconds'],
    ['Waited for', (span) => (span.wait ? rankName(span.awaited) : null)], ['Bytes', 'bytes', 'bytes'],
      ['Route', 'route', 'name'],
    ['State', stateText],
  ]);
}
