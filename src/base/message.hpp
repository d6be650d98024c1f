// SPDX-License-Identifier: Apache-2.0
#pragma once
// Parts of messages that several layers share, so that one state has one wording.

#include <cstdint>
#include <string>
#include <string_view>

#include "muster/error.hpp"

namespace muster {

/// Returns "NAME 8 is out of range for size 8 (valid: 0 to 7)".
std::string out_of_range_text(std::string_view name, std::int64_t value, std::int64_t size);

/// Returns a number of bytes for a message, from 1 MiB on also in a larger unit: "17179869184 bytes (16.0 GiB)".
std::string byte_text(std::uint64_t bytes);

/// Returns "" for 1, otherwise "s".
std::string_view plural(std::uint64_t count) noexcept;
/// Returns text such as "1 tensor" or "2 tensors".
std::string counted(std::uint64_t count, std::string_view things);

/// Returns the error with a remedy behind its message: "CAUSE. REMEDY".
Error with_remedy(const Error& error, std::string_view remedy);

}  // namespace muster
