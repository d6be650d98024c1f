// SPDX-License-Identifier: Apache-2.0
#pragma once
// A virtual file driver for libhdf5: one open descriptor, read-only, nothing else on this machine. It opens no file, so
// whatever name libhdf5 is led to ask for, there is one file and it is open already.

#include <hdf5.h>

#include <cstdint>
#include <optional>

namespace muster::hdf5 {

/// Where libhdf5 would have read raw data.
struct RawPlace {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

/// An access list for the one file of `descriptor` of this length. The driver gives it out once: a second open fails.
/// Negative where libhdf5 does not take the driver. Metadata are read in blocks that are kept, as lists of a thousand
/// datasets have their headers side by side.
hid_t descriptor_access(int descriptor, std::uint64_t bytes);

/// While this lives, raw data are not read: the driver notes where they are, and says that it has read them. That
/// is how libhdf5 tells a chunk's place by one look-up; its own question for it walks the whole index.
class RawProbe {
 public:
  RawProbe() noexcept;
  RawProbe(const RawProbe&) = delete;
  RawProbe& operator=(const RawProbe&) = delete;
  ~RawProbe();
  /// The one place that was asked for since the last call; none where it was none or several.
  std::optional<RawPlace> take() noexcept;
};

}  // namespace muster::hdf5
