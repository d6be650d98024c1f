# SPDX-License-Identifier: Apache-2.0
import json
import os
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import muster
from ranks import run

FOREIGN = pathlib.Path(__file__).parents[2] / "tests/data/foreign"
TREE = {"name": "layer", "w": np.arange(6, dtype="f4").reshape(2, 3), "list": [{"s": np.ones(2, "f2")}, None]}


def alike(a, b):
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, np.ndarray):
        return muster._core.bitwise_equal(a, b)
    return a == b


def test_split_and_join():
    config, weights = muster.split(TREE)
    assert config["w"] == {"$tensor": "w"} and list(weights) == ["w", "list.0.s"]
    assert list(muster.split({"a\0b": np.ones(1), "ü": np.ones(1)})[1]) == ["a\0b", "ü"]
    assert alike(TREE, muster.join(config, weights))


def test_state_files(tmp_path):
    path = tmp_path / "state.h5"
    muster.write_state_file(path, TREE, rank=2, world_size=4, step=7, zstd_level=1)
    state = muster.read_state_file(path)
    path.unlink()
    assert alike(TREE, state.tree()) and state.info == {"rank": 2, "world_size": 4, "step": 7}
    muster.write_state_file(path, {"a": 1}, {"x": np.zeros(3)})
    config, weights = muster.read_state_file(path)
    assert config == {"a": 1} and weights["x"].shape == (3,)
    assert muster.verify(path)["good"] and muster.show(path)["kind"] == "state"
    path.write_bytes(path.read_bytes()[:5000])
    assert not muster.verify(path)["good"]
    with pytest.raises(muster.CorruptError) as caught:
        muster.read_state_file(path)
    assert caught.value.path == str(path)
    with pytest.raises(FileNotFoundError) as caught:
        muster.read_state_file(tmp_path / "none")
    assert isinstance(caught.value, muster.NotFoundError) and caught.value.errno == 2


def test_safetensors(tmp_path):
    path = tmp_path / "model.safetensors"
    packed = muster.as_tensor(np.arange(4, dtype="u1"), "F4", (2, 4))
    muster.save_safetensors(path, {"a": np.arange(3), "b": TREE["w"].T, "c": packed}, {"format": "pt"})
    tensors = muster.load_safetensors(path)
    assert np.array_equal(tensors["a"].numpy(), np.arange(3)) and np.array_equal(tensors["b"].numpy(), TREE["w"].T)
    assert (tensors["c"].dtype, tensors["c"].shape) == ("F4", (2, 4))
    assert muster.safetensors_metadata(path) == {"format": "pt"}
    shown = muster.show(path, select="a")
    assert [tensor["name"] for tensor in shown["tensors"]] == ["a"]
    assert [tensor["name"] for tensor in muster.show(path, select="{a,b}", exclude="a")["tensors"]] == ["b"]
    other = tmp_path / "other.safetensors"
    muster.save_safetensors(other, {"a": np.arange(3) + 1, "b": TREE["w"].T, "c": packed})
    assert muster.diff(path, path)["same"] and not muster.diff(path, other)["same"] and muster.diff(path, other, exclude="a")["same"]
    made = muster.fingerprint(path)
    assert [tensor["name"] for tensor in made["tensors"]] == ["a", "b", "c"] and made["tensors"][0]["shape"] == [3]
    assert made == muster.fingerprint(str(path)) and made["hash"] != muster.fingerprint(other)["hash"]
    assert made["tensors"][1:] == muster.fingerprint(other, exclude="a")["tensors"]
    muster.save_safetensors(other, {"b": TREE["w"]})
    assert muster.fingerprint(other, dtype="BF16")["tensors"][0]["dtype"] == "BF16"


def test_files_refuse_invalid_arguments(tmp_path):
    path = tmp_path / "model.safetensors"
    for call, words in (
        (lambda: muster.save_safetensors(path, [1]), "the tensors: list is not a dict"),
        (lambda: muster.save_safetensors(path, {1: TREE["w"]}), "a tensor's name: int is not a str"),
        (lambda: muster.save_safetensors(path, {"\ud800": TREE["w"]}), "a tensor's name: str is not one without lone surrogates"),
        (lambda: muster.save_safetensors(path, {}, [1]), "metadata: list is not a dict"),
        (lambda: muster.save_safetensors(path, {}, {"a": 1}), "metadata: int is not a str"),
        (lambda: muster.join({}, [1]), "the tensors: list is not a dict"),
        (lambda: muster.launch(["true"], 1, environment={"A": 1}), "environment: int is not a str"),
        (lambda: muster.launch(["true"], 1, timeout="1"), "timeout: str is not a number"),
        (lambda: muster.as_tensor(type("Other", (), {"__array_interface__": 3})()), "an argument does not have the expected type"),
    ):
        with pytest.raises(muster.InvalidArgumentError, match=words):
            call()
    assert not path.exists()


def test_safetensors_of_others(tmp_path):
    peer = pytest.importorskip("safetensors.numpy")
    path = str(tmp_path / "peer.safetensors")
    peer.save_file({"x": TREE["w"]}, path)
    assert alike(TREE["w"], muster.load_safetensors(path)["x"])
    muster.save_safetensors(path, {"y": TREE["w"]})
    assert np.array_equal(peer.load_file(path)["y"], TREE["w"])


def test_a_workspace(tmp_path):
    told = run(
        f"""
        workspace = muster.Workspace({str(tmp_path)!r}, group)
        assert workspace.is_initialized and workspace.rank == rank
        absent = workspace.read_configs_and_weights_from_rank(1 - rank)
        group.barrier()
        step = workspace.write_configs_and_weights({{"rank": rank, "w": np.full(4, rank, "f4")}})
        group.barrier()
        state = workspace.read_configs_and_weights_from_rank(1 - rank, min_step=step)
        tree = state.tree()
        tell([absent is None, step, tree["rank"], tree["w"].numpy().tolist(), state.info["step"]])
        group.barrier()
        """
    )
    assert told == [[True, 1, 1, [1.0] * 4, 1], [True, 1, 0, [0.0] * 4, 1]]
    nowhere = muster.Workspace(None)
    assert not nowhere.is_initialized and nowhere.rank is None
    with pytest.raises(muster.InvalidArgumentError):
        nowhere.write_configs_and_weights({})


def model(folder, heads=4):
    """Writes a model in the Hugging Face layout that the built-in plan for Llama knows."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
        "num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": 1, "vocab_size": 8,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (8, 16), "model.norm.weight": (16,), "lm_head.weight": (8, 16)}
    layer = "model.layers.0."
    for name in ("q", "k", "v", "o"):
        shapes[f"{layer}self_attn.{name}_proj.weight"] = (16, 16)
    for name, shape in (("gate", (32, 16)), ("up", (32, 16)), ("down", (16, 32))):
        shapes[f"{layer}mlp.{name}_proj.weight"] = shape
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{layer}{name}.weight"] = (16,)
    random = np.random.default_rng(0)
    tensors = {name: random.random(shape, "f4") for name, shape in shapes.items()}
    muster.save_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    return folder


def test_shard_and_export(tmp_path):
    original = model(tmp_path / "model")
    report = muster.shard_model(original, tmp_path / "shards", 2, "llama")
    assert report["tensors"] == 12
    assert muster.plan_export(tmp_path / "shards")["out"]["tensors"] == 12
    told = run(
        f"""
        report = muster.export_model({str(tmp_path / "shards")!r}, {str(tmp_path / "out")!r}, "", group, checksums=True)
        bad = failure(lambda: muster.export_model("nowhere", "out", "", group, memory_budget="lots" if rank else 1 << 28))
        tell([report["manifest"]["out"]["tensors"] if report else None, bad])
        """
    )
    assert told[0][0] == 12 and told[1][0] is None
    assert told[0][1][0] == told[1][1][0] == "InvalidArgumentError" and "lots" in told[0][1][1]
    assert muster.diff(original, tmp_path / "out")["same"] and muster.verify(tmp_path / "out")["good"]
    # Verified like the input of an export, and cut for another layout with the same options.
    assert muster.verify(tmp_path / "shards", plan="llama", base_model=original, source_layout=2)["good"]
    selected = muster.verify(original, select="*.weight", exclude="*norm*")
    assert 0 < selected["tensors"] < len(muster.show(original)["tensors"]) and selected["not_selected"] > 0
    for options, words in (({"source_layout": 3}, "3"), ({"plan": "nowhere"}, "nowhere"), ({"base_model": tmp_path / "none"}, "none")):
        with pytest.raises(muster.Error, match=words):
            muster.verify(tmp_path / "shards", **options)
    again = muster.shard_model(tmp_path / "shards", tmp_path / "four", 4, "llama", to_plan="llama", source_layout="tp=2")
    assert again["tensors"] == 12
    with pytest.raises(muster.InvalidArgumentError, match="layout"):
        muster.shard_model(tmp_path / "shards", tmp_path / "none", 4, "llama", to_plan="llama", source_layout=3)


def names(shown):
    return [tensor["name"] for tensor in shown["tensors"]]


def test_options_of_an_export(tmp_path):
    """For each option, plan_export() must report what export_model() does."""
    original, shards, out = model(tmp_path / "model"), tmp_path / "shards", tmp_path / "out"
    base = model(tmp_path / "base")
    (base / "tokenizer.json").write_text("{}")
    muster.shard_model(original, shards, 2, "llama")
    for number in (0, 1):
        (tmp_path / "parts").mkdir(exist_ok=True)
        (tmp_path / "parts" / f"part{number}.safetensors").write_bytes((shards / f"rank-{number:05}-of-00002.safetensors").read_bytes())
    (tmp_path / "parts" / "config.json").write_bytes((original / "config.json").read_bytes())
    kept = lambda told, words: [name for name in names(told) if words in name]
    for source, options, holds in (
        (shards, {}, lambda told, files: len(names(told)) == 12 and "config.json" in files),
        (shards, {"dtype": "bf16"}, lambda told, files: {tensor["dtype"] for tensor in told["tensors"]} == {"BF16"}),
        (shards, {"select": "*mlp*"}, lambda told, files: len(names(told)) == len(kept(told, "mlp")) == 3),
        (shards, {"exclude": "*mlp*"}, lambda told, files: len(names(told)) == 9 and not kept(told, "mlp")),
        (shards, {"base_model": base}, lambda told, files: "tokenizer.json" in files),
        (shards, {"max_shard_size": "4KiB"}, lambda told, files: len([name for name in files if name.endswith(".safetensors")]) > 1),
        (shards, {"target_layout": 4}, lambda told, files: "rank-00003-of-00004.safetensors" in files),
        (shards, {"source_layout": "tp=2"}, lambda told, files: len(names(told)) == 12),
        (tmp_path / "parts", {"file_pattern": "part{rank}.safetensors", "plan": "llama"}, lambda told, files: len(names(told)) == 12),
        (FOREIGN / "dcp/in", {"key": "model"}, lambda told, files: "layers.0.attn.weight" in names(told)),
        (original, {}, lambda told, files: len(names(told)) == 12),
    ):
        plan = options.pop("plan", "")
        planned = muster.plan_export(source, plan, **options)
        muster.export_model(source, out, plan, muster.single_group(), force=True, **options)
        files = sorted(path.name for path in out.iterdir())
        told = muster.show(out, plan="auto" if "target_layout" in options else "")
        assert holds(told, files), (options, told, files)
        assert planned["out"]["files"] == len([name for name in files if name.endswith(".safetensors")]), options
    for extra, there in (("none", False), ("*.json", True)):
        muster.export_model(shards, out, "", muster.single_group(), force=True, extra_files=extra)
        assert (out / "config.json").exists() is there
    for options, kind, words in (
        ({"dtype": "F12"}, muster.InvalidArgumentError, "'F12' is not a dtype"),
        ({"writers": "owners"}, muster.InvalidArgumentError, "writers: unknown value 'owners'"),
        ({"target_layout": "xp=2"}, muster.InvalidArgumentError, "xp=2"),
        ({"step": -1}, muster.InvalidArgumentError, "step: the value does not have the expected type"),
        ({"select": 5}, muster.InvalidArgumentError, "select: the value does not have the expected type"),
        ({"select": "nothing*"}, muster.Error, "nothing"),
        ({"base_model": tmp_path / "none"}, muster.NotFoundError, "none"),
    ):
        with pytest.raises(kind, match=words):
            muster.export_model(shards, tmp_path / "bad", "", muster.single_group(), **options)
    assert not (tmp_path / "bad").exists()


def test_options_of_sources(tmp_path):
    original = model(tmp_path / "model")
    muster.shard_model(original, tmp_path / "workspace", 2, "llama", to_workspace=True, zstd_level=1)
    dcp, space = FOREIGN / "dcp/in", tmp_path / "workspace"
    for told, count in (
        (muster.show(dcp, key="model.layers"), 3),
        (muster.show(space, rank=1), 12),
        (muster.show(space), 24),
        (muster.show(space, plan="auto", step=1), 12),
    ):
        assert len(names(told)) == count
    assert "0.attn.weight" in names(muster.show(dcp, key="model.layers"))
    assert muster.verify(dcp, key="model")["good"] and muster.diff(space, original, plan="auto", step=1)["same"]
    shard = muster.shard_model(FOREIGN / "dcp/in", tmp_path / "none", 2, plan_of_all(tmp_path), key="model", dry_run=True)
    assert shard["tensors"] == 5
    part = muster.shard_model(original, tmp_path / "none", 2, "llama", dry_run=True, select="*mlp*", exclude="*down*")
    assert part["tensors"] == 2
    with pytest.raises(muster.NotFoundError):
        muster.show(space, step=7)


def plan_of_all(folder):
    """Writes a plan in which every tensor is the same on each rank."""
    path = folder / "plan.json"
    path.write_text(json.dumps({"muster_plan": 1, "rules": [{"match": "*", "action": "same"}]}))
    return path


def test_a_shard_in_memory(tmp_path):
    original = model(tmp_path / "model")
    for layout in (1, 3, "tp=2,pp=1"):
        muster.shard_model(original, tmp_path / "shards", layout, "llama", force=True)
        paths = sorted((tmp_path / "shards").glob("rank-*"))
        for rank, path in enumerate(paths):
            steps = []
            loaded = muster.load_shard(original, layout, rank, "llama", progress=lambda *step: steps.append(step))
            written = muster.load_safetensors(path)
            assert sorted(loaded) == sorted(written) and all(muster._core.bitwise_equal(loaded[name], written[name]) for name in written)
            assert all(tensor.is_writable for tensor in loaded.values()) and steps[-1][0] == steps[-1][1]
    whole = muster.load_shard(FOREIGN / "dcp/in", 1, 0, plan_of_all(tmp_path), key="model")
    assert "layers.0.attn.weight" in whole
    megatron = FOREIGN.parent / "megatron/dense"
    cut = {"base_model": megatron / "model", "to_plan": "llama"}
    loaded = muster.load_shard(megatron / "ranks", 2, 1, "megatron", **cut)
    assert sorted(loaded) == sorted(muster.load_shard(megatron / "model", 2, 1, "llama"))
    assert muster.shard_model(megatron / "dist", "", 2, "megatron", dry_run=True, **cut)["tensors"] == len(loaded)
    assert muster.plan_export(megatron / "ranks", "megatron", target_layout=2, **cut)["out"]["tensors"] == 2 * len(loaded)
    for layout, rank, plan, kind in ((2, 2, "llama", muster.InvalidArgumentError), (2, 0, "nothing", muster.Error), ("x", 0, "llama", muster.InvalidArgumentError)):
        with pytest.raises(kind):
            muster.load_shard(original, layout, rank, plan)


def test_load_shard_together(tmp_path):
    original = str(model(tmp_path / "model"))
    told = run(
        f"""
        alone = muster.load_shard({original!r}, 2, rank, "llama")
        mine = muster.load_shard({original!r}, 2, rank, "llama", group)
        same = list(mine) == list(alone) and all(muster._core.bitwise_equal(mine[name], alone[name]) for name in mine)
        words = failure(lambda: muster.load_shard({original!r}, 2 * (rank + 1), rank, "llama", group))
        both = muster.load_shard({original!r}, 1, 0, "llama", group)
        ended = failure(lambda: muster.load_shard({original!r}, "x" if rank == 1 else 2, rank, "llama", group))
        tell([same, words[0], "rank 1" in words[1], len(both) == len(mine), ended[0]])
        """,
        2,
    )
    assert told == [[True, "RankMismatchError", True, True, "InvalidArgumentError"]] * 2


def failing(*_):
    raise LookupError("enough")


def big_model(folder):
    """Writes a model with large tensors, so that operations on it take several steps."""
    model(folder)
    path = folder / "model.safetensors"
    tensors = muster.load_safetensors(path)
    tensors = {name: np.zeros((1 << 19, 16), "f4") if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor for name, tensor in tensors.items()}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 1 << 19}))
    muster.save_safetensors(path, tensors, {"format": "pt"})
    return folder


def test_progress(tmp_path):
    original, shards, out = big_model(tmp_path / "model"), tmp_path / "shards", tmp_path / "out"
    tensors = {"w": np.zeros(80 << 20, "u1")}
    works = [
        lambda progress: muster.shard_model(original, shards, 2, "llama", progress=progress),
        lambda progress: muster.verify(shards, progress=progress),
        lambda progress: muster.export_model(shards, out, "", muster.single_group(), progress=progress),
        lambda progress: muster.write_state_file(tmp_path / "state.h5", tensors, progress=progress),
    ]
    for work in works:
        with pytest.raises(LookupError, match="enough"):
            work(failing)
        steps = []
        work(lambda *step: steps.append(step))
        assert steps == sorted(steps) and steps[-1][0] == steps[-1][1] > 64 << 20 and steps[-1][2] >= 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "shards", "state.h5"]


@pytest.mark.parametrize(
    "work",
    [
        "muster.shard_model(folder / 'model', folder / 'shards', 2, 'llama', progress=progress)",
        "muster.verify(folder / 'ready', progress=progress)",
        "muster.export_model(folder / 'ready', folder / 'out', '', muster.single_group(), progress=progress)",
        "muster.write_state_file(folder / 'state.h5', {'w': bytearray(8 << 20)}, progress=progress)",
    ],
)
def test_ctrl_c_ends_work_on_files(work, tmp_path):
    muster.shard_model(big_model(tmp_path / "model"), tmp_path / "ready", 2, "llama")
    source = f"""
        import os, pathlib, signal, time
        import muster
        folder = pathlib.Path({str(tmp_path)!r})
        asked = []
        def progress(*step):
            if not asked:
                asked.append(os.kill(os.getpid(), signal.SIGINT))
                time.sleep(0.5)  # this is a worker thread; the main thread gets the signal
        try:
            {work}
        except KeyboardInterrupt:
            print("interrupted")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "interrupted\n", done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "ready"]


def test_the_program_as_a_module():
    done = subprocess.run([sys.executable, "-m", "muster", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"muster {muster.__version__}"
