// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/omissions.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"

namespace muster {
namespace {

constexpr std::size_t most_omissions_named = 3;

}  // namespace

std::size_t count_lost(const Omissions& omissions) noexcept {
  return static_cast<std::size_t>(std::ranges::count(omissions, true, &Omission::is_lost));
}

std::string omission_words(const Omissions& omissions, bool lost_only) {
  std::string words;
  std::size_t count = 0;
  for (const Omission& omission : omissions) {
    if ((lost_only && !omission.is_lost) || ++count > most_omissions_named) continue;
    words += fmt::format("{}{} ({})", count == 1 ? "" : ", ", in_quotes(omission.name), omission.reason);
  }
  if (count > most_omissions_named) words += fmt::format(" and {} more", count - most_omissions_named);
  return words;
}

void refuse_lost(const Omissions& omissions, std::string_view doing, const std::string& path, std::string_view remedy) {
  const std::size_t lost = count_lost(omissions);
  if (lost == 0) return;
  throw file_error(
      ErrorKind::unsupported, doing, path,
      fmt::format("{} of its items cannot be read: {}; {}", lost, omission_words(omissions, true), remedy));
}

std::vector<std::string> omission_notes(const Omissions& omissions) {
  std::vector<std::string> notes;
  for (const Omission& omission : omissions)
    if (!omission.is_lost)
      notes.push_back(fmt::format("{} is left out: {}", in_quotes(omission.name), omission.reason));
  return notes;
}

}  // namespace muster
