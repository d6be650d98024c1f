// SPDX-License-Identifier: Apache-2.0
#include "muster/load_shard.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "muster/error.hpp"
#include "src/checkpoint/agreement.hpp"
#include "src/checkpoint/export_job.hpp"
#include "src/checkpoint/shard_job.hpp"
#include "src/checkpoint/shard_set.hpp"
#include "src/checkpoint/shared_read.hpp"
#include "src/checkpoint/tensor_source.hpp"
#include "src/core/parallel.hpp"
#include "src/sync/failing.hpp"
#include "src/trace/span.hpp"

namespace muster {
namespace {

/// What is the same for all ranks that load parts of one model together.
struct Agreed {
  std::int64_t part = 0;
  std::uint64_t low = 0;
  std::uint64_t high = 0;
};

/// A part of the model, or of a tensor that views make of several, and where it goes.
struct Wanted {
  const MergedTensor* tensor = nullptr;
  std::size_t number = 0;              // of the rank's tensors
  std::vector<merge::Box> boxes = {};  // as ReadTarget's
};

/// What one rank of a layout gets.
class RankPart {
 public:
  /// `is_alone`: what others read does not count, and of ranks no more is read than this one needs.
  RankPart(const std::string& path, const std::string& plan, const ParallelLayout& layout, int rank,
           const LoadShardOptions& options, bool is_alone) {
    if (rank < 0 || rank >= layout.ranks())
      throw Error(ErrorKind::argument, fmt::format("loading rank {} of the layout {}: its ranks are 0 to {}", rank,
                                                   to_string(layout), layout.ranks() - 1));
    const auto file = static_cast<std::size_t>(rank);
    const Request request{.path = path,
                          .plan = plan,
                          .from = options.from,
                          .to = layout,
                          .to_plan = options.to_plan,
                          .base = options.base,
                          .foreign = {options.at, options.shards}};
    if (is_alone && options.to_plan.empty() && contents_of(path, request.foreign).has_ranks()) {
      const auto shards = std::make_shared<ShardSet>(path, 0, 1, workspace::StateChoice(), request.foreign);
      ExportJob job = plan_job(request, *shards, shards->listings());
      mine_ = merged_of(shards, job, std::move(job.outputs.files[file].tensors));
      return;
    }
    job_ = std::make_unique<ShardJob>(request);
    mine_ = std::make_unique<MergedTensors>(job_->source, std::vector<RankSources>(1),
                                            job_->outputs.files[file].tensors, job_->outputs.equal);
    agree_on_model(layout, rank);
  }

  [[nodiscard]] const Agreed& agreed() const noexcept { return agreed_; }

  std::vector<NamedTensor> read_alone(ProgressCounter& progress) const {
    std::vector<NamedTensor> tensors = allocate();
    for_each_piece(*mine_, false, progress,
                   [&](std::size_t tensor, std::uint64_t offset, std::span<const std::byte> piece) {
                     std::memcpy(tensors[tensor].second.mutable_data() + offset, piece.data(), piece.size());
                   });
    return tensors;
  }

  /// `all`: of each rank of the group. Collective, as read_shared.
  std::vector<NamedTensor> read_with(sync::Group& group, std::span<const Agreed> all, ProgressCounter& progress) const {
    std::vector<NamedTensor> tensors = allocate();
    std::vector<std::vector<const MergedTensor*>> wanted(all.size());
    std::vector<ReadTarget> targets;
    for (int rank = 0; rank < group.size(); ++rank) {
      if (rank != group.rank() && !group.shares_memory(rank)) continue;
      const auto at = static_cast<std::size_t>(rank);
      for (Wanted& part : wanted_by(static_cast<std::size_t>(all[at].part))) {
        wanted[at].push_back(part.tensor);
        if (rank != group.rank()) continue;
        const NamedTensor& tensor = tensors[part.number];
        const std::uint64_t item = part.boxes.empty() ? 1 : itemsize(tensor.second.dtype());
        targets.push_back({tensor.second.mutable_data(), item, std::move(part.boxes)});
        if (merge::rows_of(part.tensor->layout).has_gaps)
          std::memset(tensor.second.mutable_data(), 0, tensor.second.nbytes());
      }
    }
    read_shared(group, *job_->model, wanted, targets, progress);
    return tensors;
  }

  [[nodiscard]] std::uint64_t bytes() const {
    std::uint64_t bytes = 0;
    for (const TensorEntry& entry : mine_->tensors()) bytes += entry.bytes;
    return bytes;
  }

 private:
  void agree_on_model(const ParallelLayout& layout, int rank) {
    std::string text = to_string(layout) + job_->plan.text() + job_->set;
    for (const TensorEntry& entry : job_->model->tensors())
      text += fmt::format("\n{} {}", entry.name, to_string(TensorSpec{entry.dtype, entry.shape}));
    const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
    agreed_ = {rank, hash.low64, hash.high64};
  }

  [[nodiscard]] std::vector<NamedTensor> allocate() const {
    std::vector<NamedTensor> tensors;
    for (const TensorEntry& entry : mine_->tensors())
      tensors.push_back({entry.name, Tensor::allocate(entry.dtype, entry.shape)});
    return tensors;
  }

  [[nodiscard]] std::vector<Wanted> wanted_by(std::size_t part) const {
    std::vector<Wanted> wanted;
    const std::vector<MergedTensor>& tensors = job_->outputs.files[part].tensors;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (!job_->viewed) {
        wanted.push_back({&tensors[i], i});
        continue;
      }
      const ViewedTensor& view = job_->viewed->viewed()[tensors[i].sources.front().index];
      const std::size_t first = wanted.size();
      for (const merge::Box& box : view.boxes) {
        const MergedTensor* const cut = &job_->cut->merged()[static_cast<std::size_t>(box.source)];
        const auto place = std::find_if(wanted.begin() + static_cast<std::ptrdiff_t>(first), wanted.end(),
                                        [&](const Wanted& other) { return other.tensor == cut; });
        if (place != wanted.end())
          place->boxes.push_back(merge::reversed(box));
        else if (is_as_it_is(view, box))
          wanted.push_back({cut, i});
        else
          wanted.push_back({cut, i, {merge::reversed(box)}});
      }
    }
    return wanted;
  }

  static bool is_as_it_is(const ViewedTensor& view, const merge::Box& box) {
    const std::int64_t count = element_count(view.spec.shape);
    return view.boxes.size() == 1 &&
           (is_packed(view.spec.dtype) || box.axes.empty() || box.axes == std::vector<merge::BoxAxis>{{count, 1, 1}});
  }

  Agreed agreed_;
  std::unique_ptr<ShardJob> job_;        // null: alone, of ranks
  std::unique_ptr<MergedTensors> mine_;  // this rank's
};

void check_agreed(const SyncGroup& group, std::span<const Agreed> all) {
  for (int rank = 1; rank < group.size(); ++rank) {
    const Agreed& other = all[static_cast<std::size_t>(rank)];
    if (other.low == all[0].low && other.high == all[0].high) continue;
    throw Error(ErrorKind::rank_mismatch,
                fmt::format("{} loads of another model, or by another plan or layout, than rank 0",
                            sync::name_of(group.info(rank))),
                {.rank = rank});
  }
}

}  // namespace

std::vector<NamedTensor> load_shard(const std::string& model_dir, const std::string& plan, const ParallelLayout& layout,
                                    int rank, const LoadShardOptions& options) {
  const RankPart part(model_dir, plan, layout, rank, options, true);
  ProgressCounter progress(options.progress, part.bytes(), options.stop);
  return part.read_alone(progress);
}

std::vector<NamedTensor> load_shard(const std::string& model_dir, const std::string& plan, const ParallelLayout& layout,
                                    int rank, SyncGroup& group, const LoadShardOptions& options) {
  const sync::Use use(group);
  sync::Group& inside = sync::inside(group);
  trace::Span span(trace::Kind::phase, "load_shard");
  const FailOnStop on_stop = fail_on_stop(group, options.stop);
  std::optional<RankPart> part;
  agree_on(inside, "load: opening the model",
           [&] { part.emplace(model_dir, plan, layout, rank, options, group.size() == 1); });
  std::vector<Agreed> all(static_cast<std::size_t>(group.size()));
  inside.all_gather(std::as_bytes(std::span(&part->agreed(), 1)), std::as_writable_bytes(std::span(all)),
                    {.phase = "load: who loads what"});
  check_agreed(group, all);
  const ProgressCallback told = [&](const Progress& so_far) {
    go_on(inside);
    if (options.progress) options.progress(so_far);
  };
  ProgressCounter progress(told, part->bytes(), options.stop);
  const std::shared_ptr<sync::Group> loading = inside.companion({.phase = "load: beginning"});
  std::vector<NamedTensor> tensors;
  agree_on(inside, *loading, "load: reading",
           [&] { tensors = group.size() > 1 ? part->read_with(*loading, all, progress) : part->read_alone(progress); });
  span.add_bytes(part->bytes());
  return tensors;
}

}  // namespace muster
