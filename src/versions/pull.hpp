// SPDX-License-Identifier: Apache-2.0
#pragma once
// pull_version() as a part of other work.

#include <functional>
#include <string>

#include "muster/publish.hpp"

namespace muster::versions {

/// Does the same as pull_version(). `check` is called during all waits and long work, on any thread. It may throw.
PullReport pull_for(const std::string& source, const std::string& local, const PullOptions& options,
                    const std::function<void()>& check);

}  // namespace muster::versions
