// SPDX-License-Identifier: Apache-2.0
#pragma once
// A virtual file driver for libhdf5: one open descriptor, read-only, nothing else on this machine. It opens no file, so
// whatever name libhdf5 is led to ask for, there is one file and it is open already.

#include <hdf5.h>

#include <cstdint>

namespace muster::hdf5 {

/// An access list for the one file of `descriptor` of this length. The driver gives it out once: a second open fails.
/// Negative where libhdf5 does not take the driver.
hid_t descriptor_access(int descriptor, std::uint64_t bytes);

}  // namespace muster::hdf5
