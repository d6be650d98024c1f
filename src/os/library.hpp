// SPDX-License-Identifier: Apache-2.0
#pragma once
// Libraries that are loaded when they are first needed. They are never unloaded: what they load has handlers that run
// at exit.

#include <string>

namespace muster::os {

/// The folder of libmuster, or of the program that it is a part of, behind links. Empty if that cannot be told.
std::string own_folder();

struct LoadedLibrary {
  void* handle = nullptr;    ///< null if it could not be loaded
  std::string file;          ///< what was loaded, else the first file that was looked for
  std::string failure = {};  ///< the loader's words about each place that it was looked for in
};

/// Loads the library of that file name, from own_folder(), else where the system looks.
LoadedLibrary load_library(const std::string& name);

/// The address of a symbol of it; null if there is none.
void* find_symbol(const LoadedLibrary& library, const char* name) noexcept;

}  // namespace muster::os
