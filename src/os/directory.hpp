// SPDX-License-Identifier: Apache-2.0
#pragma once
// Directories that appear whole or not at all: made under another name, then renamed.

#include <string>

#include "src/os/fd.hpp"

namespace muster::os {

/// Where a name is: "." and "/" for names without and right below one. Of the text alone.
std::string directory_of(const std::string& path);

/// Throws Error(io | no_space), like all here; Error(argument) where the name is taken.
void make_directory(const std::string& path);

/// A descriptor of a directory.
Fd open_directory(const std::string& path);

/// Takes the directory's lock for as long as the descriptor lives, and whatever kills the process gives it back. False
/// where another process has it, or the file system has no locks.
bool try_lock(const Fd& directory) noexcept;

/// What is in the file, or which names are in the directory, is there after a power cut, too.
void sync_file(const std::string& path);
void sync_directory(const std::string& path);

/// Renames; Error(argument) where `to` exists.
void rename_to_new(const std::string& from, const std::string& to);

/// Lets two names change places in one step. False where the file system cannot.
bool exchange_names(const std::string& a, const std::string& b);

}  // namespace muster::os
