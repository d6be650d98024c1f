// SPDX-License-Identifier: Apache-2.0
#include "src/mpi/wheel/load.hpp"

#include <fmt/core.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "muster/error.hpp"
#include "muster/version.hpp"
#include "src/base/escaped.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/os/library.hpp"
#include "src/os/process.hpp"
#include "src/rendezvous/world.hpp"

namespace muster::mpi {
namespace {

using group::ProcessManager;

struct Abi {
  std::string_view name;
  std::string_view package;                    // of Debian
  std::string_view calls;                      // the library of the wheel
  std::span<const char* const> library_names;  // of MPI
};

// Debian has another name for the library of MPICH.
constexpr std::array<const char*, 2> mpich_libraries = {"libmpi.so.12", "libmpich.so.12"};
constexpr std::array<const char*, 1> open_mpi_libraries = {"libmpi.so.40"};
constexpr std::string_view open_mpi_name = "Open MPI";
constexpr Abi mpich{"MPICH", "mpich", "libmuster-mpi-mpich", mpich_libraries};
constexpr Abi open_mpi{open_mpi_name, "openmpi-bin", "libmuster-mpi-openmpi", open_mpi_libraries};

std::atomic<const muster_mpi_calls*> loaded{nullptr};

group::Start own_start() {
  try {
    return group::find_start(group::own_surroundings());
  } catch (const Error&) {
    return {};  // world() has reported it, or the program has initialised MPI itself
  }
}

std::vector<const Abi*> candidates(ProcessManager manager) {
  switch (manager) {
    case ProcessManager::pmi:
      return {&mpich};
    case ProcessManager::open_mpi:
      return {&open_mpi};
    case ProcessManager::pmix:
      return {&open_mpi, &mpich};
    case ProcessManager::none:
      break;
  }
  return {&mpich, &open_mpi};
}

/// Loads a library of MPI from the Python environment if pip or conda has installed it there, else from the system's
/// search path.
os::LoadedLibrary load_mpi(const char* name) {
  // The package is ENVIRONMENT/lib/python3.11/site-packages/muster.
  const std::filesystem::path packages = std::filesystem::path(os::own_folder()).parent_path();
  const std::filesystem::path python = packages.parent_path();
  const std::filesystem::path file = python.parent_path() / name;
  std::error_code error;
  if (packages.filename() == "site-packages" && python.filename().string().starts_with("python") &&
      std::filesystem::exists(file, error))
    return os::load_for_others(file.string());
  return os::load_for_others(name);
}

/// Loads the table for an MPI that the process has. Throws Error(unsupported).
const muster_mpi_calls* load_calls(const Abi& abi) {
  const os::LoadedLibrary library = os::load_library(fmt::format("{}.so.{}", abi.calls, version()));
  if (library.handle == nullptr)
    throw Error(ErrorKind::unsupported,
                fmt::format("{}: it cannot be loaded, and {} needs it ({}). Install a wheel of muster that was built "
                            "with the headers of {}",
                            in_quotes(library.file), abi.name, library.failure, abi.name),
                {.path = library.file});
  void* const symbol = os::find_symbol(library, "muster_mpi_table");
  const muster_mpi_calls* const table =
      symbol == nullptr ? nullptr : reinterpret_cast<const muster_mpi_calls* (*)()>(symbol)();
  if (table == nullptr)
    throw Error(ErrorKind::unsupported,
                fmt::format("{} belongs to another build of Muster. Install the wheel again", in_quotes(library.file)),
                {.path = library.file});
  // Old releases of Open MPI have the file name of MPICH.
  std::array<char, muster_mpi_max_library_version_string> text{};
  int length = 0;
  table->get_library_version(text.data(), &length);
  const std::string_view words(text.data());
  if (words.starts_with(open_mpi_name) != (abi.name == open_mpi_name))
    throw Error(
        ErrorKind::unsupported,
        fmt::format("MPI: {} has another ABI than {}, whose file name its library has. Install MPICH 4.0 or "
                    "later, or Open MPI 4.1 or later, or start the ranks with muster run, torchrun or srun --mpi=none",
                    in_quotes(words.substr(0, words.find('\n'))), abi.name));
  return table;
}

bool is_initialised(const char* name) {
  const os::LoadedLibrary library = os::find_loaded(name);
  void* const symbol = library.handle == nullptr ? nullptr : os::find_symbol(library, "MPI_Initialized");
  int flag = 0;
  return symbol != nullptr && reinterpret_cast<int (*)(int*)>(symbol)(&flag) == muster_mpi_success && flag != 0;
}

/// Loads the table for the MPI that the program has initialised; null if there is none. Throws Error(unsupported).
const muster_mpi_calls* load_for_own_mpi() {
  for (const Abi* abi : {&mpich, &open_mpi})
    for (const char* name : abi->library_names)
      if (is_initialised(name) && os::load_for_others(name).handle != nullptr) return load_calls(*abi);
  return nullptr;
}

/// Throws Error(unsupported).
const muster_mpi_calls* load() {
  if (const muster_mpi_calls* table = load_for_own_mpi()) return table;
  const group::Start start = own_start();
  std::string failures;
  std::string names;
  std::string packages;
  for (const Abi* abi : candidates(start.manager)) {
    for (const char* name : abi->library_names) {
      const os::LoadedLibrary library = load_mpi(name);
      std::string failure = library.failure;
      try {
        if (library.handle != nullptr) return load_calls(*abi);
      } catch (const Error& error) {
        failure = error.what();
      }
      failures += (failures.empty() ? "" : "; ") + failure;
    }
    names += fmt::format("{}{}", names.empty() ? "" : " or ", abi->name);
    packages += fmt::format("{}{}", packages.empty() ? "" : " or ", abi->package);
  }
  throw Error(
      ErrorKind::unsupported,
      fmt::format("MPI: no library of {} could be loaded on host {}{}: {}. Install the MPI whose mpiexec starts "
                  "the ranks on every host (Debian: {}), set LD_LIBRARY_PATH to the folder of its library, or "
                  "start the ranks with muster run, torchrun or srun --mpi=none",
                  names, os::host_name(), start.said.empty() ? "" : fmt::format(" ({})", start.said), failures,
                  packages));
}

const muster_mpi_calls* load_once(const muster_mpi_calls* (*load_it)()) {
  static ForkMutex mutex;
  const std::lock_guard lock(mutex);
  if (loaded.load() == nullptr) loaded.store(load_it());
  return loaded.load();
}

}  // namespace

const muster_mpi_calls& calls() {
  const muster_mpi_calls* const known = loaded.load(std::memory_order_acquire);
  return known != nullptr ? *known : *load_once(load);
}

const muster_mpi_calls* calls_in_process() noexcept {
  const muster_mpi_calls* const known = loaded.load(std::memory_order_acquire);
  if (known != nullptr) return known;
  try {
    return load_once(load_for_own_mpi);
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace muster::mpi
