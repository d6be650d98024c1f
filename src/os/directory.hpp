// SPDX-License-Identifier: Apache-2.0
#pragma once
// Directories: listing, creating and deleting them, and querying names. Each call makes one or two system calls; tests
// inject failures into all of them (fault.hpp).

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/os/fd.hpp"
#include "src/os/file.hpp"

namespace muster::os {

/// Returns the directory part of a path: "." if it has no slash, "/" for names directly below the root. Uses only the
/// text.
std::string directory_of(const std::string& path);

struct DirectoryEntry {
  std::string name;
  bool is_directory = false;
};
/// Returns the entries of a directory, unordered. Throws Error(not_found | io).
std::vector<DirectoryEntry> list_directory(const std::string& path);

struct FileStatus {
  std::uint64_t bytes = 0;
  std::chrono::system_clock::time_point changed;
  FileIdentity identity;
  bool is_directory = false;
  bool is_regular = false;
  bool is_link = false;
};
/// Returns the status of the name itself, or (`followed`) of the target of a symbolic link. Returns nullopt if the name
/// does not exist. Throws Error(io).
enum class Links : std::uint8_t { themselves, followed };
std::optional<FileStatus> file_status(const std::string& path, Links links = Links::themselves);

/// Creates a directory. Returns false if it exists. Its parent must exist. Throws Error(io | not_found | out_of_space).
bool make_directory(const std::string& path);
/// Creates a directory that only this user can access, unless it exists. Returns false if the name is a link, belongs
/// to another user, or is accessible to other users. Its parent must exist. Throws Error(io | not_found |
/// out_of_space).
bool make_own_directory(const std::string& path);
/// Returns false if the file did not exist. Throws Error(io).
bool remove_file(const std::string& path);
/// Returns false if the directory did not exist or is not empty. Throws Error(io).
bool remove_empty_directory(const std::string& path);
/// Renames a file and replaces an existing file at `to`. Throws Error(io | not_found).
void rename_file(const std::string& from, const std::string& to);

/// Gives a file the further name `to`, which must not exist. Returns false if the file system has no hard links, if the
/// file has too many, or if this user may not link to it. Throws Error(io | not_found | out_of_space).
bool link_file(const std::string& from, const std::string& to);
/// Returns whether something is mounted on the directory itself, so that it cannot be renamed. Throws Error(io |
/// not_found).
bool is_mount_point(const std::string& path);

/// Returns a descriptor of a directory. Throws Error(io | not_found).
Fd open_directory(const std::string& path);
/// Takes the directory's lock for the lifetime of the descriptor. The kernel releases it if the process is killed.
/// Returns false if another process has the lock, or if the file system has no locks.
bool try_lock(const Fd& directory) noexcept;

/// After these calls the contents of the file, or the names in the directory, survive a power failure. Throws
/// Error(io).
void sync_file(const std::string& path);
void sync_directory(const std::string& path);

// The kind of file system that contains a path.

struct FileSystem {
  std::string type;  ///< "nfs", "ext4"; "0x..." if the number has no name here
  /// Other hosts may write to it: caches may show old directories and old bytes, and access to a mapping may cause
  /// SIGBUS. True for FUSE and for unknown file systems.
  bool is_network = false;
};

/// Throws Error(not_found | io).
FileSystem file_system_of(const std::string& path);
/// Returns the file system of an open file. `path` is used in messages.
FileSystem file_system_of(const Fd& file, const std::string& path);

/// The space of a mounted file system. space_facts() returns nullopt if it is unknown.
struct SpaceFacts {
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;  ///< available to this user
  std::uint64_t total_files = 0;
  std::uint64_t free_files = 0;
};
std::optional<SpaceFacts> space_facts(const std::string& path) noexcept;

}  // namespace muster::os
