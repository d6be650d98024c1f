# SPDX-License-Identifier: Apache-2.0
"""Makes valid HDF5 files with h5py, for the long form of the mutation campaign. Argument: a folder."""
import os
import sys

import h5py
import hdf5plugin
import numpy

folder = sys.argv[1]
os.makedirs(folder, exist_ok=True)
for low in ["earliest", "v108", "v110"]:
    with h5py.File(os.path.join(folder, f"h5py_{low}.h5"), "w", libver=(low, "v110")) as file:
        file.attrs["format"] = "pt"
        file.attrs["numbers"] = numpy.arange(3)
        file["config"] = '{"hidden": 64}'
        file["names"] = ["one", "two"]
        file["model/weight"] = numpy.arange(600, dtype="f4").reshape(20, 30)
        file["model/weight"].attrs["note"] = "first"
        for name, options in {
            "gzip": {"compression": "gzip", "shuffle": True, "fletcher32": True},
            "zstd": dict(shuffle=True, **hdf5plugin.Zstd(clevel=1)),
            "lzf": {"compression": "lzf"},
            "plain": {},
        }.items():
            file.create_dataset(f"chunks/{name}", data=numpy.arange(900, dtype="i2").reshape(30, 30), chunks=(8, 8), **options)
        file.create_dataset("chunks/grows", data=numpy.arange(40, dtype=">f8"), chunks=(4,), maxshape=(None,))
        file.create_dataset("chunks/grid", data=numpy.ones((9, 9), "u1"), chunks=(2, 2), maxshape=(None, None))
        file.create_dataset("unwritten", shape=(1000,), dtype="f4", fillvalue=1.5)
        file["bool"] = numpy.array([True, False])
        file["complex"] = numpy.ones(3, "c8")
        file["compound"] = numpy.zeros(2, [("a", "i4"), ("b", "f8")])
        file["scalar"] = numpy.float64(1)
        file["soft"] = h5py.SoftLink("/model")
        file["external"] = h5py.ExternalLink("other.h5", "/x")
        file["again"] = file["model"]
        layout = h5py.VirtualLayout((4,), "f4")
        layout[:] = h5py.VirtualSource("nowhere.h5", "y", (4,))
        if low == "v110":
            file.create_virtual_dataset("virtual", layout)
