// SPDX-License-Identifier: Apache-2.0
#include "src/workspace/discovery.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <thread>

#include "muster/error.hpp"
#include "src/os/directory.hpp"
#include "src/os/file_system.hpp"
#include "src/os/publish.hpp"
#include "src/workspace/names.hpp"

namespace muster::workspace {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr auto longest_here = std::chrono::seconds(2);
constexpr auto longest_wrong = std::chrono::seconds(90);

bool is_on_network(const std::string& directory) noexcept {
  try {
    return os::file_system_of(directory).is_network;
  } catch (const Error&) {
    return true;
  }
}

}  // namespace

Pauses::Pauses(bool is_network) noexcept
    : pause_(is_network ? 1000 : 50), longest_(is_network ? 250'000 : 10'000), patient_(is_network ? 4000 : 10'000) {}

void Pauses::sleep() noexcept {
  std::this_thread::sleep_for(pause_);
  pause_ = std::min(longest_, pause_ * 3 / 2);
}

bool Pauses::is_patient() const noexcept {
  return pause_ >= patient_;
}

bool refresh(const std::string& directory) {
  const std::string probe = directory + "/" + probe_name();
  try {
    os::write_new_file(probe, {});
    os::remove_file(probe);
    return true;
  } catch (const Error& error) {
    const int code = error.os_error();
    if (code == EACCES || code == EPERM || code == EROFS || code == ENOSPC || code == EDQUOT) return false;
    throw;
  }
}

std::vector<os::DirectoryEntry> fresh_listing(const std::string& directory, bool is_network) {
  if (is_network) refresh(directory);
  return os::list_directory(directory);
}

bool may_be_a_cache(const Error& error) noexcept {
  return error.os_error() == ENOENT || error.os_error() == ESTALE || error.kind() == ErrorKind::corrupt ||
         error.kind() == ErrorKind::not_found;
}

void patiently(const std::string& path, const Patience& patience, const std::function<void()>& attempt) {
  const std::string directory = os::directory_of(path);
  const Clock::time_point begin = Clock::now();
  std::optional<bool> is_network;
  std::optional<Pauses> pauses;
  for (int tries = 1;; ++tries) {
    try {
      attempt();
      return;
    } catch (const Error& error) {
      if (!may_be_a_cache(error)) throw;
      if (!is_network) {
        is_network = is_on_network(directory);
        pauses.emplace(*is_network);
      }
      Clock::time_point deadline = patience.deadline;
      if (error.os_error() != ESTALE) {
        if (!*is_network) deadline = std::min(deadline, begin + longest_here);
        if (error.kind() == ErrorKind::corrupt) deadline = std::min(deadline, begin + longest_wrong);
        // What is wrong on this host's own disk does not mend.
        if (error.kind() == ErrorKind::corrupt && !*is_network && tries > 1) deadline = begin;
      }
      if (Clock::now() >= deadline) {
        const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
        if (tries == 1) throw;
        throw error.with_context(fmt::format("tried {} times in {:.1f} s", tries, seconds));
      }
    }
    if (patience.check) patience.check();
    pauses->sleep();
    try {
      fresh_listing(directory, *is_network);
    } catch (const Error& error) {
      // A directory that is gone takes all that is in it along.
      if (error.kind() == ErrorKind::not_found && Clock::now() >= patience.deadline) throw;
      // No descriptor left: the listing only refreshes caches.
      if (error.os_error() == EMFILE || error.os_error() == ENFILE) continue;
      if (!may_be_a_cache(error)) throw;
    }
  }
}

}  // namespace muster::workspace
