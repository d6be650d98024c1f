// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/show.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <tuple>
#include <unordered_map>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/export.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/checkpoint/plan/model_config.hpp"
#include "src/core/checksum.hpp"

namespace muster::inspect {

namespace {

// Names in files may consist of dots: below this depth a label has the whole rest.
constexpr int deepest = 32;

class TreeBuilder {
 public:
  TreeBuilder(const std::vector<TensorEntry>& entries, bool folds) : entries_(entries), folds_(folds) {}

  /// `places`: entries whose names are equal before `begin`, where the next part starts.
  [[nodiscard]] std::vector<NameNode> nodes(const std::vector<std::size_t>& places, std::size_t begin,
                                            int depth) const {
    std::vector<std::vector<std::size_t>> groups;
    std::unordered_map<std::string_view, std::size_t> by_label;
    for (const std::size_t place : places) {
      const auto [found, is_new] = by_label.try_emplace(label(place, begin, depth), groups.size());
      if (is_new) groups.emplace_back();
      groups[found->second].push_back(place);
    }
    std::vector<NameNode> out;
    out.reserve(groups.size());
    for (const std::vector<std::size_t>& group : groups) out.push_back(node(group, begin, depth));
    if (folds_) fold(out);
    return out;
  }

 private:
  [[nodiscard]] std::string_view label(std::size_t place, std::size_t begin, int depth) const {
    const std::string_view rest = std::string_view(entries_[place].name).substr(begin);
    return depth == deepest ? rest : rest.substr(0, rest.find_first_of("./"));
  }

  /// `places`: entries whose names have the same part at `begin`.
  [[nodiscard]] NameNode node(const std::vector<std::size_t>& places, std::size_t begin, int depth) const {
    NameNode node{.label = label(places.front(), begin, depth)};
    const std::size_t next = begin + node.label.size() + 1;
    std::vector<std::size_t> longer;
    for (const std::size_t place : places) {
      if (entries_[place].name.size() < next)
        node.tensor = place;
      else
        longer.push_back(place);
    }
    if (!longer.empty()) node.children = nodes(longer, next, depth + 1);
    if (!node.tensor && node.children.size() == 1 && node.children.front().alike == 1) {
      // Nodes without a branch are joined into one label.
      NameNode only = std::move(node.children.front());
      only.label = {only.label.data() - (next - begin), only.label.size() + next - begin};
      return only;
    }
    if (node.tensor) {
      node.tensors = 1;
      node.bytes = entries_[*node.tensor].bytes;
    }
    for (const NameNode& child : node.children) {
      node.tensors += child.alike * child.tensors;
      node.bytes += child.alike * child.bytes;
    }
    return node;
  }

  [[nodiscard]] bool are_alike(const NameNode& a, const NameNode& b) const {
    if (a.tensors != b.tensors || a.bytes != b.bytes || a.children.size() != b.children.size() ||
        a.tensor.has_value() != b.tensor.has_value())
      return false;
    if (a.tensor) {
      const TensorEntry& x = entries_[*a.tensor];
      const TensorEntry& y = entries_[*b.tensor];
      if (x.dtype != y.dtype || x.shape != y.shape) return false;
    }
    for (std::size_t i = 0; i < a.children.size(); ++i)
      if (a.children[i].label != b.children[i].label || a.children[i].alike != b.children[i].alike ||
          !are_alike(a.children[i], b.children[i]))
        return false;
    return true;
  }

  /// Splits "rank3.weight" into the text before the number that ends the first part, the number, and the rest.
  struct Numbered {
    std::string_view before;
    std::string_view number;
    std::string_view rest;
  };
  static Numbered numbered(std::string_view label) noexcept {
    const std::string_view part = label.substr(0, std::min(label.find_first_of("./"), label.size()));
    const std::size_t digits = part.find_last_not_of("0123456789") + 1;
    return {part.substr(0, digits), part.substr(digits), label.substr(part.size())};
  }

  void fold(std::vector<NameNode>& nodes) const {
    std::vector<NameNode> out;
    for (NameNode& node : nodes) {
      const Numbered mine = numbered(node.label);
      if (!out.empty() && !mine.number.empty()) {
        NameNode& first = out.back();
        const Numbered its = numbered(first.label);
        if (!its.number.empty() && its.before == mine.before && its.rest == mine.rest && are_alike(first, node)) {
          ++first.alike;
          first.last = mine.number;
          continue;
        }
      }
      out.push_back(std::move(node));
    }
    nodes = std::move(out);
  }

  const std::vector<TensorEntry>& entries_;
  bool folds_;
};

}  // namespace

std::vector<NameNode> name_tree(const std::vector<TensorEntry>& entries, const std::vector<std::size_t>& places,
                                bool folds) {
  return TreeBuilder(entries, folds).nodes(places, 0, 0);
}

namespace {

struct Total {
  std::uint64_t tensors = 0;
  std::uint64_t bytes = 0;
  std::uint64_t stored_bytes = 0;
};

/// The listing: some of the source's tensors, in the requested order.
struct TensorListing {
  TensorListing(const Source& source, const ShowOptions& options)
      : tensors(source.entries()), chosen(matching(source, options.filter)) {
    const auto name_of = [&](std::size_t i) -> std::string_view { return tensors[i].name; };
    if (options.order == ShowOrder::natural) std::ranges::sort(chosen, natural_less, name_of);
    if (options.order == ShowOrder::name) std::ranges::sort(chosen, {}, name_of);
    if (options.order == ShowOrder::size)
      std::ranges::stable_sort(chosen, std::greater(), [&](std::size_t i) { return tensors[i].bytes; });
    details.reserve(chosen.size());
    for (const std::size_t i : chosen) {
      const TensorDetail& detail = details.emplace_back(source.tensors->detail(i));
      is_compressed = is_compressed || detail.is_compressed;
      for (Total* total : {&all, &by_dtype[tensors[i].dtype]}) {
        ++total->tensors;
        total->bytes += tensors[i].bytes;
        total->stored_bytes += detail.stored_bytes;
      }
    }
  }

  const std::vector<TensorEntry>& tensors;
  std::vector<std::size_t> chosen;
  std::vector<TensorDetail> details;  // of the chosen tensors
  Total all;
  std::map<DType, Total> by_dtype;
  bool is_compressed = false;
};

std::string ratio(std::uint64_t bytes, std::uint64_t stored) {
  return stored == 0 ? "-" : fmt::format("{:.2f}", static_cast<double>(bytes) / static_cast<double>(stored));
}

std::vector<TextTable::Column> columns_of(const TensorListing& listing) {
  std::vector<TextTable::Column> columns = {{"NAME"}, {"DTYPE"}, {"SHAPE"}, {"SIZE", Align::right}};
  if (listing.is_compressed) {
    columns.push_back({"STORED", Align::right});
    columns.push_back({"RATIO", Align::right});
  }
  return columns;
}

struct Glyphs {
  std::string_view inner;
  std::string_view last;
  std::string_view below_inner;
  std::string_view below_last;
  std::string_view range;
};
constexpr Glyphs drawn = {"\u251c\u2500 ", "\u2514\u2500 ", "\u2502  ", "   ", "\u2013"};
constexpr Glyphs ascii = {"|- ", "`- ", "|  ", "   ", "-"};

class TreeRows {
 public:
  TreeRows(const TensorListing& listing, const OutputStyle& style, TextTable& table)
      : listing_(listing), glyphs_(style.is_unicode ? drawn : ascii), table_(table) {
    place_of_.resize(listing.tensors.size());
    for (std::size_t place = 0; place < listing.chosen.size(); ++place) place_of_[listing.chosen[place]] = place;
  }

  void add(const std::vector<NameNode>& nodes, const std::string& before) {
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      const bool is_last = i + 1 == nodes.size();
      // The first level needs no lines.
      const bool is_top = before.empty() && depth_ == 0;
      add(nodes[i], is_top ? "" : before + std::string(is_last ? glyphs_.last : glyphs_.inner));
      ++depth_;
      add(nodes[i].children, is_top ? "" : before + std::string(is_last ? glyphs_.below_last : glyphs_.below_inner));
      --depth_;
    }
  }

 private:
  void add(const NameNode& node, const std::string& before) {
    std::string label = printable(node.label);
    if (node.alike > 1) {
      const std::size_t end = std::min(label.find_first_of("./"), label.size());
      label = fmt::format("{}{}{}{}", label.substr(0, end), glyphs_.range, node.last, label.substr(end));
    }
    std::vector<std::string> cells = {before + label};
    const std::string each = node.alike > 1 ? fmt::format("{} x ", node.alike) : "";
    std::uint64_t stored = 0;
    if (node.tensor) {
      const TensorEntry& entry = listing_.tensors[*node.tensor];
      stored = listing_.details[place_of_[*node.tensor]].stored_bytes;
      const auto [texts, is_new] = texts_.try_emplace(&entry);
      if (is_new) texts->second = {to_string(entry.shape), human_bytes(entry.bytes)};
      cells.emplace_back(to_string(entry.dtype));
      cells.push_back(texts->second.first);
      cells.push_back(each + texts->second.second);
    } else {
      cells.emplace_back();
      cells.push_back(counted(node.tensors, "tensor"));
      cells.push_back(each + human_bytes(node.bytes));
    }
    if (listing_.is_compressed) {
      cells.push_back(node.tensor ? human_bytes(stored) : "");
      cells.push_back(node.tensor ? ratio(listing_.tensors[*node.tensor].bytes, stored) : "");
    }
    table_.add(cells);
  }

  const TensorListing& listing_;
  const Glyphs& glyphs_;
  TextTable& table_;
  std::vector<std::size_t> place_of_;  // index among the chosen tensors
  // Layers repeat: most tensors have the shape of an earlier one, and formatting the shape is the most expensive part
  // of a row.
  struct LessByShape {
    bool operator()(const TensorEntry* a, const TensorEntry* b) const noexcept {
      return a->bytes != b->bytes ? a->bytes < b->bytes : a->shape < b->shape;
    }
  };
  std::map<const TensorEntry*, std::pair<std::string, std::string>, LessByShape> texts_;
  int depth_ = 0;
};

/// Appends names as a tree, or one row per name.
void append_rows(std::string& out, const TensorListing& listing, const ShowOptions& options) {
  std::vector<NameNode> nodes;
  if (options.view == ShowView::tree)
    nodes = name_tree(listing.tensors, listing.chosen, !options.is_unfolded);
  else
    for (const std::size_t i : listing.chosen) nodes.push_back({.label = listing.tensors[i].name, .tensor = i});
  TextTable table(columns_of(listing), {0});
  TreeRows(listing, options.style, table).add(nodes, "");
  table.append_to(out, options.style);
}

std::string fact_text(const Config& value) {
  return value.is_string() ? printable(value.as_string()) : printable(to_json(value));
}

Config total_tree(const Total& total) {
  return Config::object({{"tensors", total.tensors}, {"bytes", total.bytes}, {"stored_bytes", total.stored_bytes}});
}

/// Returns an item of the list "tensors", with the indentation of that list.
Config tensor_tree(const TensorListing& listing, std::size_t place) {
  const TensorEntry& entry = listing.tensors[listing.chosen[place]];
  const TensorDetail& detail = listing.details[place];
  return Config::object({{"name", entry.name},
                         {"dtype", to_string(entry.dtype)},
                         {"shape", extents_of(entry.shape)},
                         {"bytes", entry.bytes},
                         {"file", or_null(std::string(detail.file))},
                         {"offset", entry.offset},
                         {"stored_bytes", detail.stored_bytes},
                         {"compressed", detail.is_compressed},
                         {"checksum", detail.checksum ? checksum_text(*detail.checksum) : Config()}});
}

constexpr std::size_t longest_name = 255;

/// Returns the oddity of a name; empty if it has none.
std::string oddity(const std::string& name) {
  if (name.empty()) return "the name is empty";
  if (name.size() > longest_name) return fmt::format("the name has {} bytes", name.size());
  std::string plain;
  for (const char c : name)
    if (c != '\\') plain += c;
  if (printable(plain) != plain) return "the name has invisible characters";
  if (name.front() == ' ' || name.back() == ' ') return "the name has blanks at an end";
  if (name.find("..") != std::string::npos || name.front() == '.' || name.back() == '.')
    return "the name has an empty part";
  if (name.front() == '/') return "the name looks like a path";
  return {};
}

/// "an array of 2 items", "a string".
std::string value_text(const Config& value) {
  if (value.is_array()) return fmt::format("an array of {}", counted(value.size(), "item"));
  if (value.is_object()) return fmt::format("an object of {}", counted(value.size(), "item"));
  return value.is_null() ? "null" : fmt::format("a single value ({})", to_string(value.type()));
}

/// Returns the longest existing prefix of the place, and the keys below it.
std::string nearest(const Config& tree, std::string_view place) {
  for (std::size_t dot = place.rfind('.'); dot != std::string_view::npos && dot > 0; dot = place.rfind('.', dot - 1)) {
    const Config* found = find_place(tree, place.substr(0, dot));
    if (found == nullptr) continue;
    return fmt::format("{} is {}", in_quotes(place.substr(0, dot)), value_text(*found));
  }
  if (!tree.is_object()) return fmt::format("it is {}", value_text(tree));
  constexpr std::size_t most_named = 8;
  std::string keys;
  std::size_t named = 0;
  for (const auto& [key, value] : tree.as_object()) {
    if (named++ == most_named) {
      keys += ", ...";
      break;
    }
    keys += (keys.empty() ? "" : ", ") + in_quotes(key);
  }
  return keys.empty() ? "it is empty" : "its keys are " + keys;
}

}  // namespace

std::string show_text(const Source& source, const ShowOptions& options) {
  const TensorListing listing(source, options);
  const std::size_t files = source.files.size();
  std::string out;
  // Reserves memory once: a line has about a hundred characters.
  out.reserve(listing.chosen.size() * 128 + 1024);
  out += fmt::format("{}: {}, {}", printable(source.path), counted(listing.all.tensors, "tensor"),
                     human_bytes(listing.all.bytes));
  if (listing.chosen.size() != listing.tensors.size()) out += fmt::format(" (of {} tensors)", listing.tensors.size());
  if (listing.is_compressed)
    out += fmt::format(", {} stored (ratio {})", human_bytes(listing.all.stored_bytes),
                       ratio(listing.all.bytes, listing.all.stored_bytes));
  if (files > 1) out += fmt::format(", {} files", files);
  out += "\n\n";
  if (!listing.chosen.empty()) {
    append_rows(out, listing, options);
    out += '\n';
  }
  for (const auto& [dtype, total] : listing.by_dtype)
    fmt::format_to(std::back_inserter(out), "{:<8} {}, {}\n", to_string(dtype), counted(total.tensors, "tensor"),
                   human_bytes(total.bytes));
  const auto append_line = [&](const std::string& line) {
    out += options.style.width == 0 ? line : shorten(line, options.style.width);
    out += '\n';
  };
  for (const auto& [key, value] : source.facts) append_line(fmt::format("{}: {}", key, fact_text(value)));
  for (const auto& [key, value] : source.metadata)
    append_line(fmt::format("metadata {}: {}", printable(key), printable(value)));
  return out + omissions_line(source);
}

Config file_tree(const SourceFile& file) {
  return Config::object({{"path", file.path}, {"tensors", file.tensors}, {"bytes", file.bytes}});
}

Config issue_tree(const SourceIssue& issue) {
  return Config::object({{"kind", issue.kind}, {"tensor", or_null(issue.tensor)}, {"message", issue.message}});
}

void show_json(const Source& source, const ShowOptions& options, const Sink& sink) {
  const TensorListing listing(source, options);
  ConfigObject metadata;
  metadata.reserve(source.metadata.size());
  for (const auto& [key, value] : source.metadata) metadata.insert(is_utf8(key) ? key : printable(key), value);
  ConfigObject facts;
  for (const auto& [key, value] : source.facts) facts.insert(key, value);
  Config totals = total_tree(listing.all);
  totals["dtypes"] = Config::object();
  for (const auto& [dtype, total] : listing.by_dtype) totals["dtypes"][to_string(dtype)] = total_tree(total);
  Config out = Config::object({{"path", source.path},
                               {"kind", source.kind},
                               {"facts", std::move(facts)},
                               {"files", list_of(source.files, file_tree)},
                               {"metadata", std::move(metadata)},
                               {"tensors", ConfigArray()},
                               {"totals", std::move(totals)},
                               {"not_readable", count_lost(source.tensors->omissions())}});
  if (options.has_issues) out["issues"] = list_of(find_issues(source), issue_tree);
  json_report_with_list(
      out, "tensors", listing.chosen.size(), [&](std::size_t place) { return tensor_tree(listing, place); }, sink);
}

std::vector<SourceIssue> find_issues(const Source& source) {
  std::vector<SourceIssue> issues = source.issues;
  for (const Omission& omission : source.tensors->omissions())
    issues.push_back({omission.is_lost ? "not readable" : "not shown", omission.name, omission.reason});
  std::map<std::tuple<std::uint64_t, std::uint64_t, DType>, std::size_t> first;  // by checksum and size
  const std::vector<TensorEntry>& tensors = source.entries();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorEntry& entry = tensors[i];
    const TensorDetail detail = source.tensors->detail(i);
    if (std::string message = oddity(entry.name); !message.empty())
      issues.push_back({"name", entry.name, std::move(message)});
    if (entry.bytes == 0)
      issues.push_back(
          {"empty", entry.name, fmt::format("a tensor of shape {} without elements", to_string(entry.shape))});
    const std::size_t size = itemsize(entry.dtype);
    if (entry.bytes != 0 && !detail.is_compressed && size > 1 && entry.offset % size != 0)
      issues.push_back(
          {"unaligned", entry.name,
           fmt::format("its bytes begin at {}, which is not a multiple of the element size {}", entry.offset, size)});
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
    out += escaped(issue.message) + "\n";
  }
  out += issues.empty() ? "no issues found\n" : counted(issues.size(), "issue") + "\n";
  return out;
}

std::string show_config(const Source& source, const std::string& place) {
  const std::optional<Config> config = source.config();
  if (!config)
    throw Error(ErrorKind::not_found, fmt::format("{}: has no config", in_quotes(source.path)), {.path = source.path});
  const Config* part = place.empty() ? &*config : find_place(*config, place);
  if (part == nullptr)
    throw Error(ErrorKind::not_found,
                fmt::format("{}: the config has no value at {}; {}", in_quotes(source.path), in_quotes(place),
                            nearest(*config, place)),
                {.path = source.path});
  return json_report(*part);
}

}  // namespace muster::inspect
