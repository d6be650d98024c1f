// SPDX-License-Identifier: Apache-2.0
#pragma once
// Libraries that are loaded when they are first needed. They are never unloaded, because they register handlers that
// run at exit.

#include <string>

namespace muster::os {

/// Returns the folder of libmuster, or of the program that contains it, with links resolved. Empty if it is unknown.
std::string own_folder();

struct LoadedLibrary {
  void* handle = nullptr;    ///< null: it could not be loaded
  std::string file;          ///< the loaded file, or the first candidate if loading failed
  bool exists = false;       ///< a candidate exists, whether or not it could be loaded
  std::string failure = {};  ///< the loader's messages about the candidates that exist; if none does, about all
};

/// Loads the library with that file name from own_folder(), else from the system's search path.
LoadedLibrary load_library(const std::string& name);

/// Loads the library with that path, or with that file name from the system's search path. Libraries that are loaded
/// later find its symbols.
LoadedLibrary load_for_others(const std::string& name);

/// Returns a library with that file name if the process has loaded it. Does not change what other libraries find.
LoadedLibrary find_loaded(const std::string& name);

/// Returns the address of a symbol of the library; null if it does not exist.
void* find_symbol(const LoadedLibrary& library, const char* name) noexcept;

}  // namespace muster::os
