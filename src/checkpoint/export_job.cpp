// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/export_job.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <optional>

#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "src/checkpoint/account.hpp"
#include "src/checkpoint/model_config.hpp"
#include "src/checkpoint/safetensors_header.hpp"
#include "src/checkpoint/window_mail.hpp"
#include "src/core/quoted.hpp"

namespace muster {
namespace {

constexpr std::uint64_t largest_window = 8 << 20;
constexpr std::uint64_t smallest_window = 64 << 10;
// Of what a process sends or receives: packed or being placed, in the group's hands, and one that is on its way.
constexpr std::uint64_t copies_of_mail = 3;

std::string fingerprint_of(const std::vector<ShardListing>& listings, const ExportOutputs& outputs) {
  std::string text = "muster export 1\n";
  for (const ShardListing& listing : listings) text += listing.identity + "\n";
  for (const OutputFile& file : outputs.files) {
    std::vector<TensorEntry> entries;
    for (const OutputTensor& tensor : file.tensors)
      entries.push_back({tensor.name, tensor.layout.target.dtype, tensor.layout.target.shape});
    text += file.name + make_safetensors_header(entries, file.metadata, file.name);
    for (const OutputTensor& tensor : file.tensors) {
      text += fmt::format("\n{} {} ", tensor.name, static_cast<int>(tensor.layout.combine));
      for (const merge::Piece& piece : tensor.layout.pieces) {
        const SourceRef& ref = tensor.sources[static_cast<std::size_t>(piece.source)];
        text += fmt::format("{}.{}:{}+{}>{} ", ref.rank, ref.index, piece.begin, piece.count, piece.at);
      }
    }
  }
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace

ExportJob plan_job(const std::string& shards_dir, const std::string& plan, std::vector<ShardListing> listings,
                   const Metadata& metadata, const ExportOptions& options) {
  std::ranges::sort(listings, {}, &ShardListing::rank);
  const std::optional<Config> config = read_model_config(shards_dir);
  std::vector<std::string> notes;
  ExportJob job{plan_of(listings, plan, config ? &*config : nullptr, notes), {}, {}, {}, {}};
  const ParallelLayout layout = layout_of(listings, options.layout);
  for (ShardListing& listing : listings) job.ranks.push_back(std::move(listing.tensors));
  const Arrangement arrangement = arrange(job.plan, layout, job.ranks);
  std::vector<NamedSpec> model;
  for (const ArrangedTensor& tensor : arrangement.tensors) model.push_back({tensor.name, tensor.layout.target});
  check_against_config(job.plan, model);
  job.outputs = options.to ? shard_outputs(arrangement, job.plan, *options.to, metadata)
                           : checkpoint_outputs(arrangement, options.max_shard_size, metadata);
  job.account = account_for(job.plan, layout, job.ranks, arrangement, job.outputs, options.to);
  for (const std::vector<std::string>& more : {arrangement.notes, job.outputs.notes})
    notes.insert(notes.end(), more.begin(), more.end());
  job.account.notes = std::move(notes);
  job.fingerprint = fingerprint_of(listings, job.outputs);
  return job;
}

WindowShape shape_windows(std::uint64_t budget, int processes, Writers writers, bool spread) {
  const auto count = static_cast<std::uint64_t>(processes);
  const WindowShape shape{0, writers == Writers::first ? 4U : 2U};
  // Beside its windows every writer has one piece of its own for what it puts together alone.
  const std::uint64_t pieces = writers == Writers::first ? shape.depth + 1 : count * (shape.depth + 1);
  const std::uint64_t mail = spread ? count * copies_of_mail : 0;
  const auto total = [&](std::uint64_t window) { return pieces * window + mail * WindowMail::piece_bytes(window); };
  std::uint64_t bytes = std::min(budget / pieces / 4096 * 4096, largest_window);
  while (bytes >= smallest_window && total(bytes) > budget) bytes -= 4096;
  if (bytes < smallest_window)
    throw Error(ErrorKind::argument,
                fmt::format("a memory budget of {} bytes is too small for {} ranks: at least {} are needed", budget,
                            processes, total(smallest_window)));
  return {bytes, shape.depth};
}

ExportAccount plan_export(const std::string& shards_dir, const std::string& plan, const ExportOptions& options) {
  const ShardSet shards(shards_dir, 0, 1, {{}, options.generation, options.job});
  return plan_job(shards_dir, plan, shards.listings(), shards.metadata(), options).account;
}

}  // namespace muster
