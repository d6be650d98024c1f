#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws a part of a merged trace (muster trace DIR --out TRACE.json) as SVG: one row per rank.

    trace_picture.py TRACE.json --begin MS --length MS > picture.svg

Nested spans are drawn in front of the outer ones. Times count from the first span of the trace.
"""
import argparse
import json
import sys
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, TOP, ROW, GAP = 960, 150, 12, 34, 26, 8
# These colours are also distinguishable for colour-blind readers.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999", "#f0e442"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("trace")
    parser.add_argument("--begin", type=float, default=0, metavar="MS")
    parser.add_argument("--length", type=float, required=True, metavar="MS")
    parser.add_argument("--name", action="append", default=[], metavar="RANK=NAME", help="what a row is called")
    arguments = parser.parse_args()
    roles = {int(rank): name for rank, name in (each.split("=", 1) for each in arguments.name)}
    with open(arguments.trace, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["pid"]: event["args"]["name"] for event in events
             if event["ph"] == "M" and event["name"] == "process_name"}
    first = min(span["ts"] for span in spans) + arguments.begin * 1e3
    length = arguments.length * 1e3
    spans = [span for span in spans if span["ts"] < first + length and span["ts"] + span["dur"] > first]
    kinds = sorted({span["name"] for span in spans},
                   key=lambda name: -sum(span["dur"] for span in spans if span["name"] == name))
    colours = {name: COLOURS[min(place, len(COLOURS) - 1)] for place, name in enumerate(kinds)}
    ranks = sorted(names)
    rows = {rank: TOP + place * (ROW + GAP) for place, rank in enumerate(ranks)}
    height = TOP + len(ranks) * (ROW + GAP) + 44 + 18 * ((len(kinds) + 3) // 4)
    scale = (WIDTH - LEFT - RIGHT) / length

    def text(x, y, words, anchor="start"):
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12" fill="#222222">{escape(words)}</text>'

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif">',
           f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
           text(LEFT, 18, f"{arguments.length:g} ms")]
    for rank in ranks:
        out.append(text(LEFT - 8, rows[rank] + ROW / 2 + 4, roles.get(rank, names[rank].split(" (")[0]), "end"))
        out.append(f'<rect x="{LEFT}" y="{rows[rank]}" width="{WIDTH - LEFT - RIGHT}" height="{ROW}" fill="#f4f4f4"/>')
    # Spans that begin earlier are drawn first; if they begin together, the longer one is drawn first.
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        begin = max(span["ts"], first)
        end = min(span["ts"] + span["dur"], first + length)
        inset = min(span.get("args", {}).get("depth", 0), 3) * 4
        out.append(f'<rect x="{LEFT + (begin - first) * scale:.2f}" y="{rows[span["pid"]] + inset}" '
                   f'width="{max((end - begin) * scale, 0.3):.2f}" height="{ROW - 2 * inset}" '
                   f'fill="{colours[span["name"]]}"/>')
    for place, name in enumerate(kinds):
        x = LEFT + place % 4 * (WIDTH - LEFT - RIGHT) / 4
        y = TOP + len(ranks) * (ROW + GAP) + 16 + 18 * (place // 4)
        out.append(f'<rect x="{x:.1f}" y="{y - 10}" width="12" height="12" fill="{colours[name]}"/>')
        out.append(text(x + 18, y, name))
    out.append("</svg>")
    sys.stdout.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
