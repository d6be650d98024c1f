// SPDX-License-Identifier: Apache-2.0
#pragma once
// Directories and whole small files, as a protocol over a directory needs them. Each call is one or two system calls;
// tests inject failures into all of them (fault.hpp).

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/os/file.hpp"

namespace muster::os {

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
/// Of the name itself, or (followed) of what a symbolic link leads to. None where there is no such name. Throws
/// Error(io).
enum class Links : std::uint8_t { themselves, followed };
std::optional<FileStatus> file_status(const std::string& path, Links links = Links::themselves);

/// The whole of a file. Throws Error(not_found | io), and Error(corrupt) where it is longer than `most`.
std::vector<std::byte> read_small_file(const std::string& path, std::uint64_t most);

/// Creates a file that must not be there, with these bytes; nothing stays where it fails. Returns which file it is,
/// whatever its name. Throws Error(no_space | io | not_found).
FileIdentity write_new_file(const std::string& path, std::span<const std::byte> bytes,
                            Durability durability = Durability::unsynced);

/// Throws Error(io | not_found).
void rename_file(const std::string& from, const std::string& to);
/// A second name. False where `to` exists. Throws Error(unsupported) where the file system has no links; Error(io |
/// not_found).
bool link_file(const std::string& from, const std::string& to);
/// False where it was not there. Throws Error(io).
bool remove_file(const std::string& path);
/// False where it was not there, or is not empty. Throws Error(io).
bool remove_empty_directory(const std::string& path);
/// False where it was there. Parents must be. Throws Error(io | not_found | no_space).
bool make_directory_if_absent(const std::string& path);

}  // namespace muster::os
