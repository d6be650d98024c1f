// SPDX-License-Identifier: Apache-2.0
#include "src/os/library.hpp"

#include <dlfcn.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

namespace muster::os {
namespace {

/// A function that is certainly part of libmuster.
void anchor() {}

}  // namespace

std::string own_folder() {
  Dl_info found{};
  if (::dladdr(reinterpret_cast<const void*>(&anchor), &found) == 0 || found.dli_fname == nullptr) return {};
  std::error_code error;
  const std::filesystem::path file = std::filesystem::canonical(found.dli_fname, error);
  return error ? std::string() : file.parent_path().string();
}

LoadedLibrary load_library(const std::string& name) {
  LoadedLibrary library;
  const std::string folder = own_folder();
  library.file = folder.empty() ? name : folder + "/" + name;
  for (const std::string& place : {library.file, name}) {
    library.handle = ::dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library.handle != nullptr) {
      library.file = place;
      library.exists = true;
      return library;
    }
    const char* const error = ::dlerror();
    const std::string words = error == nullptr ? place : error;
    const bool exists = words != place + ": cannot open shared object file: " + std::generic_category().message(ENOENT);
    if (exists && !library.exists) library.failure.clear();
    if (exists || !library.exists) library.failure += (library.failure.empty() ? "" : "; ") + words;
    library.exists = library.exists || exists;
  }
  return library;
}

void* find_symbol(const LoadedLibrary& library, const char* name) noexcept {
  return ::dlsym(library.handle, name);
}

}  // namespace muster::os
