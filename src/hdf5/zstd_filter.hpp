// SPDX-License-Identifier: Apache-2.0
#pragma once
// Filter 32015 in libhdf5's table, because a dataset with a mandatory filter needs an entry there. It never runs:
// chunks come compressed.

#include <hdf5.h>

namespace muster::hdf5 {

inline constexpr H5Z_filter_t zstd_filter = 32015;

/// Registers the filter unless the program has one already; what was registered here goes with this. Plugins are not
/// looked for meanwhile. Throws CallFailed.
class RegisteredZstd {
 public:
  RegisteredZstd();
  RegisteredZstd(const RegisteredZstd&) = delete;
  RegisteredZstd& operator=(const RegisteredZstd&) = delete;
  ~RegisteredZstd();

 private:
  unsigned plugins_ = 0;
  bool is_ours_ = false;
};

}  // namespace muster::hdf5
