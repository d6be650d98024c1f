// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/reports.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>

#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/export.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/core/thread_pool.hpp"
#include "src/inspect/elements.hpp"
#include "src/inspect/output.hpp"
#include "src/os/file.hpp"

namespace muster::inspect {
namespace {

// Large enough that the cost per call is negligible, small enough that two threads share one large tensor.
constexpr std::uint64_t compared_at_once = std::uint64_t{6} << 20;  // a multiple of every group of packed elements
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

void compare_pairs(const TensorSource& a, const TensorSource& b, std::vector<Pair>& pairs,
                   const ProgressCallback& progress) {
  std::vector<ComparedPiece> pieces;
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const std::uint64_t bytes = a.tensors()[pairs[i].a].bytes;
    for (std::uint64_t offset = 0; offset < bytes; offset += compared_at_once) pieces.push_back({i, offset});
    total += bytes;
  }
  ProgressCounter counter(progress, total);
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
    counter.add(length);
    if (std::memcmp(left.data(), right.data(), length) == 0) return;
    const ValueDifference difference = compare_values(entry.dtype, left, right);
    const std::lock_guard lock(mutex);
    pair.values.add(difference);
  });
}

/// Returns the indices of the tensors by name.
std::unordered_map<std::string_view, std::size_t> places_in(const TensorSource& source) {
  std::unordered_map<std::string_view, std::size_t> places;
  for (std::size_t i = 0; i < source.tensors().size(); ++i) places.emplace(source.tensors()[i].name, i);
  return places;
}

std::string type_of(const TensorEntry& entry) {
  return to_string(TensorSpec{entry.dtype, entry.shape});
}

/// The differences of one kind, as in the report, and the number of compared objects.
struct Differences {
  ConfigArray found = {};
  std::uint64_t compared = 0;
  std::uint64_t bytes = 0;
};

/// Reports tensors that are missing in b, have another type, have other values, or are missing in a.
Differences diff_tensors(const TensorSource& a, const TensorSource& b, const ProgressCallback& progress) {
  Differences out;
  std::vector<Pair> pairs;
  const auto in_b = places_in(b);
  for (std::size_t i = 0; i < a.tensors().size(); ++i) {
    const TensorEntry& left = a.tensors()[i];
    const auto place = in_b.find(left.name);
    if (place == in_b.end()) {
      out.found.push_back(Config::object({{"name", left.name}, {"kind", only_in_a}, {"a", type_of(left)}}));
      continue;
    }
    const TensorEntry& right = b.tensors()[place->second];
    if (left.dtype != right.dtype || left.shape != right.shape) {
      out.found.push_back(
          Config::object({{"name", left.name}, {"kind", other_type}, {"a", type_of(left)}, {"b", type_of(right)}}));
      continue;
    }
    pairs.push_back({i, place->second});
    ++out.compared;
    out.bytes += left.bytes;
  }
  compare_pairs(a, b, pairs, progress);
  for (const Pair& pair : pairs) {
    if (pair.values.elements == 0) continue;
    const TensorEntry& entry = a.tensors()[pair.a];
    const std::uint64_t values =
        static_cast<std::uint64_t>(element_count(entry.shape)) * values_per_element(entry.dtype);
    out.found.push_back(Config::object({{"name", entry.name},
                                        {"kind", other_values},
                                        {"a", type_of(entry)},
                                        {"b", type_of(entry)},
                                        {"compared", values},
                                        {"differing", pair.values.elements},
                                        {"nans", pair.values.nans},
                                        {"absolute", json_number(pair.values.absolute)},
                                        {"relative", json_number(pair.values.relative)}}));
  }
  const auto in_a = places_in(a);
  for (const TensorEntry& right : b.tensors())
    if (!in_a.contains(right.name))
      out.found.push_back(Config::object({{"name", right.name}, {"kind", only_in_b}, {"b", type_of(right)}}));
  return out;
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
std::string place_words(const Config& diff) {
  const auto side = [&](const char* key) { return diff.at(key).is_null() ? "nothing" : diff.at(key).as_string(); };
  const std::string& place = diff.at("place").as_string();
  return fmt::format("{}: {} / {}", place.empty() ? "the whole" : place, side("a"), side("b"));
}

constexpr std::size_t most_places = 3;
constexpr std::size_t most_config_diffs = 1000;

/// Adds the first `most` places where two trees differ to the report, and returns their total number. A side that is
/// null is missing.
std::uint64_t find_places(const Config& a, const Config& b, const std::string& path, std::size_t most,
                          ConfigArray& out) {
  std::uint64_t count = 0;
  const auto note = [&](const std::string& where, const Config& left, const Config& right) {
    ++count;
    if (out.size() < most) out.push_back(Config::object({{"place", where}, {"a", left}, {"b", right}}));
  };
  if (a.is_object() && b.is_object()) {
    const std::string below = path.empty() ? "" : path + ".";
    for (const auto& [key, value] : a.as_object()) {
      const Config* other = b.as_object().find(key);
      if (other == nullptr)
        note(below + key, excerpt(value), {});
      else
        count += find_places(value, *other, below + key, most, out);
    }
    for (const auto& [key, value] : b.as_object()) {
      if (a.as_object().find(key) == nullptr) note(below + key, {}, excerpt(value));
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
    return std::nullopt;  // the file is compared as bytes
  }
}

/// Describes the difference between two files of this name; nullopt if they are equal. JSON is compared as values:
/// order of members and white space do not matter.
std::optional<std::string> file_difference(const std::string& a, const std::string& b, const std::string& name) {
  const auto left_file = os::MappedFile::open(join_path(a, name));
  const auto right_file = os::MappedFile::open(join_path(b, name));
  const std::span<const std::byte> x = left_file->bytes();
  const std::span<const std::byte> y = right_file->bytes();
  if (x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size()) == 0)) return std::nullopt;
  const std::optional<Config> left = name.ends_with(".json") ? parse(x) : std::nullopt;
  if (const std::optional<Config> right = left ? parse(y) : std::nullopt) {
    ConfigArray places;
    const std::uint64_t count = find_places(*left, *right, "", most_places, places);
    std::string words;
    for (const Config& place : places) words += (words.empty() ? "" : ", ") + place_words(place);
    if (count > most_places) words += fmt::format(" and {} more", count - most_places);
    return count == 0 ? std::nullopt : std::optional(words);
  }
  if (x.size() != y.size()) return fmt::format("{} bytes / {} bytes", x.size(), y.size());
  const auto place = std::mismatch(x.begin(), x.end(), y.begin()).first - x.begin();
  return fmt::format("bytes differ from offset {}", place);
}

/// Compares the files that are not weights by name.
Differences diff_files(const std::string& a, const std::string& b) {
  Differences out;
  const std::vector<std::string> left = extra_files_of(a, "all").names;
  const std::vector<std::string> right = extra_files_of(b, "all").names;
  std::set<std::string> names(left.begin(), left.end());
  names.insert(right.begin(), right.end());
  const auto add = [&](const std::string& name, std::string_view kind, const std::string& detail) {
    out.found.push_back(Config::object({{"name", name}, {"kind", kind}, {"detail", detail}}));
  };
  for (const std::string& name : names) {
    if (!std::ranges::binary_search(right, name)) {
      add(name, only_in_a, "");
    } else if (!std::ranges::binary_search(left, name)) {
      add(name, only_in_b, "");
    } else {
      ++out.compared;
      if (const auto detail = file_difference(a, b, name)) add(name, other_values, *detail);
    }
  }
  return out;
}

/// Compares configs if one side is a state: its config is compared with the config or metadata of the other side.
/// Returns nullopt if there are not two.
std::optional<Differences> diff_configs(const Source& a, const Source& b) {
  const auto config_of = [](const Source& source) -> std::optional<Config> {
    if (source.kind == "safetensors" || source.kind == "hdf5") return config_from_converted(source.metadata);
    return source.config();
  };
  if (a.states.empty() && b.states.empty()) return std::nullopt;
  const std::optional<Config> left = config_of(a);
  const std::optional<Config> right = left ? config_of(b) : std::nullopt;
  if (!right) return std::nullopt;
  Differences out;
  out.compared = find_places(*left, *right, "", most_config_diffs, out.found);
  return out;
}

std::string tensor_words(const Config& diff) {
  const std::string& kind = diff.at("kind").as_string();
  if (kind == only_in_a) return fmt::format("{}: {}", kind, diff.at("a").as_string());
  if (kind == only_in_b) return fmt::format("{}: {}", kind, diff.at("b").as_string());
  if (kind == other_type) return fmt::format("{} / {}", diff.at("a").as_string(), diff.at("b").as_string());
  const std::uint64_t nans = diff.at("nans").as_uint();
  return fmt::format("{}: {} of {} values differ, by at most {:.6g} ({:.3g} relative){}", diff.at("a").as_string(),
                     diff.at("differing").as_uint(), diff.at("compared").as_uint(), distance_of(diff, "absolute"),
                     distance_of(diff, "relative"), nans == 0 ? "" : fmt::format(", {} NaN on one side", nans));
}

}  // namespace

double distance_of(const Config& diff, const char* key) {
  return diff.at(key).is_string() ? std::numeric_limits<double>::infinity() : diff.at(key).as_double();
}

namespace {

std::string not_compared_message(const Source& left, const Source& right) {
  std::string words;
  for (const auto& [side, source] : {std::pair("A", &left), std::pair("B", &right)}) {
    const Omissions& omissions = source->tensors->omissions();
    if (const std::size_t lost = count_lost(omissions); lost != 0)
      words += fmt::format("{}{} of {} cannot be read, {}", words.empty() ? "" : "; ", counted(lost, "item"), side,
                           omission_words(omissions, true));
  }
  return words.empty() ? words : words + "; the rest is the same";
}

}  // namespace

Config diff_models(const std::string& a, const std::string& b, const SourceOptions& options,
                   const TensorFilter& filter) {
  Source left = open_source(a, options);
  Source right = open_source(b, options);
  narrow(left, filter);
  narrow(right, filter);
  return diff_sources(left, right, options, filter);
}

Config diff_sources(const Source& left, const Source& right, const SourceOptions& options, const TensorFilter& filter,
                    const ProgressCallback& progress) {
  const std::string& a = left.path;
  const std::string& b = right.path;
  Differences tensors = diff_tensors(*left.tensors, *right.tensors, progress);
  std::optional<Differences> configs = filter.is_all() ? diff_configs(left, right) : std::nullopt;
  const bool has_configs = configs.has_value();
  if (!configs) configs.emplace();
  // The files beside the weights of a third-party checkpoint are for its own programs.
  const auto has_extra_files = [&](const std::string& path) {
    std::error_code error;
    return std::filesystem::is_directory(path, error) && !thirdparty::find_checkpoint(path, options.thirdparty);
  };
  const bool has_files = filter.is_all() && has_extra_files(a) && has_extra_files(b);
  Differences files = has_files ? diff_files(a, b) : Differences();
  const auto omitted = [](const Source& source) {
    return list_of(source.tensors->omissions(), [](const Omission& omission) {
      return Config::object({{"name", omission.name}, {"reason", omission.reason}, {"lost", omission.is_lost}});
    });
  };
  const std::uint64_t lost = count_lost(left.tensors->omissions()) + count_lost(right.tensors->omissions());
  const bool has_differences = !tensors.found.empty() || !files.found.empty() || !configs->found.empty();
  return Config::object({{"same", !has_differences && lost == 0},
                         {"a", a},
                         {"b", b},
                         {"tensors", tensors.compared},
                         {"bytes", tensors.bytes},
                         {"files", files.compared},
                         {"config", has_configs},
                         {"metadata_differs", !has_configs && left.metadata != right.metadata},
                         {"tensor_differences", std::move(tensors.found)},
                         {"file_differences", std::move(files.found)},
                         {"config_differences", std::move(configs->found)},
                         {"config_differences_in_all", configs->compared},
                         {"not_compared", lost},
                         {"not_compared_message", not_compared_message(left, right)},
                         {"left_out_a", omitted(left)},
                         {"left_out_b", omitted(right)}});
}

void sort_differences(Config& report, DiffOrder order) {
  ConfigArray& differences = report["tensor_differences"].as_array();
  if (order == DiffOrder::name)
    std::ranges::stable_sort(differences, natural_less,
                             [](const Config& diff) -> std::string_view { return diff.at("name").as_string(); });
  if (order == DiffOrder::relative)
    std::ranges::stable_sort(differences, std::greater(), [](const Config& diff) {
      return diff.at("kind").as_string() == other_values ? distance_of(diff, "relative")
                                                         : std::numeric_limits<double>::infinity();
    });
}

std::string diff_text(const Config& report) {
  std::string out;
  const auto add = [&out]<class... Words>(fmt::format_string<Words...> text, Words&&... words) {
    fmt::format_to(std::back_inserter(out), text, std::forward<Words>(words)...);
  };
  const ConfigArray& tensors = report.at("tensor_differences").as_array();
  const ConfigArray& files = report.at("file_differences").as_array();
  const ConfigArray& places = report.at("config_differences").as_array();
  const std::uint64_t all_places = report.at("config_differences_in_all").as_uint();
  for (const Config& diff : tensors) add("tensor {}: {}\n", printable(diff.at("name").as_string()), tensor_words(diff));
  for (const Config& diff : files) {
    const std::string& kind = diff.at("kind").as_string();
    add("file {}: {}\n", printable(diff.at("name").as_string()),
        kind == other_values ? escaped(diff.at("detail").as_string()) : kind);
  }
  for (const Config& diff : places) add("config {}\n", escaped(place_words(diff)));
  if (all_places > places.size()) add("and {} more places of the config\n", all_places - places.size());
  if (report.at("metadata_differs").as_bool())
    add("note: the headers have different metadata (muster show); this does not count as a difference\n");
  for (const auto& [side, key] : {std::pair("A", "left_out_a"), std::pair("B", "left_out_b")})
    for (const Config& omission : report.at(key).as_array())
      add("{} {}: {} ({})\n", omission.at("lost").as_bool() ? "not compared: cannot be read in" : "note: left out in",
          side, printable(omission.at("name").as_string()), escaped(omission.at("reason").as_string()));
  const std::uint64_t compared_files = report.at("files").as_uint();
  const std::string compared =
      fmt::format("{}, {}{}{}", counted(report.at("tensors").as_uint(), "tensor"),
                  human_bytes(report.at("bytes").as_uint()), report.at("config").as_bool() ? ", the config" : "",
                  compared_files == 0 ? "" : ", " + counted(compared_files, "other file"));
  if (report.at("same").as_bool())
    add("same: {}\n", compared);
  else
    add("different: {} and {}{} (compared: {})\n", counted(tensors.size(), "tensor"),
        counted(files.size(), "other file"),
        all_places == 0 ? "" : fmt::format(", {} of the config", counted(all_places, "place")), compared);
  return out;
}

}  // namespace muster::inspect
