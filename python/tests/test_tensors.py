# SPDX-License-Identifier: Apache-2.0
import array
import copy
import gc
import pickle
import subprocess
import sys
import weakref

import numpy as np
import pytest

import muster

BY_BUFFER = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "u2", "I16": "i2", "U32": "u4", "I32": "i4", "U64": "u8", "I64": "i8",
    "F16": "f2", "F32": "f4", "F64": "f8", "C64": "c8",
}
BY_ML_DTYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
                "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}


class OnlyDLPack:
    """An array with only the DLPack interface; `old`: without the version arguments of DLPack 1.0."""

    def __init__(self, array, old=False):
        self.array, self.old = array, old

    def __dlpack__(self, **options):
        if self.old and options:
            raise TypeError("no such argument")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OnlyInterface:
    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self.array = array


class TorchOnDevice:
    """The attributes of a PyTorch tensor on a device of another vendor."""

    requires_grad = False

    class device:
        type = "xpu"

        def __str__(self):
            return "xpu:0"

    device = device()

    def detach(self):
        return self


@pytest.mark.parametrize("name,numpy_name", BY_BUFFER.items())
def test_dtypes_of_numpy_both_ways(name, numpy_name):
    values = np.arange(24).reshape(4, 6).astype(numpy_name)
    for wrap in (lambda a: a, OnlyInterface, OnlyDLPack, lambda a: OnlyDLPack(a, old=True)):
        tensor = muster.as_tensor(wrap(values))
        assert (tensor.dtype, tensor.shape, tensor.nbytes) == (name, (4, 6), values.nbytes)
        assert np.array_equal(tensor.numpy(), values) and tensor.numpy().dtype == values.dtype
        assert np.shares_memory(tensor.numpy(), values)
        assert np.array_equal(np.from_dlpack(tensor), values)


@pytest.mark.parametrize("name,numpy_name", BY_ML_DTYPES.items())
def test_dtypes_of_ml_dtypes_both_ways(name, numpy_name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([0.5, 1, 2, 4], dtype=getattr(ml_dtypes, numpy_name))
    tensor = muster.as_tensor(values)
    assert (tensor.dtype, tensor.shape) == (name, (4,))
    assert tensor.numpy().dtype == values.dtype and tensor.numpy().tobytes() == values.tobytes()


@pytest.mark.parametrize("name", [*BY_BUFFER, *BY_ML_DTYPES, "F4", "U4", "I4", "F6_E2M3", "F6_E3M2"])
def test_every_dtype_by_dlpack(name):
    tensor = muster.empty(name, (3, 4))
    memoryview(tensor.view("U8")).cast("B")[:] = bytes(range(tensor.nbytes))
    back = muster.as_tensor(OnlyDLPack(tensor))
    assert (back.dtype, back.shape, back.is_writable) == (name, (3, 4), True) and bytes(back) == bytes(tensor)


def test_every_dtype_by_tvm_ffi_and_back():
    """Uses a library with its own implementation of DLPack."""
    tvm_ffi = pytest.importorskip("tvm_ffi", reason="there is no apache-tvm-ffi here")
    for name in (*BY_BUFFER, *BY_ML_DTYPES, "F4", "U4", "I4", "F6_E2M3", "F6_E3M2"):
        tensor = muster.empty(name, (3, 4))
        memoryview(tensor.view("U8")).cast("B")[:] = bytes(range(tensor.nbytes))
        theirs = tvm_ffi.from_dlpack(tensor)
        back = muster.as_tensor(theirs)
        assert (back.dtype, back.shape, back.is_writable, tuple(theirs.shape)) == (name, (3, 4), True, (3, 4))
        memoryview(tensor.view("U8")).cast("B")[0] = 77  # it is the same memory
        del tensor, theirs
        assert bytes(back) == bytes([77, *range(1, back.nbytes)])


def test_numpy_never_gets_other_numbers():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name, numpy_name in BY_ML_DTYPES.items():
        values = np.array([0.5, 1, 2, 4], dtype=getattr(ml_dtypes, numpy_name))
        for tensor in (muster.as_tensor(values), muster.as_tensor(values).copy()):
            array = np.asarray(tensor)
            assert array.dtype == values.dtype and array.tobytes() == values.tobytes()
            assert np.array(tensor, dtype="f4").tolist() == [0.5, 1, 2, 4]
        with pytest.raises(BufferError, match="U8"):
            memoryview(muster.as_tensor(values))
    for name in ("F4", "U4", "I4"):
        tensor = muster.as_tensor(np.arange(6, dtype="u1"), name, (3, 4))
        with pytest.raises(muster.InvalidArgumentError, match=name):
            np.asarray(tensor)
        with pytest.raises(BufferError, match="U8"):
            memoryview(tensor)


@pytest.mark.parametrize("name", ["F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2"])
def test_a_reader_of_dlpack_1_0_has_no_such_dtype(name):
    tensor = muster.empty(name, (3, 4))
    with pytest.raises(BufferError, match="DLPack 1.1.*U8"):
        tensor.__dlpack__(max_version=(1, 0))


def test_truth():
    for name in (*BY_BUFFER, *BY_ML_DTYPES):
        scalar = muster.empty(name, ())
        raw = memoryview(scalar.view("U8", (scalar.nbytes,)))
        raw[:] = bytes(scalar.nbytes)
        assert bool(scalar) is (name == "F8_E8M0")  # this dtype has no zero
        raw[0] = 1
        assert bool(scalar)
    for name, minus_zero, is_nan in (("F8_E4M3", 0x80, False), ("F8_E4M3FNUZ", 0x80, True), ("F8_E5M2FNUZ", 0x80, True),
                                     ("F6_E2M3", 0x20, False), ("F6_E3M2", 0xE0, False), ("F4", 0xF8, False)):
        assert bool(muster.as_tensor(bytes([minus_zero]), name, ())) is is_nan, name
        assert muster.as_tensor(bytes([1]), name, ()), name
    assert muster.as_tensor(bytes([0x10]), "F6_E2M3", ())
    assert not muster.as_tensor(np.array(-0.0)) and muster.as_tensor(np.array(np.nan)) and muster.as_tensor(np.array(0.5))
    assert muster.as_tensor(np.array(-1)) and not muster.as_tensor(np.zeros((), "c8")) and muster.as_tensor(np.array(1j, "c8"))
    assert not muster.as_tensor(np.zeros((1, 1), "f4")) and muster.as_tensor(np.ones((1, 1), "f4"))
    # All other shapes behave like a list.
    for shape in ((2,), (2, 0), (2, 2)):
        assert muster.as_tensor(np.zeros(shape, "f4"))
    for shape in ((0,), (0, 2)):
        assert not muster.empty("F32", shape)


def test_elements():
    for name in BY_BUFFER:
        array = np.arange(6).reshape(2, 3).astype(muster.empty(name, ()).numpy().dtype)
        tensor = muster.as_tensor(array)
        assert tensor.tolist() == array.tolist() and type(tensor[1, 2].item()) is type(array[1, 2].item()), name
        assert tensor[0, 1].item() == array[0, 1].item() and tensor[1, 2].tolist() == array[1, 2].item()
        assert muster.as_tensor(array.T).tolist() == array.T.tolist()
    assert muster.as_tensor(np.array([2**64 - 1], "u8")).item() == 2**64 - 1 and muster.as_tensor(np.array([[-(2**63)]])).item() == -(2**63)
    assert muster.as_tensor(np.array([1 + 2j], "c8")).item() == 1 + 2j
    assert muster.empty("F32", (0, 2)).tolist() == [] and muster.empty("F32", (2, 0)).tolist() == [[], []]
    for shape in ((2,), (0,)):
        with pytest.raises(muster.InvalidArgumentError, match="item: .* use tolist"):
            muster.empty("F32", shape).item()


def same(a, b):
    return np.array_equal(np.asarray(a, "f8"), np.asarray(b, "f8"), equal_nan=True) and np.array_equal(np.signbit(a), np.signbit(b))


def test_elements_of_small_floats():
    """All values of the formats of 16 bits and less, as ml_dtypes has them."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name, numpy_name in (*BY_ML_DTYPES.items(), ("F16", "float16")):
        dtype = np.dtype(getattr(ml_dtypes, numpy_name, numpy_name))
        values = np.arange(1 << (8 * dtype.itemsize)).astype(f"u{dtype.itemsize}").view(dtype)
        tensor = muster.as_tensor(values)
        wide = values.astype("f4")
        is_number = ~np.isnan(wide)
        assert tensor.dtype == name
        for got in (tensor.tolist(), tensor.numpy("float32"), tensor.numpy(np.float64)):
            assert np.array_equal(np.isnan(got), ~is_number) and same(np.asarray(got)[is_number], wide[is_number]), name
        assert tensor.numpy(dtype).dtype == dtype and np.shares_memory(tensor.numpy(dtype), values)
    for name, numpy_name, width in (("F4", "float4_e2m1fn", 4), ("F6_E2M3", "float6_e2m3fn", 6), ("F6_E3M2", "float6_e3m2fn", 6)):
        codes = np.arange(1 << width, dtype="u1")
        bits = (codes[:, None] >> np.arange(width) & 1).reshape(-1)
        tensor = muster.as_tensor(np.packbits(bits, bitorder="little"), name, (2, 1 << width - 1))
        wide = codes.view(getattr(ml_dtypes, numpy_name)).astype("f4").reshape(2, -1)
        assert same(tensor.tolist(), wide) and same(tensor.numpy("float32"), wide), name
    assert muster.as_tensor(b"\x10\xf8", "U4", (4,)).tolist() == [0, 1, 8, 15]
    assert muster.as_tensor(b"\x10\xf8", "I4", (4,)).numpy("int32").tolist() == [0, 1, -8, -1]


def test_values_without_ml_dtypes():
    source = """
import sys
sys.modules["ml_dtypes"] = None
import muster
tensor = muster.as_tensor(b"\\x80\\x3f\\x00\\xc0", "BF16", (2,))
assert tensor.tolist() == [1, -2] and tensor[1].item() == -2 and tensor.numpy("float32").tolist() == [1, -2]
try:
    tensor.numpy()
except muster.UnsupportedError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0 and "NumPy has BF16 only with ml_dtypes: install it" in done.stdout, done.stderr


def test_conversions():
    tensor = muster.as_tensor(np.arange(4, dtype="i2").reshape(2, 2))
    for dtype in ("float32", "F32", np.float32, np.dtype("f4")):
        assert tensor.numpy(dtype).dtype == "f4" and tensor.numpy(dtype).tolist() == [[0, 1], [2, 3]]
    assert np.shares_memory(tensor.numpy("I16"), tensor.numpy())
    with pytest.raises(muster.InvalidArgumentError, match="'F4' is not a dtype of NumPy"):
        tensor.numpy("F4")


INDICES = [
    0, -1, (1, 2), (-2, -3, -4), slice(None), slice(1, None), slice(None, None, -1), (slice(None), slice(None, None, 2)), ..., (..., 1), (0, ..., slice(3, 0, -2)),
    (), (slice(5, 9),), (slice(2, 0), 1), (np.int64(1), slice(-2, None)), (0, ..., 1, 2), (slice(None), ..., 0),
]


@pytest.mark.parametrize("index", INDICES)
def test_indexing(index):
    base = np.arange(24, dtype="f4").reshape(2, 3, 4)
    for array in (base, base.transpose(), base[::-1, :, ::2], base[:, :0]):
        tensor = muster.as_tensor(array)
        try:
            wanted = array[index]
        except IndexError:
            with pytest.raises(IndexError):
                tensor[index]
            continue
        found = tensor[index]
        assert found.shape == np.shape(wanted) and found.tolist() == wanted.tolist() and found.is_writable
        assert found.nbytes == 0 or np.shares_memory(found.numpy(), base)


def test_wrong_indices():
    tensor = muster.as_tensor(np.zeros((2, 3), "f4"))
    for index, kind, words in (
        (2, IndexError, "index 2 is out of range for dimension 0 of extent 2"), ((0, -4), IndexError, "index -4 .* dimension 1 of extent 3"),
        ((0, 0, 0), IndexError, "3 indices for a tensor of 2 dimensions"), ((..., ...), IndexError, "at most one Ellipsis"), (1 << 70, IndexError, "cannot fit"),
        (True, TypeError, "not bool"), (None, TypeError, "not NoneType"), ("a", TypeError, "not str"), ([0], TypeError, "not list"), (1.0, TypeError, "not float"),
    ):
        with pytest.raises(kind, match=words):
            tensor[index]
    with pytest.raises(ValueError, match="slice step"):
        tensor[::0]


def test_indices_of_packed_dtypes_keep_whole_bytes():
    tensor = muster.as_tensor(np.arange(9, dtype="u1"), "U4", (3, 6))
    assert tensor[1].tolist() == tensor.tolist()[1] and tensor[1:].tolist() == tensor.tolist()[1:] and tensor[1, 2:4].tolist() == tensor.tolist()[1][2:4]
    for index in ((0, 1), (slice(None), 0), slice(None, None, 2), (0, slice(None, None, -1))):
        with pytest.raises(muster.InvalidArgumentError, match="U4 share bytes"):
            tensor[index]
    odd = muster.as_tensor(np.arange(2, dtype="u1"), "U4", (3,))
    assert odd[2:].tolist() == [1]


def test_iteration():
    tensor = muster.as_tensor(np.arange(6, dtype="i4").reshape(3, 2))
    assert [row.tolist() for row in tensor] == [[0, 1], [2, 3], [4, 5]] and len(tensor) == 3 and list(muster.empty("F32", (0, 2))) == []
    a, b, c = tensor[:, 0]
    assert (a.item(), c.item()) == (0, 4)
    for call in (len, iter):
        with pytest.raises(TypeError, match="without dimensions"):
            call(tensor[0, 0])


def test_copies_and_pickles():
    tensors = [muster.as_tensor(np.arange(6, dtype="f4").reshape(2, 3).T), muster.as_tensor(b"\x01\x02\x03", "F4", (2, 3)), muster.as_tensor(np.array(5)), muster.empty("BF16", (0, 2))]
    for tensor in tensors:
        ways = [copy.copy, copy.deepcopy, *(lambda t, p=p: pickle.loads(pickle.dumps(t, p)) for p in range(pickle.HIGHEST_PROTOCOL + 1))]
        for way in ways:
            made = way(tensor)
            assert (made.dtype, made.shape, made.is_writable, made.is_contiguous) == (tensor.dtype, tensor.shape, True, True)
            assert muster._core.bitwise_equal(made, tensor)
    mine = np.zeros(3, "f4")
    made = copy.deepcopy({"a": [muster.as_tensor(mine)]})["a"][0]
    made.numpy()[:] = 1
    assert mine.tolist() == [0, 0, 0]
    buffers = []
    big = muster.as_tensor(np.arange(1 << 16))
    text = pickle.dumps(big, 5, buffer_callback=buffers.append)
    assert len(text) < 1000 and pickle.loads(text, buffers=buffers).tolist() == list(range(1 << 16))


def test_names_of_dtypes():
    for given, name in (
        *[(numpy_name, name) for numpy_name, name in (("float32", "F32"), ("bool", "BOOL"), ("bool_", "BOOL"), ("uint8", "U8"), ("int64", "I64"), ("complex64", "C64"))],
        *[(np.float32, "F32"), (np.dtype("i2"), "I16"), (np.bool_, "BOOL"), (float, "F64"), (int, "I64"), (bool, "BOOL")],
        *[("bfloat16", "BF16"), ("torch.bfloat16", "BF16"), ("float8_e4m3fn", "F8_E4M3"), ("bf16", "BF16"), ("half", "F16")],
    ):
        assert muster.empty(given, (2,)).dtype == name, given
        assert muster.SharedArena("64KiB").allocate(given, (2,)).dtype == name
        assert muster.empty("U8", (16,)).view(given).dtype == name
        assert muster.as_tensor(bytes(16), given).dtype == name
    for given in ("float", "F12", np.dtype(">f4"), np.dtype("f2,f4"), 3, None, object(), "", np.str_):
        with pytest.raises(muster.InvalidArgumentError):
            muster.empty(given, (2,))


def test_a_star_import_leaves_pythons_names_alone():
    names = {}
    exec("from muster import *", names)
    import builtins

    assert [name for name in names if hasattr(builtins, name) and not name.startswith("__")] == []
    public = [name for name in dir(muster) if not name.startswith("_") and not isinstance(getattr(muster, name), type(muster))]
    assert [name for name in public if name not in names and not hasattr(builtins, name)] == []


def test_packed_dtypes_are_bytes():
    for name in ("F4", "U4", "I4"):
        tensor = muster.as_tensor(np.arange(6, dtype="u1"), name, (3, 4))
        assert (tensor.dtype, tensor.shape, tensor.nbytes, tensor.size) == (name, (3, 4), 6, 12)
        assert tensor.numpy().tolist() == [0, 1, 2, 3, 4, 5] and bytes(tensor) == bytes(range(6))
        assert tensor.view("U8").shape == (3, 2)
    for name in ("F6_E2M3", "F6_E3M2"):
        tensor = muster.as_tensor(np.arange(9, dtype="u1"), name, (3, 4))
        assert (tensor.dtype, tensor.shape, tensor.nbytes, tensor.size) == (name, (3, 4), 9, 12)
        assert tensor.numpy().tolist() == list(range(9)) and bytes(tensor) == bytes(range(9))
        assert tensor.view("U8").shape == (3, 3) and tensor.view("U8").view(name).shape == (3, 4)
        with pytest.raises(muster.InvalidArgumentError, match=name):
            np.asarray(tensor)
        with pytest.raises(muster.InvalidArgumentError, match="bytes"):
            muster.as_tensor(np.arange(8, dtype="u1"), name, (3, 4))


@pytest.mark.parametrize("name,torch_name", [(name, other) for name, other in BY_ML_DTYPES.items() if name.startswith("F8")])
def test_small_floats_of_torch_both_ways(name, torch_name):
    torch = pytest.importorskip("torch")
    if not hasattr(torch, torch_name):
        pytest.skip(f"torch {torch.__version__} has no {torch_name}")
    values = torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(getattr(torch, torch_name))
    tensor = muster.as_tensor(values)
    assert (tensor.dtype, tensor.shape, bytes(tensor)) == (name, (3, 4), bytes(range(12)))
    assert tensor.torch().dtype == values.dtype and muster.empty(values.dtype, (2,)).dtype == name


def test_packed_floats_are_bytes_of_torch():
    torch = pytest.importorskip("torch")
    for name, shape in (("F4", (3, 2)), ("F6_E2M3", (3, 3)), ("F6_E3M2", (3, 3))):
        tensor = muster.as_tensor(bytes(range(3 * shape[1])), name, (3, 4))
        assert tuple(tensor.torch().shape) == shape and tensor.torch().dtype == torch.uint8
        assert tensor.torch().flatten().tolist() == list(range(3 * shape[1]))
    # Rows that do not end at a byte cannot be expressed as a shape of bytes.
    assert tuple(muster.as_tensor(bytes(5), "F6_E2M3", (2, 3)).torch().shape) == (5,)


def test_strides_scalars_and_nothing():
    values = np.arange(24, dtype="f4").reshape(4, 6)
    for each in (values.T, values[::2, ::-1], np.broadcast_to(values[0], (3, 6)), values[:0], np.float32(2) + np.zeros(()), values[1:2]):
        for wrap in (lambda a: a, OnlyInterface):
            tensor = muster.as_tensor(wrap(each))
            assert np.array_equal(tensor.numpy(), each) and np.array_equal(tensor.copy().numpy(), each)
            assert np.array_equal(np.from_dlpack(tensor), each)
    assert muster.as_tensor(values.T).strides == (1, 6)
    assert muster.as_tensor(array.array("d", [1, 2])).dtype == "F64"
    assert muster.as_tensor(b"abc").shape == (3,)


def test_read_only_tensors_remain_read_only():
    values = np.arange(4)
    values.flags.writeable = False
    tensor = muster.as_tensor(values)
    assert not tensor.is_writable and memoryview(tensor).readonly and not tensor.numpy().flags.writeable
    given = np.from_dlpack(tensor)
    assert not np.shares_memory(given, values)  # a copy, because some DLPack readers ignore the read-only flag
    with pytest.raises(BufferError):
        np.from_dlpack(tensor, copy=False)
    assert np.shares_memory(np.from_dlpack(muster.as_tensor(np.arange(4)), copy=False), np.arange(0)) is False
    with pytest.raises(BufferError):
        muster.as_tensor(np.ones(2)).__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="1.1"):
        muster.empty("F8_E4M3", (2,)).__dlpack__(max_version=(1, 0))


def test_memory_lives_as_long_as_anybody_holds_it():
    class Held(np.ndarray):
        pass

    for path in (lambda t: t.numpy(), np.from_dlpack, memoryview, lambda t: t.view("U8")):
        values = np.arange(1000, dtype="i8").view(Held)
        gone = weakref.ref(values)
        held = path(muster.as_tensor(values))
        del values
        gc.collect()
        assert gone() is not None
        assert bytes(memoryview(held).cast("B")[8:9]) == b"\1"
        del held
        gc.collect()
        assert gone() is None


def test_capsules_that_nobody_takes_leave_nothing():
    tensor = muster.empty("F32", (4,))
    count = sys.getrefcount(tensor)
    for version in (None, (1, 0)):
        tensor.__dlpack__(max_version=version)
    gc.collect()
    assert sys.getrefcount(tensor) == count


def test_other_objects_are_refused():
    for value, words in (
        (object(), "neither DLPack nor the buffer protocol"),
        (np.array(["a"]), "no dtype"),
        (np.zeros(2, ">f4"), "order"),
        (np.zeros(2, "f2,f4"), "no dtype"),
        (TorchOnDevice(), "the tensor is on xpu:0: copy it to the host"),
    ):
        with pytest.raises(muster.InvalidArgumentError, match=words):
            muster.as_tensor(value)
    with pytest.raises(ValueError, match="'F12' is not a dtype"):
        muster.empty("F12", (1,))
    with pytest.raises(muster.Error, match="bytes"):
        muster.empty("U8", (3,)).view("F32", (2,))


def test_an_arena_has_writable_tensors():
    arena = muster.SharedArena("1MiB")
    tensor = arena.allocate("bf16", (4, 8))
    assert tensor.dtype == "BF16" and tensor.is_writable and arena.capacity == 1 << 20
    words = memoryview(tensor.view("U16"))
    words[1, 2] = 7
    assert memoryview(tensor.view("U16"))[1, 2] == 7
    with pytest.raises(OSError, match="free"):
        arena.allocate("U8", (1 << 21,))
    for size in ("much", -1, "-1MB", 1.5, 1 << 64, "1e999"):
        with pytest.raises(muster.InvalidArgumentError, match="not a size"):
            muster.SharedArena(size)
