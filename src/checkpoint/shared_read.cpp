// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/shared_read.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "src/checkpoint/agreement.hpp"
#include "src/checkpoint/strided_read.hpp"
#include "src/shm/window_ring.hpp"

namespace muster {
namespace {

constexpr std::uint64_t block_bytes = 4 << 20;
constexpr std::uint32_t depth = 2;

/// What a rank wants of one of the source's tensors.
struct Use {
  int rank = 0;
  std::size_t number = 0;  // among what the rank wants
  const merge::Rows* rows = nullptr;
  int source = 0;  // in the rows
  SourceRef ref;
};

struct Block {
  std::size_t tensor = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint32_t users = 0;
  int reader = 0;
  std::uint32_t turn = 0;  // of the reader's windows
};

class SharedRead {
 public:
  SharedRead(sync::Group& group, const TensorSource& source, std::span<const std::vector<const MergedTensor*>> wanted,
             std::span<const ReadTarget> targets, ProgressCounter& progress)
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

  void run() {
    ring_ = std::make_unique<shm::WindowRing>(own_.empty() ? 0 : depth, block_bytes, others_.size());
    rings_ = shm::find_rings(group_, others_, *ring_, {.phase = "load: finding windows"});
    std::size_t ahead = 0;
    for (std::size_t at = 0; at < blocks_.size(); ++at) {
      for (; ahead < blocks_.size() && ahead <= at + others_.size() && is_free(blocks_[ahead], at); ++ahead)
        if (is_shared(blocks_[ahead]) && blocks_[ahead].reader == group_.rank()) fill(blocks_[ahead]);
      take(blocks_[at]);
      go_on(group_);
    }
    // The windows are there as long as anybody reads in them.
    group_.barrier({.phase = "load: ending"});
  }

 private:
  void add_uses(int rank, std::size_t number, const MergedTensor& tensor) {
    auto& rows = rows_[&tensor];
    if (!rows) rows = std::make_unique<merge::Rows>(merge::rows_of(tensor.layout));
    std::vector<int> sources;
    for (const merge::Piece& piece : tensor.layout.pieces) sources.push_back(piece.source);
    std::ranges::sort(sources);
    sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
    for (const int source : sources) {
      const SourceRef& ref = tensor.sources[static_cast<std::size_t>(source)];
      uses_[ref.index].push_back({rank, number, rows.get(), source, ref});
    }
  }

  void add_block(std::size_t tensor, std::uint64_t begin, std::uint64_t end) {
    std::vector<int> users;
    for (const Use& use : uses_[tensor])
      if ((users.empty() || users.back() != use.rank) && !rectangles(use, begin, end).empty())
        users.push_back(use.rank);
    if (users.empty()) return;
    Block block{tensor, begin, end, static_cast<std::uint32_t>(users.size()), users[blocks_.size() % users.size()]};
    if (is_shared(block)) block.turn = turns_[block.reader]++;
    if (is_shared(block) && block.reader == group_.rank()) own_.push_back(blocks_.size());
    blocks_.push_back(block);
  }

  /// What of a use lies in these bytes of the source's tensor, counted from `begin`.
  static std::vector<merge::Rectangle> rectangles(const Use& use, std::uint64_t begin, std::uint64_t end) {
    const std::uint64_t first = std::max(begin, use.ref.begin);
    const std::uint64_t last = use.ref.bytes == 0 ? end : std::min(end, use.ref.begin + use.ref.bytes);
    if (first >= last) return {};
    auto parts = merge::rectangles_of(*use.rows, use.source, first - use.ref.begin, last - use.ref.begin);
    for (merge::Rectangle& part : parts) part.from += first - begin;
    return parts;
  }

  static bool is_shared(const Block& block) { return block.users > 1; }

  /// Whether this process has used the window that it would read a block into; `at`: the block that it is at.
  [[nodiscard]] bool is_free(const Block& block, std::size_t at) const {
    return !is_shared(block) || block.reader != group_.rank() || block.turn < depth || own_[block.turn - depth] < at;
  }

  void fill(const Block& block) {
    if (block.turn >= depth) {
      const std::uint32_t last = block.turn - depth;
      ring_->wait_full(last, blocks_[own_[last]].users, others_, group_, {.phase = "load: waiting for a window"});
      ring_->release(last);
    }
    source_.read(block.tensor, block.begin, ring_->window(block.turn).first(block.end - block.begin));
    ring_->set_stage(block.turn + 1);
  }

  void take(const Block& block) {
    const bool is_own = block.reader == group_.rank();
    const std::byte* window = nullptr;
    const shm::WindowRing* ring = nullptr;
    for (const Use& use : uses_[block.tensor]) {
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

  /// From the window, or from the source where there is none.
  void copy(const Block& block, const merge::Rectangle& part, const ReadTarget& target, const std::byte* window) {
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

  /// Bytes of a merged tensor from `at` on.
  static void place(const ReadTarget& target, std::uint64_t at, std::span<const std::byte> bytes) {
    const std::uint64_t item = target.item;
    const auto begin = static_cast<std::int64_t>(at / item);
    for (const merge::Box& box : target.boxes)
      for (const merge::Box& part : merge::clipped(box, begin, static_cast<std::int64_t>((at + bytes.size()) / item))) {
        std::vector<StridedAxis> axes;
        for (const merge::BoxAxis& axis : part.axes)
          axes.push_back({static_cast<std::uint64_t>(axis.count), static_cast<std::uint64_t>(axis.to) * item,
                          static_cast<std::uint64_t>(axis.from) * item});
        copy_strided(bytes.data() + static_cast<std::uint64_t>(part.to - begin) * item, std::move(axes), item,
                     target.begin + static_cast<std::uint64_t>(part.from) * item);
      }
  }

  sync::Group& group_;
  const TensorSource& source_;
  std::span<const ReadTarget> targets_;
  ProgressCounter& progress_;
  std::vector<int> others_;  // of this host
  std::map<const MergedTensor*, std::unique_ptr<merge::Rows>> rows_;
  std::vector<std::vector<Use>> uses_;  // by the source's tensor, those of a rank together
  std::vector<Block> blocks_;
  std::map<int, std::uint32_t> turns_;  // by reader
  std::vector<std::size_t> own_;        // blocks that this process reads into its windows
  std::unique_ptr<shm::WindowRing> ring_;
  std::vector<std::unique_ptr<shm::WindowRing>> rings_;
  std::vector<std::byte> memory_;
};

}  // namespace

void read_shared(sync::Group& group, const TensorSource& source,
                 std::span<const std::vector<const MergedTensor*>> wanted, std::span<const ReadTarget> targets,
                 ProgressCounter& progress) {
  SharedRead(group, source, wanted, targets, progress).run();
}

}  // namespace muster
