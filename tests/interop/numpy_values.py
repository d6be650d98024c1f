#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares muster cat and muster stats with NumPy, on random arrays and random slices: numpy_values.py MUSTER"""
import json
import os
import random
import subprocess
import sys
import tempfile

try:
    import numpy
    from safetensors.numpy import save_file
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)


def muster(*arguments):
    done = subprocess.run([sys.argv[1], *arguments], capture_output=True, timeout=60)
    if done.returncode != 0:
        raise SystemExit(f"FAILED: muster {' '.join(arguments)}: {done.stderr.decode()}")
    return done.stdout


def random_item(extent, chooser):
    if extent and chooser.random() < 0.2:
        return str(chooser.randrange(-extent, extent))
    number = lambda: chooser.choice(["", str(chooser.randint(-extent - 2, extent + 2))])
    text = f"{number()}:{number()}"
    step = chooser.choice(["", "", "1", "2", "3", "-1", "-2", "-7"])
    return text + (f":{step}" if step or chooser.random() < 0.3 else "")


def random_slice(shape, chooser):
    items = [random_item(extent, chooser) for extent in shape]
    cut = chooser.randint(0, len(items))
    if chooser.random() < 0.3:
        items[cut:cut + chooser.randint(0, len(items) - cut)] = ["..."]
    elif cut:
        items = items[:cut]
    return ", ".join(items)


def same(found, wanted):
    return found.shape == wanted.shape and found.dtype == wanted.dtype and found.tobytes() == wanted.tobytes()


def small_floats(work):
    """Compares every code of the floats in ml_dtypes: its value, and the range of all."""
    try:
        import ml_dtypes
    except ImportError:
        print("ml_dtypes is not there: small floats are not compared")
        return
    dtypes = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
              "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn",
              "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn"}
    for dtype, name in dtypes.items():
        bits = 8 if dtype.startswith("F8") else int(dtype[1])
        codes = numpy.arange(1 << bits, dtype="u1")
        array = codes.view(getattr(ml_dtypes, name))
        packed = sum(int(code) << (bits * i) for i, code in enumerate(codes)).to_bytes((len(codes) * bits + 7) // 8, "little")
        header = {"t": {"dtype": dtype, "shape": [len(codes)], "data_offsets": [0, len(packed)]}}
        text = json.dumps(header).encode()
        path = os.path.join(work, f"{dtype}.safetensors")
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text + packed)
        found = [float(value) for value in json.loads(muster("cat", path, "--json", "t"), parse_int=float)["values"]]
        # The printed digits distinguish a value from its neighbours, so the nearest value is exact.
        exact, found = array.astype("f8"), numpy.array(found)
        finite = exact[numpy.isfinite(exact)]
        nearest = [finite[numpy.abs(finite - value).argmin()] if numpy.isfinite(value) else value for value in found]
        same_value = (nearest == exact) & (numpy.signbit(found) == numpy.signbit(exact))
        differ = ~(same_value | (numpy.isnan(found) & numpy.isnan(exact)))
        if differ.any():
            raise SystemExit(f"FAILED: values of {dtype}: {[(hex(code), found[code], exact[code]) for code in codes[differ]]}")
        stats, = json.loads(muster("stats", path, "--json"))["tensors"]
        if (stats["minimum"], stats["maximum"]) != (finite.min(), finite.max()) or stats["mean"] != finite.mean():
            raise SystemExit(f"FAILED: statistics of {dtype}: {stats}")
        if stats["nans"] != int(numpy.isnan(exact).sum()):
            raise SystemExit(f"FAILED: NaNs of {dtype}: {stats}")


def main():
    seed = 20
    chooser = random.Random(seed)
    values = numpy.random.default_rng(seed)
    dtypes = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32",
              "float64"]
    arrays = {}
    for number in range(24):
        dtype = numpy.dtype(dtypes[number % len(dtypes)])
        shape = tuple(chooser.randint(1, 9) for _ in range(chooser.randint(1, 4)))
        if dtype.kind == "f":
            array = (values.standard_normal(shape) * 10.0 ** chooser.randint(-3, 3)).astype(dtype)
        elif dtype.kind == "b":
            array = values.integers(0, 2, shape).astype(dtype)
        else:
            limits = numpy.iinfo(dtype)
            array = values.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
        arrays[f"layers.{number}.{dtype.name}"] = array
    with tempfile.TemporaryDirectory(prefix="muster-numpy-") as work:
        small_floats(work)
        path = os.path.join(work, "arrays.safetensors")
        save_file(arrays, path)
        questions = []
        for name, array in arrays.items():
            for _ in range(12):
                questions.append((name, array, random_slice(array.shape, chooser)))
        wanted = [f"{name}[{text}]" for name, _, text in questions]
        lines = muster("cat", path, "--json", "--", *wanted).decode().splitlines()
        assert len(lines) == len(questions)
        for line, (name, array, text) in zip(lines, questions):
            part = eval(f"array[{text if text else '...'}]", {"array": array})  # noqa: S307: trusted text
            found = json.loads(line)
            if found["shape"] != list(part.shape):
                raise SystemExit(f"FAILED: {name}[{text}]: shape {found['shape']}, not {part.shape}")
            again = numpy.array(found["values"], dtype=array.dtype).reshape(part.shape)
            if not same(again, numpy.array(part)):
                raise SystemExit(f"FAILED: {name}[{text}]: {again} is not {part}")
        for name, array, text in questions[::17]:
            part = numpy.array(eval(f"array[{text if text else '...'}]", {"array": array}))  # noqa: S307
            if muster("cat", path, "--raw", "--", f"{name}[{text}]") != part.tobytes():
                raise SystemExit(f"FAILED: the bytes of {name}[{text}]")
        paths = [path]
        try:
            import h5py
            paths.append(os.path.join(work, "arrays.h5"))
            with h5py.File(paths[-1], "w") as file:
                for number, (name, array) in enumerate(arrays.items()):
                    options = {"chunks": True, "compression": "gzip", "shuffle": True} if number % 2 else {}
                    file.create_dataset(name, data=array, **options)
        except ImportError:
            print("h5py is not there: only safetensors is looked at")
        for name, array, text in questions[5::19] if len(paths) == 2 else []:
            part = numpy.array(eval(f"array[{text if text else '...'}]", {"array": array}))  # noqa: S307
            if muster("cat", paths[1], "--raw", "--", f"{name}[{text}]") != part.tobytes():
                raise SystemExit(f"FAILED: the bytes of {name}[{text}] of an HDF5 file")
        tensors = [tensor for place in paths for tensor in json.loads(muster("stats", place, "--json"))["tensors"]]
        if len(tensors) != len(arrays) * len(paths):
            raise SystemExit("FAILED: not all tensors have statistics")
        for tensor in tensors:
            array = arrays[tensor["name"]]
            exact = array.astype("float64") if array.dtype.kind == "f" else array
            if tensor["minimum"] != exact.min().item() or tensor["maximum"] != exact.max().item():
                raise SystemExit(f"FAILED: the range of {tensor['name']}: {tensor}")
            for key, number in (("mean", array.mean(dtype="longdouble")), ("deviation", array.std(dtype="longdouble"))):
                scale = max(abs(float(exact.min())), abs(float(exact.max())), 1e-300)
                if abs(tensor[key] - float(number)) > 1e-9 * scale:
                    raise SystemExit(f"FAILED: the {key} of {tensor['name']}: {tensor[key]}, not {number}")
            if sum(tensor["histogram"]["counts"]) != array.size:
                raise SystemExit(f"FAILED: the histogram of {tensor['name']}")
    print("all as NumPy has it")


if __name__ == "__main__":
    main()
