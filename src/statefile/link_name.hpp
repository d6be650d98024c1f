// SPDX-License-Identifier: Apache-2.0
#pragma once
// A tensor's name as a link of an HDF5 group.

#include <string>
#include <string_view>

namespace muster::statefile {

/// The name itself, but for what HDF5 or a terminal would misread: "/", "%", control characters, and the names "." and
/// ".." are percent-encoded. Different names give different links.
std::string link_name(std::string_view name);

}  // namespace muster::statefile
