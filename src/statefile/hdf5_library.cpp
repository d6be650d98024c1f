// SPDX-License-Identifier: Apache-2.0
#include "src/statefile/hdf5_library.hpp"

#include <fmt/core.h>

#include <mutex>
#include <string>

#include "muster/error.hpp"
#include "muster/version.hpp"
#include "src/core/quoted.hpp"
#include "src/os/library.hpp"

namespace muster::statefile {
namespace {

hdf5::MakeMetadata load() {
  const std::string name = fmt::format("libmuster-hdf5.so.{}", version());
  os::LoadedLibrary library = os::load_library(name);
  if (library.handle != nullptr) {
    if (void* symbol = os::find_symbol(library, hdf5::make_metadata_symbol); symbol != nullptr)
      return reinterpret_cast<hdf5::MakeMetadata>(symbol);
    library.failure = fmt::format("{} is another library", library.file);
  }
  throw Error(ErrorKind::unsupported,
              fmt::format("writing a state file needs {} and the libhdf5 that it was built with: install them, the "
                          "first beside libmuster ({}); reading needs neither ({})",
                          name, in_quotes(library.file), library.failure),
              {.path = library.file});
}

hdf5::MakeMetadata library() {
  static std::mutex mutex;
  static hdf5::MakeMetadata function = nullptr;
  const std::lock_guard lock(mutex);
  // Tried again after a failure: it may have been installed meanwhile.
  if (function == nullptr) function = load();
  return function;
}

}  // namespace

void require_hdf5() {
  library();
}

hdf5::Metadata make_metadata(const hdf5::MetadataPlan& plan) {
  hdf5::Metadata metadata;
  if (!library()(plan, metadata))
    throw Error(ErrorKind::io, fmt::format("making the HDF5 structures of a state file: {}", metadata.failure));
  return metadata;
}

std::string link_name(std::string_view name) {
  const bool is_dots = name == "." || name == "..";
  std::string link;
  link.reserve(name.size());
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (is_dots || c == '/' || c == '%' || byte < 0x20 || byte == 0x7f) {
      fmt::format_to(std::back_inserter(link), "%{:02X}", byte);
    } else {
      link.push_back(c);
    }
  }
  return link;
}

}  // namespace muster::statefile
