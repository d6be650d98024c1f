#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests the page of report files in Chromium.

page_test.py [--screenshots DIR]     makes reports of every kind, and tests their pages
page_test.py --report FILE...        tests real reports: no errors, and numbers that equal the embedded data

Exit status: 0 if all checks pass, 1 if one fails, 77 if Playwright or Chromium is missing.
"""

import argparse
import html
import json
import math
import pathlib
import re
import shutil
import sys
import tempfile
import time

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent.parent / "src/report/page")]
import make_page  # noqa: E402
import page_data  # noqa: E402

ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage"]
# Functions of the page: pairs of terms and values; the exact values of cells.
PAIRS = "items => items.map(item => [item.querySelector('dt').textContent, item.querySelector('dd').textContent])"
EXACT = "cells => cells.map(cell => (cell.querySelector('[title]') || cell).getAttribute('title') || cell.textContent)"


# Of screenshots: the name, the width and the colour scheme.
MODES = (("light", 1280, "light"), ("dark", 1280, "dark"), ("narrow", 320, "light"))


def settle(page, milliseconds):
    """Waits for timers of the page that end earlier, and then for a drawing. A busy machine delays both in order."""
    page.evaluate("time => new Promise(done => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), time))",
        milliseconds)


class Checks:
    def __init__(self):
        self.passed = 0
        self.failed = []
        self.subject = ""

    def that(self, condition, text):
        if condition:
            self.passed += 1
        else:
            self.failed.append(f"{self.subject}: {text}")
            print(f"FAILED {self.subject}: {text}", flush=True)

    def equal(self, found, expected, text):
        self.that(found == expected, f"{text}: expected {expected!r}, found {found!r}")


class Page:
    """A page in the browser that collects errors and requests."""

    def __init__(self, browser, path, checks, width=1280, scheme="light"):
        self.checks, self.path = checks, path
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60000)
        self.page.on("console", lambda message: checks.that(message.type not in ("error", "warning"),
            f"console {message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: checks.that(False, f"page error: {error}"))
        allowed = (path.as_uri(), "data:", "about:srcdoc")
        self.page.on("request", lambda request: checks.that(
            request.url.startswith(allowed), f"request of {request.url[:100]}"))

    def __enter__(self):
        self.page.goto(self.path.as_uri())
        return self.page

    def __exit__(self, *_):
        self.context.close()


def scroll_through(page):
    """Scrolls through the page, so that all charts are drawn."""
    position = 0
    while position < page.evaluate("document.documentElement.scrollHeight"):
        page.evaluate(f"scrollTo(0, {position})")
        settle(page, 40)
        position += 700
    page.evaluate("scrollTo(0, 0)")


def embedded_data(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="muster-data">(.*?)</script>', text, re.S)[1])


def rows_of(columns):
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def number(text):
    """Reads a number of the page."""
    text = text.replace(",", "").replace("−", "-").split(" (")[0].strip()
    if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", text):
        return float(text)
    return {"–": None, "NaN": "nan", "+inf": "inf", "-inf": "-inf"}.get(text, f"not a number: {text}")


def check_figures(checks, section, element):
    figures = dict(element.locator("dl.figures > div").evaluate_all(PAIRS))
    kind = section["section"]
    if kind == "model":
        checks.equal(number(figures["Tensors"]), section["tensors"], "figure Tensors")
        checks.equal(element.locator("dl.figures span[title]").first.get_attribute("title"),
            f"{section['bytes']:,} bytes", "figure Bytes")
    elif kind == "diff":
        checks.equal(number(figures["Different tensors"]), section["different_tensors"], "figure Different tensors")
        checks.equal(number(figures["Compared tensors"]), section["tensors"], "figure Compared tensors")
    elif kind == "workspace":
        checks.equal(number(figures["Jobs"]), len(section["jobs"]), "figure Jobs")
        checks.equal(number(figures["Missing ranks"]), sum(len(job["missing_ranks"]) for job in section["jobs"]),
            "figure Missing ranks")
    elif kind == "trace":
        checks.equal(number(figures["Ranks"]), len(section["ranks"]), "figure Ranks")
    elif kind == "versions":
        checks.equal(number(figures["Versions"]), len(section["versions"]), "figure Versions")


def check_charts(checks, page, element):
    for i in range(element.locator("figure.chart").count()):
        figure = element.locator("figure.chart").nth(i)
        title = figure.locator("h4").first.inner_text()
        figure.locator(".plot").scroll_into_view_if_needed()
        figure.locator(".canvas svg").first.wait_for(state="attached")
        checks.that(len(figure.locator(".canvas").get_attribute("aria-label") or "") > 10,
            f"chart {title}: no aria-label")
        checks.that(figure.locator(".canvas svg path, .canvas svg text").count() > 0,
            f"chart {title}: nothing is drawn")
        toggle = figure.locator("> button.disclosure")
        toggle.click()
        checks.equal(toggle.get_attribute("aria-expanded"), "true", f"chart {title}: its table is expanded")
        checks.that(figure.locator("table tbody tr").count() > 0, f"chart {title}: its table is empty")
        toggle.click()
        checks.equal(figure.locator("table:visible").count(), 0, f"chart {title}: its table is hidden again")
        # The keyboard reaches the items.
        plot = figure.locator(".plot")
        plot.focus()
        before = figure.locator(".readout").inner_text()
        page.keyboard.press("Home" if "Timeline of" not in title else "+")
        if "Timeline of" not in title:
            checks.that(figure.locator(".readout").inner_text() != before,
                f"chart {title}: the keyboard does not reach its items")
        else:
            page.keyboard.press("0")
        page.keyboard.press("Tab")


def check_sorting(checks, element):
    """Sorts each table by each column, in both directions."""
    for i in range(element.locator(".table:visible").count()):
        table = element.locator(".table:visible").nth(i)
        label = table.locator("caption").text_content()
        for j in range(table.locator("thead th").count()):
            header = table.locator("thead th").nth(j)
            header.locator("button").click()
            first = header.get_attribute("aria-sort")
            header.locator("button").click()
            checks.equal({first, header.get_attribute("aria-sort")}, {"ascending", "descending"},
                f"table {label}, column {j}: directions")
        if label in ("Tensors", "Compared tensors"):
            table.locator("thead button").first.click()


def check_tensors(checks, page, section, element):
    """Finds rows by the filter, opens their details, and compares all numbers."""
    label = "Tensors" if section["section"] == "model" else "Compared tensors"
    rows = rows_of(section["rows"])
    if not rows:
        checks.equal(element.locator(f"caption:text-is('{label}')").count(), 0, "no table without rows")
        return
    part = element.locator("section.part", has=page.locator("h3:text-is('Tensors')"))
    filter_box = part.locator("input[type=search]")
    for select in part.locator("select").all()[:1]:
        select.select_option("")
    group = part.locator("input[type=checkbox]")
    if group.is_checked():
        folds = part.locator("button.fold")
        if folds.count():
            state = folds.first.get_attribute("aria-expanded")
            folds.first.click()
            checks.that(part.locator("button.fold").first.get_attribute("aria-expanded") != state,
                "a group does not fold")
            part.locator("button.fold").first.click()
    group.uncheck()
    checks.equal(part.locator("tbody tr").count(), min(len(rows), 500), "number of lines without groups")
    for row in [rows[i] for i in sorted({0, 1, len(rows) // 3, len(rows) // 2, len(rows) - 1}) if i < len(rows)]:
        if not row["name"].strip():
            continue
        filter_box.fill(printable(row["name"]))
        settle(page, 200)
        # The whole name appears in the details of the row.
        opened = False
        for line in part.locator("button.open").all()[:12]:
            line.click()
            detail = part.locator("tr.opened").first
            name = detail.locator(".fullname").text_content()
            if printable(row["name"]) == name:
                opened = True
                check_details(checks, row, detail, section)
            part.locator("button.open[aria-expanded=true]").first.click()
            if opened:
                break
        checks.that(opened, f"the filter finds {row['name'][:60]!r}")
    filter_box.fill("no such tensor anywhere")
    settle(page, 200)
    checks.that("No tensor" in part.locator("tbody").inner_text(), "an empty result is reported")
    filter_box.fill("")
    settle(page, 200)
    # The largest tensor comes first.
    header = part.locator("thead th", has_text="Bytes")
    header.locator("button").click()
    checks.equal(header.get_attribute("aria-sort"), "descending", "numbers are sorted from the largest one")
    index = part.locator("thead th").all_inner_texts().index(header.inner_text())
    cell = part.locator("tbody tr").first.locator("th, td").nth(index)
    checks.equal(cell.locator("span").get_attribute("title"), f"{max(row['bytes'] for row in rows):,} bytes",
        "the largest tensor")
    group.check()


def check_details(checks, row, detail, section):
    shown = dict(detail.locator("dl.facts > div").evaluate_all(PAIRS))
    names = {"Bytes": "bytes"}
    if section["section"] == "diff":
        names |= {"Compared values": "compared", "Differing values": "differing", "NaN on one side only": "nans",
            "Largest absolute difference": "absolute", "Largest relative difference": "relative"}
    elif section["has_values"]:
        names |= {"Values": "values", "Minimum": "minimum", "Maximum": "maximum", "Mean": "mean",
            "Standard deviation": "deviation", "Zeros": "zeros", "NaN": "nans", "Infinities": "infinities"}
        if row["histogram"] and row["minimum"] not in (None, "-inf"):
            counts = [count for count in row["histogram"]]
            detail.locator("figure .canvas svg").wait_for(state="attached")
            detail.locator("figure button.disclosure").click()
            cells = detail.locator("figure tbody tr").evaluate_all("rows => rows.map(row => row.lastChild.textContent.replace(/,/g, ''))")
            checks.equal([int(cell) for cell in cells], counts, f"histogram of {row['name'][:60]}")
            detail.locator("figure select").select_option("log")
    for term, key in names.items():
        checks.equal(number(shown.get(term, "missing")), row[key], f"{term} of {row['name'][:60]}")


def printable(text):
    """The rule of printable() in src/inspect/output.hpp."""
    def escaped(character):
        code = ord(character)
        if character in "\\\n\t":
            return {"\\": "\\\\", "\n": "\\n", "\t": "\\t"}[character]
        hidden = code < 0x20 or 0x7F <= code < 0xA0 or code in (0xAD, 0x61C,
            0xFEFF) or 0x200B <= code <= 0x200F or 0x2028 <= code <= 0x202E \
            or 0x2060 <= code <= 0x206F or 0xFFF9 <= code <= 0xFFFB or code >= 0xE0000
        return (f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}") if hidden else character
    return "".join(map(escaped, text))


def check_tables(checks, page, section, element):
    """Compares the tables of the other kinds of sections with the data."""
    def titles(label, column):
        table = element.locator(".table:visible", has=page.locator(f"caption:text-is('{label}')")).last
        headers = [text.strip(" ▲▼") for text in table.locator("thead th").all_inner_texts()]
        return table.locator(f"tbody tr > :nth-child({headers.index(column) + 1})").evaluate_all(EXACT)
    seconds = lambda texts: sorted(float(text.split()[0]) for text in texts if text != "–")
    exact = lambda values: sorted(float(value) for value in values if value is not None)
    if section["section"] == "workspace" and section["jobs"]:
        states = [state for job in section["jobs"] for state in job["states"] + job["kept"]][:500]
        if len(states) < 500:
            checks.equal(sorted(titles("States", "Bytes")), sorted(f"{state['bytes']:,} bytes" for state in states),
                "bytes of the states")
        checks.equal(sorted(titles("Jobs", "Job")), sorted(job["job"] for job in section["jobs"]), "jobs")
    if section.get("metadata_left_out"):
        checks.that(f"{section['metadata_left_out']} metadata" in element.inner_text(), "items that are left out")
    if section["section"] == "trace" and section["ranks"]:
        for column, key in (("In calls", "seconds"), ("Waiting", "waiting"), ("Waits caused", "caused"),
            ("Longest wait", "longest_wait")):
            checks.equal(seconds(titles("Ranks", column)), exact(rank[key] for rank in section["ranks"]),
                f"column {column} of the ranks")
        if section["slowest"]:
            checks.equal(seconds(titles("Slowest operations", "Duration")),
                exact(item["seconds"] for item in section["slowest"]), "slowest operations")
            table = element.locator(".table", has=page.locator("caption:text-is('Slowest operations')"))
            awaited = [str(section["ranks"][item["awaited"]]["rank"]) for item in section["slowest"]]
            checks.equal(sorted(table.locator("tbody tr > td:last-child").all_inner_texts()), sorted(awaited),
                "ranks for which the slowest operations waited")
    if section["section"] == "versions" and section["versions"]:
        checks.equal(sorted(titles("Versions", "Bytes"))[:500], sorted(f"{version['bytes']:,} bytes"
            if version["bytes"] is not None else "–" for version in section["versions"])[:500], "bytes of the versions")


def check_contrast(checks, page):
    """Computes the contrast of all visible text outside of charts."""
    poor = page.evaluate("""() => {
      const parse = (text) => { const p = text.match(/[\\d.]+/g).map(Number); return [p[0], p[1], p[2], p[3] ?? 1]; };
      const luminance = (c) => c.slice(0,
          3).map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)).reduce((a, v,
          i) => a + v * [0.2126, 0.7152, 0.0722][i], 0);
      const poor = new Set();
      for (const element of document.querySelectorAll('body *')) {
        const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        if (!hasText || element.closest('.canvas, select, .hidden, title, option')) continue;
        const box = element.getBoundingClientRect();
        const isSvg = element.closest('svg');
        if (!box.width) continue;
        let ground = [255, 255, 255, 0];
        for (let e = element; e && ground[3] < 1; e = e.parentElement) {
          ground = parse(getComputedStyle(e).backgroundColor);
        }
        const style = getComputedStyle(element);
        const [a, b] = [luminance(parse(isSvg ? style.fill : style.color)), luminance(ground)].sort((x, y) => y - x);
        const text = `${element.tagName} ${element.textContent.slice(0, 30)}: ${style.color} on ${ground}`;
        if ((a + 0.05) / (b + 0.05) < 4.5) poor.add(text);
      }
      return [...poor].slice(0, 5);
    }""")
    checks.equal(poor, [], "text with a contrast below 4.5")


def check_headings(checks, page):
    levels = page.locator(":is(h1, h2, h3, h4):visible").evaluate_all("all => all.map(h => Number(h.tagName[1]))")
    checks.that(all(after <= before + 1 for before, after in zip(levels, levels[1:])) and levels[0] == 1,
        "headings skip a level")
    for landmark in ("header", "nav", "main", "footer"):
        checks.that(page.locator(f"body > {landmark}").count() == 1, f"landmark {landmark} is missing")
    checks.equal(page.evaluate("document.documentElement.lang"), "en", "language")


def check_keyboard(checks, page):
    """Tab must reach every control, with a visible focus."""
    controls = page.evaluate("""() => {
      const all = [...document.querySelectorAll('a[href], button, select, input, summary, [tabindex="0"]')].filter(
        (e) => e.getClientRects().length && !e.closest('details:not([open]) > :not(summary)'));
      window.reached = new Set();
      document.addEventListener('focusin', (event) => window.reached.add(event.target));
      window.controls = all;
      return all.length;
    }""")
    page.evaluate("document.activeElement.blur(); getSelection().removeAllRanges(); scrollTo(0, 0)")
    page.locator("a.skip").focus()
    for _ in range(controls + 20):
        page.keyboard.press("Tab")
    missed = page.evaluate("""window.controls.filter((e) => !window.reached.has(e) && !e.matches('.skip'))
        .map((e) => e.outerHTML.slice(0, 80))""")
    checks.equal(missed, [], f"controls that Tab does not reach ({controls} in all)")
    button = page.locator("thead button").first
    button.focus()
    before = page.locator("thead th").first.get_attribute("aria-sort")
    page.keyboard.press("Enter")
    checks.that(page.locator("thead th").first.get_attribute("aria-sort") != before, "Enter does not sort")
    checks.that(page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none",
        "the focus is not visible")


def general_checks(checks, browser, path):
    """The checks of every report, also of real ones."""
    data = embedded_data(path)
    checks.subject = path.name
    with Page(browser, path, checks) as page:
        checks.equal(page.locator("main > section.section").count(), len(data["sections"]), "number of sections")
        checks.equal(page.locator("nav #contents > li").count(), len(data["sections"]), "entries of the navigation")
        checks.that(data["muster_version"] in page.locator("#written").inner_text(), "the version is shown")
        scroll_through(page)
        check_headings(checks, page)
        check_contrast(checks, page)
        for i, section in enumerate(data["sections"]):
            element = page.locator(f"#section-{i + 1}")
            check_figures(checks, section, element)
            if section["section"] in ("model", "diff"):
                check_tensors(checks, page, section, element)
            check_tables(checks, page, section, element)
            check_charts(checks, page, element)
            check_sorting(checks, element)
        links = page.locator("nav a")
        for i in range(min(links.count(), 12)):
            links.nth(i).click()
        checks.equal(page.url.split("#")[0], path.as_uri(), "links stay in the page")
        checks.equal(page.evaluate("window.hostile"), None, "a script of the data ran")
        checks.equal(page.locator("main img, main script, main b b").count(), 0, "markup of the data is in the page")
        # Lines of metadata and the layout of the page itself may contain line breaks.
        text = page.locator("main").evaluate("e => e.textContent + document.title").replace("\n", "").replace("\\", "")
        checks.that(printable(text) == text, "text of the data is not escaped")
        checks.that(len(page.pdf()) > 10000, "the page prints")
    with Page(browser, path, checks, width=320) as page:
        scroll_through(page)
        checks.that(page.evaluate("document.documentElement.scrollWidth") <= 320,
            "the page scrolls sideways at 320 pixels")
        for line in page.locator("button.open:visible").all()[:1]:
            line.click()
            checks.that(page.evaluate("document.documentElement.scrollWidth") <= 320,
                "details scroll the page sideways at 320 pixels")
    with Page(browser, path, checks, scheme="dark") as page:
        scroll_through(page)
        check_contrast(checks, page)
        checks.that(page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)",
            "dark colours are missing")


def check_heat_map(checks, browser, path):
    """Changes the value, and picks a cell by click and by keyboard."""
    checks.subject = f"{path.name}, heat map"
    with Page(browser, path, checks) as page:
        figure = page.locator("figure.chart", has_text="Layers and kinds")
        figure.scroll_into_view_if_needed()
        figure.locator(".canvas svg").wait_for()
        checks.that("1 cell: NaN or infinities" in figure.locator(".message").inner_text(), "NaN are reported")
        for text in ("layer 20, self_attn.o_proj.weight", "layer 25, mlp.up_proj.weight",
            "layer 7, input_layernorm.weight"):
            checks.equal(figure.locator(".notable button", has_text=text).count(), 1, f"notable cell {text}")
        drawings = set()
        for value in figure.locator("select").first.locator("option").all_inner_texts():
            figure.locator("select").first.select_option(value)
            checks.that(figure.locator(".message").inner_text().startswith(value),
                f"the message names the value {value}")
            drawings.add(figure.locator(".canvas svg").inner_html())
        checks.that(len(drawings) >= 6, "each value has another drawing")
        figure.locator("select").first.select_option("Standard deviation")
        figure.locator("select").nth(1).select_option("map")
        figure.locator(".plot").focus()
        for key in ("Home", "ArrowDown", "ArrowRight", "ArrowRight"):
            page.keyboard.press(key)
        readout = figure.locator(".readout").inner_text()
        checks.that("mlp.down_proj.weight" in readout and "layer 2" in readout,
            f"the keyboard moves in two directions: {readout}")
        page.keyboard.press("Enter")
        chip = page.locator("button.chip")
        checks.that("layer 2" in chip.inner_text(), "a cell filters the table")
        checks.equal(page.locator("#section-1 table.tree button.open").count(), 1, "the filtered table has one tensor")
        chip.click()
        checks.equal(page.locator("button.chip").count(), 0, "the filter is removed")
        figure.locator(".plot").scroll_into_view_if_needed()
        box = figure.locator(".canvas").bounding_box()
        page.mouse.click(box["x"] + box["width"] * 0.6, box["y"] + 36)
        checks.equal(page.locator("button.chip").count(), 1, "a click on a cell filters the table")


def check_pooling(checks, browser, path):
    """Compares the values of the outermost group with those that are computed from the data."""
    checks.subject = f"{path.name}, sums"
    rows = [row for row in rows_of(embedded_data(path)["sections"][0]["rows"]) if row["name"].startswith("model.")]
    total = sum(row["values"] - row["nans"] - row["infinities"] for row in rows)
    finite = lambda row: row["values"] - row["nans"] - row["infinities"]
    mean = math.fsum(row["mean"] * finite(row) for row in rows) / total
    deviation = math.sqrt(math.fsum((row["deviation"] ** 2 + (row["mean"] - mean) ** 2) * finite(row)
        for row in rows) / total)
    with Page(browser, path, checks) as page:
        line = page.locator("#section-1 table.tree tr.group", has_text="model").first
        headers = page.locator("#section-1 table.tree thead th").all_inner_texts()
        titles = dict(zip([text.strip(" ▲▼") for text in headers], line.locator("> *").evaluate_all(EXACT)))
        checks.equal(titles["Bytes"], f"{sum(row['bytes'] for row in rows):,} bytes", "bytes")
        checks.equal(float(titles["Min"]), min(row["minimum"] for row in rows), "minimum")
        checks.equal(float(titles["Max"]), max(row["maximum"] for row in rows), "maximum")
        checks.that(math.isclose(float(titles["Mean"]), mean, rel_tol=1e-9), f"mean {titles['Mean']}, expected {mean}")
        checks.that(math.isclose(float(titles["Std. deviation"]), deviation, rel_tol=1e-9),
            f"deviation {titles['Std. deviation']}, expected {deviation}")
        checks.equal(number(titles["NaN"]), sum(row["nans"] for row in rows), "NaN")


def check_treemap(checks, browser, path):
    checks.subject = f"{path.name}, treemap"
    with Page(browser, path, checks) as page:
        figure = page.locator("figure.chart", has_text="Bytes by module").first
        figure.scroll_into_view_if_needed()
        figure.locator(".canvas svg").wait_for()
        figure.locator(".plot").focus()
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        crumbs = figure.locator(".crumbs button")
        checks.equal(crumbs.count(), 2, "Enter opens a module")
        page.keyboard.press("Backspace")
        checks.equal(crumbs.count(), 1, "Backspace goes up")
        box = figure.locator(".canvas").bounding_box()
        page.mouse.click(box["x"] + box["width"] * 0.1, box["y"] + box["height"] * 0.3)
        checks.equal(crumbs.count(), 2, "a click opens a module")
        crumbs.first.click()
        checks.equal(crumbs.count(), 1, "a crumb leads back")


def check_timeline(checks, browser, path):
    checks.subject = f"{path.name}, timeline"
    with Page(browser, path, checks) as page:
        figure = page.locator("figure.timeline")
        figure.scroll_into_view_if_needed()
        figure.locator(".canvas svg").wait_for()
        svg = lambda: [*figure.locator(".canvas svg text").all_text_contents(), figure.locator(".canvas svg path").count()]
        whole = svg()
        figure.get_by_role("button", name="Zoom in").click()
        checks.that(svg() != whole, "the button zooms")
        figure.get_by_role("button", name="All", exact=True).click()
        checks.that(svg() == whole, "All shows all")
        figure.locator(".plot").focus()
        page.keyboard.press("+")
        zoomed = svg()
        checks.that(zoomed != whole, "the keyboard zooms")
        page.keyboard.press("ArrowRight")
        checks.that(svg() != zoomed, "the keyboard moves")
        page.keyboard.press("0")
        box = figure.locator(".plot").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 120)
        page.mouse.wheel(0, -300)
        settle(page, 150)
        checks.that(svg() != whole, "the wheel zooms")
        page.keyboard.press("0")
        page.locator("caption:text-is('Slowest operations') ~ tbody button").first.click()
        checks.that(svg() != whole, "a slow operation zooms the timeline")
        figure.get_by_role("button", name="All", exact=True).click()
        checks.that("480 spans" in figure.locator(".message").inner_text(), "phases are not shown")


def check_parts(checks, browser, path):
    checks.subject = f"{path.name}, parts"
    with Page(browser, path, checks) as page:
        part = page.locator("section.part", has=page.locator("h3:text-is('Parts of the ranks')"))
        checks.equal(part.locator(".card").count(), 9, "number of groups")
        checks.equal(part.locator(".card").first.locator("rect:not(.empty)").count(), 4, "ranges of a cut tensor")
        checks.that("8 ranks with the same part" in part.locator(".card").last.inner_text(), "copies are counted")
        part.locator("select").select_option("not on all ranks")
        checks.equal(part.locator(".card").count(), 8, "groups that not all ranks have")
        part.locator("input").fill("*qkv*")
        settle(page, 200)
        checks.equal(part.locator(".card").count(), 2, "groups by name")
        part.get_by_role("button", name="Show as table").click()
        checks.that(part.locator("table tbody tr").count() > 30, "the table has all parts")


def check_large(checks, browser, path):
    checks.subject = path.name
    with Page(browser, path, checks) as page:
        begin = time.monotonic()
        page.reload()
        seconds = time.monotonic() - begin
        # Shared machines are slow at times; the target is 2 seconds.
        checks.that(seconds < 6, f"8,000 rows open in {seconds:.1f} s")
        print(f"8,000 rows open in {seconds:.2f} s")
        part = page.locator("section.part", has=page.locator("h3:text-is('Tensors')"))
        part.locator("input[type=search]").fill("up_proj")
        part.locator("text=rows of 8,000 match").wait_for()
        checks.equal(part.locator("tbody tr").count(), 500, "lines at first")
        part.get_by_role("button", name="Show more rows").click()
        checks.equal(part.locator("tbody tr").count(), 1000, "lines after more")
        checks.that("--select 'model.extra.*.scale'" in part.inner_text(), "the command for details")
        checks.that("'moe model'\\''s'" in part.locator("code").first.inner_text(), "the path is quoted")
        part.get_by_role("button", name="Copy the command").first.click()
        part.locator(".command [role=status]:not(:empty)").first.wait_for()
        part.locator("input[type=search]").fill("model.visual")
        settle(page, 300)
        part.locator("button.open").first.click()
        checks.that("represents 300 tensors" in part.locator("tr.opened").inner_text(),
            "a row of several tensors says so")


def check_frame(checks, browser, path, folder):
    """The page must work inside a sandboxed frame, as in notebooks."""
    checks.subject = f"{path.name} in a frame"
    outer = folder / "frame.html"
    inner = html.escape(path.read_text(encoding="utf-8"))
    outer.write_text(
        '<!DOCTYPE html><title>frame</title>'
        f'<iframe sandbox="allow-scripts" style="width: 1000px; height: 800px" srcdoc="{inner}"></iframe>', encoding="utf-8")
    with Page(browser, outer, checks) as page:
        frame = page.frame_locator("iframe")
        frame.locator("#section-1 h2").wait_for()
        frame.locator("nav a").nth(3).click()
        frame.locator("figure.chart .canvas svg").first.wait_for()
        frame.locator("thead button").first.click()
        checks.equal(frame.locator("main > section.section").count(), len(embedded_data(path)["sections"]),
            "sections in the frame")


def check_details_of_page(checks):
    """Checks the assembly itself."""
    checks.subject = "make_page.py"
    head, tail = make_page.page()
    size = len((head + tail).encode())
    checks.that(size < 1250000, f"the page has {size} bytes")
    source = make_page.cpp_source()
    pieces = re.findall(r'R"page\((.*?)\)page"', source, re.S)
    checks.equal("".join(pieces), head + tail, "the C++ constants")
    checks.that(all(len(piece.encode()) <= 16000 for piece in pieces), "a piece is too long")
    for name in ("LICENSE", "NOTICE", "LICENSE-d3"):
        checks.that(html.escape(make_page.read(f"vendor/{name}"))[:200] in head, f"{name} is in the page")
    print(f"head and tail: {size} bytes")


def take_screenshots(browser, checks, paths, folder, modes=MODES):
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        for mode, width, scheme in modes:
            with Page(browser, path, checks, width, scheme) as page:
                scroll_through(page)
                settle(page, 100)
                page.screenshot(path=folder / f"{path.stem}-{mode}.png", full_page=True)
                if mode == "dark":
                    page.pdf(path=folder / f"{path.stem}.pdf")


def run(browser, options, checks):
    if options.report:
        for path in options.report:
            general_checks(checks, browser, path.resolve())
        if options.screenshots:
            take_screenshots(browser, checks, [path.resolve() for path in options.report], options.screenshots, MODES[:1])
        return
    folder = pathlib.Path(tempfile.mkdtemp(prefix="muster-page-"))
    try:
        check_details_of_page(checks)
        head, tail = make_page.page()
        paths = {}
        for kind in ("everything", "shards", "bare", "hostile", "large"):
            paths[kind] = folder / f"{kind}.html"
            text = json.dumps(getattr(page_data, kind)(), ensure_ascii=kind != "hostile")
            paths[kind].write_text(head + make_page.embedded(text) + tail, encoding="utf-8")
        for path in paths.values():
            general_checks(checks, browser, path)
        check_heat_map(checks, browser, paths["everything"])
        check_pooling(checks, browser, paths["everything"])
        check_treemap(checks, browser, paths["everything"])
        check_timeline(checks, browser, paths["everything"])
        check_parts(checks, browser, paths["shards"])
        check_large(checks, browser, paths["large"])
        for kind in ("everything", "hostile"):
            check_frame(checks, browser, paths[kind], folder)
            checks.subject = f"{kind}, keyboard"
            with Page(browser, paths[kind], checks) as page:
                scroll_through(page)
                check_keyboard(checks, page)
        if options.screenshots:
            take_screenshots(browser, checks, paths.values(), options.screenshots)
    finally:
        shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=pathlib.Path, nargs="+", metavar="FILE")
    parser.add_argument("--screenshots", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    options = parser.parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("skipped: the Python package playwright is missing")
        return 77
    if not options.chromium:
        print("skipped: chromium is missing")
        return 77
    checks = Checks()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=ARGUMENTS)
        try:
            run(browser, options, checks)
        finally:
            browser.close()
    print(f"{checks.passed} checks passed, {len(checks.failed)} failed")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
