// SPDX-License-Identifier: Apache-2.0
#include "muster/load_shard.hpp"

#include <fmt/core.h>

#include <cstring>
#include <utility>

#include "muster/error.hpp"
#include "src/checkpoint/shard_job.hpp"
#include "src/checkpoint/tensor_source.hpp"
#include "src/core/parallel.hpp"

namespace muster {

std::vector<NamedTensor> load_shard(const std::string& model_dir, const std::string& plan, const ParallelLayout& layout,
                                    int rank, const LoadShardOptions& options) {
  if (rank < 0 || rank >= layout.ranks())
    throw Error(ErrorKind::argument, fmt::format("loading rank {} of the layout {}: its ranks are 0 to {}", rank,
                                                 to_string(layout), layout.ranks() - 1));
  ShardJob job(model_dir, plan, layout, {.at = options.at});
  const MergedTensors mine(job.source, std::vector<RankSources>(1),
                           std::move(job.outputs.files[static_cast<std::size_t>(rank)].tensors), job.outputs.equal);
  std::vector<NamedTensor> tensors;
  std::vector<std::byte*> places;
  std::uint64_t bytes = 0;
  for (const TensorEntry& entry : mine.tensors()) {
    Tensor tensor = Tensor::allocate(entry.dtype, entry.shape);
    places.push_back(tensor.mutable_data());
    bytes += entry.bytes;
    tensors.push_back({entry.name, std::move(tensor)});
  }
  ProgressCounter progress(options.progress, bytes, options.stop);
  for_each_piece(mine, false, progress,
                 [&](std::size_t tensor, std::uint64_t offset, std::span<const std::byte> piece) {
                   std::memcpy(places[tensor] + offset, piece.data(), piece.size());
                 });
  return tensors;
}

}  // namespace muster
