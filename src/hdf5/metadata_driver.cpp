// SPDX-License-Identifier: Apache-2.0
#include "src/hdf5/metadata_driver.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#if __has_include(<H5FDdevelop.h>)
#include <H5FDdevelop.h>
#endif

#include "src/hdf5/ids.hpp"
#include "src/hdf5/metadata_plan.hpp"

namespace muster::hdf5 {
namespace {

// What is between superblock and structures is data, whose bytes are not ours: no structure may lie there.
constexpr haddr_t largest_address = (haddr_t{1} << 62) - 1;
constexpr hsize_t structure_alignment = 8;

// libhdf5's own part comes first: it casts between the two.
struct DriverFile {
  H5FD_t base;
  DriverState* state;
  haddr_t end;  // of what has been given out
};
struct AccessInfo {
  DriverState* state;
};

DriverFile& file_of(H5FD_t* file) noexcept {
  return *reinterpret_cast<DriverFile*>(file);
}
const DriverFile& file_of(const H5FD_t* file) noexcept {
  return *reinterpret_cast<const DriverFile*>(file);
}

}  // namespace

// The driver's functions as libhdf5 calls them: nothing may be thrown through it.
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
    if (state.is_abandoned_ || file->end < state.metadata_offset_) return 0;
    try {
      // What was given out is what the file has, written or not.
      state.structures_.resize(file->end - state.metadata_offset_);
    } catch (const std::exception&) {
      return -1;
    }
    return 0;
  }

  static herr_t query(const H5FD_t*, unsigned long* flags) {
    // No feature: blocks that libhdf5 would take in advance would leave gaps.
    if (flags != nullptr) *flags = 0;
    return 0;
  }

  static haddr_t alloc(H5FD_t* base, H5FD_mem_t type, hid_t, hsize_t size) {
    DriverFile& file = file_of(base);
    DriverState& state = *file.state;
    // Very long names are raw data to libhdf5, too: what no place was told for is a structure.
    if (type == H5FD_MEM_DRAW && state.next_bytes_ == size) {
      state.next_bytes_ = 0;
      return state.next_offset_;
    }
    if (file.end <= state.superblock_offset_) {
      // The first thing of a file is its superblock.
      if (type != H5FD_MEM_SUPER || size != superblock_bytes) return HADDR_UNDEF;
      file.end = std::max<haddr_t>(state.metadata_offset_, state.superblock_offset_ + size);
      return state.superblock_offset_;
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
    copy(state.superblock_, state.superblock_offset_);
    copy(state.structures_, state.metadata_offset_);
    return 0;
  }

  static herr_t write(H5FD_t* base, H5FD_mem_t type, hid_t, haddr_t address, size_t size, const void* source) {
    DriverState& state = *file_of(base).state;
    if (state.is_abandoned_) return 0;
    // Elements are the caller's to write.
    if (type == H5FD_MEM_DRAW && address < state.metadata_offset_) return 0;
    const bool is_superblock = address < state.metadata_offset_;
    const std::uint64_t begin = is_superblock ? state.superblock_offset_ : state.metadata_offset_;
    std::vector<std::byte>& target = is_superblock ? state.superblock_ : state.structures_;
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

RegisteredDriver::RegisteredDriver() {
  H5FD_class_t driver{};
#ifdef H5FD_CLASS_VERSION
  // From 1.14 on: version and number come first (numbers from 256 on are for those who have registered none).
  driver.version = H5FD_CLASS_VERSION;
  driver.value = static_cast<H5FD_class_value_t>(377);
#endif
  driver.name = "muster-metadata";
  driver.maxaddr = largest_address;
  driver.fc_degree = H5F_CLOSE_STRONG;
  driver.fapl_size = sizeof(AccessInfo);
  driver.open = &DriverCalls::open;
  driver.close = &DriverCalls::close;
  driver.query = &DriverCalls::query;
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

RegisteredDriver::~RegisteredDriver() {
  H5FDunregister(id_);
}

void RegisteredDriver::use_for(hid_t access_list, DriverState& state) const {
  const AccessInfo info{&state};
  checked(H5Pset_driver(access_list, id_, &info), "H5Pset_driver");
}

}  // namespace muster::hdf5
