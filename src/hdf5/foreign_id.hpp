// SPDX-License-Identifier: Apache-2.0
#pragma once
// Owners of libhdf5's identifiers.

#include <hdf5.h>

#include <utility>

namespace muster::hdf5 {

/// Closes its identifier with `close`. Not valid where libhdf5 gave none: whoever makes one looks.
template <herr_t (*close)(hid_t)>
class ForeignId {
 public:
  ForeignId() noexcept = default;
  explicit ForeignId(hid_t id) noexcept : id_(id) {}
  ForeignId(ForeignId&& other) noexcept : id_(std::exchange(other.id_, hid_t{-1})) {}
  ForeignId& operator=(ForeignId&& other) noexcept {
    if (this != &other) {
      reset();
      id_ = std::exchange(other.id_, hid_t{-1});
    }
    return *this;
  }
  ~ForeignId() { reset(); }
  explicit operator bool() const noexcept { return id_ >= 0; }
  [[nodiscard]] hid_t get() const noexcept { return id_; }

 private:
  void reset() noexcept {
    if (id_ >= 0) close(id_);
    id_ = -1;
  }
  hid_t id_ = -1;
};

using FileId = ForeignId<H5Fclose>;
using ObjectId = ForeignId<H5Oclose>;
using TypeId = ForeignId<H5Tclose>;
using SpaceId = ForeignId<H5Sclose>;
using PropertiesId = ForeignId<H5Pclose>;
using AttributeId = ForeignId<H5Aclose>;

}  // namespace muster::hdf5
