#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures other libraries that write and read tensors: safetensors, h5py, torch.save, and h5py with the zstd filter of
hdf5plugin. Prints JSON lines.

  state_file_peer.py speed DIRECTORY MEBIBYTES ROUNDS
  state_file_peer.py zstd DIRECTORY ROUNDS          for the raw files that state_file_bench zstd left there

Nothing is synced. The files are in the page cache. The time of reading ends when every byte has been summed.
"""

import json
import os
import random
import sys
import time
from pathlib import Path


def say(series, seconds, size, **more):
    print(json.dumps({"series": series, "seconds": seconds, "bytes": size, **more}), flush=True)


def missing(what, error):
    print(json.dumps({"missing": what, "why": str(error)}), flush=True)


def timed(work):
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def added_up(arrays):
    import numpy

    return sum(int(array.reshape(-1).view(numpy.uint64).sum(dtype=numpy.uint64)) for array in arrays) % 2**64


def peers(tensors):
    """Yields name, file suffix, write function, and a function that reads numpy arrays of 16-bit words."""
    import numpy
    import torch

    words = {name: tensor.view(torch.int16).numpy() for name, tensor in tensors.items()}

    def with_safetensors():
        from safetensors.torch import load_file, save_file

        return (lambda path: save_file(tensors, path),
                lambda path: [tensor.view(torch.int16).numpy() for tensor in load_file(path).values()])

    def with_h5py():
        import h5py

        def write(path):
            with h5py.File(path, "w") as file:
                for name, array in words.items():
                    file.create_dataset(name, data=array)

        def read(path):
            with h5py.File(path, "r") as file:
                return [file[name][()] for name in words]

        return write, read

    def with_torch():
        return (lambda path: torch.save(tensors, path),
                lambda path: [tensor.view(torch.int16).numpy() for tensor in torch.load(path, mmap=False).values()])

    for name, make in (("safetensors", with_safetensors), ("h5py", with_h5py), ("torch", with_torch)):
        try:
            yield (name, *make())
        except ImportError as error:
            missing(name, error)


def speed(directory, mebibytes, rounds):
    import torch

    columns = max((mebibytes << 20) // 12 // 4096 // 2, 1)
    torch.manual_seed(1)
    tensors = {f"model.layers.{i}.mlp.weight": (torch.randn(4096, columns) * 0.02).to(torch.bfloat16)
               for i in range(12)}
    size = sum(tensor.numel() * 2 for tensor in tensors.values())
    expected = added_up(tensor.view(torch.int16).numpy() for tensor in tensors.values())
    found = list(peers(tensors))
    for turn in range(rounds):
        random.shuffle(found)
        for name, write, read in found:
            path = directory / f"peer-{name}"
            path.unlink(missing_ok=True)
            os.sync()
            time.sleep(0.5)
            say(f"{name}: write", timed(lambda: write(path))[0], size)
            for again in (False, True):  # the first round is not counted
                begin = time.perf_counter()
                arrays = read(path)
                access = time.perf_counter() - begin
                total = added_up(arrays)
                whole = time.perf_counter() - begin
                if total != expected:
                    sys.exit(f"{name} does not read what it wrote")
                del arrays
                if again:
                    say(f"{name}: read", access, size)
                    say(f"{name}: read and added up", whole, size)
            path.unlink()


def zstd(directory, rounds):
    import h5py
    import hdf5plugin
    import numpy

    # One core, like the library.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for name, dtype in (("BF16", numpy.uint16), ("F32", numpy.float32), ("F8_E4M3", numpy.uint8)):
        array = numpy.fromfile(directory / f"{name}.raw", dtype).reshape(-1, 1024)
        path = directory / "peer-zstd.h5"
        rows = max((1 << 20) // (1024 * array.itemsize), 1)
        for _ in range(rounds):
            path.unlink(missing_ok=True)
            before = time.process_time()

            def write():
                with h5py.File(path, "w") as file:
                    file.create_dataset("t", data=array, chunks=(min(rows, len(array)), 1024), shuffle=True,
                                        **hdf5plugin.Zstd(clevel=1))

            seconds, _ = timed(write)
            processor = time.process_time() - before
            with h5py.File(path, "r") as file:
                stored = file["t"].id.get_storage_size()
                reading, back = timed(lambda: file["t"][()])
            if not (back.view(numpy.uint8) == array.view(numpy.uint8)).all():
                sys.exit("h5py does not read what it wrote")
            say(f"hdf5plugin: zstd {name}, one core", seconds, array.nbytes, stored=stored, processor=processor)
            say(f"hdf5plugin: unzstd {name}, one core", reading, array.nbytes)
        path.unlink()


def main():
    what, directory = sys.argv[1], Path(sys.argv[2])
    try:
        if what == "speed":
            speed(directory, int(sys.argv[3]), int(sys.argv[4]))
        else:
            zstd(directory, int(sys.argv[3]))
    except ImportError as error:
        missing(what, error)


if __name__ == "__main__":
    main()
