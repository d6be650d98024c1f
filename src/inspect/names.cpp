// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/names.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "src/core/quoted.hpp"
#include "src/inspect/tensor_source.hpp"

namespace muster::inspect {
namespace {

constexpr std::size_t longest_compared = 200;
constexpr std::size_t most_compared = 20000;
constexpr std::size_t most_named = 3;

/// Characters to change, put in or take away until one is the other; `limit` where there are more.
std::size_t edits(std::string_view a, std::string_view b, std::size_t limit) {
  if (a.size() > b.size()) std::swap(a, b);
  if (b.size() - a.size() >= limit) return limit;
  std::vector<std::size_t> row(a.size() + 1);
  for (std::size_t i = 0; i <= a.size(); ++i) row[i] = i;
  for (std::size_t j = 1; j <= b.size(); ++j) {
    std::size_t diagonal = std::exchange(row[0], j);
    std::size_t least = row[0];
    for (std::size_t i = 1; i <= a.size(); ++i) {
      const std::size_t changed = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[i];
      row[i] = std::min({changed, row[i] + 1, row[i - 1] + 1});
      least = std::min(least, row[i]);
    }
    if (least >= limit) return limit;
  }
  return std::min(row.back(), limit);
}

}  // namespace

std::vector<std::size_t> matching(const TensorSource& source, const std::string& pattern) {
  std::vector<std::size_t> places;
  const std::vector<TensorEntry>& tensors = source.tensors();
  if (pattern.empty()) {
    places.resize(tensors.size());
    for (std::size_t i = 0; i < places.size(); ++i) places[i] = i;
    return places;
  }
  const TensorPattern glob = TensorPattern::glob(pattern);
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (glob.matches(tensors[i].name)) places.push_back(i);
  if (places.empty())
    throw Error(ErrorKind::not_found,
                fmt::format("no tensor's name matches {}{}", in_quotes(pattern), near_names(source, pattern)));
  return places;
}

std::string near_names(const TensorSource& source, std::string_view name) {
  const std::vector<TensorEntry>& tensors = source.tensors();
  if (tensors.empty()) return "; there are no tensors";
  std::vector<std::pair<std::size_t, std::size_t>> near;  // distance, place
  const std::size_t limit = std::min(name.size(), longest_compared) / 3 + 2;
  for (std::size_t i = 0; i < std::min(tensors.size(), most_compared) && name.size() <= longest_compared; ++i) {
    const std::string_view other = tensors[i].name;
    if (other.size() > longest_compared) continue;
    // Who types the end or the middle of a name means it, too.
    const std::size_t distance =
        name.size() >= 3 && other.find(name) != std::string_view::npos ? 1 : edits(name, other, limit);
    if (distance < limit) near.emplace_back(distance, i);
  }
  if (near.empty()) return fmt::format("; there are {} others (muster ls, muster show)", tensors.size());
  std::stable_sort(near.begin(), near.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string list;
  for (std::size_t i = 0; i < std::min(near.size(), most_named); ++i)
    list += fmt::format("{}{}", i == 0 ? "" : ", ", in_quotes(tensors[near[i].second].name));
  return fmt::format("; near it: {}", list);
}

std::size_t find_tensor(const TensorSource& source, const std::string& path, std::string_view name) {
  if (const std::optional<std::size_t> place = source.find(name)) return *place;
  throw Error(ErrorKind::not_found,
              fmt::format("{} has no tensor {}{}", in_quotes(path), in_quotes(name), near_names(source, name)),
              {.path = path});
}

}  // namespace muster::inspect
