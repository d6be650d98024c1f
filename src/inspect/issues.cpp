// SPDX-License-Identifier: Apache-2.0
// What headers tell that may be wrong.

#include <fmt/core.h>

#include <iterator>
#include <map>
#include <tuple>

#include "src/base/escaped.hpp"
#include "src/core/quoted.hpp"
#include "src/inspect/printable.hpp"
#include "src/inspect/show.hpp"

namespace muster::inspect {
namespace {

constexpr std::size_t longest_name = 255;

/// What is odd about a name; empty where nothing is.
std::string oddity(const std::string& name) {
  if (name.empty()) return "the name is empty";
  if (name.size() > longest_name) return fmt::format("the name has {} bytes", name.size());
  std::string plain;
  for (const char c : name)
    if (c != '\\') plain += c;
  if (printable(plain) != plain) return "the name has characters that cannot be seen";
  if (name.front() == ' ' || name.back() == ' ') return "the name has blanks at an end";
  if (name.find("..") != std::string::npos || name.front() == '.' || name.back() == '.')
    return "the name has an empty part";
  if (name.front() == '/') return "the name looks like a path";
  return {};
}

}  // namespace

std::vector<SourceIssue> find_issues(const TensorSource& source) {
  std::vector<SourceIssue> issues = source.reader_issues();
  std::map<std::tuple<std::uint64_t, std::uint64_t, DType>, std::size_t> first;  // by checksum and size
  const std::vector<TensorEntry>& tensors = source.tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorEntry& entry = tensors[i];
    const TensorDetail detail = source.detail(i);
    if (std::string words = oddity(entry.name); !words.empty())
      issues.push_back({"name", entry.name, std::move(words)});
    if (entry.bytes == 0)
      issues.push_back(
          {"empty", entry.name, fmt::format("a tensor of shape {} without elements", to_string(entry.shape))});
    const std::size_t size = itemsize(entry.dtype);
    if (entry.bytes != 0 && !detail.is_compressed && size > 1 && entry.offset % size != 0)
      issues.push_back(
          {"unaligned", entry.name,
           fmt::format("its bytes begin at {}, which is no multiple of the {} of an element", entry.offset, size)});
    if (!detail.checksum || entry.bytes == 0) continue;
    const auto [other, is_first] = first.try_emplace({*detail.checksum, entry.bytes, entry.dtype}, i);
    if (!is_first)
      issues.push_back(
          {"duplicate", entry.name, fmt::format("the same bytes as {}", in_quotes(tensors[other->second].name))});
  }
  return issues;
}

std::string issues_text(const std::vector<SourceIssue>& issues, const OutputStyle& style) {
  std::string out;
  for (const SourceIssue& issue : issues) {
    out += coloured(style, Colour::warning, issue.kind) + ": ";
    if (!issue.tensor.empty()) out += printable(issue.tensor) + ": ";
    out += escaped(issue.words) + "\n";
  }
  out += issues.empty() ? "nothing suspicious\n" : counted(issues.size(), "issue") + "\n";
  return out;
}

}  // namespace muster::inspect
