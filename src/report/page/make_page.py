#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the page of report files from its parts.

make_page.py --cpp OUT.cpp                writes the page as two C++ constants, before and after the data
make_page.py --data DATA.json --out OUT   writes a whole page with this data, for tests
"""

import argparse
import base64
import hashlib
import html
import json
import pathlib
import re

FOLDER = pathlib.Path(__file__).resolve().parent
# The concepts, in the order in which they use each other.
SCRIPTS = (
    "dom format data table chart tensor_table treemap heatmap tensor parts findings model diff timeline trace workspace "
    "versions sections"
).split()
PIECE = 16000
DELIMITER = "page"


def read(name):
    return (FOLDER / name).read_text(encoding="utf-8")


def squeezed(text):
    """Removes indentation, and comments that are whole lines. No literal of the page spans lines."""
    text = re.sub(r"^\s*(/\*.*?\*/|//[^\n]*)\s*$", "", text, flags=re.M | re.S)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def policy_hash(script):
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def page():
    """Returns the text before the data and the text after it."""
    echarts = read("vendor/echarts.min.js")
    parts = [squeezed(read(f"{name}.js")) for name in SCRIPTS]
    script = "(() => {\n'use strict';\n" + "\n".join(parts) + "\n})();\n"
    for text in (echarts, script):
        # The browser ends a script at "</script", and treats "<!--" as a comment.
        if "</script" in text.lower() or "<!--" in text:
            raise SystemExit("make_page.py: a script contains </script or <!--. Write the text in another way.")
    policy = (
        f"default-src 'none'; script-src {policy_hash(echarts)} {policy_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    licences = "".join(
        f"<h2>{name}</h2>\n<pre>{html.escape(read('vendor/' + name))}</pre>\n"
        for name in ("NOTICE", "LICENSE", "LICENSE-d3")
    )
    values = {
        "policy": policy,
        "style": squeezed(read("page.css")),
        "licences": licences,
        "echarts": echarts,
        "page": script,
    }
    head, tail = read("page.html").split("{{data}}")
    return fill(head, values), fill(tail, values)


def fill(template, values):
    """Replaces each {{name}}. The values themselves may contain braces."""
    out = []
    for i, part in enumerate(template.split("{{")):
        if i:
            name, part = part.split("}}", 1)
            out.append(values[name])
        out.append(part)
    return "".join(out)


def pieces(data, size):
    """Cuts text into pieces of at most `size` bytes, between characters."""
    rest = data.encode()
    while rest:
        end = min(size, len(rest))
        while end < len(rest) and rest[end] & 0xC0 == 0x80:
            end -= 1
        yield rest[:end].decode()
        rest = rest[end:]


def cpp_constant(name, text):
    if f'){DELIMITER}"' in text:
        raise SystemExit(f'make_page.py: the page contains ){DELIMITER}". Change the delimiter of the raw strings.')
    literals = "\n".join(f'    R"{DELIMITER}({piece}){DELIMITER}"' for piece in pieces(text, PIECE))
    return f"constinit const std::string_view {name}(\n{literals},\n    {len(text.encode())});\n"


def cpp_source():
    head, tail = page()
    return (
        "// Written by make_page.py.\n"
        '#include "src/report/page.hpp"\n\n'
        "namespace muster::report {\n\n"
        f"{cpp_constant('page_head', head)}\n{cpp_constant('page_tail', tail)}\n"
        "}  // namespace muster::report\n"
    )


def embedded(text):
    """Returns JSON text that cannot end the element with the data."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpp", type=pathlib.Path)
    parser.add_argument("--data", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    if bool(options.cpp) == bool(options.data) or bool(options.data) != bool(options.out):
        parser.error("pass either --cpp OUT, or --data DATA and --out OUT")
    if options.cpp:
        options.cpp.write_text(cpp_source(), encoding="utf-8", newline="\n")
        return
    text = options.data.read_text(encoding="utf-8")
    json.loads(text)
    head, tail = page()
    options.out.write_text(head + embedded(text) + tail, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
