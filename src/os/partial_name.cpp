// SPDX-License-Identifier: Apache-2.0
#include "src/os/partial_name.hpp"

#include <fmt/core.h>

#include <exception>
#include <functional>
#include <utility>

#include "src/os/directory.hpp"
#include "src/os/process.hpp"
#include "src/os/small_file.hpp"

namespace muster::os {
namespace {

constexpr std::string_view partial_mark = ".partial-";
constexpr std::string_view replaced_mark = ".replaced-";
constexpr std::size_t nonce_digits = 16;
// File systems have 255 bytes for a name; the longest mark, nonce and writer take less than the rest.
constexpr std::size_t longest_stem = 80;

/// What the names beside `path` begin with, its directory apart.
std::string stem_of(const std::string& path) {
  const std::string name = path.substr(path.find_last_of('/') + 1);
  if (name.size() <= longest_stem) return name;
  return fmt::format("{}~{:016x}", name.substr(0, longest_stem - 17), std::hash<std::string>()(name));
}

struct Parts {
  std::string_view stem;
  std::string_view mark;
  std::string_view tail;
  ProcessIdentity writer;
};

/// Takes "STEM.MARK-NONCE" apart.
std::optional<std::pair<std::string_view, std::string_view>> stem_and_mark(std::string_view text) {
  if (text.size() < nonce_digits ||
      text.find_first_not_of("0123456789abcdef", text.size() - nonce_digits) != std::string_view::npos)
    return std::nullopt;
  text.remove_suffix(nonce_digits);
  for (const std::string_view mark : {partial_mark, replaced_mark})
    if (text.ends_with(mark) && text.size() > mark.size())
      return std::pair(text.substr(0, text.size() - mark.size()), mark);
  return std::nullopt;
}

std::optional<Parts> parse(std::string_view name) {
  const std::size_t at = name.rfind('@');
  if (at == std::string_view::npos) return std::nullopt;
  const auto writer = parse_identity(name.substr(at + 1));
  const auto begin = stem_and_mark(name.substr(0, at));
  if (!writer || !begin) return std::nullopt;
  return Parts{begin->first, begin->second, name.substr(at - nonce_digits), *writer};
}

std::string beside(const std::string& path, const std::string& name) {
  return path.substr(0, path.find_last_of('/') + 1) + name;
}

}  // namespace

std::string partial_name(const std::string& path) {
  return beside(path, fmt::format("{}{}{}@{}", stem_of(path), partial_mark, random_hex(nonce_digits / 2),
                                  identity_text(own_identity())));
}

bool is_partial_name(std::string_view name) noexcept {
  try {
    if (parse(name)) return true;
    const auto old = stem_and_mark(name);
    return old && old->second == partial_mark;
  } catch (const std::exception&) {
    return false;
  }
}

std::vector<Unfinished> unfinished_of(const std::string& path) {
  std::vector<Unfinished> found;
  const std::string stem = stem_of(path);
  for (const DirectoryEntry& entry : list_directory(directory_of(path)))
    if (const auto parts = parse(entry.name); parts && parts->stem == stem)
      found.push_back(
          {beside(path, entry.name), std::string(parts->tail), parts->mark == replaced_mark, parts->writer});
  return found;
}

std::string replaced_name(const std::string& partial) {
  const std::size_t mark = partial.rfind(partial_mark);
  return partial.substr(0, mark) + std::string(replaced_mark) + partial.substr(mark + partial_mark.size());
}

std::string released_name(const std::string& partial) {
  ProcessIdentity nobody = own_identity();
  nobody.pid = 0;
  nobody.start = 0;
  return partial.substr(0, partial.rfind('@') + 1) + identity_text(nobody);
}

void remove_dead_partials(const std::string& path) noexcept {
  try {
    for (const Unfinished& one : unfinished_of(path)) {
      if (life_of(one.writer) != Life::dead) continue;
      try {
        remove_file(one.path);
      } catch (const Error&) {
        // The next one may go.
      }
    }
  } catch (const std::exception&) {
    // What cannot be seen harms nobody.
  }
}

}  // namespace muster::os
