# SPDX-License-Identifier: Apache-2.0
"""Writes hdf5_2.h5 into the directory of this file. Needs h5py with HDF5 2, whose newest file formats it uses."""
import pathlib

import h5py
import numpy

path = pathlib.Path(__file__).with_name("hdf5_2.h5")
with h5py.File(path, "w", libver="latest") as file:
    values = numpy.arange(24, dtype="f4").reshape(4, 6)
    file["plain"] = values
    file.create_dataset("chunked", data=values, chunks=(2, 3))
    for name, options in {"one": {"chunks": (4, 6)}, "many": {"chunks": (2, 3)},
                          "growing": {"chunks": (2, 3), "maxshape": (None, 6)},
                          "grid": {"chunks": (2, 3), "maxshape": (None, None)}}.items():
        file.create_dataset(f"compressed/{name}", data=values, compression="gzip", **options)
    file["complex"] = numpy.arange(4).astype("c8")
