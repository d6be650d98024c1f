// SPDX-License-Identifier: Apache-2.0
#include "src/hdf5/zstd_filter.hpp"

#include "src/hdf5/ids.hpp"

namespace muster::hdf5 {
namespace {

// 0 is how a filter says that it failed.
size_t refuse(unsigned, size_t, const unsigned*, size_t, size_t*, void**) {
  return 0;
}

}  // namespace

RegisteredZstd::RegisteredZstd() {
  checked(H5PLget_loading_state(&plugins_), "H5PLget_loading_state");
  checked(H5PLset_loading_state(0), "H5PLset_loading_state");
  if (H5Zfilter_avail(zstd_filter) > 0) return;
  H5Z_class2_t filter{};
  filter.version = H5Z_CLASS_T_VERS;
  filter.id = zstd_filter;
  filter.encoder_present = 1;
  filter.decoder_present = 1;
  filter.name = "zstd";
  filter.filter = &refuse;
  if (H5Zregister(&filter) < 0) {
    H5PLset_loading_state(plugins_);
    throw CallFailed("H5Zregister");
  }
  is_ours_ = true;
}

RegisteredZstd::~RegisteredZstd() {
  if (is_ours_) H5Zunregister(zstd_filter);
  H5PLset_loading_state(plugins_);
}

}  // namespace muster::hdf5
