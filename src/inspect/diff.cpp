// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/diff.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>

#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/checkpoint/shard_set.hpp"
#include "src/core/parallel.hpp"
#include "src/inspect/output.hpp"
#include "src/os/file.hpp"

namespace muster::inspect {
namespace {

// Large enough that a call per piece costs nothing, small enough that two threads share one large tensor.
constexpr std::uint64_t compared_at_once = std::uint64_t{8} << 20;
constexpr std::uint64_t longest_json = std::uint64_t{256} << 20;

struct Pair {
  std::size_t a = 0;
  std::size_t b = 0;
  ValueDifference values = {};
};

struct ComparedPiece {
  std::size_t pair = 0;
  std::uint64_t offset = 0;
};

void compare_pairs(const TensorSource& a, const TensorSource& b, std::vector<Pair>& pairs) {
  std::vector<ComparedPiece> pieces;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const std::uint64_t bytes = a.tensors()[pairs[i].a].bytes;
    for (std::uint64_t offset = 0; offset < bytes; offset += compared_at_once) pieces.push_back({i, offset});
  }
  struct Memory {
    std::vector<std::byte> a;
    std::vector<std::byte> b;
  };
  std::vector<Memory> memory(copy_workers());
  std::mutex mutex;
  parallel_for(pieces.size(), memory.size(), [&](std::size_t index, std::size_t worker) {
    const auto [number, offset] = pieces[index];
    Pair& pair = pairs[number];
    const TensorEntry& entry = a.tensors()[pair.a];
    const std::uint64_t length = std::min(compared_at_once, entry.bytes - offset);
    const auto left = a.read_piece(pair.a, offset, length, memory[worker].a);
    const auto right = b.read_piece(pair.b, offset, length, memory[worker].b);
    if (std::memcmp(left.data(), right.data(), length) == 0) return;
    const ValueDifference difference = compare_values(entry.dtype, left, right);
    const std::lock_guard lock(mutex);
    pair.values.add(difference);
  });
}

/// Places of the tensors by their names.
std::unordered_map<std::string_view, std::size_t> places_in(const TensorSource& source) {
  std::unordered_map<std::string_view, std::size_t> places;
  for (std::size_t i = 0; i < source.tensors().size(); ++i) places.emplace(source.tensors()[i].name, i);
  return places;
}

void diff_tensors(const TensorSource& a, const TensorSource& b, DiffReport& report) {
  std::vector<Pair> pairs;
  const auto in_b = places_in(b);
  for (std::size_t i = 0; i < a.tensors().size(); ++i) {
    const TensorEntry& left = a.tensors()[i];
    const auto place = in_b.find(left.name);
    if (place == in_b.end()) {
      report.tensor_diffs.push_back({.name = left.name, .kind = only_in_a, .a = left});
      continue;
    }
    const TensorEntry& right = b.tensors()[place->second];
    if (left.dtype != right.dtype || left.shape != right.shape) {
      report.tensor_diffs.push_back({.name = left.name, .kind = other_type, .a = left, .b = right});
      continue;
    }
    pairs.push_back({i, place->second});
    ++report.tensors;
    report.bytes += left.bytes;
  }
  compare_pairs(a, b, pairs);
  for (const Pair& pair : pairs) {
    if (pair.values.elements == 0) continue;
    const TensorEntry& left = a.tensors()[pair.a];
    report.tensor_diffs.push_back({.name = left.name, .a = left, .b = b.tensors()[pair.b], .values = pair.values});
  }
  const auto in_a = places_in(a);
  for (const TensorEntry& right : b.tensors())
    if (!in_a.contains(right.name)) report.tensor_diffs.push_back({.name = right.name, .kind = only_in_b, .b = right});
}

std::string excerpt(const Config& value) {
  constexpr std::size_t longest = 60;
  if (value.is_object()) return fmt::format("an object of {}", value.size());
  if (value.is_array() && value.size() > 8) return fmt::format("a list of {}", value.size());
  std::string text = to_json(value);
  if (text.size() > longest) {
    std::size_t end = longest;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0U) == 0x80) --end;
    text = text.substr(0, end) + "...";
  }
  return text;
}

/// "PLACE: A / B".
std::string words_of(const ConfigDiff& diff) {
  const auto text = [](const std::string& side) { return side.empty() ? std::string("nothing") : side; };
  return fmt::format("{}: {} / {}", diff.place.empty() ? "the whole" : diff.place, text(diff.a), text(diff.b));
}

constexpr std::size_t most_places = 3;
constexpr std::size_t most_config_diffs = 1000;

/// Places where two trees differ, the first `most` of them; returns how many there are.
std::uint64_t find_places(const Config& a, const Config& b, const std::string& path, std::size_t most,
                          std::vector<ConfigDiff>& out) {
  std::uint64_t count = 0;
  const auto note = [&](const std::string& where, const std::string& left, const std::string& right) {
    ++count;
    if (out.size() < most) out.push_back({where, left, right});
  };
  if (a.is_object() && b.is_object()) {
    const std::string below = path.empty() ? "" : path + ".";
    for (const auto& [key, value] : a.as_object()) {
      const Config* other = b.as_object().find(key);
      if (other == nullptr)
        note(below + key, excerpt(value), "");
      else
        count += find_places(value, *other, below + key, most, out);
    }
    for (const auto& [key, value] : b.as_object()) {
      if (a.as_object().find(key) == nullptr) note(below + key, "", excerpt(value));
    }
  } else if (a.is_array() && b.is_array() && a.size() == b.size()) {
    for (std::size_t i = 0; i < a.size(); ++i)
      count += find_places(a.at(i), b.at(i), fmt::format("{}[{}]", path, i), most, out);
  } else if (!(a == b)) {
    note(path, excerpt(a), excerpt(b));
  }
  return count;
}

std::optional<Config> parse(std::span<const std::byte> bytes) {
  if (bytes.size() > longest_json) return std::nullopt;
  try {
    return parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  } catch (const Error&) {
    return std::nullopt;  // then it is compared as bytes
  }
}

void diff_file(const std::string& name, const DiffReport& whole, std::vector<FileDiff>& out) {
  const auto a = os::MappedFile::open(join_path(whole.a, name));
  const auto b = os::MappedFile::open(join_path(whole.b, name));
  const std::span<const std::byte> x = a->bytes();
  const std::span<const std::byte> y = b->bytes();
  if (x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size()) == 0)) return;
  if (name.ends_with(".json")) {
    const std::optional<Config> left = parse(x);
    const std::optional<Config> right = left ? parse(y) : std::nullopt;
    if (right) {
      std::vector<ConfigDiff> places;
      const std::uint64_t count = find_places(*left, *right, "", most_places, places);
      std::string words;
      for (const ConfigDiff& place : places) words += (words.empty() ? "" : ", ") + words_of(place);
      if (count > most_places) words += fmt::format(" and {} more", count - most_places);
      if (count != 0) out.push_back({.name = name, .detail = std::move(words)});
      return;
    }
  }
  if (x.size() != y.size()) {
    out.push_back({.name = name, .detail = fmt::format("{} bytes / {} bytes", x.size(), y.size())});
    return;
  }
  const auto place = std::mismatch(x.begin(), x.end(), y.begin()).first - x.begin();
  out.push_back({.name = name, .detail = fmt::format("other bytes from {} on", place)});
}

void diff_files(DiffReport& report) {
  const std::vector<std::string> a = carried_files(report.a, "all").names;
  const std::vector<std::string> b = carried_files(report.b, "all").names;
  std::set<std::string> names(a.begin(), a.end());
  names.insert(b.begin(), b.end());
  for (const std::string& name : names) {
    const bool in_a = std::binary_search(a.begin(), a.end(), name);
    const bool in_b = std::binary_search(b.begin(), b.end(), name);
    if (in_a && in_b) {
      ++report.files;
      diff_file(name, report, report.file_diffs);
    } else {
      report.file_diffs.push_back({.name = name, .kind = in_a ? only_in_a : only_in_b});
    }
  }
}

/// Where a state is among them, whose config is compared with what stands for one in the other.
void diff_configs(const Source& a, const Source& b, DiffReport& report) {
  const auto is_state = [](const Source& source) { return !source.states.empty(); };
  const auto config_of = [](const Source& source) -> std::optional<Config> {
    if (source.kind == "safetensors" || source.kind == "hdf5") return config_from_metadata(source.metadata);
    return source.config();
  };
  if (!is_state(a) && !is_state(b)) return;
  const std::optional<Config> left = config_of(a);
  const std::optional<Config> right = left ? config_of(b) : std::nullopt;
  if (!right) return;
  report.has_configs = true;
  report.config_differences = find_places(*left, *right, "", most_config_diffs, report.config_diffs);
}

std::string type_of(const TensorEntry& entry) {
  return fmt::format("{} {}", to_string(entry.dtype), to_string(entry.shape));
}

std::string words_of(const TensorDiff& diff) {
  if (diff.kind == only_in_a) return fmt::format("{}: {}", diff.kind, type_of(diff.a));
  if (diff.kind == only_in_b) return fmt::format("{}: {}", diff.kind, type_of(diff.b));
  if (diff.kind == other_type) return fmt::format("{} / {}", type_of(diff.a), type_of(diff.b));
  const ValueDifference& values = diff.values;
  return fmt::format(
      "{}: {} of {} values differ, by at most {:.6g} ({:.3g} relative){}", type_of(diff.a), values.elements,
      static_cast<std::uint64_t>(element_count(diff.a.shape)) * values_per_element(diff.a.dtype), values.absolute,
      values.relative, values.nans == 0 ? "" : fmt::format(", {} NaN on one side", values.nans));
}

}  // namespace

DiffReport diff_models(const std::string& a, const std::string& b, const SourceOptions& options) {
  DiffReport report{.a = a, .b = b};
  const Source left = open_source(a, options);
  const Source right = open_source(b, options);
  diff_tensors(*left.tensors, *right.tensors, report);
  diff_configs(left, right, report);
  report.metadata_differs = !report.has_configs && left.metadata != right.metadata;
  std::error_code error;
  if (std::filesystem::is_directory(a, error) && std::filesystem::is_directory(b, error)) diff_files(report);
  return report;
}

std::string diff_text(const DiffReport& report) {
  std::string out;
  const auto add = [&out]<class... Words>(fmt::format_string<Words...> text, Words&&... words) {
    fmt::format_to(std::back_inserter(out), text, std::forward<Words>(words)...);
  };
  for (const TensorDiff& diff : report.tensor_diffs) add("tensor {}: {}\n", printable(diff.name), words_of(diff));
  for (const FileDiff& diff : report.file_diffs)
    add("file {}: {}\n", printable(diff.name), diff.kind == other_values ? escaped(diff.detail) : diff.kind);
  for (const ConfigDiff& diff : report.config_diffs) add("config {}\n", escaped(words_of(diff)));
  if (report.config_differences > report.config_diffs.size())
    add("and {} more places of the config\n", report.config_differences - report.config_diffs.size());
  if (report.metadata_differs) add("note: the headers have different metadata (muster show), which is no difference\n");
  const std::string compared = fmt::format("{}, {}{}{}", counted(report.tensors, "tensor"), human_bytes(report.bytes),
                                           report.has_configs ? ", the config" : "",
                                           report.files == 0 ? "" : ", " + counted(report.files, "other file"));
  if (report.is_same())
    add("same: {}\n", compared);
  else
    add("different: {} and {}{} (compared: {})\n", counted(report.tensor_diffs.size(), "tensor"),
        counted(report.file_diffs.size(), "other file"),
        report.config_differences == 0 ? ""
                                       : fmt::format(", {} of the config", counted(report.config_differences, "place")),
        compared);
  return out;
}

Config diff_tree(const DiffReport& report) {
  ConfigArray tensors;
  for (const TensorDiff& diff : report.tensor_diffs) {
    Config item = Config::object({{"name", diff.name}, {"kind", diff.kind}});
    if (diff.kind != only_in_b) item["a"] = type_of(diff.a);
    if (diff.kind != only_in_a) item["b"] = type_of(diff.b);
    if (diff.kind == other_values) {
      item["elements"] = diff.values.elements;
      item["nans"] = diff.values.nans;
      item["absolute"] = json_number(diff.values.absolute);
      item["relative"] = json_number(diff.values.relative);
    }
    tensors.push_back(std::move(item));
  }
  ConfigArray files;
  for (const FileDiff& diff : report.file_diffs)
    files.push_back(Config::object({{"name", diff.name}, {"kind", diff.kind}, {"detail", diff.detail}}));
  ConfigArray places;
  for (const ConfigDiff& diff : report.config_diffs)
    places.push_back(Config::object({{"place", diff.place}, {"a", or_null(diff.a)}, {"b", or_null(diff.b)}}));
  return Config::object({{"same", report.is_same()},
                         {"a", report.a},
                         {"b", report.b},
                         {"tensors", report.tensors},
                         {"bytes", report.bytes},
                         {"files", report.files},
                         {"config", report.has_configs},
                         {"metadata_differs", report.metadata_differs},
                         {"tensor_differences", std::move(tensors)},
                         {"file_differences", std::move(files)},
                         {"config_differences", std::move(places)},
                         {"config_differences_in_all", report.config_differences}});
}

}  // namespace muster::inspect
