// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/show.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <vector>

#include "muster/model_dir.hpp"
#include "muster/plan.hpp"
#include "muster/state.hpp"
#include "src/core/utf8.hpp"
#include "src/inspect/printable.hpp"

namespace muster::inspect {
namespace {

struct Total {
  std::uint64_t tensors = 0;
  std::uint64_t bytes = 0;
};

/// What is shown: some of the model's tensors, in the order that was asked for.
struct Listing {
  Listing(const std::string& path, const ShowOptions& options) : model(ModelDir::open(path)) {
    const std::vector<TensorEntry>& tensors = model.tensors();
    chosen.reserve(tensors.size());
    if (options.pattern.empty()) {
      for (std::size_t i = 0; i < tensors.size(); ++i) chosen.push_back(i);
    } else {
      const TensorPattern pattern = TensorPattern::glob(options.pattern);
      for (std::size_t i = 0; i < tensors.size(); ++i)
        if (pattern.matches(tensors[i].name)) chosen.push_back(i);
    }
    if (options.order == ShowOrder::name)
      std::sort(chosen.begin(), chosen.end(),
                [&](std::size_t a, std::size_t b) { return tensors[a].name < tensors[b].name; });
    if (options.order == ShowOrder::size)
      std::stable_sort(chosen.begin(), chosen.end(),
                       [&](std::size_t a, std::size_t b) { return tensors[a].bytes > tensors[b].bytes; });
    for (const std::size_t i : chosen) {
      for (Total* total : {&all, &by_dtype[tensors[i].dtype]}) {
        ++total->tensors;
        total->bytes += tensors[i].bytes;
      }
    }
  }

  ModelDir model;
  std::vector<std::size_t> chosen;
  Total all;
  std::map<DType, Total> by_dtype;
};

std::string_view plural(std::uint64_t count) {
  return count == 1 ? "" : "s";
}

// JSON has no bytes: a path that is no text is shown as on a terminal.
std::string utf8(const std::string& path) {
  return core::is_utf8(path) ? path : printable(path);
}

void append_table(std::string& out, const Listing& listing, std::size_t width) {
  struct Row {
    std::string name;
    std::string_view dtype;
    std::string shape;
    std::string bytes;
  };
  std::vector<Row> rows = {{"NAME", "DTYPE", "SHAPE", "SIZE"}};
  rows.reserve(listing.chosen.size() + 1);
  for (const std::size_t i : listing.chosen) {
    const TensorEntry& entry = listing.model.tensors()[i];
    rows.push_back({printable(entry.name), to_string(entry.dtype), to_string(entry.shape), human_bytes(entry.bytes)});
  }
  std::size_t name_width = 0;
  std::size_t dtype_width = 0;
  std::size_t shape_width = 0;
  std::size_t bytes_width = 0;
  for (const Row& row : rows) {
    name_width = std::max(name_width, columns(row.name));
    dtype_width = std::max(dtype_width, row.dtype.size());
    shape_width = std::max(shape_width, row.shape.size());
    bytes_width = std::max(bytes_width, row.bytes.size());
  }
  const std::size_t others = dtype_width + shape_width + bytes_width + 6;
  constexpr std::size_t least_name = 12;
  if (width != 0) name_width = std::min(name_width, std::max(least_name, width > others ? width - others : 0));
  for (const Row& row : rows) {
    const std::string name = shorten(row.name, name_width);
    out += name;
    out.append(name_width - std::min(name_width, columns(name)), ' ');
    fmt::format_to(std::back_inserter(out), "  {:<{}}  {:<{}}  {:>{}}\n", row.dtype, dtype_width, row.shape,
                   shape_width, row.bytes, bytes_width);
  }
}

}  // namespace

std::string show_text(const std::string& path, const ShowOptions& options) {
  const Listing listing(path, options);
  const std::size_t files = listing.model.files().size();
  std::string out = fmt::format("{}: {} tensor{}, {}", printable(path), listing.all.tensors,
                                plural(listing.all.tensors), human_bytes(listing.all.bytes));
  if (listing.chosen.size() != listing.model.tensors().size())
    out += fmt::format(" (of {} tensors)", listing.model.tensors().size());
  if (files != 1) out += fmt::format(", {} files", files);
  out += "\n\n";
  if (!listing.chosen.empty()) {
    append_table(out, listing, options.width);
    out += '\n';
  }
  for (const auto& [dtype, total] : listing.by_dtype)
    fmt::format_to(std::back_inserter(out), "{:<8} {} tensor{}, {}\n", to_string(dtype), total.tensors,
                   plural(total.tensors), human_bytes(total.bytes));
  for (const auto& [key, value] : listing.model.metadata()) {
    const std::string line = fmt::format("metadata {}: {}", printable(key), printable(value));
    out += options.width == 0 ? line : shorten(line, options.width);
    out += '\n';
  }
  return out;
}

std::string show_json(const std::string& path, const ShowOptions& options) {
  const Listing listing(path, options);
  const auto total_json = [](const Total& total) {
    return Config::object({{"tensors", Config(total.tensors)}, {"bytes", Config(total.bytes)}});
  };
  ConfigArray files;
  for (const SafetensorsFile& file : listing.model.files()) {
    std::uint64_t bytes = 0;
    for (const TensorEntry& entry : file.tensors()) bytes += entry.bytes;
    files.push_back(Config::object({{"path", Config(utf8(file.path()))},
                                    {"tensors", Config(std::uint64_t{file.tensors().size()})},
                                    {"bytes", Config(bytes)}}));
  }
  ConfigObject metadata;
  metadata.reserve(listing.model.metadata().size());
  for (const auto& [key, value] : listing.model.metadata()) metadata.insert(key, Config(value));
  ConfigArray tensors;
  tensors.reserve(listing.chosen.size());
  for (const std::size_t i : listing.chosen) {
    const TensorEntry& entry = listing.model.tensors()[i];
    ConfigArray shape;
    for (const std::int64_t extent : entry.shape) shape.emplace_back(extent);
    tensors.push_back(Config::object({{"name", Config(entry.name)},
                                      {"dtype", Config(to_string(entry.dtype))},
                                      {"shape", Config(std::move(shape))},
                                      {"bytes", Config(entry.bytes)},
                                      {"file", Config(utf8(listing.model.file_of(i).path()))},
                                      {"offset", Config(entry.offset)}}));
  }
  Config totals = total_json(listing.all);
  totals["dtypes"] = Config::object();
  for (const auto& [dtype, total] : listing.by_dtype) totals["dtypes"][to_string(dtype)] = total_json(total);
  return printable_json(to_json(Config::object({{"path", Config(utf8(path))},
                                                {"files", Config(std::move(files))},
                                                {"metadata", Config(std::move(metadata))},
                                                {"tensors", Config(std::move(tensors))},
                                                {"totals", std::move(totals)}}),
                                2)) +
         "\n";
}

}  // namespace muster::inspect
