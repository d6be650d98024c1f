// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/account_output.hpp"

#include <fmt/core.h>

#include <vector>

#include "src/core/quoted.hpp"
#include "src/inspect/output.hpp"

namespace muster::inspect {
namespace {

double megabytes(std::uint64_t bytes) {
  return static_cast<double>(bytes) / 1e6;
}

/// "ranks 0-3: BF16 [32, 64]", or each shape where they differ.
std::string sources_text(const AccountedTensor& tensor) {
  std::string text;
  for (std::size_t begin = 0; begin < tensor.sources.size();) {
    std::size_t end = begin + 1;
    while (end < tensor.sources.size() && tensor.sources[end].spec == tensor.sources[begin].spec &&
           tensor.sources[end].rank == tensor.sources[end - 1].rank + 1)
      ++end;
    const int first = tensor.sources[begin].rank;
    const int last = tensor.sources[end - 1].rank;
    text += fmt::format("{}{} {}", text.empty() ? "" : "; ",
                        first == last ? fmt::format("rank {}", first) : fmt::format("ranks {}-{}", first, last),
                        to_string(tensor.sources[begin].spec));
    begin = end;
  }
  return text;
}

Config tensors_tree(const std::vector<AccountedTensor>& tensors) {
  ConfigArray list;
  for (const AccountedTensor& tensor : tensors) {
    ConfigArray sources;
    for (const AccountedSource& source : tensor.sources)
      sources.push_back(Config::object({{"rank", source.rank},
                                        {"name", source.name},
                                        {"dtype", to_string(source.spec.dtype)},
                                        {"shape", extents_of(source.spec.shape)}}));
    Config& item = list.emplace_back(Config::object({{"origin", tensor.origin},
                                                     {"rule", tensor.rule},
                                                     {"action", tensor.action},
                                                     {"dtype", to_string(tensor.spec.dtype)},
                                                     {"shape", extents_of(tensor.spec.shape)}}));
    if (!tensor.name.empty()) item["name"] = tensor.name;
    if (!tensor.file.empty()) item["file"] = tensor.file;
    item["sources"] = std::move(sources);
  }
  return list;
}

}  // namespace

std::string account_line(const ExportAccount& account) {
  const int ranks = account.layout.ranks();
  std::string text =
      fmt::format("{} tensors of {} rank{} ({:.1f} MB) {} {} ({:.1f} MB in {} file{})", account.tensors_in, ranks,
                  ranks == 1 ? "" : "s", megabytes(account.bytes_in), account.to ? "cut anew into" : "merged into",
                  account.tensors_out, megabytes(account.bytes_out), account.files, account.files == 1 ? "" : "s");
  if (!account.dropped.empty()) text += fmt::format(", {} names dropped by rule", account.dropped.size());
  return text;
}

std::string account_table(const ExportAccount& account, const OutputStyle& style) {
  TextTable table({{"TENSOR"}, {"RULE"}, {"FROM"}, {"BECOMES"}, {"FILE"}}, {0, 2, 4});
  for (const AccountedTensor& tensor : account.tensors) {
    std::string name = printable(tensor.name);
    if (tensor.name != tensor.origin) name += " (" + printable(tensor.origin) + ")";
    table.add({name, fmt::format("{} {}", tensor.rule, tensor.action), sources_text(tensor), to_string(tensor.spec),
               tensor.file.empty() ? fmt::format("{} shards", account.files) : tensor.file});
  }
  for (const AccountedTensor& tensor : account.dropped)
    table.add({printable(tensor.origin), fmt::format("{} {}", tensor.rule, tensor.action), sources_text(tensor),
               "(dropped)", ""});
  std::string text;
  table.append_to(text, style);
  return text + account_line(account) + "\n";
}

Config account_tree(const ExportAccount& account) {
  return Config::object(
      {{"plan", account.plan},
       {"layout", to_string(account.layout)},
       {"to", account.to ? to_string(*account.to) : Config()},
       {"in", Config::object({{"tensors", account.tensors_in}, {"bytes", account.bytes_in}})},
       {"out",
        Config::object({{"tensors", account.tensors_out}, {"bytes", account.bytes_out}, {"files", account.files}})},
       {"tensors", tensors_tree(account.tensors)},
       {"dropped", tensors_tree(account.dropped)},
       {"notes", ConfigArray(account.notes.begin(), account.notes.end())}});
}

std::string left_line(const std::vector<LeftFile>& left) {
  constexpr std::size_t most = 5;
  if (left.empty()) return {};
  std::string names;
  for (std::size_t i = 0; i < std::min(most, left.size()); ++i)
    names += fmt::format("{}{} ({})", i == 0 ? "" : ", ", in_quotes(left[i].name), left[i].reason);
  if (left.size() > most) names += fmt::format(" and {} more", left.size() - most);
  return fmt::format("not carried: {}; --carry chooses\n", names);
}

}  // namespace muster::inspect
