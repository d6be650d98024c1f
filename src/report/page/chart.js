// Charts: one frame for all of them, with a text alternative, keyboard control, colours and printing.

const palettes = {
  light: {
    text: '#1c2530', faint: '#56616e', line: '#d5dbe2', ground: '#ffffff', raised: '#e6e9ed', accent: '#1f5fa8',
      bad: '#c2185b',
    rising: ['#edf2f8', '#bdd5ea', '#7db0d8', '#3a7db8', '#1a4f8b', '#0b2a55'],
    both: ['#7f3703', '#cc7a2f', '#f3d3ad', '#f2f2f0', '#bcd5ea', '#4688c0', '#103c6e'],
    tint: (hue) => `hsl(${hue}, 48%, 84%)`, strong: (hue) => `hsl(${hue}, 52%, 42%)`,
  },
  dark: {
    text: '#e4e9ef', faint: '#a3aebb', line: '#3a4552', ground: '#161b22', raised: '#2c343e', accent: '#78b2ee',
      bad: '#ff6fa8',
    rising: ['#1c2a38', '#1f4467', '#25659a', '#3d92c8', '#83c1e6', '#e3f3fc'],
    both: ['#ffbd80', '#c77430', '#6b4020', '#2b3138', '#204a70', '#3f88c2', '#abd9f7'],
    tint: (hue) => `hsl(${hue}, 32%, 27%)`, strong: (hue) => `hsl(${hue}, 52%, 62%)`,
  },
};
const darkScheme = matchMedia('(prefers-color-scheme: dark)');
let isPrinting = false;

function palette() {
  return darkScheme.matches && !isPrinting ? palettes.dark : palettes.light;
}

/** Returns a hue for a number. Neighbouring numbers get hues that are easy to tell apart. */
function hueOf(index) {
  return Math.round((index * 137.508 + 210) % 360);
}

/** Returns the colour at `place`, from 0 to 1, on a list of colours. */
function mixed(colours, place) {
  const at = Math.min(Math.max(place, 0), 1) * (colours.length - 1);
  const low = Math.min(Math.floor(at), colours.length - 2);
  const part = (colour, offset) => parseInt(colour.slice(offset, offset + 2), 16);
  return `#${[1, 3, 5].map((offset) => Math.round(part(colours[low], offset) * (1 - (at - low))
    + part(colours[low + 1], offset) * (at - low)).toString(16).padStart(2, '0')).join('')}`;
}

/** Returns black or white, whichever has more contrast to the colour #rrggbb. */
function inkOn(colour) {
  const light = [1, 3, 5].map((offset) => (parseInt(colour.slice(offset, offset + 2), 16) / 255) ** 2.2);
  return 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2] > 0.2 ? '#000000' : '#ffffff';
}

const charts = new Set();
const renderers = [];

/** Calls `render` when the colours of the page change. */
function onColours(render) {
  renderers.push(render);
}

// A chart is drawn when it comes near the visible part of the page.
const nearby = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) if (isIntersecting) target.chart.draw();
}, { rootMargin: '400px' });
const widths = new ResizeObserver((entries) => {
  for (const { target } of entries) target.chart.resized();
});

/** A figure with a chart. Options:
 * - `title`, and `message()`: the statement of the chart in a sentence
 * - `option(colours, width)`: the option of ECharts without defaults; `height(width)` and `leastWidth` in pixels
 * - `table()`: the same data as a table
 * - `items`: the parts that a reader can point at: `count()`, `describe(i)` as pairs of texts, and optionally `offset`,
 *   the index of the first one in ECharts, `step(i, key)` for arrow keys, and `choose(i)` for a click and Enter
 * - `keys`: other keys with their actions; `help`: a sentence about keys and clicks
 * - `tools`, `legend`: elements above the chart */
class Chart {
  constructor(options) {
    Object.assign(this, options);
    this.at = -1;
    this.canvas = make('div', { class: 'canvas', style: `height: ${this.height(800)}px` });
    this.readout = make('p', { class: 'readout', 'aria-live': 'polite' }, this.help);
    this.plot = make('div', { class: 'plot', tabindex: '0', role: 'group', 'aria-label': `${this.title}. ${this.help}`,
      keydown: (event) => this.pressed(event), blur: () => this.point(-1) }, this.canvas);
    this.plot.chart = this;
    this.messageLine = make('p', { class: 'message' }, this.message());
    const [toggle, box] = disclosure('Show as table', () => this.table());
    this.tableBox = box;
    this.element = make('figure', { class: 'chart' }, make('figcaption', {}, make('h4', {}, this.title),
      this.messageLine),
      tools(this.tools), this.legend, this.plot, this.readout, toggle, box);
    charts.add(this);
    nearby.observe(this.plot);
  }

  draw() {
    if (this.view) return;
    nearby.unobserve(this.plot);
    this.view = echarts.init(this.canvas, null, { renderer: 'svg', width: this.width(),
      height: this.height(this.width()) });
    this.view.on('click', ({ dataIndex }) => {
      if (this.items.choose && this.itemAt(dataIndex) >= 0) this.items.choose(this.itemAt(dataIndex));
    });
    if (this.drawn) this.drawn(this.view);
    this.update();
    widths.observe(this.plot);
  }

  itemAt(dataIndex) {
    return (dataIndex ?? -1) - (this.items.offset || 0);
  }

  width() {
    const room = this.plot.clientWidth || 640;
    return Math.max(isPrinting ? Math.min(room, 680) : room, this.leastWidth || 0);
  }

  resized() {
    if (Math.abs(this.width() - this.view.getWidth()) > 1) this.update();
  }

  /** Draws everything anew: after a change of the data, the size or the colours. */
  update() {
    this.messageLine.textContent = this.message();
    if (!this.tableBox.hidden) this.tableBox.replaceChildren(this.table());
    if (!this.view) return;
    const width = this.width();
    const height = this.height(width);
    this.canvas.style.height = `${height}px`;
    this.canvas.style.width = this.leastWidth ? `${width}px` : '';
    this.view.resize({ width, height });
    const colours = palette();
    this.view.setOption({
      animation: false,
      useUTC: true,
      aria: { enabled: true, label: { enabled: true, description: `${this.title}. ${this.message()}` } },
      textStyle: { fontFamily: 'system-ui, sans-serif', color: colours.text },
      tooltip: {
        confine: true, transitionDuration: 0, backgroundColor: colours.ground, borderColor: colours.faint, padding: 8,
        textStyle: { color: colours.text, fontSize: 12 },
        formatter: ({ dataIndex }) => (this.itemAt(dataIndex) < 0 ? ''
          : definitions(this.items.describe(this.itemAt(dataIndex)), 'tip')),
      },
      ...this.option(colours, width),
    }, { notMerge: true });
  }

  /** Moves the pointer of the keyboard to an item, or removes it. */
  point(index) {
    if (!this.view) return;
    const act = (type, item) => this.view.dispatchAction({ type, seriesIndex: 0, dataIndex: item
      + (this.items.offset || 0) });
    if (this.at >= 0) act('downplay', this.at);
    this.at = index;
    if (index < 0) {
      act('hideTip', 0);
      this.readout.textContent = this.help;
      return;
    }
    act('highlight', index);
    act('showTip', index);
    this.readout.textContent = this.items.describe(index).filter(Boolean).map(([term, value]) =>
      `${term} ${value}`).join(', ');
  }

  pressed(event) {
    const { key } = event;
    const { items, keys } = this;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (keys && keys[key]) keys[key]();
    else if (key === 'Enter' && this.at >= 0 && items.choose) items.choose(this.at);
    else if (/^(Arrow|Home$|End$)/.test(key) && items.count() > 0) {
      const last = items.count() - 1;
      const step = items.step || ((at) => at + (key === 'ArrowLeft' || key === 'ArrowUp' ? -1 : 1));
      const next = key === 'Home' || this.at < 0 ? 0 : key === 'End' ? last : step(this.at, key);
      this.point(Math.min(Math.max(next, 0), last));
    } else return;
    event.preventDefault();
  }
}

function redrawAll() {
  for (const chart of charts) {
    if (chart.element.isConnected) chart.update();
    else if (chart.view) {
      // The details with this chart were closed.
      charts.delete(chart);
      widths.unobserve(chart.plot);
      chart.view.dispose();
    }
  }
  for (const render of renderers) render();
}

darkScheme.addEventListener('change', redrawAll);
for (const event of ['beforeprint', 'afterprint']) {
  addEventListener(event, () => {
    isPrinting = event === 'beforeprint';
    for (const chart of charts) if (isPrinting && chart.element.isConnected) chart.draw();
    redrawAll();
  });
}

function gridLine(colours) {
  return { show: true, lineStyle: { color: colours.line } };
}

/** Returns an axis in the colours of the page. */
function axis(colours, { axisLabel, ...more }) {
  return {
    axisLine: { lineStyle: { color: colours.faint } }, axisTick: { show: false }, splitLine: { show: false },
    axisLabel: { color: colours.text, fontSize: 11, ...axisLabel }, ...more,
  };
}

function timeAxis(colours, more) {
  const room = ({ min, max }) => max - min || 6e4;
  return axis(colours, { type: 'time', axisLabel: { hideOverlap: true }, min: (range) => range.min - room(range) * 0.03,
    max: (range) => range.max + room(range) * 0.05, ...more });
}
