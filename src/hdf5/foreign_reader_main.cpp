// SPDX-License-Identifier: Apache-2.0
// muster-hdf5-reader: lists one HDF5 file or reads elements of it. It gets the file as descriptor 3 and talks over the
// socket 4. Not for people. Arguments: how many seconds of CPU time it may take; whether it must go without seccomp
// ("insist" or "accept"); what is wanted ("list" or "read").
//
// 1. It gives up what it inherited.
// 2. It lets libhdf5 start: that reads the environment, and makes what it needs from then on.
// 3. It raises the fence. From here on it has one file, one socket, and memory.
// 4. It lists the file (foreign_listing.hpp), then reads the texts (foreign_text.cpp); or it answers questions for
//    elements (foreign_elements.hpp).

#include <hdf5.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <string_view>

#include "src/hdf5/descriptor_driver.hpp"
#include "src/hdf5/foreign_elements.hpp"
#include "src/hdf5/foreign_fence.hpp"
#include "src/hdf5/foreign_listing.hpp"
#include "src/hdf5/foreign_report_writer.hpp"
#include "src/hdf5/ids.hpp"

namespace {

using namespace muster::hdf5;

constexpr int not_for_people = 2;

RecordBytes fatal(FatalCode code, std::string_view words) {
  return RecordBytes(ForeignRecord::fatal)
      .number(static_cast<std::uint64_t>(code))
      .text(words.substr(0, longest_words));
}

/// libhdf5's own memory: no plugins, no words on standard error, caches of a few MiB.
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
  // It counts bytes in the file: what libhdf5 makes of a small header in memory is ten times as large.
  cache.max_size = std::size_t{1} << 20;
  cache.min_size = std::size_t{1} << 18;
  cache.set_initial_size = true;
  cache.initial_size = std::size_t{1} << 19;
  H5Pset_mdc_config(access, &cache);
}

/// Not valid where libhdf5 refuses it; `why` has its words then.
Id open_file(int input, std::uint64_t bytes, std::string& why) {
  const Id access(descriptor_access(input, bytes));
  if (access) {
    bound_metadata_cache(access.get());
    keep_chunks(access.get());
  }
  // An absolute name: for any other libhdf5 asks for the working directory.
  Id file(access ? H5Fopen("/file", H5F_ACC_RDONLY, access.get()) : hid_t{-1});
  if (!file) why = last_failure();
  return file;
}

/// The last record.
RecordBytes list(int input, std::uint64_t bytes, ReportWriter& report) {
  std::string why;
  const Id file = open_file(input, bytes, why);
  if (!file) return fatal(FatalCode::not_opened, why);
  ForeignListing listing(file.get(), bytes, report);
  listing.run();
  report.record(RecordBytes(ForeignRecord::listed));
  // What follows may crash libhdf5: the tensors are told by then.
  report.flush();
  report_texts(file.get(), listing.to_read(), report);
  report.finish(RecordBytes(ForeignRecord::end));
  // Closing would walk through everything once more.
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
  if (count == 4) fence.cpu_seconds = std::strtoull(arguments[1], &end, 10);
  const std::string_view mode = count == 4 ? arguments[2] : "";
  const std::string_view wanted = count == 4 ? arguments[3] : "";
  if (end == nullptr || *end != 0 || fence.cpu_seconds == 0 || (mode != "insist" && mode != "accept") ||
      (wanted != "list" && wanted != "read")) {
    std::fputs("muster-hdf5-reader is started by libmuster, which gives it a file and asks for what is in it\n",
               stderr);
    return not_for_people;
  }
  drop_inheritance(fence);
  tame_libhdf5();
  ReportWriter report(fence.socket);
  struct stat status {};
  if (::fstat(fence.input, &status) != 0) {
    report.finish(fatal(FatalCode::io, "asking for the file's length"));
    return not_for_people;
  }
  const auto bytes = static_cast<std::uint64_t>(status.st_size);
  if (wanted == "read") fence.address_bytes = answer_memory(bytes);
  const std::uint8_t flags = raise_fence(fence);
  const bool is_refused = (flags & fence_seccomp) == 0 && mode == "insist";
  if (wanted == "read" && !is_refused) read(fence.input, bytes, fence.socket);
  RecordBytes last;
  try {
    report.record(RecordBytes(ForeignRecord::fence).number(flags));
    last = is_refused ? fatal(FatalCode::no_fence, "seccomp") : list(fence.input, bytes, report);
  } catch (const ReportFull&) {
    last = fatal(FatalCode::too_large, "");
  } catch (const std::bad_alloc&) {
    last = fatal(FatalCode::no_memory, "");
  }
  report.finish(last);
  // No destructors, no exit handlers: libhdf5's would go through a file that may be damaged.
  ::_exit(0);
}
