# SPDX-License-Identifier: Apache-2.0
"""Builds the documentation site, renders pages in headless Chromium, and checks their titles, pictures and search.

usage: site.py SOURCE FOLDER STUB. The site and the pictures stay in FOLDER. Status 77: tools are not installed.
"""

import html
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

SIZE = (1300, 1400)


def chromium(url, *arguments):
    """Opens a page in a browser with an empty profile and returns the output of the browser."""
    with tempfile.TemporaryDirectory() as profile:
        command = ["chromium", "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        command += ["--virtual-time-budget=10000", "--window-size={},{}".format(*SIZE), *arguments, url]
        if os.geteuid() == 0:
            command.insert(1, "--no-sandbox")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        return subprocess.run(command, **pipes, text=True, check=True, timeout=120).stdout


def rows(picture):
    """Returns the size of a PNG and the number of its different rows of pixels: 1 for an empty page."""
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n"), f"'{picture}' is not a PNG"
    position, pixels, size = 8, b"", None
    while position < len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        content = data[position + 8 : position + 8 + length]
        if kind == b"IHDR":
            size = struct.unpack_from(">II", content)
        elif kind == b"IDAT":
            pixels += content
        position += length + 12
    pixels = zlib.decompress(pixels)
    stride = len(pixels) // size[1]
    return size, len({pixels[i : i + stride] for i in range(0, len(pixels), stride)})


def main():
    source, folder, stub = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    site = folder / "html"
    command = [source / "tools/docs", "--no-install", "--out", site, "--stub", stub if os.path.exists(stub) else ""]
    status = subprocess.run(command).returncode
    if status:
        return status
    if not shutil.which("chromium"):
        print("skipped: the site was built, but not rendered; install the browser with: apt-get install chromium")
        return 77

    version = re.search(r"version: '([^']+)'", (source / "meson.build").read_text())[1]
    tutorial = sorted([*site.glob("tutorials/*.html"), *site.glob("*-tutorial.html")])[0]
    heading = re.match("# (.*)\n", (source / "docs" / tutorial.relative_to(site).with_suffix(".md")).read_text())[1].replace("`", "")
    pictures = folder / "pictures"
    pictures.mkdir(exist_ok=True)
    for page, title in {
        site / "index.html": f"Muster {version}",
        tutorial: f"{heading} - Muster {version}",
        site / "api/cpp/error.html": f"error.hpp - Muster {version}",
    }.items():
        found = html.unescape(re.search("<title>(.*?)</title>", chromium(page.as_uri(), "--dump-dom"))[1])
        assert found == title, f"'{page}': the title is '{found}' instead of '{title}'"
        picture = pictures / f"{page.stem}.png"
        picture.unlink(missing_ok=True)
        chromium(page.as_uri(), f"--screenshot={picture}")
        size, different = rows(picture)
        assert size == SIZE and different > 100, f"'{picture}' has {size} pixels in {different} different rows"
        print(f"{picture}: {title}, {different} different rows of pixels")

    # The search needs no server.
    results = chromium(f"{(site / 'search.html').as_uri()}?q=barrier", "--dump-dom").split('id="search-results"')[1]
    assert re.search('<a href="[^"]*api/cpp/[^"]*"', results), "the search for 'barrier' finds no page of a header"
    return 0


if __name__ == "__main__":
    sys.exit(main())
