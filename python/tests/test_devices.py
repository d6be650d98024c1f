# SPDX-License-Identifier: Apache-2.0
"""Tensors on GPUs over the fake driver of tests/device/fake, whose streams progress only if they are waited for."""

import os
import textwrap

import pytest

import ranks

FAKE = os.environ.get("MUSTER_FAKE_CUDA")
pytestmark = pytest.mark.skipif(not FAKE or not os.path.exists(os.path.join(FAKE, "libcuda.so.1")), reason="the build has no fake driver (-Dcuda=enabled -Dtests=true)")

PRELUDE = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
def check(status):
    assert status == 0, status
check(cuda.cuInit(0))
context = ctypes.c_void_p()
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
check(cuda.cuCtxPushCurrent_v2(context))
cuda.fake_cuda_calls.restype = ctypes.c_uint64
def waits():
    return cuda.fake_cuda_calls(b"cuStreamWaitEvent")

# An array of a GPU that a non-blocking stream writes many times, the last time with its values.
class OnDevice:
    def __init__(self, array, read_only=False):
        self.asked = []
        pointer, host, stream = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(array.nbytes)))
        check(cuda.cuStreamCreate(ctypes.byref(stream), 1))
        for left in range(20, -1, -1):
            check(cuda.cuMemHostAlloc(ctypes.byref(host), ctypes.c_size_t(array.nbytes), 0))
            ctypes.memmove(host, (array + left).astype(array.dtype).tobytes(), array.nbytes)
            check(cuda.cuMemcpyHtoDAsync_v2(pointer, host, ctypes.c_size_t(array.nbytes), stream))
        self.stream = stream.value
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "data": (pointer.value, read_only), "version": 3, "stream": self.stream,
        }

class ByDLPack(OnDevice):
    def __init__(self, array):
        super().__init__(array)
        source = type("Source", (), {"__cuda_array_interface__": {**self.__cuda_array_interface__, "stream": None}})()
        self.tensor = muster.as_tensor(source)
        del self.__cuda_array_interface__
    def __dlpack_device__(self):
        return (2, 0)
    def __dlpack__(self, *, stream=None, max_version=None):
        self.asked.append(stream)
        event = ctypes.c_void_p()
        check(cuda.cuEventCreate(ctypes.byref(event), 2))
        check(cuda.cuEventRecord(event, ctypes.c_void_p(self.stream)))
        check(cuda.cuStreamWaitEvent(ctypes.c_void_p(stream), event, 0))
        return self.tensor.__dlpack__(stream=-1, max_version=max_version)
"""


def run(source, size=2):
    path = os.pathsep.join(filter(None, [FAKE, os.environ.get("LD_LIBRARY_PATH")]))
    return ranks.run(PRELUDE + textwrap.dedent(source), size, environment={"LD_LIBRARY_PATH": path})


@pytest.mark.parametrize("kind", ["OnDevice", "ByDLPack"])
@pytest.mark.parametrize("destination", ["host", "device"])
def test_tensors_are_read_after_the_work_of_their_stream(kind, destination):
    told = run(
        f"""
        array = np.arange(30000, dtype="f4").reshape(100, 300) + rank
        mine = {kind}(array)
        with muster.get_tensors_parallel(mine, None, group, destination={destination!r}, root_tensors="copy") as parts:
            found = [[part.device, np.array_equal(part.copy_to_host().numpy(), array + number)] for number, part in enumerate(parts)]
            found.append(parts.report()["route"])
        tell([found, mine.asked])
        """
    )
    device = {"host": "host", "device": "cuda:0"}[destination]
    assert told[0][0] == [[device, True], [device, True], "device"] and told[1][0] == ["device"]
    assert told[0][1] == told[1][1] == ([1] if kind == "ByDLPack" else [])


def test_the_fake_driver_shows_a_stream_that_is_not_waited_for():
    told = run(
        """
        array = np.arange(30000, dtype="f4")
        mine = OnDevice(array)
        mine.__cuda_array_interface__["stream"] = None
        with muster.get_tensors_parallel(mine, None, group) as parts:
            tell([np.array_equal(part.numpy(), array) for part in parts])
        """
    )
    assert told[0] == [False, False]


def test_configs_and_layers():
    told = run(
        """
        def config():
            return {"a": OnDevice(np.arange(5000, dtype="i2") * (rank + 1)), "b": [ByDLPack(np.full((8, 8), 9.0 + rank))], "rank": rank}
        def is_whole(config):
            number = config["rank"]
            return np.array_equal(config["a"].numpy(), np.arange(5000, dtype="i2") * (number + 1)) and config["b"][0][1, 1].item() == 9 + number
        found = []
        with muster.get_configs_parallel(config(), None, group) as configs:
            found += [is_whole(each) for each in configs]
        for part in muster.gather_each((config() for _ in range(2)), None, group):
            found += [is_whole(each) for each in part]
        tell(found)
        """
    )
    assert told == [[True] * 6, []]


@pytest.mark.parametrize("destination", ["host", "device"])
def test_a_root_that_has_no_tensor_on_a_device(destination):
    told = run(
        f"""
        mine = {{"a": OnDevice(np.full(100, rank, "f4"))}} if rank else None
        with muster.get_configs_parallel(mine, None, group, destination={destination!r}) as configs:
            tell([each and [each["a"].device, each["a"].copy_to_host().tolist() == [number] * 100] for number, each in enumerate(configs)])
        """,
        3,
    )
    device = {"host": "host", "device": "cuda:0"}[destination]
    assert told == [[None, [device, True], [device, True]], [], []]


def test_an_array_of_a_device_that_also_has_a_buffer():
    told = run(
        """
        class WithBuffer(bytearray):
            pass
        class WithDLPack(WithBuffer):
            def __dlpack_device__(self):
                return self.there.__dlpack_device__()
            def __dlpack__(self, **options):
                return self.there.__dlpack__(**options)
        found = []
        for mine, there in ((WithBuffer(12), OnDevice(np.arange(3, dtype="f4"))), (WithDLPack(12), ByDLPack(np.arange(3, dtype="f4")))):
            if isinstance(mine, WithDLPack):
                mine.there = there
            else:
                mine.__cuda_array_interface__ = there.__cuda_array_interface__
            tensor = muster.as_tensor(mine)
            found.append([tensor.device, tensor.copy_to_host().tolist(), *failure(lambda: muster.ProcessGroup(group).all_reduce(mine))])
        tell(found)
        """,
        1,
    )[0]
    for device, elements, kind, words in told:
        assert (device, elements, kind) == ("cuda:0", [0.0, 1.0, 2.0], "InvalidArgumentError") and "copy it to the host" in words, told


def test_a_tensor_on_a_device():
    told = run(
        """
        array = np.arange(24, dtype="f4").reshape(4, 6)
        mine = OnDevice(array, read_only=True)
        tensor = muster.as_tensor(mine)
        interface = tensor.__cuda_array_interface__
        stream = ctypes.c_void_p()
        check(cuda.cuStreamCreate(ctypes.byref(stream), 1))
        before = waits()
        tensor.__dlpack__(stream=stream.value, max_version=(1, 1))
        ordered = waits() - before
        tensor.__dlpack__(stream=-1), tensor.__dlpack__(), tensor.__dlpack__(stream=1)
        ordered = [ordered, waits() - before]
        refused = [
            failure(call)
            for call in (
                tensor.numpy, tensor.tolist, tensor.copy, lambda: memoryview(tensor), lambda: tensor.__dlpack__(dl_device=(1, 0)), lambda: tensor.__dlpack__(copy=True),
            )
        ]
        tell([
            [repr(tensor), tensor.device, tensor.is_writable, tensor.__dlpack_device__()],
            [interface[key] for key in ("shape", "typestr", "strides", "version", "stream")], interface["data"] == mine.__cuda_array_interface__["data"],
            tensor[1:3].copy_to_host().tolist() == array[1:3].tolist(), tensor[:, 2:4].copy_to_host().tolist() == array[:, 2:4].tolist(),
            tensor[:, 2:4].__cuda_array_interface__["strides"], ordered, refused,
            hasattr(muster.as_tensor(array), "__cuda_array_interface__"), hasattr(tensor.view("BF16"), "__cuda_array_interface__"),
        ])
        """,
        1,
    )[0]
    assert told[0] == ["muster.Tensor(F32 [4, 6], cuda:0, read-only)", "cuda:0", False, [2, 0]]
    assert told[1:7] == [[[4, 6], "<f4", None, 3, 1], True, True, True, [24, 4], [1, 1]]
    assert [kind for kind, _ in told[7]] == ["InvalidArgumentError"] * 3 + ["BufferError"] * 3, told[7]
    assert told[8:] == [False, False]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("wait", [True, False])
def test_live_exports_read_tensors_of_devices_where_they_are(tmp_path, wait, size):
    told = run(
        f"""
        import glob
        class Device:
            type = "cuda"
        class OfTorch(OnDevice):
            device = Device
            is_whole = True
            def is_contiguous(self):
                return self.is_whole
            def cpu(self):
                assert not self.is_whole
                return np.full((3, 5), 7, "i4")
        state = {{f"rank{{rank}}.w{{i}}": OfTorch(np.arange(1000 * i, dtype="f4") + rank) for i in range(1, 5)}}
        state["copied"] = OfTorch(np.zeros(3, "f4"))
        state["copied"].is_whole = False
        here = {{name: np.full((3, 5), 7, "i4") if name == "copied" else np.arange(1000 * int(name[-1]), dtype="f4") + rank for name in state}}
        hashes = [muster.fingerprint(each, group=group)["hash"] for each in (state, here)]
        work = muster.export_model(state, {str(tmp_path / "out")!r}, "", group, wait={wait})
        if not {wait}:
            state.clear()
            work.get()
        if rank == 0:
            found = {{}}
            for path in glob.glob({str(tmp_path / "out/*.safetensors")!r}):
                found.update(muster.load_safetensors(path))
            tell([hashes[0] == hashes[1], len(found), found["copied"].tolist() == [[7] * 5] * 3, all(np.array_equal(found[f"rank{{r}}.w{{i}}"].numpy(), np.arange(1000 * i, dtype="f4") + r) for i in range(1, 5) for r in range(size))])
        """,
        size,
    )[0]
    assert told == [True, 1 + 4 * size, True, True]


def test_calls_that_take_no_tensors_of_devices():
    told = run(
        """
        mine = OnDevice(np.ones(4, "f4"))
        ranks = muster.ProcessGroup(group)
        found = [
            failure(lambda: ranks.all_reduce(mine)), failure(lambda: ranks.broadcast_config({"a": mine}, 0)),
            failure(lambda: muster.merge_tensor_parallel(mine, muster.merge.sum, group=group)), failure(lambda: muster.get_tensors_async(mine, None, group).result()),
        ]
        ranks.barrier()
        found.append(failure(lambda: muster.get_tensors_parallel(mine if rank else np.ones(4, "f4"), None, group).__enter__()))
        with muster.get_tensors_parallel(mine, None, group) as parts:
            found.append([part.tolist() for part in parts])
        tell(found)
        """
    )
    for rank, each in enumerate(told):
        assert [kind for kind, _ in each[:4]] == ["InvalidArgumentError", "InvalidArgumentError", "UnsupportedError", "UnsupportedError"], each
        assert each[4] is not None and each[5] == ([] if rank else [[1.0] * 4] * 2)
