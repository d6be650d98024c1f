# SPDX-License-Identifier: Apache-2.0
"""Data of report files for the tests of the page, in the format of docs/reference/report-file.md."""

import math
import random

CREATED = 1790000000


def report(*sections):
    return {"format": "muster-report", "format_version": 1, "muster_version": "9.9.9", "created": CREATED,
        "sections": list(sections)}


def columns(rows):
    return {key: [row[key] for row in rows] for key in rows[0]}


def tensor(name, shape, rng, dtype="BF16", deviation=0.02, file=0, tensors=1):
    """Returns a row of a model with plausible values."""
    elements = math.prod(shape)
    bins = 32
    weights = [math.exp(-(((i + 0.5) / bins * 8 - 4) ** 2) / 2) for i in range(bins)]
    counts = [int(elements * weight / sum(weights)) for weight in weights]
    counts[bins // 2] += elements - sum(counts)
    deviation *= rng.uniform(0.9, 1.1)
    mean = rng.gauss(0, deviation / 50)
    return {
        "name": name, "tensors": tensors, "bytes": elements * (4 if dtype == "F32"
            else 2), "dtype": dtype, "shape": list(shape),
        "file": file, "values": elements, "nans": 0, "infinities": 0, "zeros": int(elements * 1e-5),
        "minimum": mean - 4 * deviation,
        "maximum": mean + 4 * deviation, "mean": mean, "deviation": deviation, "histogram": counts,
    }


def constant(row, value):
    """Makes all values of a row equal."""
    elements = row["values"]
    row.update(minimum=value, maximum=value, mean=value, deviation=0.0, histogram=[elements], zeros=elements
        if value == 0 else 0)


def model(rows, path="llama-8b", **more):
    files = sorted({row["file"] for row in rows if row["file"] is not None})
    of_file = lambda file: [row for row in rows if row["file"] == file]
    dtypes = sorted({row["dtype"] for row in rows if row["dtype"]})
    total = lambda some, key: sum(row[key] for row in some)
    sums = lambda some: {"tensors": total(some, "tensors"), "bytes": total(some, "bytes")}
    section = {
        "section": "model", "path": path, "kind": "model", "facts": {}, "tensors": total(rows,
            "tensors"), "bytes": total(rows, "bytes"),
        "not_readable": 0, "not_selected": 0, "metadata": {"format": "pt"}, "metadata_left_out": 0,
        "files": [{"path": f"model-{file + 1:05}-of-{len(files):05}.safetensors", **sums(of_file(file))}
            for file in files],
        "dtypes": {dtype: sums([row for row in rows if row["dtype"] == dtype]) for dtype in dtypes},
        "rows": columns(rows), "has_values": True, "verify": verify(), "verify_error": None, "issues": [],
        "issues_left_out": 0,
        "config": {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
            "rope_scaling": {"type": "linear", "factor": 8.0}, "tie_word_embeddings": False},
        "config_bytes": 131, "parts": None,
    }
    section.update(more)
    return section


def verify(problems=(), notes=(), left_out=()):
    return {
        "good": not problems, "path": "llama-8b", "kind": "checkpoint", "files": 4, "tensors": 291,
        "bytes": 16060522496, "has_checksums": True,
        "checked": 0, "problems": list(problems), "problems_left_out": 0, "left_out": list(left_out),
        "not_selected": 0, "notes": list(notes),
    }


def llama_rows(layers=32, hidden=4096, inner=14336, seed=1):
    rng = random.Random(seed)
    rows = [tensor("model.embed_tokens.weight", (128256, hidden), rng, deviation=0.01)]
    for layer in range(layers):
        base = f"model.layers.{layer}"
        file = layer * 4 // layers
        scale = 0.02 / math.sqrt(1 + layer / 8)
        for part, shape in {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden // 4,
                hidden), "self_attn.v_proj": (hidden // 4, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner,
                hidden), "mlp.down_proj": (hidden, inner),
        }.items():
            rows.append(tensor(f"{base}.{part}.weight", shape, rng, deviation=scale * rng.uniform(0.95, 1.05),
                file=file))
        for part in ("input_layernorm", "post_attention_layernorm"):
            rows.append(tensor(f"{base}.{part}.weight", (hidden,), rng, "F32", 0.1 + layer / 100, file))
    rows.append(tensor("model.norm.weight", (hidden,), rng, "F32", 0.4, 3))
    rows.append(tensor("lm_head.weight", (128256, hidden), rng, file=3))
    return rows


def llama():
    """A model with a dead layer, NaN and an outlier, and with problems."""
    rows = llama_rows()
    by_name = {row["name"]: row for row in rows}
    by_name["model.layers.13.mlp.down_proj.weight"].update(nans=3, infinities=1)
    constant(by_name["model.layers.20.self_attn.o_proj.weight"], 0.0)
    constant(by_name["model.layers.7.input_layernorm.weight"], 1.0)
    outlier = by_name["model.layers.25.mlp.up_proj.weight"]
    outlier.update(deviation=0.9, minimum=-6.5, maximum=7.25)
    problems = [
        {"defect": "checksum", "file": "model-00002-of-00004.safetensors",
            "tensor": "model.layers.13.mlp.down_proj.weight", "message": "the bytes differ from the checksum"},
        {"defect": "missing", "message": "model-00005-of-00005.safetensors does not exist"},
    ]
    issues = [{"kind": "unaligned", "tensor": "model.norm.weight", "message": "the bytes begin at 13"}]
    return report(model(rows, verify=verify(problems, ["2 tensors are tied"],
        [{"name": "notes.txt", "reason": "not a file of a model"}]), issues=issues, not_selected=5, not_readable=1))


def shards(tensor_parallel=4, stages=2):
    """Shards with tensor-parallel cuts, replicated norms and two pipeline stages."""
    rng = random.Random(3)
    rows = [tensor(f"rank{rank}.layers.{layer}.w", (1024, 512), rng, file=rank)
        for rank in range(tensor_parallel * stages) for layer in range(2)]
    groups = []
    for stage in range(stages):
        ranks = [stage * tensor_parallel + i for i in range(tensor_parallel)]
        cut = lambda units: [{"rank": rank, "from": units * i // tensor_parallel,
            "to": units * (i + 1) // tensor_parallel} for i, rank in enumerate(ranks)]
        whole = lambda units: [{"rank": rank, "from": 0, "to": units} for rank in ranks]
        interleaved = [part for i, rank in enumerate(ranks) for part in (
            {"rank": rank, "from": 256 * i, "to": 256 * (i + 1)}, {"rank": rank, "from": 1024 + 256 * i,
                "to": 1280 + 256 * i})]
        groups += [
            {"name": f"model.layers.{stage}*.self_attn.qkv.weight", "tensors": 16, "shape": [6144, 4096], "dim": 0,
                "units": 6144, "held": cut(6144), "combine": "copy"},
            {"name": f"model.layers.{stage}*.mlp.gate_up.weight", "tensors": 16, "shape": [2048, 4096], "dim": 0,
                "units": 2048, "held": interleaved, "combine": "copy"},
            {"name": f"model.layers.{stage}*.mlp.down.weight", "tensors": 16, "shape": [4096, 1024], "dim": 1,
                "units": 1024, "held": cut(1024), "combine": "copy"},
            {"name": f"model.layers.{stage}*.norm.weight", "tensors": 32, "shape": [4096], "dim": None, "units": 4096,
                "held": whole(4096), "combine": "copy"},
        ]
    groups.append({"name": "amax", "tensors": 4, "shape": [1], "dim": None, "units": 1,
        "held": [{"rank": rank, "from": 0, "to": 1} for rank in range(8)], "combine": "max"})
    parts = {"direction": "joined", "layout": "tp=4,pp=2", "plan": "llama", "ranks": tensor_parallel * stages,
        "groups": groups, "groups_left_out": 0, "tensors_left_out": 2}
    return report(model(rows, "shards", kind="shards", parts=parts, facts={"layout": "tp=4,pp=2", "ranks": 8}))


def large(rows=8000):
    """The largest list that a report has: experts of many layers, and rows of several tensors."""
    rng = random.Random(5)
    made = [tensor(f"model.layers.{i // 160}.mlp.experts.{i // 2 % 80}.{('up', 'down')[i % 2]}_proj.weight",
        (2048, 1024), rng, file=i // 2000) for i in range(rows - 2)]
    made.append({**tensor("model.extra.*.scale", (1,), rng, "F32"), "tensors": 4000})
    made.append({**tensor("model.visual.**", (1,), rng), "tensors": 300, "dtype": None, "shape": None, "file": None})
    return report(model(made, "moe model's"))


HOSTILE = "</script><script>window.hostile=1</script><img src=x onerror=window.hostile=1>"


def hostile():
    """Names and values that must not change the page."""
    rng = random.Random(7)
    names = [
        HOSTILE, "a\u202egpj.exe", "tab\tand\nline", "nul\x00\x1b[31m", "zero\u200bwidth\ufeff", "back\\slash",
        "x" * 5000, "..a...b..", "", "/", ".", "ünïcödé.重み.0",
        "{a|b}.{{c}}", "<!--", "&lt;&amp;", "__proto__", "constructor.prototype.0.w", "\u2066isolate\u2069",
        "\U000e0041tag", "layers.0.<b>bold</b>", "layers.1.<b>bold</b>",
    ]
    rows = [tensor(name, (8, 8), rng, "F32") for name in names]
    rows[0].update(minimum="-inf", maximum="inf", mean="nan", deviation="nan", histogram=[])
    rows[1].update(values=0, zeros=0, minimum=None, maximum=None, mean=None, deviation=None, histogram=[], bytes=0,
        shape=[0, 8])
    rows[2].update(nans=64, minimum=None, maximum=None, mean=None, deviation=None, histogram=[], zeros=0)
    rows[3].update(maximum=1.7976931348623157e308, deviation=5e-324)
    text = HOSTILE + "\u202e"
    problems = [{"defect": "file", "file": text, "tensor": text, "message": text}]
    section = model(rows, text, verify=verify(problems, [text], [{"name": text, "reason": text}]),
        metadata={text: text}, metadata_left_out=7, facts={text: text},
                    config={text: [text, None, {"<img src=x onerror=alert(1)>": math.pi}], "__proto__": {"x": 1},
                        "deep": {"a": {"b": {"c": [1, 2, 3]}}}},
                    config_bytes=10, issues=[{"kind": "name", "tensor": text, "message": text},
                        {"kind": "missing", "tensor": None, "message": text}])
    for file in section["files"]:
        file["path"] = text
    section["parts"] = {"direction": "cut", "layout": text, "plan": text, "ranks": 2, "groups": [
        {"name": text, "tensors": 1, "shape": [8, 8], "dim": 0, "units": 8,
            "held": [{"rank": 0, "from": 0, "to": 4}, {"rank": 1, "from": 4, "to": 8}], "combine": "copy"}]}
    others = [difference(text), workspace(text), trace(text), versions(text)]
    return report(section, *others)


def difference(name="fine-tuned"):
    rng = random.Random(11)
    rows = []
    for row in llama_rows(12):
        a = f"{row['dtype']} {row['shape']}"
        changed = "mlp" in row["name"] or rng.random() < 0.2
        rows.append({
            "name": row["name"], "tensors": 1, "bytes": row["bytes"], "dtype": row["dtype"], "shape": row["shape"],
            "kind": "values" if changed else "same", "a": a, "b": a,
            "different": int(changed), "compared": row["values"],
            "differing": int(row["values"] * rng.random()) if changed else 0, "nans": 0,
            "absolute": 10 ** rng.uniform(-6, -2) if changed else 0, "relative": 10 ** rng.uniform(-4,
                1) if changed else 0,
        })
    rows[1].update(kind="type", b="F32 [4096, 4096]", different=1, compared=None, differing=None, nans=None,
        absolute=None, relative=None)
    rows[2].update(kind="only in A", b=None, different=1, compared=None, differing=None, nans=None, absolute=None,
        relative=None, name="adapter.only.a")
    rows[3].update(kind="only in B", a=None, different=1, compared=None, differing=None, nans=None, absolute=None,
        relative=None, name=f"adapter.{name}")
    rows[10].update(kind="values", different=1, nans=5, differing=5, absolute="inf", relative="nan")
    return {
        "section": "diff", "same": False, "a": "base", "b": name, "tensors": len(rows) - 2, "bytes": sum(row["bytes"]
            for row in rows), "files": 3, "config": True,
        "metadata_differs": True, "rows": columns(rows), "different_tensors": sum(row["different"] for row in rows),
        "file_differences": [{"name": "tokenizer.json", "kind": "only in A", "detail": name},
            {"name": name, "kind": "content", "detail": None}],
        "config_differences": [{"place": "rope_scaling.factor", "a": 8.0, "b": None},
            {"place": name, "a": name, "b": [1, 2]}], "config_differences_in_all": 5,
        "not_compared": 2, "not_compared_message": f"2 datasets: {name}", "left_out_a": [{"name": name,
            "reason": "not a tensor"}],
        "left_out_b": [{"name": "optimizer", "reason": "cannot be read", "lost": True}],
    }


def workspace(name="state"):
    rng = random.Random(13)
    jobs = []
    for number, (size, lost) in enumerate(((4, [2]), (2, []))):
        job = f"{number}f2a{rng.getrandbits(112):028x}"
        states = [
            {"file": f"{name}-{job[:4]}-{rank}-{step}.h5", "rank": rank, "world_size": size, "step": step,
                "complete": rank not in lost, "tensors": 291,
             "problem": f"truncated state file {name}" if rank in lost else None, "tensor_bytes": 10**9,
             "compressed": False, "bytes": 10**9 + step, "age_seconds": 9000.0 - step,
             "changed": CREATED - 9000 - number * 30000 + step * 10 + rank * 20}
            for step in (100, 200, 300) for rank in range(size)
        ]
        for state in states:
            if not state["complete"]:
                del state["tensors"], state["tensor_bytes"], state["compressed"]
        jobs.append({"job": job, "world_size": size, "bytes": 12 * 10**9, "age_seconds": 5400.0, "common_step": None
            if lost else 300, "missing_ranks": lost, "states": states,
                     "kept": [{**states[0], "file": f"{name}.kept",
                         "changed": states[0]["changed"] - 3000}] if lost else [], "in_use": []})
    other = {"file": name, "kind": "being written", "bytes": 12345, "files": 1, "age_seconds": 60.0, "writer": "gone",
        "changed": CREATED - 60}
    return {"section": "workspace", "path": f"/data/{name}", "kind": "workspace", "is_workspace": "mark", "files": 24,
        "bytes": 30 * 10**9, "jobs": jobs,
            "temporary": [other], "unknown_files": [{**other, "kind": "file",
                "writer": "-"}], "model_error": f"2 jobs exist {name}"}


def trace(name="forward", processes=8, steps=20):
    rng = random.Random(17)
    names = ["step", name, "all_reduce", "gather_tensors", "copy"]
    spans = []
    now = 0.0
    operations = []
    for step in range(steps):
        work = [rng.uniform(0.010, 0.014) + (0.006 if process == 3 else 0) for process in range(processes)]
        reached = now + max(work)
        last = work.index(max(work))
        end = reached + 0.004
        common = {"operation": None, "bytes": 0, "route": None, "state": "done", "wait": None, "awaited": None,
            "thread": 1}
        for process in range(processes):
            begin = now + work[process]
            add = lambda **span: spans.append({"process": process, **common, **span})
            add(depth=0, name=0, kind="program", begin=now, end=end + 0.001)
            add(depth=1, name=1, kind="program", begin=now + 0.0005, end=begin - 0.0005)
            add(depth=1, name=2, kind="collective", begin=begin, end=end, wait=reached - begin, awaited=last,
                operation=step + 1, bytes=1 << 20, route="shm",
                state="failed" if step == 9 and process == 2 else "open" if step == steps - 1 and process == 5 else "done")
            add(depth=2, name=4, kind="phase", begin=reached, end=end - 0.001)
        operations.append({"operation": f"all_reduce {step + 1}", "kind": "collective", "route": "shm",
            "begin": now + min(work), "seconds": end - now - min(work),
                           "bytes": processes << 20, "wait": max(work) - min(work), "awaited": last})
        now = end + 0.002
    rng.shuffle(spans)
    ranks = [
        {"rank": 100 + rank, "host": f"node{rank // 4}", "pid": 4000 + rank, "job": "3f2a", "clock_offset": rank * 1e-6,
            "spans": steps * 4, "open": int(rank == 5),
         "seconds": 0.2, "waiting": 0.0 if rank == 3 else 0.12, "caused": 0.8 if rank == 3 else 0.01 * rank,
         "longest_wait": None if rank == 3 else 0.009,
         "longest_operation": None if rank == 3 else name, "longest_for": None if rank == 3 else 103}
        for rank in range(processes)
    ]
    times = [{"step": name, "iterations": [steps] * processes, "mean": [0.012 + 0.001 * rank
        for rank in range(processes)],
              "total": [0.24 + 0.02 * rank for rank in range(processes)], "largest_total": 0.38, "mean_total": 0.31}]
    return {
        "section": "trace", "path": f"traces/{name}", "seconds": now, "operations": steps, "ranks": ranks,
        "names": names, "spans": columns(spans), "spans_left_out": 12,
        "slowest": operations, "routes": [{"kind": "collective", "route": "shm", "operations": steps,
            "bytes": 160 << 20, "seconds": 0.5}],
        "missed": [{"operation": f"barrier {name}", "waiting": [0, 1, 2],
            "missing": [3]}], "notes": [f"a file is missing: {name}"],
        "imbalance": {"useful": 0.012, "waiting": 0.006, "warnings": [f"step {name} is not on rank 1"],
                      "steps": [{"step": name, "iterations": steps, "useful": 0.012, "waiting": 0.006},
                          {"step": "backward", "iterations": steps, "useful": 0.02, "waiting": 0.001}],
                      "times": times},
    }


def versions(name="source"):
    rows = []
    for number in range(1, 21):
        full = number % 10 == 1
        rows.append({
            "version": number, "path": f"{name}/weight_v{number:06}", "kind": "full" if full else "delta",
            "base_version": None if full else number - 1,
            "encoding": None if full else "xor", "checksum_format": None if full else "xxh3-128",
            "begins_at": number - (number - 1) % 10, "tensors": 291 if full else 200 + number,
            "files": 4 if full else 1, "bytes": 16 * 10**9 if full else (300 + 7 * number) * 10**6,
            "elements": 8 * 10**9, "changed_elements": None if full else (2 + number) * 10**8,
            "stream": "s", "publisher": f"{name}:4711", "ranks": 8, "digest": f"{number:032x}",
            "published": CREATED - 86400 + number * 3600, "age_seconds": 86400 - number * 3600,
            "problems": [f"checksum of {name}"] if number == 14 else [],
        })
    rows[16].update(kind=None, elements=None, changed_elements=None, tensors=None, digest=None)
    return {"section": "versions", "sound": False, "verified": True, "source": name, "versions": rows,
        "unfinished": [f"weight_v000021.partial-{name}"], "other_names": [name],
            "local": {"path": name, "version": 12, "has_record": False,
                "reason": f"record is missing {name}"}, "problems": [f"version 14: {name}"]}


def everything():
    """One report with a section of each kind."""
    return report(llama()["sections"][0], difference(), workspace(), trace(), versions())


def bare():
    """Sections with hardly any data."""
    empty = model([tensor("w", (1,), random.Random(1))], "one", config=None, config_bytes=0, metadata={})
    without = model([tensor("w.0", (1,), random.Random(1)), tensor("w.1", (1,), random.Random(1))], "no values",
        has_values=False, verify=None, verify_error="HDF5 files have no problems to look for")
    for key in ("values", "nans", "infinities", "zeros", "minimum", "maximum", "mean", "deviation", "histogram"):
        del without["rows"][key]
    without["files"], without["rows"]["file"] = [], [None, None]
    nothing = {**without, "rows": {key: [] for key in without["rows"]}, "tensors": 0, "bytes": 0, "dtypes": {}}
    workspace_empty = {"section": "workspace", "path": "empty", "kind": "workspace", "is_workspace": "empty",
        "files": 0, "bytes": 0, "jobs": [], "temporary": [], "unknown_files": [], "model_error": "no state"}
    trace_empty = {**trace(), "ranks": [], "spans": {key: [] for key in trace()["spans"]}, "names": [], "slowest": [],
        "routes": [], "missed": [], "notes": [], "spans_left_out": 0, "operations": 0, "seconds": 0,
                   "imbalance": {"useful": 0.0, "waiting": 0.0, "warnings": [], "steps": [], "times": []}}
    versions_empty = {"section": "versions", "sound": True, "verified": False, "source": "none", "versions": [],
        "unfinished": [], "other_names": [], "local": None, "problems": []}
    difference_none = {**difference(), "same": True, "file_differences": [], "config_differences": [],
        "rows": {key: [] for key in difference()["rows"]}, "different_tensors": 0, "tensors": 0, "not_compared": 0,
        "left_out_a": [], "left_out_b": []}
    return report(empty, without, nothing, workspace_empty, trace_empty, versions_empty, difference_none)
