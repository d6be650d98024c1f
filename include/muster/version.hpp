// SPDX-License-Identifier: Apache-2.0
#pragma once
// The version of the headers, and of the library that the program is linked to.

#include <string_view>

/// The first number of the version of the headers.
#define MUSTER_VERSION_MAJOR 0
/// The second number of the version of the headers.
#define MUSTER_VERSION_MINOR 2
/// The third number of the version of the headers.
#define MUSTER_VERSION_PATCH 0

namespace muster {

/// Returns the version of the loaded library, such as "0.2.0".
std::string_view version() noexcept;

}  // namespace muster
