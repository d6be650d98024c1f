// The parts of the ranks: which units of a tensor each rank has.

const groupsShown = 48;

/** Returns the ranges of each rank of a group in the order of ranks, the number of different parts, and the largest
 * number of ranks with the same one. */
function divisionOf(group) {
  const held = new Map();
  for (const { rank, from, to } of [...group.held].sort((a, b) => a.rank - b.rank)) held.set(rank,
    [...(held.get(rank) || []), [from, to]]);
  const owners = new Map();
  for (const ranges of held.values()) owners.set(String(ranges), (owners.get(String(ranges)) || 0) + 1);
  return { held, parts: owners.size, copies: Math.max(0, ...owners.values()) };
}

function groupDrawing(group, ranks) {
  const { held, parts, copies } = divisionOf(group);
  const units = Math.max(group.units, 1);
  const step = Math.min(14, Math.max(4, Math.floor(240 / ranks)));
  const every = Math.ceil(11 / step);
  const colours = palette();
  const bars = Array.from({ length: ranks }, (_, rank) => [
    rank % every === 0 && svg('text', { x: 26, y: rank * step + Math.min(step, 11) - 1, class: 'rank' }, String(rank)),
    svg('rect', { x: 32, y: rank * step, width: 240, height: step - 1, class: 'empty' }),
    (held.get(rank) || []).map(([from, to]) => svg('rect', {
      x: 32 + (240 * from) / units, y: rank * step, width: Math.max((240 * (to - from)) / units, 1), height: step - 1,
        fill: colours.strong(hueOf(rank)),
    }, svg('title', {}, `rank ${rank}: ${count(from)} to ${count(to)} of ${count(units)}`))),
  ]);
  const rangesText = ([rank, ranges]) => `rank ${rank} has ${ranges.map((range) => range.join(' to ')).join(' and ')}`;
  const facts = [
    plural(group.tensors, 'tensor'), shapeText(group.shape),
    group.dim === null ? 'not cut' : `cut along dimension ${group.dim} into ${plural(parts, 'part')}`,
    held.size === ranks ? 'on all ranks' : `on ${ranksText([...held.keys()])}`,
    copies > 1 && `${plural(copies, 'rank')} with the same part`, group.combine !== 'copy' && `parts are combined by ${group.combine}`,
  ];
  return make('figure', { class: 'card' },
    make('figcaption', {}, make('strong', {}, name(group.name)), make('span', {}, facts.filter(Boolean).join(', '))),
    svg('svg', {
      viewBox: `0 0 274 ${ranks * step}`, role: 'img',
      'aria-label': `Of ${plural(units, 'unit')}, ${[...held].slice(0, 16).map(rangesText).join('; ')}${held.size > 16 ? '; and so on' : ''}.`,
    }, bars));
}

function partsView({ direction, layout, plan, ranks, groups, tensors_left_out: undrawn }) {
  const state = { text: '', way: 'all', limit: groupsShown };
  const cards = make('div', { class: 'cards' });
  const note = make('p', { class: 'faint', role: 'status' });
  const ways = {
    all: () => true,
    cut: (group) => group.dim !== null,
    'on several ranks': (group) => divisionOf(group).copies > 1,
    'not on all ranks': (group) => divisionOf(group).held.size < ranks,
    'combined by an operation': (group) => group.combine !== 'copy',
  };
  const render = (change) => {
    Object.assign(state, change);
    const test = nameTest(state.text);
    const found = groups.filter((group) => test(group.name) && ways[state.way](group));
    cards.replaceChildren(...found.slice(0, state.limit).map((group) => groupDrawing(group, ranks)));
    more.hidden = found.length <= state.limit;
    note.textContent = `Showing ${count(Math.min(found.length, state.limit))} of ${plural(groups.length, 'group')}.`;
  };
  const more = button('Show all groups', () => render({ limit: Infinity }));
  render();
  onColours(() => render());
  return [
    paragraph(`${direction === 'cut' ? 'The drawings show how this layout would cut the model.'
      : 'The drawings show the parts in the shards of the ranks.'} Each line is a rank. `
      + 'The coloured part is what the rank has of the tensor. A rank without colour has nothing of it.'),
    undrawn > 0 && paragraph(`${plural(undrawn, 'tensor')} not drawn: the parts are not ranges along one dimension.`),
    definitions([['Layout', say(layout)], ['Plan', say(plan)], ['Ranks', count(ranks)],
      ['Groups of tensors', count(groups.length)]]),
    tools(nameFilter((text) => render({ text })), choice('Groups', Object.keys(ways).map((way) => [way, way]), 'all',
      (way) => render({ way }))),
    cards, tools(note, more),
    disclosure('Show as table', () => simpleTable('Parts of the ranks',
      groups.flatMap((group) => group.held.map((held) => ({ ...group, ...held }))), [
      ['Group', 'name', 'name'], ['Tensors', 'tensors', 'number'], ['Shape', (row) => shapeText(row.shape)],
        ['Dimension', 'dim', 'number'],
      ['Rank', 'rank', 'number'], ['From', 'from', 'number'], ['To', 'to', 'number'], ['Units', 'units', 'number'],
        ['Combined by', 'combine'],
    ])),
  ];
}
