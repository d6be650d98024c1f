// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/export_writer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "muster/error.hpp"
#include "src/checkpoint/parallel.hpp"
#include "src/checkpoint/quoted.hpp"
#include "src/checkpoint/row_copy.hpp"

namespace muster {
namespace {

// The tensors of a batch, by merged tensor (from the batch's first) and rank; null where a rank has no part.
class Sources {
 public:
  Sources(const ExportLayout& layout, std::size_t begin, std::size_t end, const GatheredConfigs& gathered)
      : ranks_(layout.ranks()), tensors_((end - begin) * ranks_) {
    for (const auto& [rank, list] : gathered.present()) take(layout, begin, end, rank, list.as_array());
  }

  [[nodiscard]] std::span<const Tensor* const> of(std::size_t index) const {
    return std::span(tensors_).subspan(index * ranks_, ranks_);
  }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }

 private:
  void take(const ExportLayout& layout, std::size_t begin, std::size_t end, int rank, const ConfigArray& list) {
    auto next = list.begin();
    for (std::size_t i = begin; i < end; ++i) {
      const std::span<const int> needed = layout.contributors(i);
      if (!std::binary_search(needed.begin(), needed.end(), rank)) continue;
      const TensorSpec& spec = layout.source(i, rank);
      if (next == list.end() || !next->is_tensor() || next->as_tensor().dtype() != spec.dtype ||
          next->as_tensor().shape() != spec.shape || !next->as_tensor().view().is_contiguous()) {
        throw Error(ErrorKind::corrupt,
                    fmt::format("rank {} sent other tensors than its shard lists, {} among them", rank,
                                in_quotes(layout.merged()[i].name)),
                    {.rank = rank});
      }
      const Tensor& tensor = next++->as_tensor();
      tensors_[(i - begin) * ranks_ + static_cast<std::size_t>(rank)] = &tensor;
      bytes_ += tensor.nbytes();
    }
  }

  std::size_t ranks_;
  std::vector<const Tensor*> tensors_;
  std::uint64_t bytes_ = 0;
};

void check_same(const MergedTensor& merged, std::span<const Tensor* const> sources) {
  const int first = merged.pieces.front().rank;
  const Tensor& reference = *sources[static_cast<std::size_t>(first)];
  std::string differing;
  for (const int rank : merged.must_equal) {
    if (!bitwise_equal(reference, *sources[static_cast<std::size_t>(rank)])) {
      differing += (differing.empty() ? "" : ", ") + std::to_string(rank);
    }
  }
  if (differing.empty()) return;
  throw Error(ErrorKind::rank_mismatch,
              fmt::format("tensor {}: the rule \"same\" wants all ranks to agree, but rank {} and rank {} have other "
                          "values; use \"first\" if rank {}'s are wanted",
                          in_quotes(merged.name), first, differing, first));
}

}  // namespace

ExportWriter::ExportWriter(const ExportLayout& layout, const std::string& shards_dir, const std::string& directory,
                           std::uint64_t max_shard_size, Metadata metadata, SyncGroup& group)
    : layout_(layout),
      shards_dir_(shards_dir),
      directory_(directory),
      metadata_(std::move(metadata)),
      group_(group),
      buffers_(copy_workers()) {
  metadata_.erase(std::string(shard_metadata_key));
  // Loaders of the field look for it before they read a file.
  metadata_.try_emplace("format", "pt");
  std::vector<TensorEntry> entries;
  entries.reserve(layout.merged().size());
  for (std::size_t i = 0; i < layout.merged().size(); ++i) {
    entries.push_back(entry(i));
    bytes_out_ += byte_size(entries.back().dtype, entries.back().shape);
  }
  ShardLayout shards = plan_shards(entries, max_shard_size);
  index_ = std::move(shards.index);
  std::size_t begin = 0;
  for (ShardFile& file : shards.files) {
    const std::size_t end = begin + file.tensors.size();
    files_.push_back({std::move(file.name), begin, end});
    begin = end;
  }
}

TensorEntry ExportWriter::entry(std::size_t index) const {
  const MergedTensor& merged = layout_.merged()[index];
  return {merged.name, merged.whole.dtype, merged.whole.shape};
}

// Files that have tensors before `end`.
void ExportWriter::open_files(std::size_t end) {
  for (; opened_ < files_.size() && files_[opened_].begin < end; ++opened_) {
    File& file = files_[opened_];
    std::vector<TensorEntry> entries;
    entries.reserve(file.end - file.begin);
    for (std::size_t i = file.begin; i < file.end; ++i) entries.push_back(entry(i));
    file.writer = std::make_unique<SafetensorsWriter>(directory_ + "/" + file.name, std::move(entries), metadata_);
  }
}

// Files whose tensors are all before `end`.
void ExportWriter::close_files(std::size_t end) {
  for (; closed_ < opened_ && files_[closed_].end <= end; ++closed_) {
    files_[closed_].writer->commit();
    files_[closed_].writer.reset();
    group_.progress();
  }
}

void ExportWriter::write(std::size_t batch, const GatheredConfigs& gathered) {
  const auto range = layout_.batches()[batch];
  const std::size_t begin = range.first;
  const std::size_t end = range.second;
  const Sources sources(layout_, begin, end, gathered);
  open_files(end);
  std::vector<SafetensorsWriter*> writers;
  writers.reserve(end - begin);
  for (std::size_t i = begin, file = closed_; i < end; ++i) {
    while (i >= files_[file].end) ++file;
    writers.push_back(files_[file].writer.get());
  }
  parallel_for(end - begin, buffers_.size(), [&](std::size_t index, std::size_t worker) {
    std::vector<std::byte>& buffer = buffers_[worker];
    buffer.resize(row_buffer_bytes);
    write_tensor(layout_.merged()[begin + index], sources.of(index), *writers[index], buffer);
  });
  bytes_in_ += sources.bytes();
  close_files(end);
}

void ExportWriter::write_tensor(const MergedTensor& merged, std::span<const Tensor* const> sources,
                                SafetensorsWriter& writer, std::span<std::byte> buffer) {
  if (!merged.must_equal.empty()) check_same(merged, sources);
  std::vector<const std::byte*> data(sources.size());
  std::vector<const Shape*> shapes(sources.size());
  for (std::size_t rank = 0; rank < sources.size(); ++rank) {
    if (sources[rank] == nullptr) continue;
    data[rank] = sources[rank]->data();
    shapes[rank] = &sources[rank]->shape();
  }
  try {
    copy_rows(merge_rows(merged, data, shapes), buffer, [&](std::uint64_t offset, std::span<const std::byte> bytes) {
      writer.write(merged.name, offset, bytes);
      group_.progress();
    });
  } catch (const Error& error) {
    throw error.with_context(fmt::format("writing the tensor {}", in_quotes(merged.name)));
  }
}

void ExportWriter::finish() {
  // A model without a tensor has a file nevertheless.
  open_files(layout_.merged().size() + 1);
  close_files(layout_.merged().size());
  copy_carried_files(shards_dir_, directory_);
  if (!index_.empty()) write_file(directory_ + "/model.safetensors.index.json", index_);
}

}  // namespace muster
