// SPDX-License-Identifier: Apache-2.0
#pragma once
// Directories: what is in them, made and removed, and what is known of a name. Each call is one or two system calls;
// tests inject failures into all of them (fault.hpp).

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/os/fd.hpp"
#include "src/os/file.hpp"

namespace muster::os {

/// Where a name is: "." and "/" for names without and right below one. Of the text alone.
std::string directory_of(const std::string& path);

struct DirectoryEntry {
  std::string name;
  bool is_directory = false;
};
/// What the directory shows, in no order. Throws Error(not_found | io).
std::vector<DirectoryEntry> list_directory(const std::string& path);

struct FileStatus {
  std::uint64_t bytes = 0;
  std::chrono::system_clock::time_point changed;
  FileIdentity identity;
  bool is_directory = false;
  bool is_regular = false;
  bool is_link = false;
};
/// Of the name itself, or (followed) of what a symbolic link leads to. None if there is no such name. Throws
/// Error(io).
enum class Links : std::uint8_t { themselves, followed };
std::optional<FileStatus> file_status(const std::string& path, Links links = Links::themselves);

/// False if it was there. Parents must be. Throws Error(io | not_found | no_space).
bool make_directory(const std::string& path);
/// A directory of this user's alone, made if it is not there. False if the name is taken by a link, by another user, or
/// by what others may write to or read. Parents must be. Throws Error(io | not_found | no_space).
bool make_own_directory(const std::string& path);
/// False if it was not there. Throws Error(io).
bool remove_file(const std::string& path);
/// False if it was not there, or is not empty. Throws Error(io).
bool remove_empty_directory(const std::string& path);
/// In place of what has the name. Throws Error(io | not_found).
void rename_file(const std::string& from, const std::string& to);

/// A descriptor of a directory. Throws Error(io | not_found).
Fd open_directory(const std::string& path);
/// Takes the directory's lock for as long as the descriptor lives, and whatever kills the process gives it back. False
/// if another process has it, or the file system has no locks.
bool try_lock(const Fd& directory) noexcept;

/// What is in the file, or which names are in the directory, is there after a power cut, too. Throws Error(io).
void sync_file(const std::string& path);
void sync_directory(const std::string& path);

// What kind of file system a path lies on.

struct FileSystem {
  std::string type;         ///< "nfs", "ext4"; "0x..." where it has no name here
  bool is_network = false;  ///< other hosts write to it: caches may show old directories and old bytes, and a mapping
                            ///< may end in SIGBUS. FUSE, and what has no name here, count as one.
};

/// Throws Error(not_found | io).
FileSystem file_system_of(const std::string& path);
/// Of an open file, which messages call `path`.
FileSystem file_system_of(const Fd& file, const std::string& path);

/// A mounted file system with room left; none if the path has none.
struct SpaceFacts {
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;  ///< for this user
  std::uint64_t total_files = 0;
  std::uint64_t free_files = 0;
};
std::optional<SpaceFacts> space_facts(const std::string& path) noexcept;

}  // namespace muster::os
