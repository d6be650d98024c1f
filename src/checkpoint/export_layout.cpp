// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/export_layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>
#include <unordered_map>

#include "muster/error.hpp"
#include "src/checkpoint/quoted.hpp"

namespace muster {
namespace {

[[noreturn]] void refuse(const std::string& words) {
  throw Error(ErrorKind::corrupt, words);
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// The digits at the front of `text`, without leading zeros, taken off.
std::string_view take_number(std::string_view& text) {
  std::size_t end = 0;
  while (end < text.size() && is_digit(text[end])) ++end;
  std::string_view number = text.substr(0, end);
  text.remove_prefix(end);
  number.remove_prefix(std::min(number.find_first_not_of('0'), number.size()));
  return number;
}

// "layers.2." before "layers.10.": layers that follow each other in the model do so in the files.
bool natural_less(std::string_view a, std::string_view b) {
  const std::string_view whole_a = a;
  const std::string_view whole_b = b;
  while (!a.empty() && !b.empty()) {
    if (is_digit(a[0]) && is_digit(b[0])) {
      const std::string_view x = take_number(a);
      const std::string_view y = take_number(b);
      if (x.size() != y.size()) return x.size() < y.size();
      if (x != y) return x < y;
    } else if (a[0] != b[0]) {
      return a[0] < b[0];
    } else {
      a.remove_prefix(1);
      b.remove_prefix(1);
    }
  }
  if (a.empty() != b.empty()) return a.empty();
  return whole_a < whole_b;  // "a01" and "a1" are two names
}

template <class T>
void append(std::vector<std::byte>& bytes, T value) {
  const std::size_t at = bytes.size();
  bytes.resize(at + sizeof(T));
  std::memcpy(bytes.data() + at, &value, sizeof(T));
}

std::uint32_t take(std::span<const std::byte>& bytes) {
  std::uint32_t value = 0;
  if (bytes.size() < sizeof(value)) refuse("the schedule of an export ends early");
  std::memcpy(&value, bytes.data(), sizeof(value));
  bytes = bytes.subspan(sizeof(value));
  return value;
}

PaddedSizes parse_padded(const Config& padded) {
  PaddedSizes sizes;
  for (const auto& [name, place] : padded.as_object()) {
    sizes.emplace(name, std::pair(static_cast<std::size_t>(place.at(std::size_t{0}).as_int()),
                                  place.at(std::size_t{1}).as_int()));
  }
  return sizes;
}

}  // namespace

std::vector<std::byte> encode_schedule(const Schedule& schedule) {
  std::vector<std::byte> bytes;
  append(bytes, static_cast<std::uint32_t>(schedule.size()));
  for (const auto& batch : schedule) {
    append(bytes, static_cast<std::uint32_t>(batch.size()));
    for (const std::uint32_t index : batch) append(bytes, index);
  }
  return bytes;
}

Schedule decode_schedule(std::span<const std::byte> bytes, std::size_t tensors) {
  const std::uint32_t batches = take(bytes);
  if (batches > bytes.size() / sizeof(std::uint32_t)) refuse("the schedule of an export ends early");
  Schedule schedule(batches);
  for (auto& batch : schedule) {
    const std::uint32_t count = take(bytes);
    if (count > bytes.size() / sizeof(std::uint32_t)) refuse("the schedule of an export ends early");
    batch.reserve(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      batch.push_back(take(bytes));
      if (batch.back() >= tensors) refuse("the schedule of an export names a tensor that is not there");
    }
  }
  return schedule;
}

Config shard_listing(const SafetensorsFile& shard, const PaddedSizes& padded) {
  ConfigArray tensors;
  tensors.reserve(shard.tensors().size());
  for (const auto& entry : shard.tensors()) {
    ConfigArray item;
    item.reserve(2 + entry.shape.size());
    item.emplace_back(entry.name);
    item.emplace_back(static_cast<std::int64_t>(entry.dtype));
    for (const std::int64_t extent : entry.shape) item.emplace_back(extent);
    tensors.emplace_back(std::move(item));
  }
  Config sizes = ConfigObject();
  for (const auto& [name, place] : padded) {
    sizes[name] = Config::array({static_cast<std::int64_t>(place.first), place.second});
  }
  return Config::object({{"tensors", std::move(tensors)}, {"padded", std::move(sizes)}});
}

ShardListing parse_shard_listing(int rank, const Config& listing) {
  try {
    ShardListing parsed;
    const ConfigArray& tensors = listing.at("tensors").as_array();
    if (tensors.size() > std::numeric_limits<std::uint32_t>::max()) refuse("too many tensors");
    parsed.tensors.reserve(tensors.size());
    for (const Config& item : tensors) {
      const ConfigArray& fields = item.as_array();
      const auto dtype = dtype_from_number(static_cast<std::uint8_t>(item.at(std::size_t{1}).as_int()));
      if (!dtype) refuse("an unknown dtype");
      NamedSpec& tensor = parsed.tensors.emplace_back(NamedSpec{item.at(std::size_t{0}).as_string(), {*dtype, {}}});
      for (std::size_t i = 2; i < fields.size(); ++i) tensor.spec.shape.push_back(fields[i].as_int());
    }
    parsed.padded = parse_padded(listing.at("padded"));
    return parsed;
  } catch (const Error& error) {
    throw Error(ErrorKind::corrupt,
                fmt::format("what rank {} says of its shard cannot be read: {}", rank, error.what()), {.rank = rank});
  }
}

ExportLayout::ExportLayout(const MergePlan& plan, std::vector<ShardListing> ranks, std::uint64_t batch_bytes) {
  ranks_.reserve(ranks.size());
  for (ShardListing& rank : ranks) {
    if (rank.padded != ranks[0].padded) {
      throw Error(ErrorKind::rank_mismatch,
                  fmt::format("the shards of rank 0 and rank {} remember different paddings; they are not of one set",
                              ranks_.size()),
                  {.rank = static_cast<int>(ranks_.size())});
    }
    ranks_.push_back(std::move(rank.tensors));
  }
  merged_ = merge_layout(plan, ranks_, ranks.empty() ? PaddedSizes() : ranks[0].padded);
  std::sort(merged_.begin(), merged_.end(),
            [](const MergedTensor& a, const MergedTensor& b) { return natural_less(a.name, b.name); });

  std::unordered_map<std::string_view, std::uint32_t> index;
  for (std::size_t i = 0; i < merged_.size(); ++i) {
    index.emplace(merged_[i].name, static_cast<std::uint32_t>(i));
    std::vector<int>& needed = contributors_.emplace_back(merged_[i].must_equal);
    for (const Piece& piece : merged_[i].pieces) needed.push_back(piece.rank);
    std::sort(needed.begin(), needed.end());
    needed.erase(std::unique(needed.begin(), needed.end()), needed.end());
  }
  for (const std::vector<NamedSpec>& tensors : ranks_) {
    std::vector<std::uint32_t>& places = places_.emplace_back(merged_.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto found = index.find(tensors[i].name);
      if (found != index.end()) places[found->second] = static_cast<std::uint32_t>(i);
    }
  }
  make_batches(batch_bytes);
}

void ExportLayout::make_batches(std::uint64_t batch_bytes) {
  std::vector<std::uint64_t> bytes(ranks_.size());
  std::size_t begin = 0;
  for (std::size_t i = 0; i < merged_.size(); ++i) {
    bool full = false;
    for (const int rank : contributors_[i]) {
      const TensorSpec& spec = source(i, rank);
      std::uint64_t& sum = bytes[static_cast<std::size_t>(rank)];
      sum += byte_size(spec.dtype, spec.shape);
      full = full || sum > batch_bytes;
    }
    if (!full || i == begin) continue;
    // It goes into the next batch, which begins with it.
    batches_.emplace_back(begin, i);
    begin = i;
    std::fill(bytes.begin(), bytes.end(), 0);
    for (const int rank : contributors_[i]) {
      const TensorSpec& spec = source(i, rank);
      bytes[static_cast<std::size_t>(rank)] = byte_size(spec.dtype, spec.shape);
    }
  }
  if (begin < merged_.size()) batches_.emplace_back(begin, merged_.size());
}

Schedule ExportLayout::schedule(int rank) const {
  Schedule schedule;
  schedule.reserve(batches_.size());
  for (const auto& [begin, end] : batches_) {
    auto& batch = schedule.emplace_back();
    for (std::size_t i = begin; i < end; ++i) {
      if (std::binary_search(contributors_[i].begin(), contributors_[i].end(), rank)) {
        batch.push_back(places_[static_cast<std::size_t>(rank)][i]);
      }
    }
  }
  return schedule;
}

const TensorSpec& ExportLayout::source(std::size_t index, int rank) const noexcept {
  const auto r = static_cast<std::size_t>(rank);
  return ranks_[r][places_[r][index]].spec;
}

std::uint64_t ExportLayout::tensors_in() const noexcept {
  std::uint64_t count = 0;
  for (const std::vector<NamedSpec>& tensors : ranks_) count += tensors.size();
  return count;
}

}  // namespace muster
