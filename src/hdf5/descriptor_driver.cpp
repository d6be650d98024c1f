// SPDX-License-Identifier: Apache-2.0
#include "src/hdf5/descriptor_driver.hpp"

#if __has_include(<H5FDdevelop.h>)
#include <H5FDdevelop.h>
#endif
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <type_traits>

namespace muster::hdf5 {
namespace {

struct DescriptorFile {
  H5FD_t base;  // first, as libhdf5 knows only that
  haddr_t allocated_end;
};
static_assert(std::is_standard_layout_v<DescriptorFile>);

/// The one file.
struct Shared {
  int descriptor = -1;
  std::uint64_t bytes = 0;
  bool is_given_out = false;
};

Shared& shared() {
  static Shared the_file;
  return the_file;
}

/// What is behind the file's end reads as zeros, as libhdf5 wants it of structures. Elements must be there.
bool read_through(std::uint64_t offset, std::byte* target, std::size_t bytes, bool are_elements) {
  while (bytes != 0) {
    const ssize_t got = ::pread(shared().descriptor, target, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return false;
    if (got == 0 && are_elements) return false;
    if (got == 0) {
      std::memset(target, 0, bytes);
      return true;
    }
    target += got;
    offset += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

extern "C" {

H5FD_t* driver_open(const char* /*name*/, unsigned flags, hid_t /*access*/, haddr_t maximum) {
  if (shared().descriptor < 0 || shared().is_given_out || (flags & (H5F_ACC_RDWR | H5F_ACC_CREAT)) != 0 || maximum == 0)
    return nullptr;
  auto file = std::make_unique<DescriptorFile>();
  shared().is_given_out = true;
  return &file.release()->base;
}

herr_t driver_close(H5FD_t* file) {
  delete reinterpret_cast<DescriptorFile*>(file);
  return 0;
}

int driver_compare(const H5FD_t* a, const H5FD_t* b) {
  return a == b ? 0 : a < b ? -1 : 1;
}

herr_t driver_query(const H5FD_t* /*file*/, unsigned long* flags) {
  if (flags != nullptr) *flags = 0;
  return 0;
}

haddr_t driver_get_eoa(const H5FD_t* file, H5FD_mem_t /*kind*/) {
  return reinterpret_cast<const DescriptorFile*>(file)->allocated_end;
}

herr_t driver_set_eoa(H5FD_t* file, H5FD_mem_t /*kind*/, haddr_t end) {
  reinterpret_cast<DescriptorFile*>(file)->allocated_end = end;
  return 0;
}

haddr_t driver_get_eof(const H5FD_t* /*file*/, H5FD_mem_t /*kind*/) {
  return shared().bytes;
}

herr_t driver_read(H5FD_t* /*file*/, H5FD_mem_t kind, hid_t /*transfer*/, haddr_t offset, size_t bytes, void* buffer) {
  if (offset > static_cast<haddr_t>(INT64_MAX) || bytes > static_cast<haddr_t>(INT64_MAX) - offset) return -1;
  return read_through(offset, static_cast<std::byte*>(buffer), bytes, kind == H5FD_MEM_DRAW) ? 0 : -1;
}

herr_t driver_write(H5FD_t* /*file*/, H5FD_mem_t /*kind*/, hid_t /*transfer*/, haddr_t /*offset*/, size_t /*bytes*/,
                    const void* /*buffer*/) {
  return -1;
}

}  // extern "C"

}  // namespace

hid_t descriptor_access(int descriptor, std::uint64_t bytes) {
  shared().descriptor = descriptor;
  shared().bytes = bytes;
  // Versions of libhdf5 have other members, so each is set by its name. The class must stay as long as the driver.
  static H5FD_class_t driver;
#ifdef H5FD_CLASS_VERSION
  driver.version = H5FD_CLASS_VERSION;
  // Of the range that is free for tests and private use.
  constexpr int private_value = 500;
  driver.value = private_value;
#endif
  driver.name = "muster-descriptor";
  driver.maxaddr = static_cast<haddr_t>(INT64_MAX);
  driver.fc_degree = H5F_CLOSE_STRONG;
  driver.open = driver_open;
  driver.close = driver_close;
  driver.cmp = driver_compare;
  driver.query = driver_query;
  driver.get_eoa = driver_get_eoa;
  driver.set_eoa = driver_set_eoa;
  driver.get_eof = driver_get_eof;
  driver.read = driver_read;
  driver.write = driver_write;
  for (H5FD_mem_t& kind : driver.fl_map) kind = H5FD_MEM_DEFAULT;
  const hid_t id = H5FDregister(&driver);
  if (id < 0) return -1;
  const hid_t access = H5Pcreate(H5P_FILE_ACCESS);
  if (access < 0 || H5Pset_driver(access, id, nullptr) < 0) return -1;
  return access;
}

}  // namespace muster::hdf5
