// SPDX-License-Identifier: Apache-2.0
#include "src/os/library.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

namespace muster::os {
namespace {

/// A function that is certainly part of libmuster.
void anchor() {}

/// Returns whether the library could be loaded. Otherwise adds the loader's message.
bool load_from(const std::string& place, int visibility, LoadedLibrary& library) {
  library.handle = ::dlopen(place.c_str(), RTLD_NOW | visibility);
  if (library.handle != nullptr) {
    library.file = place;
    library.exists = true;
    return true;
  }
  const char* const error = ::dlerror();
  const std::string words = error == nullptr ? place : error;
  const bool exists = words != place + ": cannot open shared object file: " + std::generic_category().message(ENOENT);
  if (exists && !library.exists) library.failure.clear();
  if (exists || !library.exists) library.failure += (library.failure.empty() ? "" : "; ") + words;
  library.exists = library.exists || exists;
  return false;
}

}  // namespace

std::string own_folder() {
  Dl_info found{};
  void* object = nullptr;
  if (::dladdr1(reinterpret_cast<const void*>(&anchor), &found, &object, RTLD_DL_LINKMAP) == 0) return {};
  // The loader has no name for the program. Its first argument need not be a path.
  const std::string name = static_cast<const link_map*>(object)->l_name;
  std::error_code error;
  const std::filesystem::path file = std::filesystem::canonical(name.empty() ? "/proc/self/exe" : name, error);
  return error ? std::string() : file.parent_path().string();
}

LoadedLibrary load_library(const std::string& name) {
  LoadedLibrary library;
  const std::string folder = own_folder();
  library.file = folder.empty() ? name : folder + "/" + name;
  for (const std::string& place : {library.file, name})
    if (load_from(place, RTLD_LOCAL, library)) break;
  return library;
}

LoadedLibrary load_for_others(const std::string& name) {
  LoadedLibrary library;
  library.file = name;
  load_from(name, RTLD_GLOBAL, library);
  return library;
}

LoadedLibrary find_loaded(const std::string& name) {
  LoadedLibrary library;
  library.file = name;
  load_from(name, RTLD_LOCAL | RTLD_NOLOAD, library);
  return library;
}

void* find_symbol(const LoadedLibrary& library, const char* name) noexcept {
  return ::dlsym(library.handle, name);
}

}  // namespace muster::os
