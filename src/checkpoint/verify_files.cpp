// SPDX-License-Identifier: Apache-2.0
// The index of a checkpoint, read without believing it: ModelDir refuses a bad one at its first defect, this lists all.
//
// And a directory with one file a rank.

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "muster/config.hpp"
#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/checksums.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/checkpoint/shard_set.hpp"
#include "src/checkpoint/verification.hpp"

namespace muster {
namespace {

std::optional<Config> read_json(const std::string& name, Verification& verification) {
  try {
    return parse_json(read_text(join_path(verification.directory, name), longest_index));
  } catch (const Error& error) {
    verification.add(Defect::index, name, "", "the index {}: {}", in_quotes(name), error.what());
    return std::nullopt;
  }
}

void verify_total(const Config& index, const std::string& name, const Places& places, Verification& verification) {
  const Config* metadata = index.as_object().find("metadata");
  const Config* total =
      metadata != nullptr && metadata->is_object() ? metadata->as_object().find("total_size") : nullptr;
  if (total == nullptr) return;  // it may be left out
  std::uint64_t bytes = 0;
  for (const auto& [tensor, place] : places) bytes += place.first->file.tensors()[place.second].bytes;
  // Some writers have it as a real number.
  const bool is_number = total->type() == Config::Type::integer || total->type() == Config::Type::real;
  if (!is_number || total->as_double() != static_cast<double>(bytes))
    verification.add(Defect::index, name, "", "the index {}: \"total_size\" is {}, and the tensors have {} bytes",
                     in_quotes(name), is_number ? to_json(*total) : "no number", bytes);
}

struct Shard {
  int rank = 0;
  const OpenedFile* opened = nullptr;
  std::optional<ShardFacts> facts;
};

// What a shard says of itself, against its name and its tensors.
void verify_facts(Shard& shard, int ranks, Verification& verification) {
  const std::string& name = shard.opened->name;
  try {
    shard.facts = parse_shard_facts(shard.opened->file.metadata());
  } catch (const Error& error) {
    return verification.add(Defect::file, name, "", "{}: {}", in_quotes(name), error.what());
  }
  if (!shard.facts) return;
  if (shard.facts->rank != shard.rank || shard.facts->ranks != ranks)
    verification.add(Defect::disagree, name, "", "{}: it says that it is rank {} of {}", in_quotes(name),
                     shard.facts->rank, shard.facts->ranks);
  if (shard.facts->layout && shard.facts->layout->ranks() != ranks) {
    verification.add(Defect::disagree, name, "", "{}: it was cut for the layout {}, which has other than {} ranks",
                     in_quotes(name), to_string(*shard.facts->layout), ranks);
    shard.facts->layout.reset();
  }
  for (const auto& [tensor, place] : shard.facts->padded) {
    const auto index = shard.opened->file.find(tensor);
    if (!index) {
      verification.add(Defect::disagree, name, tensor, "{}: it has padding of the tensor {}, which it does not have",
                       in_quotes(name), in_quotes(tensor));
      continue;
    }
    const Shape& shape = shard.opened->file.tensors()[*index].shape;
    if (place.first >= shape.size())
      verification.add(Defect::disagree, name, tensor, "{}: the tensor {} of shape {} is padded along dimension {}",
                       in_quotes(name), in_quotes(tensor), to_string(shape), place.first);
  }
}

// Two ranks that hold parts of the same tensors.
void compare(const Shard& first, const Shard& other, Verification& verification) {
  const std::string& name = other.opened->name;
  const std::string one = in_quotes(first.opened->name);
  const std::string two = in_quotes(name);
  const auto lacks = [&](const TensorEntry& entry, const std::string& has, const std::string& has_not) {
    verification.add(Defect::disagree, name, entry.name, "the tensor {} is in {} and not in {}", in_quotes(entry.name),
                     has, has_not);
  };
  for (const TensorEntry& entry : first.opened->file.tensors()) {
    const auto index = other.opened->file.find(entry.name);
    if (!index) {
      lacks(entry, one, two);
      continue;
    }
    const TensorEntry& there = other.opened->file.tensors()[*index];
    if (there.dtype == entry.dtype && there.shape.size() == entry.shape.size()) continue;
    verification.add(Defect::disagree, name, entry.name, "the tensor {} is {} in {} and {} in {}",
                     in_quotes(entry.name), to_string(TensorSpec{entry.dtype, entry.shape}), one,
                     to_string(TensorSpec{there.dtype, there.shape}), two);
  }
  for (const TensorEntry& entry : other.opened->file.tensors())
    if (!first.opened->file.find(entry.name)) lacks(entry, two, one);
  if (first.facts && other.facts && first.facts->padded != other.facts->padded)
    verification.add(Defect::disagree, name, "", "{} and {} do not say the same of padding", one, two);
}

// Ranks of one group hold parts of the same tensors: those of one pipeline stage and one expert rank.
int group_of(const Shard& shard) {
  return shard.facts && shard.facts->layout ? shard.rank / shard.facts->layout->tensor : 0;
}

// Two ranks of one set, whatever they hold.
void compare_facts(const Shard& first, const Shard& other, Verification& verification) {
  const std::string& name = other.opened->name;
  const auto words_of_layout = [](const Shard& shard) {
    return shard.facts->layout ? to_string(*shard.facts->layout) : std::string("(none)");
  };
  if (first.facts.has_value() != other.facts.has_value())
    verification.add(Defect::disagree, name, "",
                     "one of {} and {} says that it is a shard, the other does not; they are of different origin",
                     in_quotes(first.opened->name), in_quotes(name));
  else if (first.facts && first.facts->layout != other.facts->layout)
    verification.add(Defect::disagree, name, "", "{} was cut for the layout {}, {} for {}",
                     in_quotes(first.opened->name), words_of_layout(first), in_quotes(name), words_of_layout(other));
}

// What shards say of their own bytes.
void verify_pieces(const std::vector<OpenedFile>& files, Verification& verification) {
  std::vector<ReadTensor> all;
  std::vector<std::shared_ptr<const CheckedTensor>> tensors;  // of each
  for (const OpenedFile& opened : files) {
    try {
      const PieceChecksums sums = piece_checksums_of(opened.file);
      for (std::size_t i = 0; i < opened.file.tensors().size(); ++i)
        if (auto tensor = checked_tensor(opened.file, i, sums)) {
          all.push_back({&opened, i});
          tensors.push_back(std::move(tensor));
        }
    } catch (const Error& error) {
      verification.add(Defect::file, opened.name, "", "{}", error.what());
    }
  }
  verification.report.has_checksums = !all.empty();
  if (!verification.options.checksums) return;
  read_all(all, verification.options.progress, [&](std::size_t place, const ReadProgress& progress) {
    const std::uint64_t bytes = all[place].entry().bytes;
    std::vector<std::byte> memory(std::min(bytes, checked_piece_bytes));
    for (std::uint64_t at = 0; at < bytes; at += memory.size()) {
      memory.resize(std::min(bytes - at, checked_piece_bytes));
      tensors[place]->read(at, memory);
      progress(memory.size());
    }
  });
  verification.report.checked += all.size();
  for (const ReadTensor& read : all)
    if (!read.failure.empty())
      verification.add(Defect::checksum, read.file->name, read.entry().name, "{}", read.failure);
}

/// Tells each run of numbers from `first` to `last` that is not there; a count from a name is only believed as far as
/// there are files.
void find_holes(const std::set<std::uint64_t>& there, std::uint64_t first, std::uint64_t last, std::string_view what,
                const std::function<std::string(std::uint64_t)>& name_of, Verification& verification) {
  for (auto next = there.lower_bound(first); first <= last; ++first) {
    const std::uint64_t end = next == there.end() || *next > last ? last + 1 : *next++;
    const std::string name = name_of(first);
    if (first + 1 == end)
      verification.add(Defect::missing, name, "", "{} is not there", in_quotes(name));
    else if (first < end)
      verification.add(Defect::missing, name, "", "{} and those up to {} {} are not there", in_quotes(name), what,
                       end - 1);
    first = end;
  }
}

}  // namespace

void verify_index(const std::string& index_name, const std::vector<std::string>& names,
                  const std::vector<OpenedFile>& files, const Places& places, Verification& verification) {
  const std::optional<Config> index = read_json(index_name, verification);
  if (!index) return;
  const auto problem = [&](Defect defect, std::string_view file, std::string_view tensor, const std::string& words) {
    verification.add(defect, file, tensor, "the index {}: {}", in_quotes(index_name), words);
  };
  const Config* map = index->is_object() ? index->as_object().find("weight_map") : nullptr;
  if (map == nullptr || !map->is_object())
    return problem(Defect::index, index_name, "", "it has no object \"weight_map\"");
  verify_total(*index, index_name, places, verification);

  std::unordered_map<std::string_view, const OpenedFile*> opened;
  for (const OpenedFile& file : files) opened.emplace(file.name, &file);
  std::set<std::string_view> named;
  std::unordered_set<std::string_view> indexed;
  for (const auto& [tensor, value] : map->as_object()) {
    indexed.insert(tensor);
    if (!value.is_string() || !is_name_beside(value.as_string())) {
      problem(Defect::index, index_name, tensor,
              fmt::format("the tensor {} is in {}, which is no name of a file beside it", in_quotes(tensor),
                          value.is_string() ? in_quotes(value.as_string()) : "what is no string"));
      continue;
    }
    const std::string& name = value.as_string();
    const bool is_new = named.insert(name).second;
    if (!std::binary_search(names.begin(), names.end(), name)) {
      if (is_new) problem(Defect::missing, name, "", fmt::format("it names {}, which is not there", in_quotes(name)));
      continue;
    }
    const auto file = opened.find(name);
    if (file == opened.end() || file->second->file.find(tensor)) continue;  // told when it could not be opened
    const auto elsewhere = places.find(tensor);
    problem(Defect::index, name, tensor,
            fmt::format("the tensor {} is not in {}{}", in_quotes(tensor), in_quotes(name),
                        elsewhere == places.end() ? ", nor in any other file"
                                                  : ", but in " + in_quotes(elsewhere->second.first->name)));
  }
  for (const std::string& name : names)
    if (!named.contains(name))
      problem(Defect::unindexed, name, "", fmt::format("it does not name {}", in_quotes(name)));
  for (const auto& [tensor, place] : places) {
    if (indexed.contains(tensor) || !named.contains(place.first->name)) continue;
    problem(Defect::unindexed, place.first->name, tensor,
            fmt::format("it lacks the tensor {}, which {} has", in_quotes(tensor), in_quotes(place.first->name)));
  }
}

bool verify_numbering(const std::vector<std::string>& names, Verification& verification) {
  struct Set {
    std::set<std::uint64_t> numbers;
    std::string first;
  };
  std::map<std::string, std::map<std::uint64_t, Set>> sets;
  for (const std::string& name : names) {
    const std::optional<NumberedName> numbered = parse_numbered_name(name);
    if (!numbered) continue;
    Set& set = sets[numbered->prefix][numbered->count];
    set.numbers.insert(numbered->number);
    if (set.first.empty()) set.first = name;
  }
  for (const auto& [prefix, counts] : sets) {
    const bool is_rank = prefix == shard_prefix;
    if (counts.size() > 1) {
      std::string list;
      for (const auto& [count, set] : counts)
        list += fmt::format("{}{}", list.empty() ? "" : ", ", in_quotes(set.first));
      verification.add(Defect::numbering, counts.begin()->second.first, "", "{} of sets of different sizes: {}",
                       is_rank ? "shards" : "files", list);
    }
    for (const auto& [count, set] : counts) {
      const auto name_of = [&, prefix = prefix, count = count](std::uint64_t number) {
        return numbered_name(prefix, number, count);
      };
      const std::uint64_t first = is_rank ? 0 : 1;
      const std::uint64_t last = count + first - 1;
      for (const std::uint64_t number : set.numbers)
        if (number < first || number > last)
          verification.add(Defect::numbering, name_of(number), "", "{} is no number from {} to {}",
                           in_quotes(name_of(number)), first, last);
      find_holes(set.numbers, first, last, is_rank ? "rank" : "number", name_of, verification);
    }
  }
  return !sets.empty();
}

void verify_shards(const std::vector<std::string>& names, Verification& verification) {
  std::vector<std::string> shard_names;
  for (const std::string& name : names) {
    if (parse_shard_file_name(name))
      shard_names.push_back(name);
    else
      verification.add(Defect::numbering, name, "", "{} is no shard's name, among shards", in_quotes(name));
  }
  verify_numbering(shard_names, verification);
  const std::vector<OpenedFile> files = verification.open_all(shard_names);
  std::map<int, Shard> first;                           // of each set
  std::map<std::pair<int, int>, Shard> first_of_group;  // of each set and group
  for (const OpenedFile& file : files) {
    const auto parsed = parse_shard_file_name(file.name);
    Shard shard{parsed->rank, &file, {}};
    verify_facts(shard, parsed->ranks, verification);
    if (const auto [other, is_first] = first_of_group.try_emplace({parsed->ranks, group_of(shard)}, shard); !is_first)
      compare(other->second, shard, verification);
    if (const auto [other, is_first] = first.try_emplace(parsed->ranks, shard); !is_first)
      compare_facts(other->second, shard, verification);
  }
  verify_pieces(files, verification);
}

}  // namespace muster
