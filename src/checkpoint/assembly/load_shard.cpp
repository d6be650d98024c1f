// SPDX-License-Identifier: Apache-2.0
#include "muster/load_shard.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "muster/error.hpp"
#include "src/checkpoint/assembly/agreement.hpp"
#include "src/checkpoint/assembly/export_job.hpp"
#include "src/checkpoint/assembly/shard_job.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/model/strided_read.hpp"
#include "src/checkpoint/model/tensor_source.hpp"
#include "src/checkpoint/plan/placement.hpp"
#include "src/core/thread_pool.hpp"
#include "src/group/error_propagation.hpp"
#include "src/merge/view.hpp"
#include "src/shm/window_ring.hpp"
#include "src/trace/span.hpp"

namespace muster {
namespace {

// Reads parts of one source's tensors that several processes request: on each host every byte is read once.
//
// The source's tensors are cut into blocks. All processes of a host know which process requests which part of each
// block, and handle the blocks in one order:
//
//  1. A block that one process requests is read by that process, directly to its destination.
//  2. A block that several processes request is read by one of them, in turn, into a window of its shared memory. It
//     then raises its ring's stage.
//  3. Each of them, including the reader, waits for the stage, copies its parts, and signals its arrival.
//  4. The reader releases a window when all have arrived, and reads a later block into it. It reads ahead as far as it
//     has itself finished with its windows.
//
// The processes cannot deadlock: consider a process that is furthest behind. The reader of the block that it waits for
// is at that block or later. It waits at most for a window of an earlier block, with which all processes have finished.

/// The destination of the bytes of a merged tensor.
struct ReadTarget {
  std::byte* begin = nullptr;
  std::uint64_t item = 1;                ///< bytes of an element
  std::vector<merge::StridedBox> boxes;  ///< boxes from `begin` on to the merged tensor; empty: a contiguous copy
};

constexpr std::uint64_t block_bytes = 4 << 20;
constexpr std::uint32_t windows_each = 2;

/// A rank's request for a part of one of the source's tensors.
struct PartRequest {
  int rank = 0;
  std::size_t number = 0;  // index in the rank's requests
  const merge::Rows* rows = nullptr;
  int source = 0;  // index in the rows
  SourceRef ref;
};

struct ReadBlock {
  std::size_t tensor = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint32_t users = 0;
  int reader = 0;
  std::uint32_t turn = 0;  // index of the reader's window
};

/// A failing process aborts `group`: pass a group for this object alone. `wanted` has, for each rank of this host,
/// copies of `source`'s tensors, and is equal on all of them; entries of other ranks are empty. `targets` are those of
/// this rank, with zeros where nothing is copied.
class SharedRead {
 public:
  SharedRead(group::BaseGroup& group, const TensorSource& source,
             std::span<const std::vector<const MergedTensor*>> wanted, std::span<const ReadTarget> targets,
             ProgressCounter& progress)
      : group_(group),
        source_(source),
        targets_(targets),
        progress_(progress),
        others_(shm::near_ranks(group)),
        uses_(source.tensors().size()) {
    for (int rank = 0; rank < group.size(); ++rank) {
      const auto& tensors = wanted[static_cast<std::size_t>(rank)];
      for (std::size_t i = 0; i < tensors.size(); ++i) add_uses(rank, i, *tensors[i]);
    }
    for (std::size_t tensor = 0; tensor < uses_.size(); ++tensor)
      for (std::uint64_t at = 0, bytes = source.tensors()[tensor].bytes; at < bytes; at += block_bytes)
        add_block(tensor, at, std::min(bytes, at + block_bytes));
  }

  /// Collective. Throws the first failure of any rank.
  void run() {
    ring_ = std::make_unique<shm::WindowRing>(own_.empty() ? 0 : windows_each, block_bytes, others_.size());
    rings_ = shm::find_rings(group_, others_, *ring_, {.phase = "load: finding windows"});
    std::size_t ahead = 0;
    for (std::size_t at = 0; at < blocks_.size(); ++at) {
      for (; ahead < blocks_.size() && ahead <= at + others_.size() && is_free(blocks_[ahead], at); ++ahead)
        if (is_shared(blocks_[ahead]) && blocks_[ahead].reader == group_.rank()) fill(blocks_[ahead]);
      take(blocks_[at]);
      go_on(group_);
    }
    // A window must exist as long as any process reads it.
    group_.barrier({.phase = "load: ending"});
  }

 private:
  void add_uses(int rank, std::size_t number, const MergedTensor& tensor) {
    auto& rows = rows_[&tensor];
    if (!rows) rows = std::make_unique<merge::Rows>(merge::rows_of(tensor.layout));
    std::vector<int> sources;
    for (const merge::UnitRange& piece : tensor.layout.pieces) sources.push_back(piece.source);
    std::ranges::sort(sources);
    sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
    for (const int source : sources) {
      const SourceRef& ref = tensor.sources[static_cast<std::size_t>(source)];
      uses_[ref.index].push_back({rank, number, rows.get(), source, ref});
    }
  }

  void add_block(std::size_t tensor, std::uint64_t begin, std::uint64_t end) {
    std::vector<int> users;
    for (const PartRequest& use : uses_[tensor])
      if ((users.empty() || users.back() != use.rank) && !rectangles(use, begin, end).empty())
        users.push_back(use.rank);
    if (users.empty()) return;
    ReadBlock block{tensor, begin, end, static_cast<std::uint32_t>(users.size()), users[blocks_.size() % users.size()]};
    if (is_shared(block)) block.turn = turns_[block.reader]++;
    if (is_shared(block) && block.reader == group_.rank()) own_.push_back(blocks_.size());
    blocks_.push_back(block);
  }

  /// Returns the rectangles of a use in this byte range of the source's tensor, relative to `begin`.
  static std::vector<merge::Rectangle> rectangles(const PartRequest& use, std::uint64_t begin, std::uint64_t end) {
    const std::uint64_t first = std::max(begin, use.ref.begin);
    const std::uint64_t last = use.ref.bytes == 0 ? end : std::min(end, use.ref.begin + use.ref.bytes);
    if (first >= last) return {};
    auto parts = merge::rectangles_of(*use.rows, use.source, first - use.ref.begin, last - use.ref.begin);
    for (merge::Rectangle& part : parts) part.from += first - begin;
    return parts;
  }

  static bool is_shared(const ReadBlock& block) { return block.users > 1; }

  /// Whether this process has finished with the window into which it would read a block; `at` is its current block.
  [[nodiscard]] bool is_free(const ReadBlock& block, std::size_t at) const {
    return !is_shared(block) || block.reader != group_.rank() || block.turn < windows_each ||
           own_[block.turn - windows_each] < at;
  }

  void fill(const ReadBlock& block) {
    if (block.turn >= windows_each) {
      const std::uint32_t last = block.turn - windows_each;
      ring_->wait_full(last, blocks_[own_[last]].users, others_, group_, {.phase = "load: waiting for a window"});
      ring_->release(last);
    }
    source_.read(block.tensor, block.begin, ring_->window(block.turn).first(block.end - block.begin));
    ring_->set_stage(block.turn + 1);
  }

  void take(const ReadBlock& block) {
    const bool is_own = block.reader == group_.rank();
    const std::byte* window = nullptr;
    const shm::WindowRing* ring = nullptr;
    for (const PartRequest& use : uses_[block.tensor]) {
      if (use.rank != group_.rank()) continue;
      for (const merge::Rectangle& part : rectangles(use, block.begin, block.end)) {
        if (is_shared(block) && ring == nullptr) {
          ring = is_own ? ring_.get() : rings_[static_cast<std::size_t>(block.reader)].get();
          if (!is_own)
            ring->wait_stage(block.turn + 1, std::span(&block.reader, 1), group_, {.phase = "load: waiting for bytes"});
          window = ring->window(block.turn).data();
        }
        copy(block, part, targets_[use.number], window);
        progress_.add(part.rows * part.bytes);
      }
    }
    if (ring != nullptr) ring->arrive(block.turn);
  }

  /// Copies from the window, or from the source if there is none.
  void copy(const ReadBlock& block, const merge::Rectangle& part, const ReadTarget& target, const std::byte* window) {
    if (window == nullptr && target.boxes.empty()) {
      merge::Rectangle whole = part;
      whole.to = 0;
      return read_rows(source_, block.tensor, block.begin, whole,
                       {target.begin + part.to, (part.rows - 1) * part.to_stride + part.bytes});
    }
    for (std::uint64_t row = 0; row < part.rows; ++row) {
      const std::uint64_t from = part.from + row * part.from_stride;
      const std::uint64_t to = part.to + row * part.to_stride;
      const std::byte* bytes = window == nullptr
                                   ? source_.read_piece(block.tensor, block.begin + from, part.bytes, memory_).data()
                                   : window + from;
      if (target.boxes.empty())
        std::memcpy(target.begin + to, bytes, part.bytes);
      else
        place(target, to, {bytes, part.bytes});
    }
  }

  /// Copies bytes of a merged tensor from `at` on.
  static void place(const ReadTarget& target, std::uint64_t at, std::span<const std::byte> bytes) {
    const std::uint64_t item = target.item;
    const auto begin = static_cast<std::int64_t>(at / item);
    for (const merge::StridedBox& box : target.boxes)
      for (const merge::StridedBox& part :
           merge::clipped(box, begin, static_cast<std::int64_t>((at + bytes.size()) / item))) {
        std::vector<StridedAxis> axes;
        for (const merge::BoxAxis& axis : part.axes)
          axes.push_back({static_cast<std::uint64_t>(axis.count), static_cast<std::uint64_t>(axis.to) * item,
                          static_cast<std::uint64_t>(axis.from) * item});
        copy_strided(bytes.data() + static_cast<std::uint64_t>(part.to - begin) * item, std::move(axes), item,
                     target.begin + static_cast<std::uint64_t>(part.from) * item);
      }
  }

  group::BaseGroup& group_;
  const TensorSource& source_;
  std::span<const ReadTarget> targets_;
  ProgressCounter& progress_;
  std::vector<int> others_;  // ranks of this host
  std::map<const MergedTensor*, std::unique_ptr<merge::Rows>> rows_;
  std::vector<std::vector<PartRequest>> uses_;  // by the source's tensor, with the uses of a rank together
  std::vector<ReadBlock> blocks_;
  std::map<int, std::uint32_t> turns_;  // by reader
  std::vector<std::size_t> own_;        // blocks that this process reads into its windows
  std::unique_ptr<shm::WindowRing> ring_;
  std::vector<std::unique_ptr<shm::WindowRing>> rings_;
  std::vector<std::byte> memory_;
};

/// The arguments that must agree on all ranks that load parts of one model together.
struct Agreed {
  std::int64_t part = 0;
  std::uint64_t low = 0;
  std::uint64_t high = 0;
};

/// A part of the model, or of a tensor that views make of several, and its destination.
struct Wanted {
  const MergedTensor* tensor = nullptr;
  std::size_t number = 0;                     // index in the rank's tensors
  std::vector<merge::StridedBox> boxes = {};  // as ReadTarget::boxes
};

/// The part of one rank of a layout.
class ShardLoad {
 public:
  /// `is_alone`: this rank loads without the others, and reads no more of the source's ranks than it needs.
  ShardLoad(const std::string& path, const std::string& plan, const ParallelLayout& layout, int rank,
            const LoadShardOptions& options, bool is_alone) {
    if (rank < 0 || rank >= layout.ranks())
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("loading a shard: rank {} is out of range for the layout {} (valid: 0 to {})", rank,
                              to_string(layout), layout.ranks() - 1));
    const auto file = static_cast<std::size_t>(rank);
    const Request request{.path = path,
                          .plan = plan,
                          .source_layout = options.source_layout,
                          .target_layout = layout,
                          .to_plan = options.to_plan,
                          .base_model = options.base_model,
                          .thirdparty = {options.key, options.file_pattern}};
    if (is_alone && options.to_plan.empty() && contents_of(path, request.thirdparty).has_ranks()) {
      const auto shards = std::make_shared<ShardSet>(path, 0, 1, workspace::StateChoice(), request.thirdparty);
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

  /// `all` has the parts of every rank of the group. Collective, as SharedRead::run().
  std::vector<NamedTensor> read_with(group::BaseGroup& group, std::span<const Agreed> all,
                                     ProgressCounter& progress) const {
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
    SharedRead(group, *job_->model, wanted, targets, progress).run();
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
      for (const merge::StridedBox& box : view.boxes) {
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

  static bool is_as_it_is(const ViewedTensor& view, const merge::StridedBox& box) {
    const std::int64_t count = element_count(view.spec.shape);
    return view.boxes.size() == 1 &&
           (is_packed(view.spec.dtype) || box.axes.empty() || box.axes == std::vector<merge::BoxAxis>{{count, 1, 1}});
  }

  Agreed agreed_;
  std::unique_ptr<ShardJob> job_;        // null if it loads alone from ranks
  std::unique_ptr<MergedTensors> mine_;  // tensors of this rank
};

void check_agreed(const Group& group, std::span<const Agreed> all) {
  for (int rank = 1; rank < group.size(); ++rank) {
    const Agreed& other = all[static_cast<std::size_t>(rank)];
    if (other.low == all[0].low && other.high == all[0].high) continue;
    throw Error(ErrorKind::rank_mismatch,
                fmt::format("{} and rank 0 passed different models, plans or layouts to load_shard()",
                            group::name_of(group.info(rank))),
                {.rank = rank});
  }
}

}  // namespace

std::vector<NamedTensor> load_shard(const std::string& model_dir, const ParallelLayout& layout, int rank,
                                    const std::string& plan, const LoadShardOptions& options) {
  const ShardLoad part(model_dir, plan, layout, rank, options, true);
  ProgressCounter progress(options.progress, part.bytes(), options.stop);
  return part.read_alone(progress);
}

std::vector<NamedTensor> load_shard(const std::string& model_dir, const ParallelLayout& layout, int rank,
                                    const std::string& plan, Group& group, const LoadShardOptions& options) {
  const group::GroupLock use(group);
  group::BaseGroup& inside = group::inside(group);
  trace::Span span(trace::SpanKind::phase, "load_shard");
  const FailOnStop on_stop = fail_on_stop(group, options.stop);
  std::optional<ShardLoad> part;
  agree_on(inside, "load: opening the model",
           [&] { part.emplace(model_dir, plan, layout, rank, options, group.size() == 1); });
  std::vector<Agreed> all(static_cast<std::size_t>(group.size()));
  inside.all_gather(std::as_bytes(std::span(&part->agreed(), 1)), std::as_writable_bytes(std::span(all)),
                    {.phase = "load: distributing the work"});
  check_agreed(group, all);
  const ProgressCallback told = [&](const Progress& so_far) {
    go_on(inside);
    if (options.progress) options.progress(so_far);
  };
  ProgressCounter progress(told, part->bytes(), options.stop);
  const std::shared_ptr<group::BaseGroup> loading = inside.companion({.phase = "load: beginning"});
  std::vector<NamedTensor> tensors;
  agree_on(inside, *loading, "load: reading",
           [&] { tensors = group.size() > 1 ? part->read_with(*loading, all, progress) : part->read_alone(progress); });
  span.add_bytes(part->bytes());
  return tensors;
}

}  // namespace muster
