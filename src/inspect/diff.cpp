// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/diff.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/checkpoint/shard_files.hpp"
#include "src/core/parallel.hpp"
#include "src/inspect/tensor_source.hpp"
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

ValueDifference compare_piece(const TensorSource& source_a, const TensorSource& source_b, const Pair& pair,
                              std::uint64_t offset) {
  const TensorEntry& entry = source_a.tensors()[pair.a];
  const std::uint64_t length = std::min(compared_at_once, entry.bytes - offset);
  const std::unique_ptr<PieceBytes> a = source_a.read(pair.a, offset, length);
  const std::unique_ptr<PieceBytes> b = source_b.read(pair.b, offset, length);
  if (std::memcmp(a->bytes().data(), b->bytes().data(), length) == 0) return {};
  return compare_values(entry.dtype, a->bytes(), b->bytes());
}

void compare_pairs(const TensorSource& a, const TensorSource& b, std::vector<Pair>& pairs) {
  std::vector<ComparedPiece> pieces;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const std::uint64_t bytes = a.tensors()[pairs[i].a].bytes;
    for (std::uint64_t offset = 0; offset < bytes; offset += compared_at_once) pieces.push_back({i, offset});
  }
  std::mutex mutex;
  parallel_for(pieces.size(), copy_workers(), [&](std::size_t index, std::size_t) {
    const ComparedPiece& piece = pieces[index];
    const ValueDifference difference = compare_piece(a, b, pairs[piece.pair], piece.offset);
    if (difference.elements == 0) return;
    const std::lock_guard lock(mutex);
    pairs[piece.pair].values.add(difference);
  });
}

void diff_tensors(const TensorSource& a, const TensorSource& b, DiffReport& report) {
  std::vector<Pair> pairs;
  pairs.reserve(a.tensors().size());
  for (std::size_t i = 0; i < a.tensors().size(); ++i) {
    const TensorEntry& left = a.tensors()[i];
    const std::optional<std::size_t> place = b.find(left.name);
    if (!place) {
      report.tensor_diffs.push_back({.name = left.name, .kind = DiffKind::only_in_a, .a = left});
      continue;
    }
    const TensorEntry& right = b.tensors()[*place];
    if (left.dtype != right.dtype || left.shape != right.shape) {
      report.tensor_diffs.push_back({.name = left.name, .kind = DiffKind::type, .a = left, .b = right});
      continue;
    }
    pairs.push_back({i, *place});
    ++report.tensors;
    report.bytes += left.bytes;
  }
  compare_pairs(a, b, pairs);
  for (const Pair& pair : pairs) {
    if (pair.values.elements == 0) continue;
    const TensorEntry& left = a.tensors()[pair.a];
    report.tensor_diffs.push_back(
        {.name = left.name, .kind = DiffKind::values, .a = left, .b = b.tensors()[pair.b], .values = pair.values});
  }
  for (const TensorEntry& right : b.tensors()) {
    if (!a.find(right.name))
      report.tensor_diffs.push_back({.name = right.name, .kind = DiffKind::only_in_b, .b = right});
  }
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
      report.file_diffs.push_back({.name = name, .kind = in_a ? DiffKind::only_in_a : DiffKind::only_in_b});
    }
  }
}

/// What stands for a source's config beside a state's.
std::optional<Config> comparable_config(const TensorSource& source) {
  if (source.kind() == "safetensors" || source.kind() == "hdf5") return config_from_metadata(source.metadata());
  const std::optional<std::string> text = source.config_text();
  if (!text) return std::nullopt;
  return parse_json(*text);
}

void diff_configs(const TensorSource& a, const TensorSource& b, DiffReport& report) {
  const auto is_state = [](const TensorSource& source) {
    return source.kind() == "state" || source.kind() == "workspace";
  };
  if (!is_state(a) && !is_state(b)) return;
  const std::optional<Config> left = comparable_config(a);
  const std::optional<Config> right = left ? comparable_config(b) : std::nullopt;
  if (!right) return;
  report.has_configs = true;
  report.config_differences = find_places(*left, *right, "", most_config_diffs, report.config_diffs);
}

}  // namespace

std::string words_of(const ConfigDiff& diff) {
  const auto text = [](const std::string& side) { return side.empty() ? std::string("nothing") : side; };
  return fmt::format("{}: {} / {}", diff.place.empty() ? "the whole" : diff.place, text(diff.a), text(diff.b));
}

DiffReport diff_models(const std::string& a, const std::string& b, const SourceOptions& options) {
  DiffReport report{.a = a, .b = b};
  const std::unique_ptr<TensorSource> left = open_source(a, options);
  const std::unique_ptr<TensorSource> right = open_source(b, options);
  diff_tensors(*left, *right, report);
  diff_configs(*left, *right, report);
  report.metadata_differs = !report.has_configs && left->metadata() != right->metadata();
  std::error_code error;
  if (std::filesystem::is_directory(a, error) && std::filesystem::is_directory(b, error)) diff_files(report);
  return report;
}

}  // namespace muster::inspect
