// SPDX-License-Identifier: Apache-2.0
#include "src/workspace/workspace_directory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string_view>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/core/quoted.hpp"
#include "src/os/file_system.hpp"
#include "src/os/small_file.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/names.hpp"
#include "src/workspace/publication.hpp"

namespace muster::workspace {
namespace {

constexpr std::string_view version_key = "muster_workspace";
constexpr std::uint64_t longest_mark = 64 << 10;

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

void make_directories(const std::string& path) {
  try {
    os::make_directory_if_absent(path);
  } catch (const Error& error) {
    const std::size_t slash = path.find_last_of('/');
    if (error.os_error() != ENOENT || slash == 0 || slash == std::string::npos) throw;
    make_directories(without_slash(path.substr(0, slash)));
    os::make_directory_if_absent(path);
  }
}

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(ErrorKind::argument, fmt::format("{} cannot be a workspace: {}", in_quotes(path), why), {.path = path});
}

void require_directory(const std::string& path) {
  const auto status = os::file_status(path, os::Links::followed);
  if (status && !status->is_directory) refuse(path, "it is a file; name a directory");
  if (status) return;
  const auto itself = os::file_status(path);
  if (itself && itself->is_link) refuse(path, "it is a link to what is not there");
  make_directories(path);
}

void write_mark(const std::string& path) {
  const std::string text = to_json(Config::object({{version_key, workspace_version}, {"made_by", "muster"}}), 2) + "\n";
  try {
    publish_first(path, file_name({.kind = NameKind::mark}), std::as_bytes(std::span(text)));
  } catch (const Error& error) {
    throw error.with_context(fmt::format("making {} a workspace", in_quotes(path)));
  }
}

}  // namespace

void check_mark(const std::string& workspace) {
  const std::string path = workspace + "/" + file_name({.kind = NameKind::mark});
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  patiently(path, {.deadline = deadline}, [&] {
    const auto bytes = os::read_small_file(path, longest_mark);
    std::int64_t version = 0;
    try {
      version = parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()}).at(version_key).as_int();
    } catch (const Error& error) {
      throw Error(ErrorKind::corrupt,
                  fmt::format("the mark of the workspace {} is damaged ({}): if nothing in it is needed, remove it and "
                              "let it be made anew",
                              in_quotes(workspace), error.what()),
                  {.path = path});
    }
    if (version < 1 || version > workspace_version)
      throw Error(ErrorKind::version,
                  fmt::format("the workspace {} is of version {}, and this Muster knows {}: use the newer one, or "
                              "another directory",
                              in_quotes(workspace), version, workspace_version),
                  {.path = path});
  });
}

WorkspaceDirectory prepare_workspace(const std::string& given) {
  if (given.empty()) throw Error(ErrorKind::argument, "a workspace needs a path");
  WorkspaceDirectory workspace;
  workspace.path = without_slash(given);
  require_directory(workspace.path);
  workspace.is_network = os::file_system_of(workspace.path).is_network;
  const auto entries = fresh_listing(workspace.path, workspace.is_network);
  const std::string mark = file_name({.kind = NameKind::mark});
  if (std::ranges::find(entries, mark, &os::DirectoryEntry::name) != entries.end()) {
    check_mark(workspace.path);
    return workspace;
  }
  std::string foreign;
  for (const os::DirectoryEntry& entry : entries) {
    if (parse_name(entry.name)) {
      foreign.clear();
      break;
    }
    foreign = entry.name;
  }
  if (!foreign.empty())
    refuse(workspace.path,
           fmt::format("it has files that are none of Muster's, such as {}: give an empty or a new directory",
                       in_quotes(foreign)));
  write_mark(workspace.path);
  return workspace;
}

}  // namespace muster::workspace
