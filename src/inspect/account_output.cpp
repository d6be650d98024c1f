// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/account_output.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "src/inspect/printable.hpp"

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

Config shape_json(const Shape& shape) {
  ConfigArray extents;
  for (const std::int64_t extent : shape) extents.emplace_back(extent);
  return extents;
}

Config tensor_json(const AccountedTensor& tensor) {
  ConfigArray sources;
  for (const AccountedSource& source : tensor.sources)
    sources.push_back(Config::object({{"rank", source.rank},
                                      {"name", source.name},
                                      {"dtype", std::string(to_string(source.spec.dtype))},
                                      {"shape", shape_json(source.spec.shape)}}));
  Config json = Config::object({{"origin", tensor.origin},
                                {"rule", static_cast<std::int64_t>(tensor.rule)},
                                {"action", tensor.action},
                                {"dtype", std::string(to_string(tensor.spec.dtype))},
                                {"shape", shape_json(tensor.spec.shape)}});
  if (!tensor.name.empty()) json["name"] = tensor.name;
  if (!tensor.file.empty()) json["file"] = tensor.file;
  json["sources"] = std::move(sources);
  return json;
}

Config tensors_json(const std::vector<AccountedTensor>& tensors) {
  ConfigArray list;
  for (const AccountedTensor& tensor : tensors) list.push_back(tensor_json(tensor));
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

std::string account_table(const ExportAccount& account) {
  using Row = std::array<std::string, 5>;
  std::vector<Row> rows = {{"tensor", "rule", "from", "becomes", "file"}};
  for (const AccountedTensor& tensor : account.tensors) {
    std::string name = printable(tensor.name);
    if (tensor.name != tensor.origin) name += " (" + printable(tensor.origin) + ")";
    rows.push_back({name, fmt::format("{} {}", tensor.rule, tensor.action), sources_text(tensor),
                    to_string(tensor.spec),
                    tensor.file.empty() ? fmt::format("{} shards", account.files) : tensor.file});
  }
  for (const AccountedTensor& tensor : account.dropped)
    rows.push_back({printable(tensor.origin), fmt::format("{} {}", tensor.rule, tensor.action), sources_text(tensor),
                    "(dropped)", ""});
  std::array<std::size_t, 5> widths{};
  for (const Row& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string text;
  for (const Row& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) line += fmt::format("{:<{}}  ", row[i], widths[i]);
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text + account_line(account) + "\n";
}

Config account_json(const ExportAccount& account) {
  ConfigArray notes;
  for (const std::string& note : account.notes) notes.emplace_back(note);
  return Config::object({{"plan", account.plan},
                         {"layout", to_string(account.layout)},
                         {"to", account.to ? Config(to_string(*account.to)) : Config()},
                         {"in", Config::object({{"tensors", static_cast<std::int64_t>(account.tensors_in)},
                                                {"bytes", static_cast<std::int64_t>(account.bytes_in)}})},
                         {"out", Config::object({{"tensors", static_cast<std::int64_t>(account.tensors_out)},
                                                 {"bytes", static_cast<std::int64_t>(account.bytes_out)},
                                                 {"files", static_cast<std::int64_t>(account.files)}})},
                         {"tensors", tensors_json(account.tensors)},
                         {"dropped", tensors_json(account.dropped)},
                         {"notes", std::move(notes)}});
}

}  // namespace muster::inspect
