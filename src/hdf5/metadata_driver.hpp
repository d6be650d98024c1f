// SPDX-License-Identifier: Apache-2.0
#pragma once
// A virtual file driver for libhdf5 in memory: structures are kept, elements are discarded. The offset of raw data is
// set in advance, so data can be in the file before libhdf5 knows of it.

#include <hdf5.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <new>
#include <vector>
#if __has_include(<H5FDdevelop.h>)
#include <H5FDdevelop.h>
#endif

#include "src/hdf5/ids.hpp"
#include "src/hdf5/metadata_plan.hpp"

namespace muster::hdf5 {

/// The state of a file that is being made; one file uses it at a time.
struct DriverState {
  std::uint64_t superblock_offset = 0;
  std::uint64_t metadata_offset = 0;
  /// The offset, below metadata_offset, of the next raw data of this size that libhdf5 allocates. 0: it has been used.
  std::uint64_t next_offset = 0;
  std::uint64_t next_bytes = 0;
  /// The file is discarded: everything that libhdf5 still does until it is closed succeeds and has no effect.
  bool is_abandoned = false;
  std::vector<std::byte> superblock = {};
  std::vector<std::byte> structures = {};  ///< from metadata_offset to the end of the file
};

// The range between superblock and structures has the caller's data: no structure may be allocated there.
inline constexpr haddr_t largest_address = (haddr_t{1} << 62) - 1;
inline constexpr hsize_t structure_alignment = 8;

// libhdf5's own part comes first, because it casts between the two.
struct DriverFile {
  H5FD_t base;
  DriverState* state;
  haddr_t end;  // end of the allocated range
};
struct AccessInfo {
  DriverState* state;
};

inline DriverFile& file_of(H5FD_t* file) noexcept {
  return *reinterpret_cast<DriverFile*>(file);
}
inline const DriverFile& file_of(const H5FD_t* file) noexcept {
  return *reinterpret_cast<const DriverFile*>(file);
}

// The driver's functions as libhdf5 calls them. No exception may leave them.
struct DriverCalls {
  static H5FD_t* open(const char*, unsigned, hid_t access_list, haddr_t) {
    const auto* info = static_cast<const AccessInfo*>(H5Pget_driver_info(access_list));
    if (info == nullptr) return nullptr;
    auto* file = new (std::nothrow) DriverFile{};
    if (file == nullptr) return nullptr;
    file->state = info->state;
    return &file->base;
  }

  static herr_t close(H5FD_t* base) {
    const std::unique_ptr<DriverFile> file(&file_of(base));
    DriverState& state = *file->state;
    if (state.is_abandoned || file->end < state.metadata_offset) return 0;
    try {
      // The file has all allocated bytes, written or not.
      state.structures.resize(file->end - state.metadata_offset);
    } catch (const std::exception&) {
      return -1;
    }
    return 0;
  }

  static haddr_t alloc(H5FD_t* base, H5FD_mem_t type, hid_t, hsize_t size) {
    DriverFile& file = file_of(base);
    DriverState& state = *file.state;
    // Very long names are raw data to libhdf5, too: raw data without an offset set in advance is a structure.
    if (type == H5FD_MEM_DRAW && state.next_bytes == size) {
      state.next_bytes = 0;
      return state.next_offset;
    }
    if (file.end <= state.superblock_offset) {
      // The superblock is the first allocation of a file.
      if (type != H5FD_MEM_SUPER || size != superblock_bytes) return HADDR_UNDEF;
      file.end = std::max<haddr_t>(state.metadata_offset, state.superblock_offset + size);
      return state.superblock_offset;
    }
    const haddr_t begin = (file.end + structure_alignment - 1) / structure_alignment * structure_alignment;
    if (size > largest_address - begin) return HADDR_UNDEF;
    file.end = begin + size;
    return begin;
  }

  static haddr_t get_eoa(const H5FD_t* file, H5FD_mem_t) { return file_of(file).end; }

  static herr_t set_eoa(H5FD_t* file, H5FD_mem_t, haddr_t end) {
    file_of(file).end = end;
    return 0;
  }

  static haddr_t get_eof(const H5FD_t* file, H5FD_mem_t) { return file_of(file).end; }

  static herr_t read(H5FD_t* base, H5FD_mem_t, hid_t, haddr_t address, size_t size, void* target) {
    const DriverState& state = *file_of(base).state;
    std::memset(target, 0, size);
    const auto copy = [&](const std::vector<std::byte>& from, std::uint64_t begin) {
      if (address < begin || address - begin >= from.size()) return;
      const std::size_t at = address - begin;
      std::memcpy(target, from.data() + at, std::min(size, from.size() - at));
    };
    copy(state.superblock, state.superblock_offset);
    copy(state.structures, state.metadata_offset);
    return 0;
  }

  static herr_t write(H5FD_t* base, H5FD_mem_t type, hid_t, haddr_t address, size_t size, const void* source) {
    DriverState& state = *file_of(base).state;
    if (state.is_abandoned) return 0;
    // The caller writes the elements.
    if (type == H5FD_MEM_DRAW && address < state.metadata_offset) return 0;
    const bool is_superblock = address < state.metadata_offset;
    const std::uint64_t begin = is_superblock ? state.superblock_offset : state.metadata_offset;
    std::vector<std::byte>& target = is_superblock ? state.superblock : state.structures;
    if (address < begin || (is_superblock && address - begin + size > superblock_bytes)) return -1;
    try {
      if (target.size() < address - begin + size) target.resize(address - begin + size);
    } catch (const std::exception&) {
      return -1;
    }
    std::memcpy(target.data() + (address - begin), source, size);
    return 0;
  }
};

/// Registers the driver with libhdf5 during its lifetime. Throws CallFailed (ids.hpp).
class RegisteredDriver {
 public:
  RegisteredDriver() {
    H5FD_class_t driver{};
#ifdef H5FD_CLASS_VERSION
    // From 1.14 on, version and number come first (numbers from 256 on are for drivers without a registered number).
    driver.version = H5FD_CLASS_VERSION;
    driver.value = static_cast<H5FD_class_value_t>(377);
#endif
    driver.name = "muster-metadata";
    driver.maxaddr = largest_address;
    driver.fc_degree = H5F_CLOSE_STRONG;
    driver.fapl_size = sizeof(AccessInfo);
    driver.open = &DriverCalls::open;
    driver.close = &DriverCalls::close;
    driver.alloc = &DriverCalls::alloc;
    driver.get_eoa = &DriverCalls::get_eoa;
    driver.set_eoa = &DriverCalls::set_eoa;
    driver.get_eof = &DriverCalls::get_eof;
    driver.read = &DriverCalls::read;
    driver.write = &DriverCalls::write;
    const H5FD_mem_t free_lists[H5FD_MEM_NTYPES] = H5FD_FLMAP_DICHOTOMY;
    std::copy(std::begin(free_lists), std::end(free_lists), std::begin(driver.fl_map));
    id_ = checked(H5FDregister(&driver), "H5FDregister");
  }
  RegisteredDriver& operator=(RegisteredDriver&&) = delete;
  ~RegisteredDriver() {
    H5FDunregister(id_);
  }

  /// Stores files that are made with this access list in `state`, which must outlive them.
  void use_for(hid_t access_list, DriverState& state) const {
    const AccessInfo info{&state};
    checked(H5Pset_driver(access_list, id_, &info), "H5Pset_driver");
  }

 private:
  hid_t id_;
};

}  // namespace muster::hdf5
