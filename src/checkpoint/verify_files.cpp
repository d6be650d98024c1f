// SPDX-License-Identifier: Apache-2.0
// Verifies a directory with one file per rank.

#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/checksums.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/checkpoint/shard_set.hpp"
#include "src/checkpoint/verification.hpp"

namespace muster {
namespace {

struct Shard {
  int rank = 0;
  const OpenedFile* opened = nullptr;
  std::optional<ShardFacts> facts;
};

// Checks the facts in a shard against its name and its tensors.
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

// Compares two ranks that have parts of the same tensors.
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

// Ranks of one group have parts of the same tensors: those of one pipeline stage and one expert rank.
int group_of(const Shard& shard) {
  return shard.facts && shard.facts->layout ? shard.rank / shard.facts->layout->tensor : 0;
}

// Compares two ranks of one set, whichever tensors they have.
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

// Verifies shards against the checksums in their metadata.
void verify_pieces(const std::vector<OpenedFile>& files, Verification& verification) {
  std::vector<ReadTensor> all;
  std::vector<std::shared_ptr<const CheckedTensor>> tensors;  // one per tensor
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

}  // namespace

void verify_shards(const std::vector<std::string>& names, Verification& verification) {
  const ShardSurvey survey = survey_shards(names);
  for (const Finding& finding : survey.findings) verification.add(finding);
  const std::vector<OpenedFile> files = verification.open_all(survey.names);
  std::map<int, Shard> first;                           // the first shard of each set
  std::map<std::pair<int, int>, Shard> first_of_group;  // the first shard of each set and group
  for (const OpenedFile& file : files) {
    const auto parsed = parse_shard_file_name(file.name);
    Shard shard{parsed->rank, &file, {}};
    verify_facts(shard, parsed->ranks, verification);
    if (const auto [other, is_first] = first_of_group.try_emplace({parsed->ranks, group_of(shard)}, shard); !is_first)
      compare(other->second, shard, verification);
    if (const auto [other, is_first] = first.try_emplace(parsed->ranks, shard); !is_first)
      compare_facts(other->second, shard, verification);
  }
  if (verification.report.is_good() && !verification.has_request())
    verify_request(verification.directory, verification);
  verify_pieces(files, verification);
}

}  // namespace muster
