#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Opens reports of eight kinds of input, and of a hostile model, in headless Chromium (page_test.py).

usage: browser.py MUSTER DEMO_MODEL TRACED_RANK [--keep DIR]

Four inputs are models: a BERT, its shards, a DCP checkpoint and a model of 100,000 tensors. The others are a diff with
one changed layer, a workspace, a state file, and a trace of a job with a slow rank. With --keep, DIR gets the reports and screenshots.
Status 77: Chromium or playwright is not installed.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import inputs

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS / "interop"))

import minilm  # noqa: E402


def make_reports(muster, demo_model, traced_rank, work, out):
    """Yields the reports."""

    def report(name, *arguments):
        path = out / f"{name}.html"
        muster("report", *arguments, "--out", path, "--force")
        return path

    if bert := minilm.fetch():
        muster("shard", bert, "--to", "4", "--plan", "bert", "--out", work / "shards")
        yield report("bert", bert)
        yield report("shards", work / "shards")
    else:
        print("not tested: a real BERT and its shards")
    yield report("dcp", TESTS / "data/foreign/dcp")
    inputs.write_experts(work / "experts", 100_000)
    yield report("experts", work / "experts")
    inputs.write_layered(work / "before", layers=12)
    inputs.write_layered(work / "after", layers=12, dead=(5,))
    yield report("diff", work / "before", work / "after", "--diff")
    subprocess.run([demo_model, "--megabytes", "2", work / "demo"], check=True, capture_output=True)
    muster("shard", work / "demo", "--to", "2", "--plan", "auto", "--workspace", "--out", work / "workspace")
    yield report("workspace", work / "workspace")
    yield report("state", next((work / "workspace").glob("state-*.h5")))
    yield report("layout", work / "demo", "--layout", "tp=2,pp=2", "--plan", "auto")
    inputs.write_trace(muster, work / "trace", traced_rank)
    yield report("trace", work / "trace")
    muster("publish", work / "demo", work / "versions", "--base", work / "demo", "--full")
    yield report("versions", work / "versions")
    inputs.write_layered(work / "spoiled", layers=12, dead=(3,), spoiled=(7,))
    yield report("spoiled", work / "spoiled")
    inputs.write_hostile(work / "hostile.safetensors")
    yield report("hostile", work / "hostile.safetensors")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("muster")
    parser.add_argument("demo_model")
    parser.add_argument("traced_rank")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="muster-browser-") as name:
        work = Path(name)
        out = options.keep or work
        out.mkdir(exist_ok=True)
        reports = list(make_reports(inputs.Muster(options.muster), options.demo_model, options.traced_rank, work, out))
        command = [sys.executable, Path(__file__).with_name("page_test.py"), "--report", *reports]
        if options.keep:
            command += ["--screenshots", out / "screenshots"]
        sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
