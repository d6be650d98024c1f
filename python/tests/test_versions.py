# SPDX-License-Identifier: Apache-2.0
"""Versions of weights: Publisher, publish(), pull(), versions(), and the module of SGLang."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import muster
import muster.compat.sglang
from ranks import Ranks, run

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def model(step=0):
    """The model of a step. Each step changes some elements of each tensor but the last."""
    random = np.random.default_rng(0)
    found = {f"layers.{layer}.weight": random.random((24, 16)).astype("f4") for layer in range(3)}
    found["norm"] = random.random(24).astype("f4")
    for each in range(1, step + 1):
        for name in list(found)[:3]:
            found[name].flat[each :: 40] += each
    return found


def write(folder, tensors):
    folder.mkdir()
    muster.save_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def loaded(folder):
    found = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        found.update({name: np.asarray(tensor).copy() for name, tensor in muster.load_safetensors(path).items()})
    return found


def is_model(folder, step):
    found, wanted = loaded(folder), model(step)
    return sorted(found) == sorted(wanted) and all(np.array_equal(found[name], wanted[name]) for name in wanted)


def marker(folder):
    return json.loads((pathlib.Path(folder) / ".weight_sync" / "state.json").read_text())["version"]


@pytest.fixture
def base(tmp_path):
    return write(tmp_path / "base", model())


def test_publish_pull_and_log(tmp_path, base):
    source, local = tmp_path / "weights", tmp_path / "local"
    with muster.Publisher(source, base=base, group=muster.single_group()) as publisher:
        assert publisher.source == str(source)
        for step in (1, 2, 3):
            report = publisher.publish(model(step), full=step == 2)
            assert (report.version, report.tensors) == (step, 4)
            assert report.kind == ("full" if step == 2 else "delta")
            assert report.changed_tensors == (4 if step == 2 else 3)
    first = muster.pull(source, local, base=base, version=1)
    assert (first.version, first.previous, first.is_changed, first.begun_at, first.applied) == (1, None, True, "base", (1,))
    assert is_model(local, 1) and marker(local) == "000001"
    newest = muster.pull(source, local, base=base)
    assert (newest.version, newest.previous) == (3, 1)
    assert is_model(local, 3) and marker(local) == "000003"
    assert not muster.pull(source, local, base=base).is_changed
    log = muster.versions(source, base=base, local=local, verify=True)
    assert log.is_sound and log.verified and log.problems == ()
    assert [each.version for each in log.versions] == [1, 2, 3]
    assert [each.kind for each in log.versions] == ["delta", "full", "delta"]
    assert [each.begins_at for each in log.versions] == [0, 2, 2]
    assert log.versions[0].encoding == "xor" and log.versions[1].encoding is None
    assert log.versions[0].changed_elements == 3 * len(range(1, 24 * 16, 40))
    assert log.versions[0].elements == 3 * 24 * 16 + 24
    assert abs(log.versions[0].published - time.time()) < 600
    assert log.local == muster.LocalVersion(str(local), 3, True, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        log.versions[0].version = 4


def test_files_are_published(tmp_path, base):
    source = tmp_path / "weights"
    first = muster.publish(write(tmp_path / "one", model(1)), source, base=base, encoding="overwrite", group=muster.single_group())
    assert (first.version, first.kind, first.changed_tensors) == (1, "delta", 3)
    second = muster.publish(write(tmp_path / "two", model(2)), source, base=base, full_every=2, version=2)
    assert (second.version, second.kind) == (2, "full") and second.reason
    with pytest.raises(muster.InvalidArgumentError, match="next version is 3"):
        muster.publish(tmp_path / "two", source, base=base, version=9)
    muster.pull(source, tmp_path / "local", base=base)
    assert is_model(tmp_path / "local", 2)


def test_a_publisher_continues_and_deletes_old_versions(tmp_path, base):
    source = tmp_path / "weights"
    for step in range(1, 6):
        with muster.Publisher(source, base=base, keep=1, keep_for=0, group=muster.single_group()) as publisher:
            report = publisher.publish(model(step), full=step == 4)
            assert report.version == step
    log = muster.versions(source, verify=True)
    assert [each.version for each in log.versions] == [4, 5] and log.is_sound
    muster.pull(source, tmp_path / "local")
    assert is_model(tmp_path / "local", 5)


class Module:
    def state_dict(self):
        return model(1)


def test_a_module_has_its_state_dict_published(tmp_path, base):
    with muster.Publisher(tmp_path / "weights", base=base, group=muster.single_group()) as publisher:
        assert publisher.publish(Module()).changed_tensors == 3


def test_invalid_arguments_publish_nothing(tmp_path, base):
    source = tmp_path / "weights"
    with pytest.raises(muster.InvalidArgumentError, match="encoding: unknown value 'add'"):
        muster.Publisher(source, base=base, encoding="add", group=muster.single_group())
    for wrong in (-1, float("nan"), "soon"):
        with pytest.raises(muster.InvalidArgumentError, match="keep_for"):
            muster.Publisher(source, base=base, keep_for=wrong, group=muster.single_group())
    with pytest.raises(muster.Error):
        muster.Publisher(source, base=tmp_path / "none", group=muster.single_group()).publish(model(1))
    publisher = muster.Publisher(source, base=base, group=muster.single_group())
    for wrong in ([1], {"norm": "text"}, {3: model(1)["norm"]}, None):
        with pytest.raises(muster.InvalidArgumentError):
            publisher.publish(wrong)
    with pytest.raises(muster.InvalidArgumentError, match="version"):
        publisher.publish(model(1), version="first")
    assert publisher.publish(model(1)).version == 1  # it remains usable
    publisher.close()
    publisher.close()
    with pytest.raises(muster.InvalidArgumentError, match="closed"):
        publisher.publish(model(1))
    for options in ({"wait": -1}, {"durability": "forever"}, {"version": "x"}, {"lock_timeout": float("nan")}):
        with pytest.raises(muster.InvalidArgumentError):
            muster.pull(source, tmp_path / "local", base=base, **options)
    with pytest.raises(muster.NotFoundError):
        muster.pull(source, tmp_path / "local", base=base, version=2)
    with pytest.raises(muster.NotFoundError):
        muster.versions(tmp_path / "none")
    assert not (tmp_path / "local").exists()


def test_damage_is_refused_and_reported(tmp_path, base):
    source, local = tmp_path / "weights", tmp_path / "local"
    with muster.Publisher(source, base=base, group=muster.single_group()) as publisher:
        for step in (1, 2):
            publisher.publish(model(step))
    muster.pull(source, local, base=base, version=1)
    path = next((source / "weight_v000002").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(muster.CorruptError, match="version 2"):
        muster.pull(source, local, base=base)
    assert is_model(local, 1) and marker(local) == "000001"
    log = muster.versions(source, base=base, verify=True)
    assert not log.is_sound and [bool(each.problems) for each in log.versions] == [False, True]


def test_progress_and_its_exceptions(tmp_path, base):
    source, local = tmp_path / "weights", tmp_path / "local"
    seen = []
    with muster.Publisher(source, base=base, group=muster.single_group()) as publisher:
        publisher.publish(model(1), progress=lambda *facts: seen.append(facts))
    muster.pull(source, local, base=base, progress=lambda *facts: seen.append(facts))
    muster.versions(source, base=base, verify=True, progress=lambda *facts: seen.append(facts))
    assert seen and all(len(facts) == 3 for facts in seen)

    def failing(*_):
        raise LookupError("no")

    with pytest.raises(LookupError):
        muster.pull(source, tmp_path / "other", base=base, progress=failing)
    assert not (tmp_path / "other").exists()
    with pytest.raises(LookupError):
        muster.versions(source, base=base, verify=True, progress=failing)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_publish_together(size, tmp_path, base):
    source = f"""
        random = np.random.default_rng(0)
        def model(step):
            found = {{f"layers.{{layer}}.weight": random.random((24, 16)).astype("f4") for layer in range(3)}}
            found["norm"] = random.random(24).astype("f4")
            for each in range(1, step + 1):
                for name in list(found)[:3]:
                    found[name].flat[each :: 40] += each
            return found
        def mine(step):
            global random
            random = np.random.default_rng(0)
            state = {{}}
            for name, whole in model(step).items():
                rows = -(-whole.shape[0] // size)
                part = whole[rank * rows : (rank + 1) * rows].copy()
                state[name] = whole if name == "norm" else muster.Part(part, whole.shape, (rank * rows, 0))
            return state
        with muster.Publisher({str(tmp_path / "weights")!r}, base={str(base)!r}, group=group) as publisher:
            first = publisher.publish(mine(1))
            wrong = mine(2)
            if rank == size - 1:
                wrong["norm"] = "text"
            refused = failure(lambda: publisher.publish(wrong))
            unequal = mine(2)
            unequal["norm"] = unequal["norm"] + rank
            mismatch = failure(lambda: publisher.publish(unequal))
            second = publisher.publish(mine(2))
        tell([first.version, second.version, first.kind, second.kind, refused, mismatch])
    """
    told = run(source, size)
    for rank, (first, second, kind, _, refused, mismatch) in enumerate(told):
        assert (first, second) == (1, 2) and kind == ("delta" if rank == 0 else None)
        assert refused[0] == "InvalidArgumentError" and 'tensor "norm"' in refused[1]
        assert mismatch[0] == "RankMismatchError" and "norm" in mismatch[1]
    muster.pull(tmp_path / "weights", tmp_path / "local", base=base)
    assert is_model(tmp_path / "local", 2)
    assert muster.versions(tmp_path / "weights", base=base, verify=True).is_sound


def test_ctrl_c_ends_the_wait_for_a_version(tmp_path, base):
    with muster.Publisher(tmp_path / "weights", base=base, group=muster.single_group()) as publisher:
        publisher.publish(model(1))
    source = f"""
        tell("begun")
        try:
            muster.pull({str(tmp_path / "weights")!r}, {str(tmp_path / "local")!r}, base={str(base)!r}, version=2, wait=60)
        except KeyboardInterrupt:
            tell("ended")
    """
    ranks = Ranks(source, 1)
    process = ranks.processes[0]
    assert "begun" in process.stdout.readline()
    time.sleep(0.5)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert "ended" in output and time.monotonic() - begin < 10, errors
    assert not (tmp_path / "local").exists()


def test_the_function_of_sglang(tmp_path, base, monkeypatch):
    source, local = tmp_path / "weights", tmp_path / "local"
    with muster.Publisher(source, base=base, group=muster.single_group()) as publisher:
        for step in (1, 2):
            publisher.publish(model(step))
    calls = []
    monkeypatch.setattr(muster.compat.sglang, "called", lambda *facts: calls.append(facts), raising=False)
    pull = muster.compat.sglang.pull
    assert pull(str(local), str(base), str(source), 0, "muster.compat.sglang.called") is None
    assert calls == [] and is_model(local, 0) and marker(local) == "000000"
    pull(str(local), str(base), str(source), target_version=2, pre_read_hook="muster.compat.sglang.called")
    assert calls == [(str(source), 2)] and is_model(local, 2)
    pull(str(local), str(base), str(source), 1)  # SGLang's function does nothing here
    assert is_model(local, 1) and marker(local) == "000001"


def test_the_import_line_of_sglang(tmp_path, base):
    (tmp_path / "engine.py").write_text(
        "import sys\nfrom sglang.srt.weight_sync.local_checkpoint import pull\npull(*sys.argv[1:4], int(sys.argv[4]))\n"
    )
    with muster.Publisher(tmp_path / "weights", base=base, group=muster.single_group()) as publisher:
        publisher.publish(model(1))
    arguments = [str(tmp_path / "local"), str(base), str(tmp_path / "weights"), "1"]
    subprocess.run([sys.executable, "-m", "muster.compat", str(tmp_path / "engine.py"), *arguments], check=True, timeout=60)
    assert is_model(tmp_path / "local", 1)


def test_the_examples(tmp_path):
    """A trainer of four ranks, and two readers that are started first."""
    program, folder = os.environ["MUSTER_PROGRAM"], str(tmp_path)
    run_python = {"cwd": folder, "stdout": subprocess.PIPE, "text": True}
    subprocess.run([sys.executable, EXAMPLES / "make_model.py", "model"], cwd=folder, check=True, capture_output=True)
    readers = [
        subprocess.Popen([sys.executable, EXAMPLES / "pull_weights.py", "weights", f"local{number}", "model", "5"], **run_python)
        for number in range(2)
    ]
    trainer = subprocess.run([program, "run", "-n", "4", "--", sys.executable, EXAMPLES / "publish_weights.py", "model", "weights", "5"], timeout=60, **run_python)
    assert trainer.returncode == 0
    published = {line.split()[2]: line.split()[-1] for line in trainer.stdout.splitlines()}
    assert list(published) == ["1", "2", "3", "4", "5"]
    for reader in readers:
        output, _ = reader.communicate(timeout=60)
        assert reader.returncode == 0
        assert {line.split()[2].rstrip(":"): line.split()[-1] for line in output.splitlines()} == published
