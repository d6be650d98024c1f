// SPDX-License-Identifier: Apache-2.0
#include "src/base/similar.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "src/base/escaped.hpp"

namespace muster {
namespace {

constexpr std::size_t longest_compared = 200;
constexpr std::size_t most_compared = 20000;

/// Returns the edit distance of two texts; `limit` if it is larger.
std::size_t edits(std::string_view a, std::string_view b, std::size_t limit) {
  if (a.size() > b.size()) std::swap(a, b);
  if (b.size() - a.size() >= limit) return limit;
  std::vector<std::size_t> row(a.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
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

std::vector<std::size_t> similar_to(std::string_view name, std::span<const std::string_view> candidates,
                                    std::size_t most) {
  if (name.size() > longest_compared) return {};
  const std::size_t limit = name.size() / 3 + 2;
  std::vector<std::pair<std::size_t, std::size_t>> near;  // distance, index
  for (std::size_t i = 0; i < std::min(candidates.size(), most_compared); ++i) {
    const std::string_view other = candidates[i];
    if (other.size() > longest_compared) continue;
    // The end or the middle of a name counts as similar, too.
    const std::size_t distance =
        name.size() >= 3 && other.find(name) != std::string_view::npos ? 1 : edits(name, other, limit);
    if (distance < limit) near.emplace_back(distance, i);
  }
  std::ranges::sort(near);
  std::vector<std::size_t> places;
  for (const auto& [distance, place] : near)
    if (places.size() < most && distance == near.front().first) places.push_back(place);
  return places;
}

std::string did_you_mean(std::string_view name, std::span<const std::string_view> candidates) {
  const std::vector<std::size_t> near = similar_to(name, candidates);
  std::string list;
  for (std::size_t i = 0; i < near.size(); ++i)
    list += (i == 0 ? "" : i + 1 == near.size() ? " or " : ", ") + in_quotes(candidates[near[i]]);
  return near.empty() ? list : "did you mean " + list + "?";
}

}  // namespace muster
