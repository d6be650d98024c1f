# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import muster
from ranks import run

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
    assert alike(TREE, muster.join(config, weights))


def test_state_files(tmp_path):
    path = tmp_path / "state.h5"
    muster.write_state_file(path, TREE, rank=2, world_size=4, generation=7, zstd_level=1)
    state = muster.read_state_file(path)
    path.unlink()
    assert alike(TREE, state.tree()) and state.info == {"rank": 2, "world_size": 4, "generation": 7}
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
    shown = muster.show(path, pattern="a")
    assert [tensor["name"] for tensor in shown["tensors"]] == ["a"]
    other = tmp_path / "other.safetensors"
    muster.save_safetensors(other, {"a": np.arange(3) + 1, "b": TREE["w"].T, "c": packed})
    assert muster.diff(path, path)["same"] and not muster.diff(path, other)["same"]


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
        workspace = muster.NFSWorkspace({str(tmp_path)!r}, group)
        assert workspace.is_initialized and workspace.rank == rank
        absent = workspace.read_configs_and_weights_from_rank(1 - rank)
        group.barrier()
        step = workspace.write_configs_and_weights({{"rank": rank, "w": np.full(4, rank, "f4")}})
        group.barrier()
        state = workspace.read_configs_and_weights_from_rank(1 - rank, at_least=step)
        tree = state.tree()
        tell([absent is None, step, tree["rank"], tree["w"].numpy().tolist(), state.info["generation"]])
        group.barrier()
        """
    )
    assert told == [[True, 1, 1, [1.0] * 4, 1], [True, 1, 0, [0.0] * 4, 1]]
    nowhere = muster.NFSWorkspace(None)
    assert not nowhere.is_initialized and nowhere.rank is None
    with pytest.raises(muster.ArgumentError):
        nowhere.write_configs_and_weights({})


def model(folder, heads=4):
    """A model in HuggingFace's layout that the built-in plan for Llama knows."""
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
        tell([report["account"]["out"]["tensors"] if report else None, bad])
        """
    )
    assert told[0][0] == 12 and told[1][0] is None
    assert told[0][1][0] == told[1][1][0] == "ArgumentError" and "lots" in told[0][1][1]
    assert muster.diff(original, tmp_path / "out")["same"] and muster.verify(tmp_path / "out")["good"]


def failing(*_):
    raise LookupError("enough")


def big_model(folder):
    """32 MiB, so that work on it takes some steps."""
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
    works = [
        lambda progress: muster.shard_model(original, shards, 2, "llama", progress=progress),
        lambda progress: muster.verify(shards, progress=progress),
        lambda progress: muster.export_model(shards, out, "", muster.single_group(), progress=progress),
    ]
    for work in works:
        with pytest.raises(LookupError, match="enough"):
            work(failing)
        steps = []
        work(lambda *step: steps.append(step))
        assert steps == sorted(steps) and steps[-1][0] == steps[-1][1] > 64 << 20 and steps[-1][2] >= 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "shards"]


@pytest.mark.parametrize(
    "work",
    [
        "muster.shard_model(folder / 'model', folder / 'shards', 2, 'llama', progress=progress)",
        "muster.verify(folder / 'ready', progress=progress)",
        "muster.export_model(folder / 'ready', folder / 'out', '', muster.single_group(), progress=progress)",
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
                time.sleep(0.5)  # this is a thread of the work: the main one hears it meanwhile
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
