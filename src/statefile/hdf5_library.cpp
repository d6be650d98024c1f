// SPDX-License-Identifier: Apache-2.0
#include "src/statefile/hdf5_library.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <mutex>
#include <string>

#include "muster/error.hpp"
#include "muster/version.hpp"
#include "src/core/quoted.hpp"

namespace muster::statefile {
namespace {

/// The folder of the file that this code was loaded from; empty where the loader does not say.
std::string own_folder() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&require_hdf5), &info) == 0 || info.dli_fname == nullptr) return {};
  const std::string file = info.dli_fname;
  const std::size_t slash = file.rfind('/');
  return slash == std::string::npos ? std::string() : file.substr(0, slash + 1);
}

// Never unloaded: libhdf5 has handlers that run at exit.
hdf5::MakeMetadata load() {
  const std::string name = fmt::format("libmuster-hdf5.so.{}", version());
  const std::string beside = own_folder() + name;
  std::string failure;
  for (const std::string& place : {beside, name}) {
    void* library = ::dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* words = ::dlerror();
      failure += fmt::format("{}{}", failure.empty() ? "" : "; ", words == nullptr ? place.c_str() : words);
      continue;
    }
    if (void* symbol = ::dlsym(library, hdf5::make_metadata_symbol); symbol != nullptr)
      return reinterpret_cast<hdf5::MakeMetadata>(symbol);
    failure += fmt::format("{}{} is another library", failure.empty() ? "" : "; ", place);
  }
  throw Error(ErrorKind::unsupported,
              fmt::format("writing a state file needs {} and the libhdf5 that it was built with: install them, the "
                          "first beside libmuster ({}); reading needs neither ({})",
                          name, in_quotes(beside), failure),
              {.path = beside});
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

}  // namespace muster::statefile
