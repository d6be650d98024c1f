// SPDX-License-Identifier: Apache-2.0
#include "src/workspace/publication.hpp"

#include <cerrno>

#include "muster/error.hpp"
#include "src/os/directory.hpp"
#include "src/workspace/names.hpp"

namespace muster::workspace {
namespace {

/// A file under its growing name; gone with its owner unless it got another one.
class Growing {
 public:
  Growing(const std::string& directory, std::span<const std::byte> bytes, os::Durability durability)
      : path_(directory + "/" + growing_name()), identity_(os::write_new_file(path_, bytes, durability)) {}
  Growing(const Growing&) = delete;
  Growing& operator=(const Growing&) = delete;
  ~Growing() {
    if (is_there_) remove();
  }

  void rename(const std::string& target) {
    try {
      os::rename_file(path_, target);
    } catch (const Error& error) {
      if (error.os_error() != ENOENT || !is_ours(target)) throw;
    }
    is_there_ = false;
  }
  /// False where the name is another's.
  bool link(const std::string& target) {
    // A repeated request finds its own name there.
    return os::link_file(path_, target) || is_ours(target);
  }

 private:
  [[nodiscard]] bool is_ours(const std::string& target) const {
    const auto there = os::file_status(target);
    return there && there->identity == identity_;
  }
  void remove() const noexcept {
    try {
      os::remove_file(path_);
    } catch (const Error&) {
      // It is named so that a clean-up finds it.
    }
  }

  std::string path_;
  os::FileIdentity identity_;
  bool is_there_ = true;
};

}  // namespace

void publish(const std::string& directory, const std::string& name, std::span<const std::byte> bytes,
             os::Durability durability) {
  Growing(directory, bytes, durability).rename(directory + "/" + name);
  if (durability == os::Durability::synced) os::sync_directory(directory);
}

bool publish_first(const std::string& directory, const std::string& name, std::span<const std::byte> bytes,
                   os::Durability durability) {
  const std::string target = directory + "/" + name;
  bool is_first = true;
  try {
    is_first = Growing(directory, bytes, durability).link(target);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::unsupported) throw;
    // No second names on this file system: then creation decides, and whoever reads it too early reads it again.
    try {
      os::write_new_file(target, bytes, durability);
    } catch (const Error& failure) {
      if (failure.os_error() != EEXIST) throw;
      is_first = false;
    }
  }
  if (durability == os::Durability::synced) os::sync_directory(directory);
  return is_first;
}

}  // namespace muster::workspace
