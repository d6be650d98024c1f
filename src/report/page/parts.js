// The parts of the ranks: which units of a tensor each rank has.

const groupsShown = 48;

/** Returns the ranges of each rank of a group, by rank. */
function heldByRank(group) {
  const held = new Map();
  for (const { rank, from, to } of group.held) held.set(rank, [...(held.get(rank) || []), [from, to]]);
  return new Map([...held].sort((a, b) => a[0] - b[0]));
}

/** Returns the number of different parts, and the largest number of ranks with the same one. */
function divisionOf(held) {
  const sets = new Map();
  for (const ranges of held.values()) {
    const key = JSON.stringify(ranges);
    sets.set(key, (sets.get(key) || 0) + 1);
  }
  return { parts: sets.size, copies: Math.max(0, ...sets.values()) };
}

/** Describes a group in a sentence. */
function divisionText(group, ranks) {
  const held = heldByRank(group);
  const { parts, copies } = divisionOf(held);
  const cut = group.dim === null ? 'not cut' : `cut along dimension ${group.dim} into ${plural(parts, 'part')}`;
  const owners = held.size === ranks ? 'all ranks' : ranksText([...held.keys()]);
  const ways = group.combine === 'copy' ? '' : `; parts combined by ${group.combine}`;
  return `${cut}; on ${owners}${copies > 1 ? `; ${plural(copies, 'copy', 'copies')}` : ''}${ways}`;
}

function groupDrawing(group, ranks) {
  const held = heldByRank(group);
  const units = Math.max(group.units || 0, 1);
  const step = Math.min(14, Math.max(4, Math.floor(240 / ranks)));
  const dark = palette() === palettes.dark;
  const every = Math.ceil(11 / step);
  const bars = [];
  for (let rank = 0; rank < ranks; ++rank) {
    const y = rank * step;
    if (rank % every === 0) bars.push(svg('text', { x: 26, y: y + Math.min(step, 11) - 1, class: 'rank' }, String(rank)));
    bars.push(svg('rect', { x: 32, y, width: 240, height: step - 1, class: 'empty' }));
    for (const [from, to] of held.get(rank) || []) {
      bars.push(svg('rect', {
        x: 32 + (240 * from) / units, y, width: Math.max((240 * (to - from)) / units, 1), height: step - 1,
        fill: dark ? palettes.dark.strong(hueOf(rank)) : palettes.light.strong(hueOf(rank)),
      }, svg('title', {}, `rank ${rank}: ${count(from)} to ${count(to)} of ${count(units)}`)));
    }
  }
  return make('figure', { class: 'card' },
    make('figcaption', {}, make('strong', {}, name(group.name)),
      make('span', {}, `${plural(group.tensors, 'tensor')}, ${shapeText(group.shape)}, ${divisionText(group, ranks)}`)),
    svg('svg', {
      viewBox: `0 0 274 ${ranks * step}`, role: 'img',
      'aria-label': `One bar per rank: ${[...held].slice(0, 8).map(([rank, ranges]) =>
        `rank ${rank} has ${ranges.map(([from, to]) => `${from} to ${to}`).join(' and ')}`).join('; ')}${held.size > 8 ? '; and so on' : ''}. `
        + `${count(units)} units.`,
    }, bars));
}

function partsView(parts) {
  const state = { text: '', way: 'all', limit: groupsShown };
  const cards = make('div', { class: 'cards' });
  const note = make('p', { class: 'faint', role: 'status' });
  const more = button('Show all groups', () => {
    state.limit = Infinity;
    render();
  });
  const ways = {
    all: () => true,
    cut: (group) => group.dim !== null,
    copied: (group) => divisionOf(heldByRank(group)).copies > 1,
    some: (group) => heldByRank(group).size < parts.ranks,
    combined: (group) => group.combine !== 'copy',
  };
  const render = () => {
    const test = nameTest(state.text);
    const found = parts.groups.filter((group) => test(group.name) && ways[state.way](group));
    cards.replaceChildren(...found.slice(0, state.limit).map((group) => groupDrawing(group, parts.ranks)));
    more.hidden = found.length <= state.limit;
    note.textContent = `Showing ${count(Math.min(found.length, state.limit))} of ${plural(parts.groups.length, 'group')}.`;
  };
  render();
  darkScheme.addEventListener('change', render);
  const sentence = parts.direction === 'cut' ? 'The model is whole. The drawing shows how this layout would cut it.'
    : 'The drawing shows the parts in the shards of the ranks.';
  return [
    make('p', {}, `${sentence} Each bar is a rank, and its width is the whole tensor. Ranks without a bar do not have the tensor.`),
    definitions([['Layout', say(parts.layout)], ['Plan', say(parts.plan)], ['Ranks', count(parts.ranks)],
      ['Groups of tensors', count(parts.groups.length)]]),
    make('div', { class: 'tools' }, textField('Filter', 'part of a name, or a pattern with *', (text) => {
      state.text = text;
      render();
    }), choice('Groups', [['all', 'all'], ['cut', 'cut'], ['copied', 'on several ranks'], ['some', 'not on all ranks'],
      ['combined', 'combined by an operation']], 'all', (way) => {
      state.way = way;
      render();
    })),
    cards, make('div', { class: 'tools' }, note, more),
    disclosure('Show as table', () => simpleTable('Parts of the ranks', parts.groups.flatMap((group) =>
      group.held.map((part) => ({ ...group, ...part }))), [
      ['Group', 'name', 'name'], ['Tensors', 'tensors', 'number'], ['Shape', (part) => shapeText(part.shape)], ['Dimension', 'dim', 'number'],
      ['Rank', 'rank', 'number'], ['From', 'from', 'number'], ['To', 'to', 'number'], ['Units', 'units', 'number'], ['Combined by', 'combine'],
    ])),
  ];
}
