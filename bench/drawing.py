# SPDX-License-Identifier: Apache-2.0
"""Draws time against bytes, both logarithmic, as SVG."""

import math
from xml.sax.saxutils import escape

from figures import size_name
from tables import peer_value

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 84, 216, 58, 64

# Series, label, colour (also distinguishable for colour-blind readers), dashes.
SERIES = [
    ("floor", "floor: parallel copy", "#555555", "6 4"),
    ("muster", "Muster", "#d55e00", ""),
    ("mpi-window", "MPI shared window", "#009e73", ""),
    ("mpi-gather-in-place", "MPI_Gather in place", "#56b4e9", ""),
    ("mpi-gather", "MPI_Gather", "#0072b2", ""),
    ("gloo-gather", "torch gloo gather", "#cc79a7", ""),
    ("modelopt-configs-files", "ModelOpt configs, files", "#b8a000", "2 3"),
    ("modelopt-tensors", "ModelOpt tensors", "#000000", ""),
]


def value_of(figures, key, name):
    return figures.best(key, "floor") if name == "floor" else peer_value(figures, key, name)


def collect(figures, ranks):
    keys = [key for key in figures.keys("gather") if key[1] == ranks]
    lines = []
    for name, label, colour, dashes in SERIES:
        points = [(key[2], value_of(figures, key, name)) for key in keys]
        points = [point for point in points if point[1] is not None]
        if points:
            lines.append((label, colour, dashes, points))
    return lines


def time_name(seconds):
    exponent = round(math.log10(seconds))
    unit, shift = ("s", 0) if exponent >= 0 else ("ms", 3) if exponent >= -3 else ("µs", 6)
    return f"{10 ** (exponent + shift):g} {unit}"


class Axes:
    def __init__(self, lines):
        sizes = [size for *_, points in lines for size, _ in points]
        seconds = [value for *_, points in lines for _, value in points]
        self.sizes = sorted(set(sizes))
        self.left, self.right = math.log2(self.sizes[0]), math.log2(self.sizes[-1])
        self.low, self.high = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds)))
        if self.low == self.high:
            self.high += 1

    def x(self, size):
        span = (self.right - self.left) or 1
        return LEFT + (math.log2(size) - self.left) / span * (WIDTH - LEFT - RIGHT)

    def y(self, seconds):
        part = (math.log10(seconds) - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)


def text(x, y, words, anchor="start", size=13, colour="#222222", extra=""):
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"{extra}>'
            f"{escape(words)}</text>")


def grid(axes):
    out = []
    for exponent in range(axes.low, axes.high + 1):
        y = axes.y(10.0 ** exponent)
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#cccccc"/>')
        out.append(text(LEFT - 8, y + 4, time_name(10.0 ** exponent), "end"))
        if exponent < axes.high:
            for step in range(2, 10):
                y = axes.y(step * 10.0 ** exponent)
                out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#f0f0f0"/>')
    for size in axes.sizes:
        x = axes.x(size)
        out.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#e4e4e4"/>')
        out.append(text(x, HEIGHT - BOTTOM + 20, size_name(size), "middle"))
    return out


def legend_places(axes, lines):
    """Returns one label position per line, next to its end. Labels of close ends are moved apart."""
    gap = 19
    order = sorted(range(len(lines)), key=lambda i: axes.y(lines[i][3][-1][1]))
    wanted = [axes.y(lines[i][3][-1][1]) for i in order]
    places = []
    for y in wanted:
        places.append(max(y, places[-1] + gap) if places else y)
    over = max(0, places[-1] - (HEIGHT - BOTTOM))
    for i in reversed(range(len(places))):
        limit = (HEIGHT - BOTTOM) if i == len(places) - 1 else places[i + 1] - gap
        places[i] = min(places[i], limit) if over else places[i]
    return dict(zip(order, places))


def draw(figures, ranks):
    """Draws the gathers. Returns None if there is nothing to draw."""
    lines = collect(figures, ranks)
    if not lines:
        return None
    return picture(lines, f"Gather of {ranks} ranks to the first: time against bytes",
                   f"{ranks} ranks on one host: until the first rank has access to every rank's tensor",
                   "bytes of one rank")


def picture(lines, title, heading, below):
    """Returns the SVG text. Each line is (label, colour, dashes, [(bytes, seconds)])."""
    axes = Axes(lines)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
           'font-family="DejaVu Sans, Helvetica, Arial, sans-serif">',
           f"<title>{escape(title)}</title>",
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
           text(LEFT, 26, heading, size=16),
           text(LEFT, 45, "medians of one run; both axes logarithmic; lower is better", size=12, colour="#666666")]
    out += grid(axes)
    out.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, below, "middle"))
    places = legend_places(axes, lines)
    for i, (label, colour, dashes, points) in enumerate(lines):
        width = 3 if label == "Muster" else 2
        path = " ".join(f"{axes.x(size):.1f},{axes.y(value):.1f}" for size, value in points)
        style = f' stroke-dasharray="{dashes}"' if dashes else ""
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{style}/>')
        for size, value in points:
            out.append(f'<circle cx="{axes.x(size):.1f}" cy="{axes.y(value):.1f}" r="{width + 0.5}" fill="{colour}">'
                       f"<title>{escape(label)}, {size_name(size)}: {value * 1e3:.3f} ms</title></circle>")
        end_x, end_y = axes.x(points[-1][0]), axes.y(points[-1][1])
        label_x = WIDTH - RIGHT + 22
        out.append(f'<line x1="{end_x + 6:.1f}" y1="{end_y:.1f}" x2="{label_x - 4}" y2="{places[i]:.1f}" '
                   f'stroke="{colour}" stroke-width="1"/>')
        out.append(text(label_x, places[i] + 4, label, colour=colour,
                        extra=' font-weight="bold"' if label == "Muster" else ""))
    out.append("</svg>")
    return "\n".join(out) + "\n"
