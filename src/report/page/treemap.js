// Bytes by module: a treemap that opens a module by a click or a key.

const tilesShown = 60;

/** Returns the parts to draw, outer ones first: the largest groups are divided until there are enough tiles. */
function partsOf(root) {
  const sorted = (node) => [...node.children].filter((part) => part.bytes > 0).sort((a, b) =>
    b.bytes - a.bytes).slice(0, 200);
  const inner = new Map([[root, sorted(root)]]);
  const tiles = new Map(inner.get(root).map((part) => [part, 1]));
  for (;;) {
    const divisible = [...tiles].filter(([part, depth]) => part.children && depth < 3 && part.children.length
      + tiles.size <= tilesShown)
      .sort((a, b) => b[0].bytes - a[0].bytes)[0];
    if (!divisible) break;
    const [part, depth] = divisible;
    inner.set(part, sorted(part));
    tiles.delete(part);
    for (const child of inner.get(part)) tiles.set(child, depth + 1);
  }
  const order = [];
  const collect = (node) => {
    for (const part of inner.get(node) || []) {
      order.push(part);
      collect(part);
    }
  };
  collect(root);
  return { order, inner };
}

/** `pick(row)` is called for a tensor that is chosen. */
function treemap(root, pick) {
  const path = [root];
  const crumbs = make('nav', { class: 'crumbs', 'aria-label': 'Module' });
  const here = () => path[path.length - 1];
  let parts = partsOf(root);
  let chart = null;
  const refresh = () => {
    parts = partsOf(here());
    crumbs.replaceChildren(...path.map((node, depth) => button(node === root ? 'whole model'
      : shorten(printable(labelOf(node)), 60), () => {
      path.length = depth + 1;
      refresh();
    }, { 'aria-current': node === here() ? 'true' : null })));
    if (!chart) return;
    chart.at = -1;
    chart.update();
  };
  const open = (node) => {
    if (!node.children) return pick(node.row);
    path.push(node);
    return refresh();
  };
  refresh();
  const shareOf = (node) => percent(node.bytes / (here().bytes || 1));
  chart = new Chart({
    title: 'Bytes by module',
    help: 'Click a blue tile to open its module, and a grey tile to list its tensor. '
      + 'Keys: arrows to move, Enter to open, Backspace to go up.',
    tools: crumbs,
    message: () => {
      const tile = parts.order.filter((part) => !parts.inner.has(part))
        .reduce((best, part) => (!best || part.bytes > best.bytes ? part : best), null);
      return `${here() === root ? 'All modules' : printable(labelOf(here(), 'path'))}: ${bytes(here().bytes)}.`
        + (tile ? ` The largest tile is ${shorten(printable(labelOf(tile, 'path')), 80)} with ${shareOf(tile)}.` : '');
    },
    height: (width) => Math.min(Math.max(width * 0.42, 280), 460),
    items: {
      count: () => parts.order.length,
      describe: (index) => {
        const node = parts.order[index];
        return [['', shorten(printable(labelOf(node, 'path')), 120)],
          ['Bytes', `${bytes(node.bytes)} (${shareOf(node)})`], ['Tensors', count(sum(node.rows, 'tensors'))]];
      },
      offset: 1,  // ECharts counts the root as well
      choose: (index) => open(parts.order[index]),
    },
    keys: {
      Backspace: () => {
        if (path.length > 1) path.pop();
        refresh();
      },
    },
    option: (colours) => {
      const dataOf = (node) => parts.inner.get(node).map((part) => {
        const label = shorten(printable(labelOf(part)), 48);
        const isOuter = parts.inner.has(part);
        return {
          name: label, value: part.bytes, children: isOuter ? dataOf(part) : undefined,
          itemStyle: { color: part.children ? colours.tint(212) : colours.raised, borderColor: isOuter ? colours.line
            : colours.ground },
          label: { formatter: () => `${label}\n${bytes(part.bytes)}` },
          upperLabel: { show: isOuter, formatter: () => `${label} · ${bytes(part.bytes)}` },
        };
      });
      return {
        series: [{
          type: 'treemap', left: 0, right: 0, top: 0, bottom: 0, roam: false, nodeClick: false,
            breadcrumb: { show: false }, sort: false,
          itemStyle: { borderWidth: 1, gapWidth: 1 }, emphasis: { itemStyle: { borderColor: colours.text },
            upperLabel: { show: true } },
          label: { color: colours.text, fontSize: 11, lineHeight: 15, overflow: 'truncate', position: 'insideTopLeft',
            padding: [3, 5] },
          upperLabel: { color: colours.text, fontSize: 11, height: 20, padding: [0, 5] }, data: dataOf(here()),
        }],
      };
    },
    table: () => simpleTable('Bytes by module', [...here().children], [
      ['Module', 'label', 'name', (node) => (node.children
        ? link(name(labelOf(node), 70), () => open(node)) : name(node.label, 70))],
      ['Bytes', 'bytes', 'bytes'], ['Share', (node) => node.bytes / (here().bytes || 1), 'share'],
      ['Tensors', (node) => sum(node.rows, 'tensors'), 'number'],
    ], { sort: 1, descending: true }),
  });
  return chart.element;
}

/** Returns bars of bytes: a list of [label element, bytes, remark]. */
function byteBars(title, parts) {
  const total = parts.reduce((all, [, value]) => all + value, 0) || 1;
  const largest = Math.max(...parts.map(([, value]) => value), 1);
  const line = ([label, value, remark]) => make('li', {},
    make('span', { class: 'label' }, label),
    make('span', { class: 'track', 'aria-hidden': 'true' }, make('span',
      { style: `width: ${(100 * value) / largest}%` })),
    make('span', { class: 'amount' }, bytesCell(value), ` · ${percent(value / total)}`, remark && ` · ${remark}`));
  const sorted = [...parts].sort((a, b) => b[1] - a[1]);
  return make('div', { class: 'bars' }, make('h4', {}, title), make('ul', {}, sorted.slice(0, 12).map(line)),
    sorted.length > 12 && disclosure(`Show ${sorted.length - 12} more`, () =>
      make('ul', {}, sorted.slice(12).map(line))));
}
