# SPDX-License-Identifier: Apache-2.0
"""Programs whose import lines name the reference systems, run by `python -m muster.compat` and install()."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import muster
import muster.compat

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason=f"{sys.executable} has no torch")


def python(source, *arguments, folder=None, longest=120, **variables):
    """Runs a program, with a folder on its path, and returns the value of the expression that it prints."""
    path = os.pathsep.join([*([str(folder)] if folder else []), *[each for each in sys.path if each]])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    command = [sys.executable, *arguments] if source is None else [sys.executable, "-c", textwrap.dedent(source), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=longest)
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


ORIGINAL = {
    "gfn/__init__.py": "from .uses import held\n",
    "gfn/uses.py": """
        from gfn.utils.distributed import send as held
        backend = "torch"
    """,
    "gfn/utils/__init__.py": "",
    "gfn/utils/distributed.py": """
        default_backend = "torch"
        other = "kept"
        def send():
            pass
        class DistributedContext:
            pass
    """,
}


def test_modules_that_are_not_installed_are_created():
    assert python(
        """
        import muster.compat
        muster.compat.install()
        muster.compat.install()
        import gfn.utils.distributed as d
        import muster.compat.torchgfn, muster.compat.ml, muster.modelopt
        from gfn.utils.distributed import average_models
        from ml.utils.torch_distributed import launch_subprocesses
        import modelopt.torch.export.distribute as m
        import gfn, gfn.utils
        missing = []
        for name in ("gfn.samplers", "gfn.utils.common", "modelopt.onnx"):
            try:
                __import__(name)
            except ModuleNotFoundError as error:
                missing.append(error.name)
        print([d is muster.compat.torchgfn, average_models is d.average_models, launch_subprocesses is muster.compat.ml.launch_subprocesses,
               m is muster.modelopt, gfn.utils.distributed is d, d.__name__, missing])
        """
    ) == [True, True, True, True, True, "muster.compat.torchgfn", ["gfn.samplers", "gfn.utils.common", "modelopt.onnx"]]


@pytest.mark.parametrize("is_before", [True, False])
def test_only_the_names_of_an_installed_module_are_replaced(is_before, tmp_path):
    write(tmp_path, ORIGINAL)
    lines = ["import muster.compat; muster.compat.install('gfn.utils.distributed')", "import gfn"]
    source = """
        import gfn.utils.distributed as d
        import muster.compat.torchgfn as ours
        print([d is ours, d.__name__, d.send is ours.send, gfn.held is ours.send, gfn.uses.held is ours.send,
               d.DistributedContext is ours.DistributedContext, d.other, d.default_backend, gfn.uses.backend, hasattr(d, "recv")])
    """
    told = python("\n".join(lines if is_before else lines[::-1]) + textwrap.dedent(source), folder=tmp_path)
    assert told == [False, "gfn.utils.distributed", True, True, True, True, "kept", "mpi", "torch", False]


def test_an_installed_project_is_not_extended(tmp_path):
    write(tmp_path, {"gfn/__init__.py": "", "ml/utils/__init__.py": "", "ml/__init__.py": ""})
    assert python(
        """
        import muster.compat
        muster.compat.install()
        missing = []
        for name in ("gfn.utils.distributed", "ml.utils.torch_distributed"):
            try:
                __import__(name)
            except ModuleNotFoundError as error:
                missing.append(error.name)
        print(missing)
        """,
        folder=tmp_path,
    ) == ["gfn.utils", "ml.utils.torch_distributed"]


@pytest.mark.parametrize("value, found", [("1", [True, True]), ("gfn.utils.distributed", [True, False]), ("", [False, False])])
def test_the_variable(value, found):
    assert python(
        """
        import muster, importlib.util
        def has(name):
            try:
                return importlib.util.find_spec(name) is not None
            except ModuleNotFoundError:
                return False
        print([has("gfn.utils.distributed"), has("ml.utils.torch_distributed")])
        """,
        MUSTER_COMPAT=value,
    ) == found


def test_an_unknown_module_is_an_error():
    with pytest.raises(muster.InvalidArgumentError, match="unknown module 'gfn.utils' .expected one of gfn.utils.distributed, "):
        muster.compat.install("gfn.utils")


def test_torch_distributed_is_replaced_only_by_name(tmp_path):
    """With a PyTorch and a module of Muster that the test makes."""
    write(
        tmp_path,
        {
            "torch/__init__.py": "from . import distributed, user\n",
            "torch/distributed.py": "def get_rank():\n    return 'original'\ndef kept():\n    pass\n",
            "torch/user.py": "from .distributed import get_rank\n",
        },
    )
    told = python(
        """
        import sys, types
        import muster.compat
        ours = types.ModuleType("muster.compat.torch_distributed")
        ours.__all__, ours.get_rank, ours.reduce_op = ["get_rank", "reduce_op"], lambda: "ours", "old"
        sys.modules[ours.__name__] = ours
        muster.compat.install()
        import torch.distributed as dist
        seen = [dist.get_rank()]
        muster.compat.install("torch.distributed")
        print(seen + [dist.get_rank(), dist.reduce_op, hasattr(dist, "kept"), sys.modules["torch"].user.get_rank()])
        """,
        folder=tmp_path,
    )
    assert told == ["original", "ours", "old", True, "original"]


@needs_torch
def test_other_names_of_vllm_are_kept(tmp_path):
    module = "class GroupCoordinator:\n    pass\ndef get_tp_group():\n    return GroupCoordinator\n"
    write(tmp_path, {"vllm/__init__.py": "", "vllm/distributed/__init__.py": "", "vllm/distributed/parallel_state.py": module})
    assert python(
        """
        import muster.compat
        muster.compat.install()
        from vllm.distributed.parallel_state import GroupCoordinator, get_tp_group
        import muster.compat.vllm
        print([GroupCoordinator is muster.compat.vllm.GroupCoordinator, get_tp_group() is GroupCoordinator])
        """,
        folder=tmp_path,
    ) == [True, True]


@needs_torch
def test_pytorch_keeps_its_references_to_torch_distributed():
    assert python(
        """
        import muster.compat
        muster.compat.install("torch.distributed")
        import torch.distributed as dist
        import muster.compat.torch_distributed as ours
        print([all(getattr(dist, name) is getattr(ours, name) for name in ours.__all__), dist.distributed_c10d.get_rank is ours.get_rank, dist.is_initialized()])
        """
    ) == [True, False, False]


@needs_torch
def test_the_world_does_not_take_our_torch_distributed_for_that_of_pytorch():
    assert python(
        """
        import muster, muster.compat
        muster.compat.install("torch.distributed")
        import torch.distributed as dist
        dist.init_process_group("shm")
        print([dist.is_initialized(), muster.world().size])
        """
    ) == [True, 1]


def test_the_command_runs_a_script_with_its_arguments(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys, gfn.utils.distributed as d\nprint([d.get_rank(), __name__, sys.argv[1:], os.environ['MUSTER_COMPAT'], sys.path[0]])\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-m", "muster.compat", str(script), "a", "b"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert eval(done.stdout) == [0, "__main__", ["a", "b"], "1", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "muster.compat"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr == "usage: python -m muster.compat SCRIPT [ARGUMENT ...]\n"


def test_ranks_of_a_launched_function_have_the_modules(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import pathlib, sys
            from ml.utils.torch_distributed import MultiprocessConfig, launch_subprocesses

            def work(folder):
                import gfn.utils.distributed as d
                pathlib.Path(folder, f"rank-{d.get_rank()}").write_text(str(d.get_world_size()))

            if __name__ == "__main__":
                launch_subprocesses(work, MultiprocessConfig(world_size=2), None, 0, sys.argv[1])
            """
        )
    )
    done = subprocess.run([sys.executable, "-m", "muster.compat", str(script), str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["2", "2"]


@needs_torch
def test_the_example_of_torchgfn(capfd):
    muster.launch([sys.executable, "-m", "muster.compat", str(EXAMPLES / "torchgfn_replay.py")], 4, environment={"OMP_NUM_THREADS": "1"}, timeout=240)
    output, errors = capfd.readouterr()
    loss = re.fullmatch(r"loss (\S+), equal weights on 2 ranks: True\n", output)
    assert loss and float(loss[1]) < 0.1, output
    assert "INFO:muster.compat.torchgfn:learn (200 times): " in errors and "INFO:muster.compat.torchgfn:learn, rank 0: mean " in errors


@needs_torch
def test_the_example_of_ml_starter():
    done = subprocess.run([sys.executable, "-m", "muster.compat", str(EXAMPLES / "ml_launch.py")], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    loss = re.fullmatch(r"loss (\S+) on 2 ranks\n", done.stdout)
    assert loss and float(loss[1]) < 0.1, done.stdout
