// SPDX-License-Identifier: Apache-2.0
#include "muster/parallel_layout.hpp"

#include <fmt/core.h>

#include <charconv>
#include <cstdint>
#include <optional>

#include "muster/error.hpp"
#include "src/core/quoted.hpp"

namespace muster {
namespace {

constexpr int most_ranks = 4096;

std::optional<int> parse_count(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1 || value > most_ranks) return std::nullopt;
  return value;
}

}  // namespace

ParallelLayout ParallelLayout::parse(std::string_view text) {
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorKind::argument,
                fmt::format("the layout {} {}; write 4 (tensor parallelism alone) or tp=2,pp=2,ep=2",
                            in_quotes(std::string(text)), why));
  };
  ParallelLayout layout;
  if (const auto tensor = parse_count(text)) {
    layout.tensor = *tensor;
    return layout;
  }
  std::int64_t ranks = 1;
  bool seen[3] = {};
  for (std::string_view rest = text;;) {
    const std::size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    const std::size_t equals = item.find('=');
    const std::string_view key = item.substr(0, equals);
    const int which = key == "tp" ? 0 : key == "pp" ? 1 : key == "ep" ? 2 : -1;
    const auto count = equals == std::string_view::npos ? std::nullopt : parse_count(item.substr(equals + 1));
    if (which < 0 || !count) refuse(fmt::format("has {} in it", in_quotes(std::string(item))));
    if (seen[which]) refuse(fmt::format("says {} twice", key));
    seen[which] = true;
    (which == 0 ? layout.tensor : which == 1 ? layout.pipeline : layout.expert) = *count;
    ranks *= *count;
    if (ranks > most_ranks) refuse(fmt::format("has more than {} ranks", most_ranks));
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  return layout;
}

std::string to_string(const ParallelLayout& layout) {
  if (layout.pipeline == 1 && layout.expert == 1) return std::to_string(layout.tensor);
  return fmt::format("tp={},pp={},ep={}", layout.tensor, layout.pipeline, layout.expert);
}

}  // namespace muster
