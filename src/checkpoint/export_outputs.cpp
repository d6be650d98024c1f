// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/export_outputs.hpp"

#include <algorithm>

#include "src/checkpoint/piece_checksums.hpp"
#include "src/checkpoint/placement.hpp"

namespace muster {
namespace {

/// Numbers the sets of an arrangement's tensors; `numbers[i]` are those of tensor i.
std::vector<std::vector<std::uint32_t>> number_sets(const Arrangement& arrangement, ExportOutputs& outputs) {
  std::vector<std::vector<std::uint32_t>> numbers;
  for (const ArrangedTensor& tensor : arrangement.tensors) {
    auto& mine = numbers.emplace_back();
    for (const auto& set : tensor.equal) {
      mine.push_back(static_cast<std::uint32_t>(outputs.equal.size()));
      outputs.equal.push_back(set);
      outputs.equal_names.push_back(tensor.origin);
    }
  }
  return numbers;
}

/// One source is all of it: then it can be cut along any dimension.
const merge::Piece* only_piece(const merge::Layout& layout) {
  if (layout.combine != merge::Combine::copy || layout.pieces.size() != 1) return nullptr;
  const merge::Piece& piece = layout.pieces.front();
  const std::int64_t units = layout.source_units[static_cast<std::size_t>(piece.source)];
  return piece.begin == 0 && piece.count == layout.target_units && units == layout.target_units ? &piece : nullptr;
}

}  // namespace

ExportOutputs checkpoint_outputs(const Arrangement& arrangement, std::uint64_t max_shard_size,
                                 const Metadata& metadata) {
  ExportOutputs outputs;
  const auto sets = number_sets(arrangement, outputs);
  std::vector<TensorEntry> entries;
  for (const ArrangedTensor& tensor : arrangement.tensors)
    entries.push_back({tensor.name, tensor.layout.target.dtype, tensor.layout.target.shape});
  ShardLayout shards = plan_shards(entries, max_shard_size);
  outputs.index = std::move(shards.index);
  for (ShardFile& file : shards.files) {
    OutputFile& output = outputs.files.emplace_back();
    output.name = std::move(file.name);
    output.metadata = metadata;
    // Loaders of the field look for it before they read a file.
    output.metadata.try_emplace("format", "pt");
    for (const std::size_t i : file.tensors) {
      const ArrangedTensor& tensor = arrangement.tensors[i];
      output.tensors.push_back({tensor.name, tensor.layout, tensor.sources, sets[i]});
    }
  }
  return outputs;
}

ExportOutputs shard_outputs(const Arrangement& arrangement, const MergePlan& plan, const ParallelLayout& layout,
                            const Metadata& metadata) {
  ExportOutputs outputs;
  const auto sets = number_sets(arrangement, outputs);
  std::vector<WholeTensor> wholes;
  for (const ArrangedTensor& tensor : arrangement.tensors)
    wholes.push_back({tensor.origin, tensor.rule, tensor.layout.target});
  Placement placement = place(plan, layout, wholes);
  outputs.notes = std::move(placement.notes);
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    OutputFile& output = outputs.files.emplace_back();
    output.name = shard_file_name(rank, layout.ranks());
    output.metadata = metadata;
    output.metadata[std::string(shard_metadata_key)] = shard_facts_text(
        {rank, layout.ranks(), placement.padded[at], layout, {plan.name(), plan.text()}, placement.heads[at]});
    for (const PlacedTensor& placed : placement.ranks[at]) {
      const ArrangedTensor& tensor = arrangement.tensors[placed.whole];
      const merge::Cut& cut = placement.cuts[placed.whole];
      if (const merge::Piece* piece = only_piece(tensor.layout))
        output.tensors.push_back({placed.name,
                                  merge::part_of(cut, placed.part),
                                  {tensor.sources[static_cast<std::size_t>(piece->source)]},
                                  sets[placed.whole]});
      else
        output.tensors.push_back(
            {placed.name, merge::compose(tensor.layout, cut, placed.part), tensor.sources, sets[placed.whole]});
    }
    output.metadata[std::string(piece_checksums_key)] = piece_checksums_text(no_piece_checksums(output.tensors));
  }
  return outputs;
}

Arrangement arrange_model(const MergePlan& plan, std::span<const NamedSpec> model) {
  Arrangement arrangement;
  const std::vector<WholeTensor> wholes = wholes_of(plan, model);
  for (std::uint32_t index = 0; index < wholes.size(); ++index) {
    const WholeTensor& whole = wholes[index];
    arrangement.tensors.push_back({model[index].name,
                                   whole.origin,
                                   whole.rule,
                                   merge::join(First{}, std::span(&whole.spec, 1)),
                                   {{0, index}},
                                   {},
                                   {}});
  }
  note_unused_rules(plan, arrangement);
  return arrangement;
}

}  // namespace muster
