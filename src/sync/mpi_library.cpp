// SPDX-License-Identifier: Apache-2.0
#include "src/sync/mpi_library.hpp"

#include <fmt/core.h>

#include <mutex>
#include <optional>

#include "muster/error.hpp"
#include "muster/version.hpp"
#include "src/os/library.hpp"

namespace muster::sync {
namespace {

std::optional<MpiSupport>& registered() {
  static std::optional<MpiSupport> support;
  return support;
}

}  // namespace

void set_mpi_support(MpiSupport support) {
  registered() = std::move(support);
}

const MpiSupport* mpi_support() {
  return registered() ? &*registered() : nullptr;
}

const MpiSupport& require_mpi() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (const MpiSupport* support = mpi_support()) return *support;
  const std::string name = fmt::format("libmuster-mpi.so.{}", version());
  // It registers itself while it is loaded.
  const os::LoadedLibrary library = os::load_library(name);
  if (const MpiSupport* support = mpi_support()) return *support;
  throw Error(ErrorKind::unsupported,
              fmt::format("ranks that MPI has started need {} and the MPI that it was built with: install them, the "
                          "first beside libmuster ({}), or make the group by muster::mpi_group() and set_world() ({})",
                          name, library.file, library.failure),
              {.path = library.file});
}

}  // namespace muster::sync
