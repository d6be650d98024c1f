// SPDX-License-Identifier: Apache-2.0
// muster-hdf5-reader lists one HDF5 file or reads elements of it. It is an internal program. The file is descriptor 3,
// and descriptor 4 is a socket to the parent. Arguments: the limit of CPU time in seconds, and the task ("list" or
// "read").
//
// 1. It drops what it inherited.
// 2. It initialises libhdf5, which reads the environment and allocates what it needs later.
// 3. It enters the sandbox. From here on it can use only the file, the socket and memory.
// 4. It lists the file (listing.hpp), then reads the texts (text.cpp); or it answers requests for elements
//    (elements.cpp).

#include <hdf5.h>
#include <sys/stat.h>
#include <unistd.h>
#if __has_include(<H5FDdevelop.h>)
#include <H5FDdevelop.h>
#endif

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>

#include "src/checkpoint/thirdparty/hdf5/listing.hpp"
#include "src/checkpoint/thirdparty/hdf5/reader.hpp"
#include "src/hdf5/ids.hpp"

namespace {

using namespace muster::hdf5;

// A virtual file driver for libhdf5 with access to one open descriptor, read-only. It never opens a file: for any name
// that libhdf5 requests, it uses that descriptor.

struct DescriptorFile {
  H5FD_t base;  // must be first, because libhdf5 casts to it
  haddr_t allocated_end;
};
static_assert(std::is_standard_layout_v<DescriptorFile>);

/// The open file.
struct OpenFile {
  int descriptor = -1;
  std::uint64_t bytes = 0;
  bool is_given_out = false;
};

OpenFile& shared() {
  static OpenFile the_file;
  return the_file;
}

/// Reads bytes of the file. Bytes past its end read as zeros, as libhdf5 expects for structures; for elements they are
/// an error.
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

/// Returns a file access list for the file of `descriptor` with this length. The driver opens it once: a second open
/// fails. The result is negative if libhdf5 rejects the driver.
hid_t descriptor_access(int descriptor, std::uint64_t bytes) {
  shared().descriptor = descriptor;
  shared().bytes = bytes;
  // Versions of libhdf5 differ in members, so each is set by its name. The class must live as long as the driver.
  static H5FD_class_t driver;
#ifdef H5FD_CLASS_VERSION
  driver.version = H5FD_CLASS_VERSION;
  // From the range for tests and private use.
  constexpr int private_value = 500;
  driver.value = private_value;
#endif
  driver.name = "muster-descriptor";
  driver.maxaddr = static_cast<haddr_t>(INT64_MAX);
  driver.fc_degree = H5F_CLOSE_STRONG;
  driver.open = driver_open;
  driver.close = driver_close;
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

constexpr int not_for_people = 2;

RecordBytes fatal(FatalCode code, std::string_view words) {
  return RecordBytes(ForeignRecord::fatal)
      .number(static_cast<std::uint64_t>(code))
      .text(words.substr(0, longest_words));
}

/// Restricts libhdf5: no plugins, no messages on standard error, caches of a few MiB.
void tame_libhdf5() {
  H5open();
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  H5PLset_loading_state(0);
  register_decoders();
  constexpr int global = 4 << 20;
  constexpr int each = 1 << 20;
  H5set_free_list_limits(global, each, global, each, global, each);
}

void bound_metadata_cache(hid_t access) {
  H5AC_cache_config_t cache{};
  cache.version = H5AC__CURR_CACHE_CONFIG_VERSION;
  if (H5Pget_mdc_config(access, &cache) < 0) return;
  // The limit counts bytes in the file: a small header takes ten times as much in memory.
  cache.max_size = std::size_t{1} << 20;
  cache.min_size = std::size_t{1} << 18;
  cache.set_initial_size = true;
  cache.initial_size = std::size_t{1} << 19;
  H5Pset_mdc_config(access, &cache);
}

/// Returns an invalid id if libhdf5 refuses the file; `why` then has its message.
Id open_file(int input, std::uint64_t bytes, std::string& why) {
  const Id access(descriptor_access(input, bytes));
  if (access) {
    bound_metadata_cache(access.get());
    keep_chunks(access.get());
  }
  // An absolute name, because for a relative one libhdf5 queries the working directory.
  Id file(access ? H5Fopen("/file", H5F_ACC_RDONLY, access.get()) : hid_t{-1});
  if (!file) why = last_failure();
  return file;
}

/// Returns the last record.
RecordBytes list(int input, std::uint64_t bytes, ReportWriter& report) {
  std::string why;
  const Id file = open_file(input, bytes, why);
  if (!file) return fatal(FatalCode::not_opened, why);
  const std::vector<ObjectToRead> objects = report_objects(file.get(), bytes, report);
  report.record(RecordBytes(ForeignRecord::listed));
  // The next step may crash libhdf5, so all tensors are reported before it.
  report.flush();
  report_texts(file.get(), objects, report);
  report.finish(RecordBytes(ForeignRecord::end));
  // Closing would traverse the whole file again.
  ::_exit(0);
}

[[noreturn]] void read(int input, std::uint64_t bytes, int socket) {
  std::string why;
  const Id file = open_file(input, bytes, why);
  answer_questions(file.get(), file ? "" : "libhdf5 cannot open the file: " + why, socket);
  ::_exit(0);
}

}  // namespace

int main(int count, char** arguments) {
  FenceOptions fence;
  char* end = nullptr;
  if (count == 3) fence.cpu_seconds = std::strtoull(arguments[1], &end, 10);
  const std::string_view wanted = count == 3 ? arguments[2] : "";
  if (end == nullptr || *end != 0 || fence.cpu_seconds == 0 || (wanted != "list" && wanted != "read")) {
    std::fputs("muster-hdf5-reader: run by libmuster to list the contents of HDF5 files; it has no other use\n",
               stderr);
    return not_for_people;
  }
  drop_inheritance(fence);
  tame_libhdf5();
  ReportWriter report(fence.socket);
  struct stat status {};
  if (::fstat(fence.input, &status) != 0) {
    report.finish(fatal(FatalCode::io, "querying the length of the file"));
    return not_for_people;
  }
  const auto bytes = static_cast<std::uint64_t>(status.st_size);
  if (wanted == "read") fence.address_bytes = answer_memory(bytes);
  const std::uint8_t flags = raise_fence(fence);
  if (wanted == "read") read(fence.input, bytes, fence.socket);
  RecordBytes last;
  try {
    report.record(RecordBytes(ForeignRecord::fence).number(flags));
    last = list(fence.input, bytes, report);
  } catch (const ReportFull&) {
    last = fatal(FatalCode::too_large, "");
  } catch (const std::bad_alloc&) {
    last = fatal(FatalCode::no_memory, "");
  }
  report.finish(last);
  // Skips destructors and exit handlers, because those of libhdf5 would traverse a file that may be damaged.
  ::_exit(0);
}
