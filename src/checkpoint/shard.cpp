// SPDX-License-Identifier: Apache-2.0
// Cutting a checkpoint: one pass over the mapped model for as many shards as are open at once, each tensor's slices
// straight from the mapping into the files.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <set>
#include <system_error>
#include <vector>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/model_dir.hpp"
#include "muster/safetensors.hpp"
#include "src/checkpoint/merge_layout.hpp"
#include "src/checkpoint/output_directory.hpp"
#include "src/checkpoint/parallel.hpp"
#include "src/checkpoint/quoted.hpp"
#include "src/checkpoint/row_copy.hpp"
#include "src/checkpoint/shard_files.hpp"

namespace muster {
namespace {

constexpr int most_ranks = 4096;
// Descriptors are few (1,024 by default): more ranks are more passes over the model.
constexpr int open_at_once = 128;

class Sharding {
 public:
  Sharding(const ModelDir& model, const MergePlan& plan, int ranks) : model_(model), ranks_(ranks) {
    std::vector<NamedSpec> tensors;
    tensors.reserve(model.tensors().size());
    for (const auto& entry : model.tensors()) tensors.push_back({entry.name, {entry.dtype, entry.shape}});
    check_rules(plan, tensors);
    splits_.reserve(tensors.size());
    for (const NamedSpec& tensor : tensors) {
      const SplitTensor& split = splits_.emplace_back(split_layout(plan, tensor, ranks));
      if (split.padded) padded_.emplace(tensor.name, std::pair(split.dim, tensor.spec.shape[split.dim]));
      entries_.push_back({tensor.name, split.shard.dtype, split.shard.shape});
    }
  }

  [[nodiscard]] ShardReport report() const {
    ShardReport report{.tensors = entries_.size()};
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const auto& whole = model_.tensors()[i];
      report.bytes += byte_size(whole.dtype, whole.shape);
      report.bytes_written += byte_size(entries_[i].dtype, entries_[i].shape) * static_cast<std::uint64_t>(ranks_);
    }
    return report;
  }

  void write(const std::string& directory) {
    for (int begin = 0; begin < ranks_; begin += open_at_once) {
      write_ranks(directory, begin, std::min(begin + open_at_once, ranks_));
    }
  }

 private:
  void write_ranks(const std::string& directory, int begin, int end) {
    std::vector<std::unique_ptr<SafetensorsWriter>> writers;
    for (int rank = begin; rank < end; ++rank) {
      Metadata metadata = model_.metadata();
      metadata[std::string(shard_metadata_key)] = shard_facts_text({rank, ranks_, padded_});
      writers.push_back(std::make_unique<SafetensorsWriter>(directory + "/" + shard_file_name(rank, ranks_), entries_,
                                                            std::move(metadata)));
    }
    std::vector<std::vector<std::byte>> buffers(copy_workers());
    parallel_for(splits_.size(), buffers.size(), [&](std::size_t index, std::size_t worker) {
      buffers[worker].resize(row_buffer_bytes);
      write_tensor(index, begin, writers, buffers[worker]);
    });
    for (const auto& writer : writers) writer->commit();
  }

  void write_tensor(std::size_t index, int first_rank, std::span<const std::unique_ptr<SafetensorsWriter>> writers,
                    std::span<std::byte> buffer) const {
    const Tensor tensor = model_.tensor(index);
    const std::string& name = entries_[index].name;
    try {
      for (std::size_t i = 0; i < writers.size(); ++i) {
        const RowCopy rows = split_rows(splits_[index], {tensor.dtype(), tensor.shape()}, tensor.data(),
                                        first_rank + static_cast<int>(i));
        copy_rows(rows, buffer, [&](std::uint64_t offset, std::span<const std::byte> bytes) {
          writers[i]->write(name, offset, bytes);
        });
      }
    } catch (const Error& error) {
      throw error.with_context(fmt::format("cutting the tensor {}", in_quotes(name)));
    }
  }

  const ModelDir& model_;
  int ranks_;
  std::vector<SplitTensor> splits_;
  std::vector<TensorEntry> entries_;
  PaddedSizes padded_;
};

}  // namespace

ShardReport shard_model(const std::string& model_dir, const std::string& out, const MergePlan& plan, int ranks,
                        const ShardOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  if (ranks < 1 || ranks > most_ranks) {
    throw Error(ErrorKind::argument,
                fmt::format("a model can be cut for 1 to {} ranks, not for {}", most_ranks, ranks));
  }
  check_output(out, options.force);
  check_not_source(model_dir, out);
  const ModelDir model = ModelDir::open(model_dir);
  Sharding sharding(model, plan, ranks);
  OutputDirectory output(out, options.force);
  sharding.write(output.partial());
  copy_carried_files(model_dir, output.partial());
  output.commit();
  ShardReport report = sharding.report();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

int count_shards(const std::string& shards_dir) {
  std::set<int> sizes;
  std::set<int> found;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(shards_dir, error), end; !error && entry != end;
       entry.increment(error)) {
    const auto name = parse_shard_file_name(entry->path().filename().string());
    if (!name) continue;
    sizes.insert(name->ranks);
    found.insert(name->rank);
  }
  if (error) {
    throw Error(ErrorKind::not_found,
                fmt::format("reading the shards in {}: {}", in_quotes(shards_dir), error.message()),
                {.path = shards_dir, .os_error = error.value()});
  }
  if (sizes.empty()) {
    throw Error(ErrorKind::not_found,
                fmt::format("{} has no shards (rank-00000-of-0000N.safetensors); muster shard makes some",
                            in_quotes(shards_dir)),
                {.path = shards_dir});
  }
  if (sizes.size() > 1) {
    throw Error(ErrorKind::argument,
                fmt::format("{} has shards of sets of {} ranks, two sources for one model; move all but one set away",
                            in_quotes(shards_dir), fmt::join(sizes, " and of ")),
                {.path = shards_dir});
  }
  const int ranks = *sizes.begin();
  for (int rank = 0; rank < ranks; ++rank) {
    if (found.contains(rank)) continue;
    throw Error(ErrorKind::not_found,
                fmt::format("{} lacks the shard {} ({} of {} are there); copy it there, or cut the model again",
                            in_quotes(shards_dir), shard_file_name(rank, ranks), found.size(), ranks),
                {.path = shards_dir});
  }
  return ranks;
}

}  // namespace muster
