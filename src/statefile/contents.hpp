// SPDX-License-Identifier: Apache-2.0
#pragma once
// What an opened state file knows, shared by reading (state_file.cpp) and checking (check.cpp).

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "muster/state_file.hpp"
#include "src/os/file.hpp"
#include "src/statefile/catalogue.hpp"
#include "src/statefile/user_block.hpp"

namespace muster {

struct StateFile::Contents {
  os::ReadableFile file;
  statefile::UserBlock block;
  statefile::Catalogue catalogue;
  statefile::NameIndex index;
  std::shared_ptr<const os::MappedFile> mapping;  ///< null where the file is read
};

namespace statefile {

/// The block of an open file, checked; the catalogue, checked against it. Throw as StateFile::open.
UserBlock read_user_block(const os::ReadableFile& file);
Catalogue read_catalogue(const os::ReadableFile& file, const UserBlock& block);

/// Fills `target` with the bytes of a tensor's elements from `offset` on, by up to `workers` threads; the range is
/// inside. Throws as StateFile::tensor.
void read_elements(const os::ReadableFile& file, const Catalogue& catalogue, std::size_t index, std::uint64_t offset,
                   std::span<std::byte> target, std::size_t workers);

}  // namespace statefile
}  // namespace muster
