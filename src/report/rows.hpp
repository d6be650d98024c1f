// SPDX-License-Identifier: Apache-2.0
#pragma once
// Joins tensors into the rows of a report, so that the size of the report has a limit.

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "muster/config.hpp"

namespace muster::report {

/// A row: one tensor, or several under a pattern.
struct Row {
  std::string name;                  ///< the tensor's name, or a pattern with `*`
  std::vector<std::size_t> members;  ///< indices into the names
};

/// The limits of one list of rows.
struct RowLimits {
  std::size_t rows = 8000;
  std::size_t name_bytes = std::size_t{1} << 20;  ///< sum over all names, as they are in the page
};

/// Returns a row for each name, or fewer rows if these exceed a limit. Each name then keeps its first N numbers, and
/// `*` replaces the others. N is the largest count that meets the limits, so that experts are joined before layers. If
/// even N = 0 exceeds them, rows are modules, "MODULE.**". A number is a part between dots or slashes that has only
/// digits. Rows keep the order of their first members.
std::vector<Row> rows_of(const std::vector<std::string_view>& names, const RowLimits& limits = {});

/// Returns the value get(member) if it is the same for all members of a row, otherwise null.
template <class Get>
Config common_value(const Row& row, const Get& get) {
  const Config first = get(row.members.front());
  const bool is_same = std::ranges::all_of(row.members, [&](std::size_t member) { return get(member) == first; });
  return is_same ? first : Config();
}

/// Replaces every number of a name but the first `kept` by `*`, and always that of a prefix "rankN/".
std::string name_pattern(std::string_view name, std::size_t kept);

}  // namespace muster::report
