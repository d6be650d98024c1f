# SPDX-License-Identifier: Apache-2.0
"""Tensors of PyTorch and CuPy on a real GPU. Ranks share the first GPU. Skipped without a GPU, PyTorch or libmuster-cuda.

tests/device/on_gpu runs these tests together with those of the C++ library.
"""

import ctypes
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time

import pytest

import ranks


def obstacle():
    """Returns why these tests cannot run. Only the ranks start the driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no CUDA driver: {error}"
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no PyTorch"
    found = subprocess.run(
        [sys.executable, "-c", "import torch, muster; x = torch.zeros(1, device='cuda'); muster.as_tensor(x)"], capture_output=True, text=True
    )
    return found.stderr.strip().splitlines()[-1] if found.returncode else None


OBSTACLE = obstacle()
pytestmark = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))

PRELUDE = """
import torch
torch.cuda.set_device(0)
def numbered(number, shape=(300, 1000), dtype=torch.float32):
    return (torch.arange(torch.Size(shape).numel(), device="cuda") % 251 + number).reshape(shape).to(dtype)
def is_numbered(tensor, number, shape=(300, 1000), dtype=torch.float32):
    found = tensor.torch() if isinstance(tensor, muster.Tensor) else tensor
    return bool(torch.equal(found.cuda(), numbered(number, shape, dtype)))
def method(result):
    # The phases that are named after the method of a transfer.
    return [line.strip().split("  ")[0] for line in result.explain().splitlines() if "device: " in line]
def slow():
    # Work of some hundred milliseconds in the current stream.
    torch.cuda._sleep(500_000_000)
"""


def run(source, size=2, environment=(), **options):
    return ranks.run(PRELUDE + ranks.textwrap.dedent(source), size, longest=120, environment=environment, **options)


@pytest.mark.parametrize("size", [2, 4])
def test_tensors_of_all_dtypes(size):
    told = run(
        """
        found = {}
        for destination in ("host", "device"):
            for name in ("float32", "bfloat16", "float16", "float64", "uint8", "int8", "int16", "int32", "int64", "bool", "complex64"):
                dtype = getattr(torch, name)
                mine = numbered(rank, dtype=dtype)
                for own in ("borrow", "copy"):
                    with muster.get_tensors_parallel(mine, None, group, destination=destination, root_tensors=own) as parts:
                        good = all(is_numbered(part, number, dtype=dtype) for number, part in enumerate(parts))
                        places = {part.device for part in parts}
                        if not good or places - {"host" if destination == "host" else "cuda:0"} or len(parts) != (0 if rank else size):
                            found[f"{destination} {name} {own}"] = [good, sorted(places), len(parts)]
                        if rank == 1:
                            found[destination] = parts.explain()
            fp8 = torch.arange(4096, device="cuda").to(torch.uint8).view(torch.float8_e4m3fn)
            with muster.get_tensors_parallel(fp8, None, group, destination=destination) as parts:
                if not all(torch.equal(part.torch().cuda().view(torch.uint8), fp8.view(torch.uint8)) for part in parts):
                    found[f"{destination} fp8"] = False
        tell(found)
        """,
        size,
    )
    assert told[0] == {}, told[0]
    assert "page-locked shared memory" in told[1]["host"] and "CUDA IPC" in told[1]["device"], told[1]


def test_work_of_other_streams_comes_first_and_the_source_is_free_afterwards():
    told = run(
        """
        found = []
        for destination in ("host", "device"):
            for kind in ("current", "other"):
                mine, stream = torch.zeros(1 << 22, device="cuda"), torch.cuda.Stream()
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    slow()
                    mine.fill_(rank + 5.0)
                    tensor = mine if kind == "current" else muster.as_tensor(mine)
                    if kind == "current":
                        result = muster.get_tensors_parallel(mine, None, group, destination=destination, root_tensors="copy").__enter__()
                if kind == "other":
                    result = muster.get_tensors_parallel(tensor, None, group, destination=destination, root_tensors="copy").__enter__()
                with torch.cuda.stream(stream):
                    mine.zero_()
                torch.cuda.synchronize()
                group.barrier()
                found.append([bool((part.torch() == number + 5.0).all()) for number, part in enumerate(result)])
                result.__exit__(None, None, None)
        tell(found)
        """
    )
    assert told[0] == [[True, True]] * 4, told[0]


def test_configs_and_layers():
    told = run(
        """
        def config(layer=0):
            number = rank * 10 + layer
            return {"weight": numbered(number, (1000, 3000), torch.bfloat16), "bias": [numbered(number, (7,)), numbered(number, (0, 4))], "rank": number}
        def is_whole(config):
            number = config["rank"]
            return is_numbered(config["weight"], number, (1000, 3000), torch.bfloat16) and is_numbered(config["bias"][0], number, (7,)) and config["bias"][1].shape == (0, 4)
        found = []
        for destination in ("host", "device"):
            for _ in range(3):
                with muster.get_configs_parallel(config(), None, group, destination=destination) as configs:
                    found += [is_whole(each) for each in configs]
        for part in muster.gather_each((config(layer) for layer in range(4)), None, group):
            found += [is_whole(each) for each in part]
        # Layers that are larger than a part.
        seen = 0
        for part in muster.gather_each((config(layer) for layer in range(3)), None, group, memory_budget="2MiB"):
            seen += 1
        tell([found, seen])
        """,
        4,
    )
    assert told[0][0] == [True] * (4 * 6 + 4 * 4) and told[0][1] > 3, told[0]
    assert all(each[0] == [] for each in told[1:])


def test_dlpack_and_the_array_interface_share_memory():
    told = run(
        """
        source = numbered(3, (40, 50))
        tensor = muster.as_tensor(source)
        class Interface:
            def __init__(self, interface):
                self.__cuda_array_interface__ = interface
        from_interface = muster.as_tensor(Interface(source.__cuda_array_interface__))
        back, again = torch.from_dlpack(tensor), torch.as_tensor(Interface(tensor.__cuda_array_interface__), device="cuda")
        own = tensor.torch()
        found = [tensor.device, tensor.__cuda_array_interface__["data"][0] == source.data_ptr(), from_interface.__cuda_array_interface__["data"][0] == source.data_ptr()]
        found += [each.data_ptr() == source.data_ptr() and torch.equal(each, source) for each in (back, again, own)]
        # A view with strides, and a transposed one.
        rows = muster.as_tensor(source[:, 10:20])
        found += [torch.equal(rows.torch(), source[:, 10:20]), np.array_equal(rows.copy_to_host().numpy(), source[:, 10:20].cpu().numpy())]
        refused = failure(lambda: muster.as_tensor(source.T).copy_to_host())
        # A reader with a stream of its own sees what the default stream writes first.
        stream = torch.cuda.Stream()
        big = torch.zeros(1 << 24, device="cuda")
        there = muster.as_tensor(big)
        torch.cuda.synchronize()
        slow()
        big.fill_(7)
        with torch.cuda.stream(stream):
            seen = torch.from_dlpack(there).clone()
        torch.cuda.synchronize()
        found.append(bool((seen == 7).all()))
        tell([found, refused, failure(lambda: tensor.numpy()), failure(lambda: muster.as_tensor(torch.zeros(3, device="cuda", requires_grad=True)))])
        """,
        1,
    )[0]
    assert told[0] == ["cuda:0"] + [True] * 8, told
    assert told[1][0] == "InvalidArgumentError" and "contiguous" in told[1][1], told
    assert told[2][0] == "InvalidArgumentError" and told[3] is None, told


def test_results_on_the_gpu_are_used_by_pytorch_and_their_memory_is_reused_alone():
    told = run(
        """
        mine = numbered(rank, (1 << 22,))
        free = []
        for turn in range(30):
            with muster.get_tensors_parallel(mine, None, group, destination="device", root_tensors="copy") as parts:
                if rank == 0:
                    total = sum(part.torch() for part in parts)
                    assert torch.equal(total, sum(numbered(number, (1 << 22,)) for number in range(size))), turn
                    del total
            group.barrier()
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info()[0])
        tell([free[5], free[-1]])
        """,
        3,
    )
    assert told[0][1] >= told[0][0] - (64 << 20), told


@pytest.mark.parametrize("allocator", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_memory_that_cannot_be_exported_is_staged(allocator):
    told = run(
        """
        found = []
        for destination in ("host", "device"):
            mine = numbered(rank)
            with muster.get_tensors_parallel(mine, None, group, destination=destination) as parts:
                found.append([[is_numbered(part, number) for number, part in enumerate(parts)], method(parts)])
        tell([found, failure(lambda: os.environ.update(MUSTER_DEVICE_TRANSPORT="ipc") or muster.get_tensors_parallel(mine, None, group, destination="device").__enter__())])
        """,
        environment={"PYTORCH_CUDA_ALLOC_CONF": allocator, "PYTORCH_ALLOC_CONF": allocator},
    )
    assert [each[0] for each in told[0][0]] == [[True, True], [True, True]], told
    assert all("page-locked shared memory" in each[1][0] for each in told[1][0]), told
    assert told[0][1] == told[1][1] and told[0][1][0] == "UnsupportedError" and "memory pools cannot be exported" in told[0][1][1], told


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="no CuPy")
@pytest.mark.parametrize("pool", ["MemoryPool", "MemoryAsyncPool"])
def test_cupy(pool):
    told = run(
        f"""
        import cupy
        cupy.cuda.set_allocator(cupy.cuda.{pool}().malloc)
        found = []
        for destination in ("host", "device"):
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                mine = cupy.arange(100000, dtype=cupy.float32) + rank
                with muster.get_tensors_parallel(mine, None, group, destination=destination, root_tensors="copy") as parts:
                    found += [bool((cupy.asarray(cupy.from_dlpack(part) if destination == "device" else part.numpy()) == cupy.arange(100000, dtype=cupy.float32) + number).all()) for number, part in enumerate(parts)]
                    ways = method(parts)
        tell([found, ways])
        """
    )
    assert told[0][0] == [True] * 4, told
    assert ("CUDA IPC" if pool == "MemoryPool" else "page-locked") in told[1][1][0], told


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="no JAX")
def test_jax():
    told = run(
        """
        import jax
        import jax.numpy as jnp
        found = []
        for destination in ("host", "device"):
            for dtype in (jnp.float32, jnp.bfloat16):
                mine = (jnp.arange(3000) % 100 + rank).astype(dtype).reshape(30, 100)
                with muster.get_tensors_parallel(mine, None, group, destination=destination, root_tensors="copy") as parts:
                    for number, part in enumerate(parts):
                        got = jnp.from_dlpack(part) if destination == "device" else jnp.asarray(part.numpy())
                        found.append(bool((got == (jnp.arange(3000) % 100 + number).astype(dtype).reshape(30, 100)).all()))
        tell([mine.devices().pop().platform, found])
        """,
        environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )
    if told[0][0] != "gpu":
        pytest.skip("this JAX uses no GPU")
    assert told[0][1] == [True] * 8, told


@pytest.mark.skipif(importlib.util.find_spec("numba") is None or importlib.util.find_spec("numba_cuda") is None, reason="no numba-cuda")
def test_numba():
    told = run(
        """
        from numba import cuda
        found = []
        for destination in ("host", "device"):
            mine = cuda.to_device(np.arange(3000, dtype="f4") + rank)
            with muster.get_tensors_parallel(mine, None, group, destination=destination, root_tensors="copy") as parts:
                for number, part in enumerate(parts):
                    got = cuda.as_cuda_array(part).copy_to_host() if destination == "device" else part.numpy()
                    found.append(bool((got == np.arange(3000, dtype="f4") + number).all()))
        tell(found)
        """
    )
    assert told[0] == [True] * 4, told


def test_a_root_that_has_no_tensor_on_the_gpu():
    told = ranks.run(
        """
        if rank:
            import torch
            mine = {"w": torch.full((1000,), float(rank), device="cuda")}
        found = []
        for destination in ("host", "device"):
            with muster.get_configs_parallel(mine if rank else None, None, group, destination=destination) as configs:
                found += [each and [each["w"].device, each["w"].copy_to_host().tolist() == [number] * 1000] for number, each in enumerate(configs)]
        tell(found)
        """,
        3,
        longest=120,
    )
    assert told == [[None, ["host", True], ["host", True], None, ["cuda:0", True], ["cuda:0", True]], [], []]


def test_a_gpu_that_does_not_finish_is_named_at_the_deadline():
    told = run(
        """
        mine = numbered(rank)
        with muster.get_tensors_parallel(mine, None, group):
            pass
        tensor = muster.as_tensor(mine)
        if rank == 1:
            for _ in range(10):
                torch.cuda._sleep(2_000_000_000)
        begun = time.monotonic()
        found = failure(lambda: muster.get_tensors_parallel(tensor, None, group, timeout=2).__enter__())
        tell([found, time.monotonic() - begun])
        """
    )
    for found, seconds in told:
        assert found[0] == "TimeoutError" and "rank 1" in found[1] and "cuda:0" in found[1] and seconds < 6, told


def test_a_cuda_graph_of_pytorch():
    told = run(
        """
        x = torch.zeros(100000, device="cuda")
        other, expected = muster.as_tensor(numbered(9)), numbered(9).cpu().numpy()
        graph = torch.cuda.CUDAGraph()
        found = []
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = x + 1
            # Another tensor, while this thread captures. The first exchange allocates memory.
            with muster.get_tensors_parallel(other, None, group) as parts:
                found += [np.array_equal(part.numpy(), expected) for part in parts]
        for turn in range(3):
            x.fill_(rank + turn)
            graph.replay()
            for destination in ("host", "device"):
                with muster.get_tensors_parallel(y, None, group, destination=destination) as parts:
                    found += [bool((part.torch() == number + turn + 1).all()) for number, part in enumerate(parts)]
        tell(found)
        """
    )
    assert told[0] == [True] * 14, told


def test_live_exports(tmp_path):
    for wait in (True, False):
        out = tmp_path / f"out{wait}"
        told = run(
            f"""
            state = {{f"rank{{rank}}.w{{i}}": numbered(i + rank, (500 + i, 700), torch.bfloat16) for i in range(6)}}
            state["same"] = numbered(4, (5000,))
            work = muster.export_model(state, {str(out)!r}, "", group, wait={wait})
            if not {wait}:
                for each in state.values():
                    each.zero_()
                work.get()
            tell("done")
            """,
            3,
        )
        assert told == ["done"] * 3
        found = run(
            f"""
            from safetensors.torch import load_file
            import glob
            whole = {{}}
            for path in glob.glob({str(out)!r} + "/*.safetensors"):
                whole.update(load_file(path))
            tell([len(whole), all(is_numbered(whole[f"rank{{r}}.w{{i}}"], i + r, (500 + i, 700), torch.bfloat16) for i in range(6) for r in range(3)), is_numbered(whole["same"], 4, (5000,))])
            """,
            1,
        )[0]
        assert found == [19, True, True]


def test_live_exports_of_dtensors(tmp_path):
    told = run(
        f"""
        import glob
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["GPU_TEST_PORT"])
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cuda", (size,))
        state = {{
            "rows": DTensor.from_local(numbered(rank, (100, 50)), mesh, [Shard(0)], run_check=False),
            "columns": DTensor.from_local(numbered(rank, (100, 50)), mesh, [Shard(1)], run_check=False),
            "turned": numbered(3, (40, 60)).T,
        }}
        muster.export_model(state, {str(tmp_path / "out")!r})
        if rank == 0:
            found = {{}}
            for path in glob.glob({str(tmp_path / "out/*.safetensors")!r}):
                found.update(muster.load_safetensors(path))
            parts = [numbered(number, (100, 50)).cpu().numpy() for number in range(size)]
            tell([np.array_equal(found["rows"].numpy(), np.concatenate(parts)), np.array_equal(found["columns"].numpy(), np.concatenate(parts, 1)), np.array_equal(found["turned"].numpy(), numbered(3, (40, 60)).T.cpu().numpy())])
        dist.destroy_process_group()
        """,
        environment={"GPU_TEST_PORT": str(22000 + os.getpid() % 20000)},
    )[0]
    assert told == [True, True, True]


def test_too_little_memory_on_the_gpu_is_an_error_of_all_ranks():
    told = run(
        """
        mine = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
        with muster.get_tensors_parallel(mine[:1000], None, group, destination="device"):
            pass
        # The parts of one tensor, many times: more than the GPU has.
        many = [mine] * (torch.cuda.get_device_properties(0).total_memory // mine.numel() + 1)
        found = [failure(lambda: muster.get_configs_parallel(many if rank else None, None, group, destination="device").__enter__())]
        with muster.get_tensors_parallel(mine, None, group) as parts:
            found.append([int(part.torch().sum()) for part in parts])
        tell(found)
        """,
        3,
    )
    for rank, each in enumerate(told):
        assert each[0] and each[0][0] == "OutOfSpaceError" and "are free" in each[0][1] and "gather to the host" in each[0][1], told
        assert each[1] == ([] if rank else [0, 0, 0])


def test_a_context_that_is_lost_is_an_error_of_all_ranks():
    told = run(
        """
        mine = numbered(rank)
        with muster.get_tensors_parallel(mine, None, group) as parts:
            pass
        tensor = muster.as_tensor(mine)
        if rank == 1:
            try:
                torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].sum().item()
            except Exception:
                pass
        found = [failure(lambda: muster.get_tensors_parallel(tensor, None, group).__enter__())]
        with muster.get_tensors_parallel(np.full(9, rank), None, group) as parts:
            found.append([part.tolist() for part in parts])
        print("told " + json.dumps(found), flush=True)
        os._exit(0)
        """,
        3,
    )
    for rank, each in enumerate(told):
        assert each[0][0] == "IoError" and "rank 1" in each[0][1] and "CUDA_ERROR" in each[0][1], told
        assert len(each[1]) == (0 if rank else 3)


@pytest.mark.parametrize("destination", ["host", "device"])
def test_a_killed_sender_is_named(destination):
    many = ranks.Ranks(
        PRELUDE
        + ranks.textwrap.dedent(
            f"""
            mine = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
            def gather():
                with muster.get_tensors_parallel(mine, None, group, destination={destination!r}):
                    pass
            gather()
            group.barrier()
            tell("ready")
            def endless():
                while True:
                    gather()
            begun = time.monotonic()
            told = failure(endless)
            tell(told)
            x = numbered(1)
            tell(is_numbered(muster.as_tensor(x).copy_to_host(), 1))
            """
        ),
        3,
    )
    try:
        for process in many.processes:
            assert process.stdout.readline() == 'told "ready"\n', process.stderr.read()
        time.sleep(0.5)
        many.processes[1].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        for rank in (0, 2):
            line = many.processes[rank].stdout.readline()
            assert "PeerLostError" in line and "rank 1" in line, line + many.processes[rank].stderr.read()
            assert many.processes[rank].stdout.readline() == "told true\n"
        assert time.monotonic() - killed < 10
    finally:
        for process in many.processes:
            process.kill()
            process.communicate()


def test_calls_that_take_no_tensors_on_gpus_name_the_remedy():
    told = run(
        """
        mine = numbered(rank)
        together = muster.ProcessGroup(group)
        found = [
            failure(lambda: together.all_reduce(mine)),
            failure(lambda: together.broadcast_config({"a": mine}, 0)),
            failure(lambda: muster.merge_tensor_parallel(mine, muster.merge.sum, group=group)),
            failure(lambda: muster.get_tensors_async(mine, None, group).result()),
        ]
        into = [torch.empty_like(mine) for _ in range(size)] if rank == 0 else None
        found.append(failure(lambda: muster.get_tensors_parallel(mine, None, group, into=into).__enter__()))
        together.barrier()
        tell(found)
        """
    )
    for each in told:
        assert [kind for kind, _ in each[:4]] == ["InvalidArgumentError", "InvalidArgumentError", "UnsupportedError", "UnsupportedError"], each
        assert all(".cpu()" in words or "host" in words for _, words in each[:4]), each


def test_forced_nccl_on_one_gpu_names_the_remedy():
    told = run(
        """
        mine = numbered(rank)
        found = failure(lambda: muster.get_tensors_parallel(mine, None, group, destination="device").__enter__())
        with muster.get_tensors_parallel(mine, None, group) as parts:
            tell([found, [is_numbered(part, number) for number, part in enumerate(parts)]])
        """,
        environment={"MUSTER_DEVICE_TRANSPORT": "nccl"},
    )
    for rank, each in enumerate(told):
        assert each[0][0] == "UnsupportedError" and "a different device for each rank" in each[0][1], told
        assert each[1] == ([] if rank else [True, True])


def test_tensors_on_a_gpu_in_the_interfaces_of_other_systems():
    told = run(
        """
        import torch.distributed as dist
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["GPU_TEST_PORT"])
        dist.init_process_group("gloo")
        import muster.modelopt
        import muster.compat.torchgfn as torchgfn
        found = {}
        with muster.modelopt.get_tensors_parallel(numbered(rank), [0, 1]) as parts:
            found["modelopt"] = [[str(part.device), is_numbered(part, number)] for number, part in enumerate(parts)]
        with muster.modelopt.get_configs_parallel({"w": numbered(rank)}, [0, 1]) as configs:
            found["configs"] = [is_numbered(each["w"], number) for number, each in enumerate(configs)]
        gathered = torchgfn.gather_distributed_data(numbered(rank, (4, 5)))
        found["torchgfn"] = None if gathered is None else [str(gathered.device), is_numbered(gathered[:4], 0, (4, 5)), is_numbered(gathered[4:], 1, (4, 5))]
        found["group"] = []
        with muster.get_tensors_parallel(numbered(rank), None, dist.group.WORLD, destination="device") as parts:
            found["group"] = [is_numbered(part, number) for number, part in enumerate(parts)]
        dist.destroy_process_group()
        tell(found)
        """,
        environment={"GPU_TEST_PORT": str(20000 + os.getpid() % 20000)},
    )
    assert told[0]["configs"] == [True, True] and told[0]["group"] == [True, True], told
    assert [good for _, good in told[0]["modelopt"]] == [True, True], told
    assert told[0]["torchgfn"] == ["cuda:0", True, True], told


def test_the_backend_of_torch_distributed_beside_nccl():
    told = run(
        """
        import torch.distributed as dist
        import muster.torch
        try:
            muster.torch.register()
        except ImportError as error:
            tell(str(error))
            sys.exit()
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["GPU_TEST_PORT"])
        dist.init_process_group("cpu:muster_cpu,cuda:nccl", device_id=torch.device("cuda", 0))
        here, there = torch.ones(5), torch.ones(5, device="cuda")
        dist.all_reduce(here), dist.all_reduce(there)
        dist.barrier()
        tell([here.tolist(), there.tolist()])
        dist.destroy_process_group()
        """,
        1,
        environment={"GPU_TEST_PORT": str(21000 + os.getpid() % 20000)},
    )[0]
    if isinstance(told, str):
        pytest.skip(told)
    assert told == [[1.0] * 5, [1.0] * 5]


def test_doctor_reports_the_driver_and_nccl():
    program = os.environ.get("MUSTER_PROGRAM")
    if not program:
        pytest.skip("MUSTER_PROGRAM does not name the program")
    found = subprocess.run([program, "doctor"], capture_output=True, text=True, timeout=60)
    print(found.stdout)
    assert re.search(r"cuda:0 .+ GiB", found.stdout), found.stdout + found.stderr
