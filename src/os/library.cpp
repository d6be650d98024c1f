// SPDX-License-Identifier: Apache-2.0
#include "src/os/library.hpp"

#include <dlfcn.h>

namespace muster::os {
namespace {

/// The folder of the file that the code was loaded from; empty where the loader does not say.
std::string folder_of(const void* code) {
  Dl_info info{};
  if (::dladdr(code, &info) == 0 || info.dli_fname == nullptr) return {};
  const std::string file = info.dli_fname;
  const std::size_t slash = file.rfind('/');
  return slash == std::string::npos ? std::string() : file.substr(0, slash + 1);
}

}  // namespace

LoadedLibrary load_library(const void* code, const std::string& name) {
  LoadedLibrary library;
  library.file = folder_of(code) + name;
  for (const std::string& place : {library.file, name}) {
    library.handle = ::dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library.handle != nullptr) {
      library.file = place;
      return library;
    }
    const char* words = ::dlerror();
    library.failure += (library.failure.empty() ? "" : "; ") + std::string(words == nullptr ? place.c_str() : words);
  }
  return library;
}

void* find_symbol(const LoadedLibrary& library, const char* name) noexcept {
  return ::dlsym(library.handle, name);
}

}  // namespace muster::os
