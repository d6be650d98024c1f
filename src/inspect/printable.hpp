// SPDX-License-Identifier: Apache-2.0
#pragma once
// Text from files on a terminal: nothing in it may move the cursor, colour the screen or break a line.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace muster::inspect {

/// Control characters (C0, DEL, C1), what reorders or hides text (bidirectional marks, zero width), and bytes that are
/// no UTF-8, all as \n, \x1b or \u202e; a backslash is \\. Everything else as it is.
std::string printable(std::string_view text);

/// The same for JSON text, where these characters stand in strings only and have JSON's own escapes.
std::string printable_json(std::string_view json);

/// Characters of printable text: one column each.
std::size_t columns(std::string_view text) noexcept;

/// Printable text in at most `width` columns (at least 5), "..." in its middle where it was longer.
std::string shorten(std::string_view text, std::size_t width);

/// "1.2 GB": powers of 1000, as file managers have them; exact below 1000 ("17 B").
std::string human_bytes(std::uint64_t bytes);

}  // namespace muster::inspect
