// SPDX-License-Identifier: Apache-2.0
#pragma once
// A virtual file driver for libhdf5 that lives in memory: structures are kept, elements are not. Where raw data lies is
// told beforehand instead of asked afterwards, so data can be in the file before libhdf5 has heard of it.

#include <hdf5.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace muster::hdf5 {

/// What a file in the making is: used by one file at a time.
class DriverState {
 public:
  DriverState(std::uint64_t superblock_offset, std::uint64_t metadata_offset)
      : superblock_offset_(superblock_offset), metadata_offset_(metadata_offset) {}

  /// The next raw data of this size that libhdf5 makes room for lies there, before metadata_offset. At least a byte.
  void place_next(std::uint64_t offset, std::uint64_t bytes) noexcept {
    next_offset_ = offset;
    next_bytes_ = bytes;
  }
  /// Whether what was told has been used.
  [[nodiscard]] bool is_placed() const noexcept { return next_bytes_ == 0; }

  /// The file will not be used: whatever libhdf5 still does on the way to closing it succeeds and is forgotten.
  void abandon() noexcept { is_abandoned_ = true; }

  [[nodiscard]] const std::vector<std::byte>& superblock() const noexcept { return superblock_; }
  /// From metadata_offset to the end of the file.
  [[nodiscard]] const std::vector<std::byte>& structures() const noexcept { return structures_; }

 private:
  friend struct DriverCalls;
  std::uint64_t superblock_offset_;
  std::uint64_t metadata_offset_;
  std::uint64_t next_offset_ = 0;
  std::uint64_t next_bytes_ = 0;
  bool is_abandoned_ = false;
  std::vector<std::byte> superblock_;
  std::vector<std::byte> structures_;
};

/// The driver's id in libhdf5 for as long as this lives. Throws CallFailed (ids.hpp).
class RegisteredDriver {
 public:
  RegisteredDriver();
  RegisteredDriver(const RegisteredDriver&) = delete;
  RegisteredDriver& operator=(const RegisteredDriver&) = delete;
  ~RegisteredDriver();
  /// Lets files that are made with this access list live in `state`, which must live longer.
  void use_for(hid_t access_list, DriverState& state) const;

 private:
  hid_t id_;
};

}  // namespace muster::hdf5
