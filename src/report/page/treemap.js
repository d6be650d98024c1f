// Bytes by module: a treemap that opens a module by a click or a key.

/** `pick(row)` is called for a tensor that is chosen. */
function treemap(root, pick) {
  const path = [root];
  const crumbs = make('nav', { class: 'crumbs', 'aria-label': 'Module' });
  const here = () => path[path.length - 1];
  // Small parts beyond the first 300 would be invisible.
  const parts = () => [...here().children].sort((a, b) => b.bytes - a.bytes).slice(0, 300).filter((part) => part.bytes > 0);
  const titleOf = (node) => (node === root ? 'whole' : printable(node.label));
  const open = (node) => {
    if (!node.children) return pick(node.row);
    path.push(node);
    return refresh();
  };
  const refresh = () => {
    crumbs.replaceChildren(...path.map((node, depth) => button(shorten(titleOf(node), 60), () => {
      path.length = depth + 1;
      refresh();
    }, { 'aria-current': node === here() ? 'true' : null })));
    if (chart) {
      chart.at = -1;
      chart.update();
    }
  };
  let chart = null;
  refresh();
  chart = new Chart({
    title: 'Bytes by module',
    help: 'Click a module to open it. Keys: arrows to move, Enter to open, Backspace to go up.',
    tools: crumbs,
    message: () => {
      const [largest] = parts();
      const node = here();
      return `${node === root ? 'All modules' : printable(node.path)}: ${bytes(node.bytes)}`
        + (largest ? `. The largest part is ${shorten(printable(largest.label), 80)} with ${percent(largest.bytes / node.bytes)}.` : '.');
    },
    height: (width) => Math.min(Math.max(width * 0.4, 260), 420),
    items: {
      count: () => parts().length,
      describe: (index) => {
        const node = parts()[index];
        return [['', shorten(printable(node.path), 120)], ['Bytes', `${bytes(node.bytes)} (${percent(node.bytes / here().bytes)})`],
          ['Tensors', count(sum(node.rows, 'tensors'))]];
      },
      index: (event) => (event.data ? event.data.part : null),
      target: (index) => ({ seriesIndex: 0, dataIndex: index + 1 }),  // 0 is the root
      choose: (index) => open(parts()[index]),
    },
    keys: {
      Backspace: () => {
        if (path.length > 1) path.pop();
        refresh();
      },
    },
    option: (colours) => ({
      series: [{
        type: 'treemap', left: 0, right: 0, top: 0, bottom: 0, roam: false, nodeClick: false, breadcrumb: { show: false },
        sort: false, squareRatio: 1.2, itemStyle: { borderWidth: 1, gapWidth: 1, borderColor: colours.ground },
        emphasis: { itemStyle: { borderColor: colours.text, borderWidth: 2 }, label: { show: true } },
        label: { color: colours.text, fontSize: 12, lineHeight: 16, overflow: 'truncate', position: 'insideTopLeft', padding: [4, 6] },
        data: parts().map((node, index) => {
          const label = shorten(printable(node.label.replace(/[./]$/, '')), 40);
          return {
            name: label, value: node.bytes, part: index, label: { formatter: () => `${label}\n${bytes(node.bytes)}` },
            itemStyle: { color: colours.tint(hueOf(index)) },
          };
        }),
      }],
    }),
    table: () => simpleTable('Bytes by module', [...here().children], [
      ['Module', (node) => node.label, 'left', (node) => (node.children
        ? button(name(node.label), () => open(node), { class: 'plain' }) : name(node.label))],
      ['Bytes', (node) => node.bytes, 'right', (node) => bytesCell(node.bytes)],
      ['Share', (node) => node.bytes / here().bytes, 'right', (node) => percent(node.bytes / here().bytes)],
      ['Tensors', (node) => sum(node.rows, 'tensors'), 'right'],
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
    make('span', { class: 'track', 'aria-hidden': 'true' }, make('span', { style: `width: ${(100 * value) / largest}%` })),
    make('span', { class: 'amount' }, bytesCell(value), ` · ${percent(value / total)}`, remark && ` · ${remark}`));
  const sorted = [...parts].sort((a, b) => b[1] - a[1]);
  return make('div', { class: 'bars' }, make('h4', {}, title), make('ul', {}, sorted.slice(0, 12).map(line)),
    sorted.length > 12 && disclosure(`Show ${sorted.length - 12} more`, () => make('ul', {}, sorted.slice(12).map(line))));
}
