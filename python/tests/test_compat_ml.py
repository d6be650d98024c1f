# SPDX-License-Identifier: Apache-2.0
"""muster.compat.ml. The tests whose names begin with "test_defect" are about defects of ml-starter."""

import copy
import importlib.util
import json
import os
import pickle
import socket
import subprocess
import sys
import threading

import pytest

import muster
from muster.compat import ml
from ranks import run

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason=f"{sys.executable} has no torch")

PROGRAM = """
import dataclasses, os, pathlib, sys
import muster
from muster.compat import ml

@dataclasses.dataclass
class Settings:
    scale: float
    words: set

names = []

def prepare():
    names.append(["prepared", os.environ["RANK"], ml._ranks is None])

def work(folder, settings=None, fail=None):
    rank = muster.world().rank
    if fail == rank:
        raise LookupError("shelf 7 is empty")
    if fail == "interrupt" and rank == 1:
        raise KeyboardInterrupt
    if fail == "kill" and rank == 1:
        os.kill(os.getpid(), 9)
    summed = ml._ranks.all_gather_config(rank)
    variables = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    pathlib.Path(folder, f"rank-{rank}").write_text(repr([names, summed, variables, settings and [settings.scale, settings.words]]))

def closure():
    return lambda: None

if __name__ == "__main__":
"""


def program(tmp_path, *lines):
    """Runs a program that ends with these lines, and returns the text of each rank, in order."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM + "".join(f"    {line}\n" for line in lines))
    done = subprocess.run([sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return [eval(each.read_text()) for each in sorted(tmp_path.glob("rank-*"))], done.stdout


def free_port():
    """Returns a port that is free, as is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
                return port
            except OSError:
                continue


# Configs.


def test_resolve_fills_in_the_missing_fields(monkeypatch):
    monkeypatch.delenv("TORCH_DISTRIBUTED_BACKEND", raising=False)
    config = ml.MultiprocessConfig(world_size=3, pipeline_parallelism=3, data_parallel_backend="shm")
    assert config.master_port == config.local_world_size == "???"
    assert ml.MultiprocessConfig.resolve(config) is None
    assert (config.world_size, config.local_world_size, config.rank) == (3, 3, -1)
    assert (config.backend, config.model_parallel_backend, config.data_parallel_backend) == ("gloo", "gloo", "shm")
    assert 1 <= config.master_port <= 65534 and config.launch_method == "forkserver"
    copied = pickle.loads(pickle.dumps(copy.deepcopy(config)))
    assert copied == config


def test_defect_the_port_stays_reserved():
    """ml-starter closes the port before it is used."""
    before = os.listdir("/proc/self/fd")
    config = ml.MultiprocessConfig(world_size=2)
    config.resolve(config)
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("", config.master_port))
    del config
    # Another process may take the port now, so the test does not bind it.
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"world_size": 0}, "world_size 0 is out of range"),
        ({"world_size": "two"}, "world_size: str is not an int"),
        ({"world_size": 2, "local_world_size": 3}, "local_world_size 3 is out of range"),
        ({"world_size": 2, "rank": 2}, "rank 2 of 2"),
        ({"world_size": 3, "model_parallelism": 2}, "3 ranks cannot be split"),
        ({"world_size": 2, "backend": "ucc"}, "unknown backend"),
        ({"world_size": 2, "launch_method": "thread"}, "launch_method: unknown value 'thread'"),
        ({"world_size": 2, "init_method": "udp://"}, "init_method"),
        ({"world_size": 2, "local_world_size": 1}, "master_port must be set"),
        ({"world_size": 2, "master_port": 0}, "master_port 0 is out of range"),
    ],
)
def test_configs_that_cannot_be(fields, words):
    config = ml.MultiprocessConfig(**fields)
    with pytest.raises(muster.InvalidArgumentError, match=words):
        config.resolve(config)


def test_backends(monkeypatch):
    monkeypatch.delenv("TORCH_DISTRIBUTED_BACKEND", raising=False)
    assert ml.default_backend() == ml.get_distributed_backend() == "gloo"
    ml.set_distributed_backend("shm")
    assert os.environ["TORCH_DISTRIBUTED_BACKEND"] == "shm"
    assert ml.default_backend() == ml.get_distributed_backend() == "shm"
    with pytest.raises(muster.InvalidArgumentError, match="ucc"):
        ml.set_distributed_backend("ucc")
    with pytest.raises(muster.InvalidArgumentError, match="backend: int is not a str"):
        ml.set_distributed_backend(7)
    monkeypatch.setenv("TORCH_DISTRIBUTED_BACKEND", "nccl")
    assert ml.get_distributed_backend() == "gloo"


# Launches.


def test_a_function_in_subprocesses(tmp_path):
    told, _ = program(
        tmp_path,
        "config = ml.MultiprocessConfig(world_size=2)",
        "ml.launch_subprocesses(work, config, prepare, 0, '.', settings=Settings(1.5, {'a'}))",
        "print(config.master_port)",
    )
    port = told[0][2][5]
    for rank, each in enumerate(told):
        assert each == [[["prepared", str(rank), True]], [0, 1], [str(rank), str(rank), "2", "2", "127.0.0.1", port], [1.5, {"a"}]]


def test_arguments_of_classes_of_the_program_for_a_function_of_another_module(tmp_path):
    (tmp_path / "other.py").write_text("import pathlib\ndef work(settings):\n    pathlib.Path('rank-0').write_text(repr(type(settings).__name__))\n")
    told, _ = program(tmp_path, "import other", "ml.launch_subprocesses(other.work, ml.MultiprocessConfig(world_size=1), None, 0, Settings(1, set()))")
    assert told == ["Settings"]


def test_defect_a_single_rank_runs_setup(tmp_path):
    """ml-starter calls no setup function for a single rank."""
    told, _ = program(tmp_path, "ml.launch_subprocesses(work, ml.MultiprocessConfig(world_size=1), setup=prepare, folder='.')")
    assert [each[:2] for each in told] == [[[["prepared", "0", True]], [0]]]


def test_defect_rank_offset_starts_only_the_ranks_of_its_host(tmp_path):
    """ml-starter starts world_size processes with each offset."""
    told, _ = program(
        tmp_path,
        "import threading",
        "def launch(offset):",
        f"    config = ml.MultiprocessConfig(world_size=3, local_world_size=2 if offset == 0 else 1, master_port={free_port()})",
        "    ml.launch_subprocesses(work, config, None, offset, '.')",
        "threads = [threading.Thread(target=launch, args=(offset,)) for offset in (0, 2)]",
        "[thread.start() for thread in threads]",
        "[thread.join() for thread in threads]",
    )
    assert [each[1] for each in told] == [[0, 1, 2]] * 3
    assert [each[2][:4] for each in told] == [["0", "0", "3", "2"], ["1", "1", "3", "2"], ["2", "0", "3", "1"]]


FAILURE = (
    "try:",
    "    ml.launch_subprocesses(work, ml.MultiprocessConfig(world_size=2), None, 0, '.', fail={})",
    "except RuntimeError as error:",
    "    print(repr([isinstance(error, muster.Error), error.rank, error.pid > 0, type(error.__cause__).__name__, str(error)]))",
)


@pytest.mark.parametrize(
    "how, kind, words",
    [
        ("1", "PeerLostError", ["LookupError: shelf 7 is empty", "Traceback", "program.py"]),
        ("'kill'", "PeerLostError", ["was killed by SIGKILL"]),
        ("'interrupt'", "CancelledError", ["KeyboardInterrupt"]),
    ],
)
def test_defect_every_failure_of_a_rank_is_an_error(how, kind, words, tmp_path):
    """In ml-starter a killed rank leaves no traceback, and one that receives KeyboardInterrupt has succeeded."""
    _, output = program(tmp_path, *[line.format(how) for line in FAILURE])
    is_error, rank, has_pid, cause, message = eval(output)
    assert (is_error, rank, has_pid, cause) == (True, 1, True, kind)
    assert all(each in message for each in words), message


def test_targets_that_cannot_be():
    config = ml.MultiprocessConfig(world_size=1)
    with pytest.raises(muster.InvalidArgumentError, match="ranks cannot import"):
        ml.launch_subprocesses(lambda: None, config)
    with pytest.raises(muster.InvalidArgumentError, match="ranks cannot import"):
        ml.launch_subprocesses(free_port, config, lambda: None)
    with pytest.raises(muster.InvalidArgumentError, match="cannot be pickled"):
        ml.launch_subprocesses(free_port, config, None, 0, threading.Lock())
    with pytest.raises(muster.InvalidArgumentError, match="1 ranks from 1 are out of range"):
        ml.launch_subprocesses(free_port, config, None, 1)
    with pytest.raises(muster.InvalidArgumentError, match="rank_offset: str is not an int"):
        ml.launch_subprocesses(free_port, config, None, "1")


def test_a_program_without_the_guard_is_one_error(tmp_path):
    path = tmp_path / "unguarded.py"
    path.write_text(PROGRAM.replace('if __name__ == "__main__":', "ml.launch_subprocesses(work, ml.MultiprocessConfig(world_size=1))"))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and '__name__ == "__main__"' in done.stderr and "launch_subprocesses" in done.stderr, done.stderr


# Ranks that something else has started.

START = """
from muster.compat import ml
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name, None)
"""


def test_init_dist_and_its_variables():
    port = free_port()
    told = run(
        START
        + f"""
x = np.arange(2)
before = ml.all_to_all(x, None) is x
ml.init_dist(rank, rank, size, size, "127.0.0.1", {port}, "env://")
again = failure(lambda: ml.init_process_group_from_backend("shm"))
exchanged = ml.all_to_all(x + 10 * rank, None).numpy().tolist()
tell([before, again, exchanged, [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]])
""",
        environment={"MUSTER_JOB": f"ml {port}"},
    )
    for rank, (before, again, exchanged, variables) in enumerate(told):
        assert before and exchanged == [rank, 10 + rank]
        assert again[0] == "InvalidArgumentError" and "already initialized" in again[1]
        assert variables == [str(rank), str(rank), "2", "2", "127.0.0.1", str(port)]


def test_init_process_group_from_backend():
    told = run(
        START
        + """
os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
unknown = failure(lambda: ml.init_process_group_from_backend("ucc"))
ml.init_process_group_from_backend()
tell([unknown, ml.all_to_all(np.arange(2), None).numpy().tolist()])
""",
        environment={"MUSTER_JOB": f"ml from backend {os.getpid()} {threading.get_ident()}"},
    )
    for rank, (unknown, exchanged) in enumerate(told):
        assert unknown[0] == "InvalidArgumentError" and exchanged == [rank, rank]


@pytest.mark.parametrize("method", ["file", "tcp"])
def test_init_and_run(method, tmp_path):
    place = f"file://{tmp_path}/meeting" if method == "file" else f"tcp://127.0.0.1:{free_port()}"
    told = run(
        START
        + f"""
def work(a, *, b):
    seen.append([a, b, ml._ranks.size, ml.all_to_all(np.arange(2), None).numpy().tolist()])
    raise LookupError("from the function")
seen = []
config = ml.MultiprocessConfig(rank=rank, local_rank=rank, world_size=size, local_world_size=size, master_port=29500, init_method={place!r}, model_parallelism=2)
raised = failure(lambda: ml.init_and_run(work, config, 1, b=2))
x = np.zeros(2)
bad = failure(lambda: ml.init_and_run(work, ml.MultiprocessConfig(world_size=size)))
config.model_parallelism, config.init_method = 3, config.init_method + "again" * {method == "file"}
three = failure(lambda: ml.init_and_run(work, config)) if {method == "file"} else None
tell([seen, raised, ml.all_to_all(x, None) is x, bad, three])
"""
    )
    for rank, (seen, raised, is_over, bad, three) in enumerate(told):
        assert seen == [[1, 2, 2, [rank, rank]]] and raised == ["LookupError", "from the function"] and is_over
        assert bad[0] == "InvalidArgumentError" and "init_dist() needs rank" in bad[1]
        assert method == "tcp" or (three[0] == "InvalidArgumentError" and "cannot be split" in three[1])


def test_all_to_all_refuses_bad_arguments_on_all_ranks():
    told = run(
        START
        + """
ranks = muster.ProcessGroup(group)
part = ranks.split([rank])
tell([ml.all_to_all(np.arange(2) + rank, ranks).numpy().tolist(), ml.all_to_all(np.arange(3), part).numpy().tolist(),
      failure(lambda: ml.all_to_all(np.arange(3), ranks)), failure(lambda: ml.all_to_all("x" if rank else np.arange(2), ranks)),
      failure(lambda: ml.all_to_all(np.arange(2), 7))])
"""
    )
    for rank, each in enumerate(told):
        assert each[:2] == [[rank, rank + 1], [0, 1, 2]]
        assert [kind for kind, _ in each[2:]] == ["InvalidArgumentError"] * 3
        assert "str is not a tensor" in each[3][1] and "7 is not a group" in each[4][1]


@needs_torch
def test_all_to_all_is_differentiable_and_torch_distributed_runs_on_muster(tmp_path):
    path = tmp_path / "trained.py"
    path.write_text(
        """
import json, pathlib, sys
import torch
import torch.distributed as distributed
import muster
from muster.compat import ml

def work(folder):
    torch.set_num_threads(1)
    rank = distributed.get_rank()
    x = torch.arange(4.0).reshape(2, 2).t().add(10 * rank).requires_grad_()
    y = ml.all_to_all(x * 2, None)
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1)
    (gradient,) = torch.autograd.grad((y * weights).sum(), x, create_graph=True)
    second = torch.autograd.grad((ml.all_to_all(x * x, None)).sum(), x)[0]
    pair = distributed.new_group([0, 1])
    of_group = ml.all_to_all(torch.tensor([rank, rank], dtype=torch.int32), pair)
    summed = torch.ones(1)
    distributed.all_reduce(summed)
    told = [y.tolist(), gradient.tolist(), second.tolist(), of_group.tolist(), summed.item(), distributed.get_backend(), muster.world().size]
    pathlib.Path(folder, f"rank-{rank}").write_text(json.dumps(told))

if __name__ == "__main__":
    ml.launch_subprocesses(work, ml.MultiprocessConfig(world_size=2), None, 0, sys.argv[1])
"""
    )
    done = subprocess.run([sys.executable, str(path), str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    import torch

    version = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
    for rank, (y, gradient, second, of_group, summed, backend, size) in enumerate(told):
        # x of rank r is [[10 r, 10 r + 2], [10 r + 1, 10 r + 3]]. Row i of it goes to rank i.
        rows = [[2 * (10 * other + rank), 2 * (10 * other + 2 + rank)] for other in range(2)]
        assert y == rows
        # Row i of the gradient comes from rank i, from the row of this rank there.
        weights = [[1.0, 2.0], [3.0, 4.0]][rank]
        assert gradient == [[2 * (other + 1) * each for each in weights] for other in range(2)]
        assert second == [[20.0 * rank, 20.0 * rank + 4], [20.0 * rank + 2, 20.0 * rank + 6]]
        assert of_group == [0, 1] and summed == 2 and size == 2
        assert backend == ("muster" if version >= (2, 14) else "gloo")


@needs_torch
def test_a_rank_selects_its_gpu():
    told = run(
        START
        + """
import types
import torch
chosen = []
torch.cuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, set_device=chosen.append)
torch.distributed = types.SimpleNamespace(is_available=lambda: False)
os.environ.update(LOCAL_RANK="3")
os.environ["MUSTER_STANDALONE"] = "1"
ml.init_process_group_from_backend("shm")
tell(chosen)
""",
        1,
        longest=180,
    )
    assert told == [[1]]
