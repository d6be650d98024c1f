# SPDX-License-Identifier: Apache-2.0
"""Muster reads files of the reference implementation, and the reference reads Muster's. Argument: Muster's peer program.

Exit status: 0, 1, or 77 if safetensors or numpy cannot be imported (skipped).
"""
import json
import os
import subprocess
import sys
import tempfile

import checks
from checks import check

try:
    import numpy
    import safetensors
    import safetensors.numpy
except ImportError as error:
    print(f"SKIPPED: {error}; MUSTER_TEST_PYTHON names a Python that has safetensors and numpy", file=sys.stderr)
    sys.exit(77)
try:
    import safetensors.torch
    import torch
except ImportError:
    torch = None

peer = sys.argv[1]


def run(*arguments):
    return subprocess.run([peer, *arguments], capture_output=True, text=True)


def header_of(path):
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length))


def theirs_to_ours_numpy(folder):
    random = numpy.random.default_rng(1)
    names = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 complex64".split()
    tensors = {}
    for name in names:
        tensors[name] = random.integers(0, 2, (3, 5)).astype(name)
        tensors[name + ".scalar"] = numpy.ones((), name)
        tensors[name + ".empty"] = numpy.zeros((0, 2), name)
    theirs, ours = os.path.join(folder, "n.safetensors"), os.path.join(folder, "n2.safetensors")
    safetensors.numpy.save_file(tensors, theirs, metadata={"key": "value \u00fc"})
    result = run("copy", theirs, ours)
    check(result.returncode == 0, result.stderr)
    read = safetensors.numpy.load_file(ours)
    check(read.keys() == tensors.keys(), "other names")
    for name, tensor in tensors.items():
        check(read[name].dtype == tensor.dtype and read[name].shape == tensor.shape, name)
        check(read[name].tobytes() == tensor.tobytes(), name)
    with safetensors.safe_open(ours, "numpy") as file:
        check(file.metadata() == {"key": "value \u00fc"}, "other metadata")
    with open(theirs, "rb") as a, open(ours, "rb") as b:
        print("numpy:", "the same bytes" if a.read() == b.read() else "the same tensors, in another order")


def theirs_to_ours_torch(folder):
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
              torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
    dtypes += [getattr(torch, name) for name in ["float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "uint16", "uint32", "uint64"] if hasattr(torch, name)]
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(torch.float32).to(dtype) for dtype in dtypes}
    if hasattr(torch, "float4_e2m1fn_x2"):
        tensors["f4"] = torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2)
    theirs, ours = os.path.join(folder, "t.safetensors"), os.path.join(folder, "t2.safetensors")
    safetensors.torch.save_file(tensors, theirs, metadata={"format": "pt"})
    result = run("copy", theirs, ours)
    check(result.returncode == 0, result.stderr)
    read = safetensors.torch.load_file(ours)
    check(read.keys() == tensors.keys(), "other names")
    for name, tensor in tensors.items():
        check(read[name].dtype == tensor.dtype and read[name].shape == tensor.shape, name)
        check(torch.equal(read[name].view(torch.uint8), tensor.view(torch.uint8)) if tensor.dim() else True, name)
    with open(theirs, "rb") as a, open(ours, "rb") as b:
        print("torch:", "the same bytes" if a.read() == b.read() else "the same tensors, in another order")


def both_read_f6_and_fnuz(folder):
    """The reference does not write F6, but reads and checks it."""
    sizes = {"F8_E4M3FNUZ": 12, "F8_E5M2FNUZ": 12, "F6_E2M3": 9, "F6_E3M2": 9}
    for dtype, size in sizes.items():
        for shape, length in [([3, 4], size), ([12], size), ([3, 4], size + 1), ([3, 4], size - 1), ([3, 3], 7)]:
            header = {"t": {"dtype": dtype, "shape": shape, "data_offsets": [0, length]}}
            text = json.dumps(header).encode()
            path, again = os.path.join(folder, "f6.safetensors"), os.path.join(folder, "f6.2.safetensors")
            with open(path, "wb") as file:
                file.write(len(text).to_bytes(8, "little") + text + bytes(range(length)))
            with open(path, "rb") as file:
                try:
                    theirs = safetensors.deserialize(file.read())
                except safetensors.SafetensorError:
                    theirs = None
            result = run("copy", path, again)
            check((theirs is not None) == (result.returncode == 0) == (length == size),
                  f"{header}: {theirs} {result.stderr}")
            if theirs is None:
                check(dtype in result.stderr and '"t"' in result.stderr, result.stderr)
                continue
            with open(again, "rb") as file:
                (_, read), = safetensors.deserialize(file.read())
            check(read["dtype"] == dtype and read["shape"] == shape and bytes(read["data"]) == bytes(range(length)), dtype)
    # The reference has the same order, so Muster writes its tensors with the same bytes.
    memory = bytes(range(8))
    address = numpy.frombuffer(memory, "u1").ctypes.data
    names = {"bool": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1, "float8_e4m3fnuz": 1,
             "float8_e5m2fnuz": 1, "int16": 2}
    specs = {name: safetensors.TensorSpec(dtype=name, shape=[1], data_ptr=address, data_len=size) for name, size in names.items()}
    theirs, ours = os.path.join(folder, "o.safetensors"), os.path.join(folder, "o2.safetensors")
    safetensors.serialize_file(specs, theirs)
    check(run("copy", theirs, ours).returncode == 0, "copy")
    with open(theirs, "rb") as a, open(ours, "rb") as b:
        check(a.read() == b.read(), "other bytes than the reference writes")


def ours_to_theirs(folder):
    path = os.path.join(folder, "ours.safetensors")
    result = run("make", path)
    check(result.returncode == 0, result.stderr)
    header = header_of(path)
    check(header["U4"] == {"dtype": "U8", "shape": [3], "data_offsets": header["U4"]["data_offsets"]}, header["U4"])
    check(header["__metadata__"]["muster.dtype.U4"] == "U4 [2, 3]", header["__metadata__"])
    check(header["F4"]["dtype"] == "F4" and header["F4"]["shape"] == [2, 3], header["F4"])
    # Six elements of six bits do not end at a byte, so the format cannot store them.
    check(header["F6_E2M3"]["dtype"] == "U8" and header["F6_E2M3"]["shape"] == [5], header["F6_E2M3"])
    check(header["__metadata__"]["muster.dtype.F6_E2M3"] == "F6_E2M3 [2, 3]", header["__metadata__"])
    items = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8, "F16": 2, "F32": 4,
             "F64": 8, "C64": 8}
    with safetensors.safe_open(path, "numpy") as file:
        names = set(file.keys())
        check(len(names) == len(header) - 1 and "\u00fc \"quoted\"\n" in names, "other names")
        for name, item in items.items():
            tensor = file.get_tensor(name)
            check(tensor.shape == (2, 3) and tensor.itemsize == item, name)
            expected = bytes(i % 2 if name == "BOOL" else i for i in range(6 * item))
            check(tensor.tobytes() == expected, name)
        check(file.get_tensor("U4").tobytes() == bytes(range(3)), "U4")
        check(file.get_tensor("scalar").shape == () and file.get_tensor("empty").shape == (0, 5), "shapes")
    if torch is not None:
        with safetensors.safe_open(path, "pt") as file:
            for name in ["BF16", "F8_E4M3", "F8_E5M2"]:
                tensor = file.get_tensor(name)
                check(tuple(tensor.shape) == (2, 3), name)
                size = 6 * tensor.element_size()
                check(bytes(tensor.view(torch.uint8).flatten().tolist()) == bytes(range(size)), name)


def both_refuse(folder):
    """Muster refuses the files that the reference refuses."""
    good = {"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    bad = {
        "overlap": {**good, "u": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        "hole": {"t": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}},
        "size": {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        "dtype": {"t": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}},
        "negative": {"t": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        "metadata": {"__metadata__": {"a": 1}, **good},
        "overflow": {"t": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}},
        "good": good,
    }
    for name, header in bad.items():
        path = os.path.join(folder, name + ".safetensors")
        text = json.dumps(header).encode()
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text + bytes(4))
        try:
            with safetensors.safe_open(path, "numpy") as file:
                file.keys()
            theirs = True
        except Exception:
            theirs = False
        ours = run("copy", path, os.path.join(folder, "out.safetensors")).returncode == 0
        check(ours == theirs == (name == "good"), f"{name}: reference {theirs}, ours {ours}")


with tempfile.TemporaryDirectory(prefix="muster-test-") as temporary:
    theirs_to_ours_numpy(temporary)
    if torch is not None:
        theirs_to_ours_torch(temporary)
    else:
        print("torch cannot be imported: its dtypes were NOT tried", file=sys.stderr)
    if hasattr(safetensors, "TensorSpec"):
        both_read_f6_and_fnuz(temporary)
    else:
        print("an old safetensors: F6 and FNUZ were NOT tried", file=sys.stderr)
    ours_to_theirs(temporary)
    both_refuse(temporary)
print(f"{checks.count} checks with safetensors {safetensors.__version__}, numpy {numpy.__version__}"
      + (f", torch {torch.__version__}" if torch is not None else ""))
