// SPDX-License-Identifier: Apache-2.0
#pragma once
// Fills workspaces for tests, and checks the remaining files.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "src/workspace/names.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/temporary_directory.hpp"

namespace muster::test {

/// Return the identity of a process of this host that has ended, and of a process of another host.
inline os::ProcessIdentity dead() {
  os::ProcessIdentity identity = os::own_identity();
  identity.pid = 0x7ffffff0;
  return identity;
}
inline os::ProcessIdentity elsewhere() {
  os::ProcessIdentity identity = dead();
  identity.host = "elsewhere";
  return identity;
}

inline std::size_t files_of(const std::string& directory, workspace::NameKind kind) {
  return static_cast<std::size_t>(std::ranges::count_if(names_in(directory), [&](const std::string& file) {
    const auto name = workspace::parse_name(file);
    return name && name->kind == kind;
  }));
}

/// Returns whether the directory contains only the marker file.
inline bool is_clean(const std::string& directory) {
  const auto files = names_in(directory);
  for (const std::string& file : files)
    if (file != "muster-workspace.json") MESSAGE("left: " << file);
  return files == std::vector<std::string>{"muster-workspace.json"};
}

/// Returns the config of a rank, which differs between seeds.
inline Config layer_of(int rank, int seed = 0) {
  Config layer = Config::object({{"rank", rank}, {"seed", seed}, {"scale", 0.5}, {"none", nullptr}});
  layer["attention"]["weight"] = pattern(DType::bf16, {33, 65}, static_cast<std::uint64_t>(100 * rank + seed));
  layer["norm"] = pattern(DType::f32, {}, static_cast<std::uint64_t>(rank));
  layer["$tensor"] = "a user's own key";
  return layer;
}

}  // namespace muster::test
