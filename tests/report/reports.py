#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads the data of reports back, and compares it with the output of the other commands.

usage: reports.py MUSTER DEMO_MODEL TRACED_RANK
"""

import hashlib
import json
import math
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import inputs

MIB = 1 << 20
# These keys of `muster stats --json` are columns of a report.
STATISTICS = ("bytes", "dtype", "shape", "values", "nans", "infinities", "zeros", "minimum", "maximum", "mean", "deviation")


def check(condition, message):
    if not condition:
        sys.exit(f"FAILED: {message}")


def data_of(page):
    found = re.search(r'<script type="application/json" id="muster-data">(.*?)</script>', page, re.S)
    check(found, "the page has no data")
    check(not set("<>&") & set(found[1]), "the data has characters of markup")
    return json.loads(found[1])


def rows_of(section):
    """Returns the rows as dicts, by name."""
    columns = section["rows"]
    count = len(columns["name"])
    check(all(len(column) == count for column in columns.values()), f"columns differ in length: {path_of(section)}")
    return {name: {key: columns[key][i] for key in columns} for i, name in enumerate(columns["name"])}


def path_of(section):
    return section.get("path", section["section"])


class Reports:
    def __init__(self, muster, place):
        self.muster = muster
        self.place = place

    def __call__(self, *arguments):
        """Writes a report. Returns its sections and its size, after comparing the page with the output of --json."""
        out = self.place / "report.html"
        self.muster("report", *arguments, "--out", out, "--force")
        page = out.read_text()
        data, printed = data_of(page), self.muster.json("report", *arguments)
        for one in (data, printed):
            check(one["format"] == "muster-report" and one["format_version"] == 1, "format")
            check(isinstance(one.pop("created"), float), "created")
            for section in one["sections"]:
                forget_ages(section)
        check(data == printed, f"the page and --json differ: {arguments}")
        return data["sections"], out.stat().st_size


def forget_ages(tree):
    """Ages change from one call to the next."""
    if isinstance(tree, dict):
        tree.pop("age_seconds", None)
        for value in tree.values():
            forget_ages(value)
    elif isinstance(tree, list):
        for value in tree:
            forget_ages(value)


def forget_nothing_left_out(tree):
    """Removes the counts of left out items, which must be 0."""
    for key in [key for key in tree if key.endswith("_left_out")]:
        check(tree.pop(key) == 0, key)
    for job in tree.get("jobs", []):
        forget_nothing_left_out(job)


def compare_statistics(muster, section, *arguments):
    rows = rows_of(section)
    stats = muster.json("stats", *arguments, "--bins", 24)["tensors"]
    check(len(stats) == len(rows) == section["tensors"], f"number of tensors: {arguments}")
    for tensor in stats:
        row = rows[tensor["name"]]
        for key in STATISTICS:
            check(row[key] == tensor[key], f"{tensor['name']}: {key} is {row[key]}, stats prints {tensor[key]}")
        check(row["histogram"] == tensor["histogram"]["counts"], f"{tensor['name']}: histogram")
        check(row["tensors"] == 1 and row["outliers"] == [], tensor["name"])


def test_models(muster, report, place):
    inputs.write_layered(place / "model", layers=6, dead=(2,), spoiled=(4,))
    (section,), _ = report(place / "model")
    compare_statistics(muster, section, place / "model")
    check(section["dtypes"] == {"F32": {"tensors": 37, "bytes": section["bytes"]}}, "dtypes")
    check(section["metadata"] == {"format": "pt"} and section["verify"]["good"], "metadata, verify")
    check([section["files"][file]["path"] for file in set(section["rows"]["file"])] == [str(place / "model/model.safetensors")], "files")
    (narrow,), _ = report(place / "model", "--select", "*.mlp.*", "--no-values")
    check(narrow["tensors"] == 12 and narrow["not_selected"] == 25 and "mean" not in narrow["rows"], "--select, --no-values")
    # A damaged file is a finding, if its headers can be read.
    muster("verify", place / "model", "--write-checksums")
    check(report(place / "model", "--checksums")[0][0]["verify"]["checked"] == 37, "--checksums")
    with open(place / "model/model.safetensors", "r+b") as file:
        file.seek(-8, 2)
        file.write(b"\x01" * 8)
    check(report(place / "model")[0][0]["verify"]["good"], "without --checksums")
    problems = report(place / "model", "--checksums")[0][0]["verify"]["problems"]
    check([problem["defect"] for problem in problems] == ["checksum"], f"--checksums: {problems}")


def compare_parts(muster, report, model, shards, layout, plan):
    """The parts that the shards have are those into which the model would be cut."""
    (joined,), _ = report(shards)
    compare_statistics(muster, joined, shards)
    (cut,), _ = report(model, "--layout", layout, "--plan", plan)
    joined, cut = joined["parts"], cut["parts"]
    check((joined["direction"], cut["direction"]) == ("joined", "cut"), "direction")
    check(joined["ranks"] == cut["ranks"] == 4 and joined["plan"] == cut["plan"], f"ranks, plan: {joined} {cut}")
    check(len(joined["groups"]) == len(cut["groups"]) > 5 and joined["tensors_left_out"] == 0, "groups")
    for group in cut["groups"]:
        check(group in joined["groups"], f"the cut has {group}, but the shards do not: {joined['groups']}")
        # Every unit is held, and nothing else.
        held = sorted((part["from"], part["to"]) for part in group["held"])
        check(held[0][0] == 0 and held[-1][1] == group["units"], group["name"])
        check(group["dim"] is None or group["units"] == group["shape"][group["dim"]], group["name"])


def test_ranks(muster, report, place, demo_model):
    subprocess.run([demo_model, "--megabytes", "2", place / "demo"], check=True, capture_output=True)
    muster("shard", place / "demo", "--to", "tp=2,pp=2", "--plan", "auto", "--out", place / "shards")
    muster("shard", place / "demo", "--to", "2", "--plan", "auto", "--workspace", "--out", place / "workspace")
    inputs.write_mixture(place / "mixture")
    muster("shard", place / "mixture", "--to", "tp=2,ep=2", "--plan", "moe", "--out", place / "mixture_shards")
    for model, shards, layout, plan in (
        ("demo", "shards", "tp=2,pp=2", "auto"),
        ("mixture", "mixture_shards", "tp=2,ep=2", "moe"),
    ):
        compare_parts(muster, report, place / model, place / shards, layout, plan)
    (cut,), _ = report(place / "demo", "--layout", "2", "--plan", "auto", "--select", "*norm*")
    check(all("norm" in group["name"] for group in cut["parts"]["groups"]), "--select and --layout")
    (views,), _ = report(place / "demo", "--layout", "2", "--plan", "vllm")
    check(views["parts"]["tensors_left_out"] == views["tensors"], "a plan with views")
    survey, states = report(place / "workspace")[0]
    forget_nothing_left_out(survey)
    listed = muster.json("ls", place / "workspace")
    forget_ages(listed)
    check(survey.pop("section") == "workspace" and survey.pop("model_error") is None, "workspace")
    check(survey == listed, "the workspace differs from muster ls")
    compare_statistics(muster, states, place / "workspace")
    (state,), _ = report(next((place / "workspace").glob("*state*.h5"), None) or next((place / "workspace").glob("*.h5")))
    check(state["kind"] == "state" and state["facts"]["world_size"] == 2, f"state: {state['facts']}")


def test_diff(muster, report, place):
    inputs.write_layered(place / "a", layers=5)
    inputs.write_layered(place / "b", layers=5, dead=(3,))
    (section,), _ = report(place / "a", place / "b", "--diff")
    expected = muster.json("diff", place / "a", place / "b", status=1)
    differences = {one["name"]: one for one in expected.pop("tensor_differences")}
    check({key: section[key] for key in expected} == expected, "the keys of diff --json")
    rows = rows_of(section)
    check(len(rows) == 31 and section["different_tensors"] == len(differences) == 2, "number of rows")
    for name, row in rows.items():
        one = differences.get(name, {"kind": "same", "differing": 0, "nans": 0, "absolute": 0, "relative": 0})
        for key in ("kind", "differing", "nans", "absolute", "relative"):
            check(row[key] == one[key], f"{name}: {key} is {row[key]}, diff prints {one[key]}")
        check(row["different"] == (name in differences) and row["a"] == row["b"], name)
    check(all("layers.3.mlp" in name for name in differences), "the dead layer")


def test_trace(muster, report, place, traced_rank):
    inputs.write_trace(muster, place / "trace", traced_rank)
    (section,), _ = report(place / "trace")
    expected = muster.json("trace", place / "trace", "--imbalance")
    forget_nothing_left_out(section["imbalance"])
    check({key: section[key] for key in expected} == expected, "the keys of trace --json")
    check([rank["rank"] for rank in section["ranks"]] == [0, 1, 2], "ranks")
    spans = section["spans"]
    check(len({len(column) for column in spans.values()}) == 1 and section["spans_left_out"] == 0, "columns of spans")
    check(all(0 <= begin <= end <= section["seconds"] + 1e-9 for begin, end in zip(spans["begin"], spans["end"])), "times")
    reduced = [i for i, name in enumerate(spans["name"]) if section["names"][name] == "all_reduce"]
    waits = [i for i in reduced if spans["awaited"][i] == 2 and spans["process"][i] != 2 and spans["wait"][i] > 0.01]
    check(len(waits) >= 36, f"{len(waits)} waits for rank 2 of {len(reduced)} calls")
    for rank in section["ranks"]:
        total = sum(wait for process, wait in zip(spans["process"], spans["wait"]) if wait is not None and process == rank["rank"])
        check(abs(total - rank["waiting"]) < 1e-6, f"rank {rank['rank']}: waits are {total}, trace prints {rank['waiting']}")
    seconds = [one["seconds"] for one in section["slowest"]]
    check(seconds == sorted(seconds, reverse=True) and len(seconds) >= 20, "slowest operations")


def test_joined_rows(muster, report, place):
    """Rows of booleans, of extreme numbers and of single values."""
    tensors = {f"a.{i}.{j}.flag": ("BOOL", [2], bytes([i % 2, 0])) for i in range(100) for j in range(90)}
    tensors |= {f"b.0.{j}.scale": ("F64", [1], struct.pack("<d", 1e200 * j)) for j in range(91)}
    tensors |= {f"b.1.{j}.id": ("U64", [1], struct.pack("<Q", 2**64 - 1 - j)) for j in range(91)}
    tensors |= {f"b.2.{j}.nan": ("F32", [1], struct.pack("<f", math.nan)) for j in range(91)}
    inputs.write_safetensors(place / "joined.safetensors", tensors)
    (section,), _ = report(place / "joined.safetensors")
    rows = rows_of(section)
    flag, scale, number, nan = (rows[name] for name in ("a.1.*.flag", "b.0.*.scale", "b.1.*.id", "b.2.*.nan"))
    check((flag["minimum"], flag["maximum"], flag["mean"], flag["zeros"]) == (False, True, 0.5, 90), f"flags: {flag}")
    check(scale["maximum"] == 9e201 and len(scale["histogram"]) == 24 and sum(scale["histogram"]) == 91, f"{scale}")
    check(abs(scale["mean"] / 4.5e201 - 1) < 1e-12 and abs(scale["deviation"] / 2.6267851e201 - 1) < 1e-6, f"{scale}")
    check((number["minimum"], number["maximum"]) == (2**64 - 91, 2**64 - 1), f"integers: {number}")
    check(nan["minimum"] is None and nan["histogram"] == [] and nan["nans"] == 91, f"NaN: {nan}")
    check([one["reason"] for one in nan["outliers"]] == ["nan"] * 3, f"outliers: {nan['outliers']}")


def test_limits(muster, report, place):
    """Lists that other people control have limits, and the rest is counted."""
    values = struct.pack("<2f", math.nan, math.inf)
    name = "<" * 20 + ".{}.{}." + "&" * 20
    tensors = {name.format(i, j): ("F32", [2], values) for i in range(4000) for j in range(3)}
    inputs.write_safetensors(place / "many.safetensors", tensors, {f"key{i}": "x" * 3990 for i in range(5000)})
    (section,), size = report(place / "many.safetensors")
    check(size <= 5 * MIB, f"{size} bytes")
    check(len(section["metadata"]) + section["metadata_left_out"] == 5000 and section["outliers_left_out"] > 0, "counts")
    deep = place / "deep"
    deep.mkdir()
    inputs.write_safetensors(deep / "model.safetensors", {"w": ("F32", [1], b"1234")}, {"format": "pt"})
    (deep / "config.json").write_text('{"a":' * 250 + "1" + "}" * 250)
    (section,), _ = report(deep)
    check(section["config"] is None and section["config_bytes"] > 0, "a deep config")


def test_sizes(muster, report, place):
    inputs.write_layered(place / "thousand", layers=167, width=4)
    (section,), size = report(place / "thousand")
    check(section["tensors"] == len(section["rows"]["name"]) == 1003 and size <= 2 * MIB, f"1,003 tensors: {size} bytes")
    inputs.write_experts(place / "experts", 100_000)
    (section,), size = report(place / "experts")
    rows = rows_of(section)
    check(section["tensors"] == sum(row["tensors"] for row in rows.values()) == 100_000 and size <= 5 * MIB, f"{size} bytes")
    row = rows["model.layers.3.mlp.experts.*.up_proj.weight"]
    check({"name": "model.layers.3.mlp.experts.17.up_proj.weight", "reason": "zero"} in row["outliers"], row["outliers"])
    stats = muster.json("stats", place / "experts", "--select", "model.layers.3.mlp.experts.*.up_proj.weight")["tensors"]
    check(row["tensors"] == len(stats) and row["minimum"] == min(one["minimum"] for one in stats), "minimum of a row")
    check(row["zeros"] == sum(one["zeros"] for one in stats) and sum(row["histogram"]) == row["values"], "zeros of a row")
    mean = sum(one["mean"] * one["values"] for one in stats) / row["values"]
    square = sum((one["deviation"] ** 2 + (one["mean"] - mean) ** 2) * one["values"] for one in stats) / row["values"]
    check(abs(row["mean"] - mean) < 1e-9 and abs(row["deviation"] - square**0.5) < 1e-9, "mean and deviation of a row")


def test_hostile(muster, report, place):
    inputs.write_hostile(place / "hostile.safetensors")
    (section,), _ = report(place / "hostile.safetensors")
    check(set(inputs.HOSTILE_NAMES) <= set(section["rows"]["name"]), "names")
    compare_statistics(muster, section, place / "hostile.safetensors")


def test_refusals(muster, place):
    def refused(*arguments):
        return muster("report", *arguments, status=2)

    kept = place / "kept.html"
    kept.write_text("kept")
    check("--force" in refused(place / "model", "--out", kept) and kept.read_text() == "kept", "an existing file")
    check("not an HTML page" in refused(place / "model", "--out", kept, "--force") and kept.read_text() == "kept", "no page")
    check("nowhere" in refused(place / "model", "--out", place / "nowhere/new.html"), "no directory")
    link = place / "link.html"
    link.symlink_to(kept)
    check("not a regular file" in refused(place / "model", "--out", link, "--force") and kept.read_text() == "kept", "a link")
    check("--out is required" in refused(place / "model"), "no --out")
    check("two paths" in refused(place / "model", "--diff", "--out", place / "new.html"), "one path")
    check("leave" in refused(place / "model", place / "model", "--diff", "--no-values", "--out", place / "new.html").lower(), "diff")
    for wrong in ([place / "missing"], ["/dev/null"], [kept], [place / "workspace", "--rank", 99], [place / "workspace", "--plan", "typo"]):
        mine = refused(*wrong, "--out", place / "new.html").replace("muster report", "muster show")
        check(mine == muster("show", *wrong, status=2), f"{wrong}: the messages of report and show differ: {mine}")
    check(not (place / "new.html").exists() and not list(place.glob("*.partial*")), "leftovers")


def test_library():
    """The plotting library is the file that the table beside it names."""
    vendor = Path(__file__).resolve().parents[2] / "src/report/page/vendor"
    digest = hashlib.sha256((vendor / "echarts.min.js").read_bytes()).hexdigest()
    check(f"`{digest}`" in (vendor / "README.md").read_text(), f"vendor/README.md does not have the digest {digest}")


def main(program, demo_model, traced_rank):
    muster = inputs.Muster(program)
    test_library()
    with tempfile.TemporaryDirectory(prefix="muster-report-") as name:
        place = Path(name)
        report = Reports(muster, place)
        test_models(muster, report, place)
        test_ranks(muster, report, place, demo_model)
        test_diff(muster, report, place)
        test_trace(muster, report, place, traced_rank)
        test_joined_rows(muster, report, place)
        test_limits(muster, report, place)
        test_sizes(muster, report, place)
        test_hostile(muster, report, place)
        test_refusals(muster, place)


if __name__ == "__main__":
    main(*sys.argv[1:])
