# SPDX-License-Identifier: Apache-2.0
"""Exports of tensors in the memory of ranks."""

import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import muster
from ranks import Ranks, run

# The model, and the state dict that a rank has of it: rows and columns of DTensors, lists of parts, replicas, a tensor
# that one rank has alone, and scalars.
MODEL = """
import ml_dtypes, pathlib, types
import numpy as np
import muster
class Shard:
    def __init__(self, dim): self.dim = dim
    def is_shard(self, dim=None): return True
    def is_replicate(self): return False
    def is_partial(self): return False
def wholes(step=0):
    random = np.random.default_rng(step)
    found = {}
    for layer in range(3):
        for name, shape in (("rows", (7, 5)), ("columns", (4, 9)), ("parts", (8, 3)), ("norm", (6,)), ("scale", ()), ("alone", (5, 2))):
            dtype = ml_dtypes.bfloat16 if name == "rows" else "i8" if name == "parts" else "f4"
            found[f"layers.{layer}.{name}"] = np.asarray(random.random(shape) * 100).astype(dtype)
    found["none"] = np.zeros((0, 4), "f4")
    return found
def cut(whole, dim, rank, size):
    step = -(-whole.shape[dim] // size)
    mesh = types.SimpleNamespace(shape=(size,), get_coordinate=lambda: (rank,))
    local = np.ascontiguousarray(whole.take(range(min(rank * step, whole.shape[dim]), min(rank * step + step, whole.shape[dim])), axis=dim))
    return types.SimpleNamespace(shape=whole.shape, placements=(Shard(dim),), device_mesh=mesh, local=local, to_local=lambda: local)
def state(rank, size, step=0):
    mine = {}
    for name, whole in wholes(step).items():
        kind = name.split(".")[-1]
        if kind in ("rows", "columns"):
            mine[name] = cut(whole, 0 if kind == "rows" else 1, rank, size)
        elif kind == "parts":
            mine[name] = [muster.Part(whole[row : row + 1].copy(), whole.shape, (row, 0)) for row in range(rank, 8, size)]
        elif kind != "alone" or rank == size - 1:
            mine[name] = whole
    return mine
def layers(rank, size, step=0):
    mine = state(rank, size, step)
    for layer in range(3):
        yield {name: value for name, value in mine.items() if name.startswith(f"layers.{layer}.")}
    yield {name: value for name, value in mine.items() if not name.startswith("layers.")}
"""
exec(MODEL)


def loaded(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update({name: tensor for name, tensor in muster.load_safetensors(path).items()})
    return found


def is_complete(folder, step=0):
    """Returns whether the checkpoint in a folder is equal to the model, bit for bit."""
    found, whole = loaded(folder), wholes(step)
    return sorted(found) == sorted(whole) and all(muster._core.bitwise_equal(found[name], muster.as_tensor(whole[name])) for name in whole)


def run_model(source, size, folder, **options):
    return run(MODEL + f"folder = pathlib.Path({str(folder)!r})\n" + source, size, **options)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("source", ["state(rank, size)", "layers(rank, size)", "list(layers(rank, size))"])
def test_export_of_state_dicts(source, size, tmp_path):
    told = run_model(
        f"""
report = muster.export_model({source}, folder / "out", group=group, files={{"config.json": "{{}}"}}, max_shard_size=400)
tell([sorted(report), report.get("manifest", {{}}).get("out", {{}}).get("tensors")])
""",
        size,
        tmp_path,
    )
    assert told[1:] == [[[], None]] * (size - 1) and told[0][1] == len(wholes())
    assert is_complete(tmp_path / "out")
    assert (tmp_path / "out/config.json").read_text() == "{}" and muster.verify(tmp_path / "out")["good"]
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(wholes()) and len(set(index["weight_map"].values())) > 1


@pytest.mark.parametrize("size", [2, 4])
def test_tensors_may_change_after_the_call(size, tmp_path):
    """Two saves are begun one after the other, and the tensors are overwritten and freed."""
    told = run_model(
        """
works = []
for step in range(2):
    mine = state(rank, size, step)
    works.append(muster.export_model(mine, folder / f"out{step}", group=group, wait=False))
    for value in mine.values():
        for tensor in [part.tensor for part in value] if isinstance(value, list) else [getattr(value, "local", value)]:
            tensor[...] = 0
    del mine, value, tensor
reports = [work.get() for work in works]
tell([all(work.is_done() and work.wait(1) for work in works), [bool(report) for report in reports]])
""",
        size,
        tmp_path,
    )
    assert told == [[True, [rank == 0] * 2] for rank in range(size)]
    assert is_complete(tmp_path / "out0") and is_complete(tmp_path / "out1", 1)


def test_options(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "other"}')
    (base / "tokenizer.json").write_text("base")
    (base / "notes.json").write_text("base")
    muster.save_safetensors(base / "model.safetensors", wholes())
    mine = wholes()
    muster.export_model(
        mine, tmp_path / "out", group=muster.single_group(), base_model=base, files={"notes.json": "ours"}, dtype="bf16", exclude="*.alone", checksums=True
    )
    texts = [(tmp_path / "out" / name).read_text() for name in ("tokenizer.json", "notes.json")]
    assert texts == ["base", "ours"] and muster.verify(tmp_path / "out")["good"]
    found = loaded(tmp_path / "out")
    assert sorted(found) == sorted(name for name in mine if not name.endswith("alone"))
    name = "layers.0.columns"
    assert found[name].dtype == "BF16" and np.array_equal(found[name].numpy(), mine[name].astype(ml_dtypes.bfloat16))
    for options, words in (
        ({"resume": True}, "resume"),
        ({"target_layout": 2}, "layout"),
        ({"key": "model"}, "key"),
        ({"files": {"config.json": 3}}, "files: int is not a str"),
        ({"files": ["config.json"]}, "files: list is not a dict"),
        ({"check_replicas": "no"}, "check_replicas: the value does not have the expected type"),
        ({}, "out"),
    ):
        for wait in (True, False):
            with pytest.raises(muster.InvalidArgumentError, match=words):
                muster.export_model(mine, tmp_path / "out", group=muster.single_group(), wait=wait, **options)
    for source in (layers(0, 1), tmp_path, str(tmp_path)):
        with pytest.raises(muster.InvalidArgumentError, match="wait=False needs the tensors of a state dict"):
            muster.export_model(source, tmp_path / "none", group=muster.single_group(), wait=False)


def test_an_error_of_one_rank_is_raised_by_all(tmp_path):
    """The group remains usable after each of them, and no output remains."""
    told = run_model(
        """
def failing():
    yield from list(layers(rank, size))[:2]
    if rank == 1:
        raise LookupError("no more layers")
    yield {}
def uneven():
    yield {}
    if rank == 1:
        yield {}
out = folder / "out"
replica = {"w": np.full(4, float(rank == 1), "f4")}
errors = []
blocking, both = [True], [True, False]
for source, options, forms in (
    ({"w": None} if rank == 1 else state(rank, size), {}, both),
    (state(rank, size), {"memory_budget": "lots" if rank == 1 else "64MiB"}, both),
    (3 if rank == 1 else {}, {}, both),
    (({"w": "x"} for _ in range(1)) if rank == 1 else iter([{}]), {}, blocking),
    (failing(), {}, blocking),
    (uneven(), {}, blocking),
    (replica, {}, both),
    ({"w": muster.Part(np.zeros(3), (8,), (3 * rank,))}, {}, both),
    ({"w": muster.Part(np.zeros(1), (4,), (rank,))}, {}, both),
):
    for wait in forms:
        caught = None
        try:
            muster.export_model(source, out, group=group, wait=wait, **options)
        except Exception as error:
            caught = [type(error).__name__, error.rank, str(error), type(error.__cause__).__name__]
        errors.append(caught)
muster.export_model(replica, folder / "replica", group=group, check_replicas=False)
muster.export_model(state(rank, size), folder / "good", group=group)
tell([errors, sorted(path.name for path in folder.iterdir())])
""",
        3,
        tmp_path,
    )
    expected = [
        *[("InvalidArgumentError", 'tensor "w": NoneType is not a tensor')] * 2,
        *[("InvalidArgumentError", "'lots' is not a size")] * 2,
        *[("InvalidArgumentError", "state dict: int is not a dict of tensors")] * 2,
        ("InvalidArgumentError", 'tensor "w": str is not a tensor'),
        ("IoError", "LookupError: no more layers"),
        ("RankMismatchError", ""),
        *[("RankMismatchError", '"w"')] * 2,
        *[("InvalidArgumentError", '"w"')] * 4,
    ]
    for rank, (caught, left) in enumerate(told):
        assert left == ["good", "replica"]
        for (kind, words), (found, origin, message, cause) in zip(expected, caught, strict=True):
            assert found == kind and words in message, message
        assert [each[1] for each in caught[:8]] == [1] * 8
        assert caught[7][3] == ("LookupError" if rank == 1 else "NoneType")
    assert is_complete(tmp_path / "good")


def test_units_are_freed_one_after_the_other(tmp_path):
    """Each dict is destroyed before the next one is requested."""
    run_model(
        """
import weakref
def units():
    for layer in range(4):
        array = np.full(1000, layer, "f4")
        assert [each() for each in references] == [None] * layer
        references.append(weakref.ref(array))
        yield {f"layers.{layer}": array} if layer % size == rank else {}
        del array
references = []
muster.export_model(units(), folder / "out", group=group)
tell(True)
""",
        2,
        tmp_path,
    )
    assert sorted(loaded(tmp_path / "out")) == [f"layers.{layer}" for layer in range(4)]


@pytest.mark.parametrize("end", ["", "del work", "del work, group, mine", "import gc; del work, group; gc.collect(); sys.exit(0)", "raise SystemExit(0)"])
def test_the_interpreter_waits_for_an_export(end, tmp_path):
    source = f"""
mine = state(rank, size)
mine["big"] = cut(np.ones((1 << 20, 8), "f4"), 0, rank, size)
def progress(*step):
    time.sleep(0.3)
work = muster.export_model(mine, folder / "out", group=group, wait=False, progress=progress)
{end}
"""
    Ranks(MODEL + f"folder = pathlib.Path({str(tmp_path)!r})\n" + source, 2).told()
    found = loaded(tmp_path / "out")
    assert len(found) == len(wholes()) + 1 and found["big"].numpy().all()


@pytest.mark.parametrize("form", ["blocking", "units", "get", "exit"])
def test_ctrl_c_cancels(form, tmp_path):
    source = f"""
import signal, threading, time
def interrupt(*step):
    if rank == 0 and not asked:
        asked.append(os.kill(os.getpid(), signal.SIGINT))
        time.sleep(0.5)  # this is a worker thread; the main thread gets the signal
def units():
    yield {{"w": cut(np.ones((1 << 20, 8), "f4"), 0, rank, size)}}
    interrupt()
    yield {{}}
asked = []
mine = {{"w": cut(np.ones((1 << 22, 8), "f4"), 0, rank, size)}}
form = {form!r}
caught = None
try:
    if form == "blocking":
        muster.export_model(mine, folder / "out", group=group, progress=interrupt)
    elif form == "units":
        muster.export_model(units(), folder / "out", group=group)
    else:
        work = muster.export_model(mine, folder / "out", group=group, wait=False, progress=interrupt)
        if form == "get":
            work.get()
except BaseException as error:
    caught = type(error).__name__
tell(caught)
"""
    told = Ranks(MODEL + f"folder = pathlib.Path({str(tmp_path)!r})\n" + source, 2).told()
    others = {"blocking": ("CancelledError",), "units": ("IoError", "CancelledError"), "get": ("CancelledError",), "exit": (None,)}[form]
    assert told[0] == [None if form == "exit" else "KeyboardInterrupt"] and told[1][0] in others
    assert list(tmp_path.iterdir()) == []


def test_progress_of_an_export_in_the_background(tmp_path):
    steps = []
    mine = {"w": np.ones((1 << 22, 8), "f4")}
    group = muster.single_group()
    muster.export_model(mine, tmp_path / "out", group=group, wait=False, progress=lambda *step: steps.append(step)).get()
    assert steps == sorted(steps) and steps[-1][0] == steps[-1][1] == 1 << 27
    with pytest.raises(ZeroDivisionError):
        muster.export_model(mine, tmp_path / "bad", group=group, wait=False, progress=lambda *step: 1 / 0).get()
    work = muster.export_model(mine, tmp_path / "bad", group=group, wait=False)
    work.cancel()
    with pytest.raises(muster.CancelledError):
        work.get()
    assert not (tmp_path / "bad").exists()


def test_import_loads_no_framework(tmp_path):
    source = f"import muster, sys; muster.export_model({{'w': b'abcd'}}, {str(tmp_path / 'out')!r}, group=muster.single_group()); print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_fingerprints(size, tmp_path):
    """All ways to the fingerprint of a model give the same one, which names each changed tensor."""
    told = run_model(
        """
mine = state(rank, size)
def exported(name, values, **options):
    report = muster.export_model(values, folder / name, group=group, fingerprint=True, checksums=True, **options)
    return (report if options.get("wait", True) else report.get()).get("fingerprint")
made = muster.fingerprint(mine, group=group)
reports = [exported("a", mine), exported("b", layers(rank, size), max_shard_size=400), exported("c", mine, wait=False)]
changed = {name: value if name != "layers.1.norm" else value + np.float32(1) for name, value in mine.items()}
other = muster.fingerprint(changed, group=group, exclude="*.alone")
tell([made, [report == (made if rank == 0 else None) for report in reports], other["tensors"]])
""",
        size,
        tmp_path,
    )
    made, _, others = told[0]
    assert told == [[made, [True] * 3, others]] * size
    found = muster.fingerprint(tmp_path / "b")
    assert found == {**made, "path": str(tmp_path / "b")} and made["text"].endswith(f"model {made['hash']}\n")
    assert [tensor["name"] for tensor in made["tensors"] if tensor not in others] == ["layers.0.alone", "layers.1.alone", "layers.1.norm", "layers.2.alone"]
    (tmp_path / "file").write_text(made["text"])
    program = [os.environ["MUSTER_PROGRAM"], "fingerprint", tmp_path / "c", "--check", tmp_path / "file"]
    assert subprocess.run(program, stdout=subprocess.DEVNULL).returncode == 0
    for name in ("a", "b", "c"):
        sums = json.loads((tmp_path / name / "muster.checksums.json").read_text())
        assert sums["algorithm"] == "crc64-xz" and sums["tensors"] == {tensor["name"]: tensor["crc"] for tensor in made["tensors"]}
        assert muster.verify(tmp_path / name)["good"]


def test_fingerprints_by_plan(tmp_path):
    """The names and parts of a plan's ranks give the fingerprint of the exported model, also as units and in another dtype."""
    rules = [{"match": "*.rows", "action": "concat", "dim": 0}, {"match": "*", "action": "same"}]
    (tmp_path / "plan.json").write_text(json.dumps({"muster_plan": 1, "rules": rules}))
    source = MODEL + """
plan = str(pathlib.Path(folder) / "plan.json")
mine = {name: whole[:6].reshape(2, 3, 5)[rank] if name.endswith("rows") else whole for name, whole in wholes().items()}
print_of = lambda **options: muster.fingerprint(mine, group=group, plan=plan, source_layout="tp=2", **options)["hash"]
def layers_of():
    for layer in range(4):
        yield {name: value for name, value in mine.items() if name.startswith(f"layers.{layer}.") or (layer == 3 and "." not in name)}
cast = {"dtype": "BF16", "cast_all": True}
muster.export_model(mine, folder + "/whole", plan, group=group, source_layout="tp=2")
muster.export_model(layers_of(), folder + "/units", plan, group=group, source_layout="tp=2")
muster.export_model(layers_of(), folder + "/cast", plan, group=group, source_layout="tp=2", **cast)
tell([print_of(), print_of(), print_of(**cast)])
"""
    told = run("folder = " + repr(str(tmp_path)) + "\n" + source, 2)
    found = [muster.fingerprint(tmp_path / name)["hash"] for name in ("whole", "units", "cast")]
    assert told == [found, found] and found[0] == found[1] != found[2]


def test_refused_fingerprints(tmp_path):
    """A mistake of one rank is one error on all ranks, and the group stays usable."""
    told = run_model(
        """
good = state(rank, size)
tell([
    failure(lambda: muster.fingerprint({"w": 3} if rank == 1 else good, group=group)),
    failure(lambda: muster.fingerprint({"w": np.full(3, rank)}, group=group)),
    failure(lambda: muster.fingerprint({"w": muster.Part(np.zeros(3), (9,), (rank * 3,))}, group=group)),
    failure(lambda: muster.fingerprint(good, group=group, key="model")),
    failure(lambda: muster.fingerprint(folder, group=group)),
    muster.fingerprint(good, group=group)["hash"],
])
""",
        2,
        tmp_path,
    )
    assert told[0][-1] == told[1][-1]
    kinds = ["InvalidArgumentError", "RankMismatchError", "InvalidArgumentError", "UnsupportedError", "InvalidArgumentError"]
    parts = ['tensor "w": int', "rank 0 and rank 1 have different values", "cover 6 of 9 elements", "fingerprint: ", "group: a path"]
    for failures in told:
        assert [kind for kind, _ in failures[:-1]] == kinds
        assert all(part in words for (_, words), part in zip(failures, parts))
