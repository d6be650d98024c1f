// SPDX-License-Identifier: Apache-2.0
// Whole tensors by all cores. Work is cut into pieces; neighbours in the file that are small are written together.
// Checksums follow the pieces in their order: whoever finishes the piece that is next sums it while the processor has
// it, and all that are done behind it.

#include <fmt/core.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <vector>

#include "src/core/element_range.hpp"
#include "src/core/parallel.hpp"
#include "src/core/progress_counter.hpp"
#include "src/os/process.hpp"
#include "src/statefile/writer_state.hpp"

namespace muster {
namespace statefile {
namespace {

// Smaller tensors are put together in memory, those of a block.
constexpr std::uint64_t least_alone = std::uint64_t{64} << 10;

/// The checksum of a contiguous tensor whose pieces are finished in any order.
class PiecesInOrder {
 public:
  /// Cut into chunks where there is a grid, else where blocks of the file begin; `offset` is the tensor's in the file.
  PiecesInOrder(std::span<const std::byte> bytes, std::optional<ChunkGrid> grid, std::uint64_t offset)
      : bytes_(bytes),
        grid_(std::move(grid)),
        into_block_(offset % write_block),
        done_(grid_ ? grid_->count() : (into_block_ + bytes.size() - 1) / write_block + 1) {}

  [[nodiscard]] std::uint64_t count() const noexcept { return done_.size(); }
  [[nodiscard]] const std::optional<ChunkGrid>& grid() const noexcept { return grid_; }
  [[nodiscard]] std::uint64_t begin(std::uint64_t piece) const noexcept {
    if (grid_) return grid_->begin(piece);
    return piece == 0 ? 0 : piece * write_block - into_block_;
  }
  [[nodiscard]] std::span<const std::byte> at(std::uint64_t piece) const noexcept {
    const std::uint64_t first = begin(piece);
    return bytes_.subspan(first, grid_ ? grid_->bytes(piece) : std::min(begin(piece + 1), bytes_.size()) - first);
  }

  /// True when that was the last one of all.
  bool finish(std::uint64_t piece) {
    std::unique_lock lock(mutex_);
    done_[piece] = true;
    if (is_busy_) return false;
    is_busy_ = true;
    while (next_ < done_.size() && done_[next_]) {
      const std::span<const std::byte> next = at(next_);
      lock.unlock();
      sum_.add(next);
      lock.lock();
      ++next_;
    }
    is_busy_ = false;
    return next_ == done_.size();
  }
  [[nodiscard]] std::uint64_t checksum() const { return sum_.value(); }

 private:
  std::span<const std::byte> bytes_;
  std::optional<ChunkGrid> grid_;
  std::uint64_t into_block_;
  std::mutex mutex_;
  std::vector<bool> done_;
  std::uint64_t next_ = 0;
  bool is_busy_ = false;
  TensorChecksum sum_;
};

class WritingAll {
 public:
  WritingAll(StateFileWriter& writer, WriterState& state, std::span<const TensorView> tensors,
             const ProgressCallback& progress)
      : writer_(writer), state_(state), tensors_(tensors), sums_(tensors.size()), progress_(progress, total(tensors)) {}

  void write() {
    plan();
    const bool is_compressing = state_.options.zstd_level.has_value();
    const std::size_t workers = is_compressing ? static_cast<std::size_t>(os::usable_cores()) : copy_workers();
    buffers_.resize(workers);
    parallel_for(tasks_.size(), workers, [&](std::size_t i, std::size_t worker) { run(tasks_[i], buffers_[worker]); });
  }

 private:
  enum class Kind : std::uint8_t {
    piece,  // of a contiguous tensor, compressed or not
    whole,  // a strided tensor
    run,    // small neighbours
  };
  struct Task {
    Kind kind;
    std::size_t tensor;
    std::uint64_t number;  // of the piece; of a run: how many tensors
  };

  static std::uint64_t total(std::span<const TensorView> tensors) noexcept {
    std::uint64_t bytes = 0;
    for (const TensorView& tensor : tensors) bytes += tensor.nbytes();
    return bytes;
  }

  void plan() {
    const std::vector<StateTensor>& entries = state_.catalogue.tensors;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const std::uint64_t bytes = entries[i].bytes;
      if (bytes == 0) continue;
      if (!entries[i].compressed && bytes < least_alone) {
        add_to_run(i);
      } else if (!tensors_[i].is_contiguous()) {
        tasks_.push_back({Kind::whole, i, 0});
      } else {
        std::optional<ChunkGrid> grid;
        if (entries[i].compressed) grid = state_.grid(i);
        sums_[i].emplace(tensors_[i].bytes(), std::move(grid), entries[i].offset);
        for (std::uint64_t number = 0; number < sums_[i]->count(); ++number) tasks_.push_back({Kind::piece, i, number});
      }
    }
  }

  void add_to_run(std::size_t index) {
    const StateTensor& entry = state_.catalogue.tensors[index];
    if (!tasks_.empty() && tasks_.back().kind == Kind::run && tasks_.back().tensor + tasks_.back().number == index) {
      const std::uint64_t begin = state_.catalogue.tensors[tasks_.back().tensor].offset;
      if (entry.offset / write_block == begin / write_block) {
        ++tasks_.back().number;
        return;
      }
    }
    tasks_.push_back({Kind::run, index, 1});
  }

  void run(const Task& task, std::vector<std::byte>& buffer) {
    switch (task.kind) {
      case Kind::piece:
        return write_piece(task.tensor, task.number);
      case Kind::whole:
        writer_.write(task.tensor, tensors_[task.tensor]);
        return progress_.add(tensors_[task.tensor].nbytes());
      case Kind::run:
        return write_run(task.tensor, task.tensor + task.number, buffer);
    }
  }

  void write_piece(std::size_t index, std::uint64_t number) {
    PiecesInOrder& sum = *sums_[index];
    const std::span<const std::byte> piece = sum.at(number);
    if (sum.grid()) {
      const WriterState::BorrowedEncoder encoder(state_);
      state_.write_chunk(index, *sum.grid(), number, piece, *encoder);
    } else {
      state_.write_plain(index, sum.begin(number), piece);
    }
    if (sum.finish(number)) state_.targets[index].set_checksum(sum.checksum(), tensors_[index].nbytes());
    progress_.add(piece.size());
  }

  void write_run(std::size_t first, std::size_t end, std::vector<std::byte>& buffer) {
    const std::vector<StateTensor>& entries = state_.catalogue.tensors;
    const std::uint64_t begin = entries[first].offset;
    buffer.assign(entries[end - 1].offset + entries[end - 1].bytes - begin, std::byte{0});
    std::uint64_t bytes = 0;
    for (std::size_t i = first; i < end; ++i) {
      const std::span<std::byte> target = std::span(buffer).subspan(entries[i].offset - begin, entries[i].bytes);
      copy_contiguous(tensors_[i], target.data());
      state_.targets[i].set_checksum(tensor_checksum(target), target.size());
      state_.targets[i].count(target.size());
      bytes += target.size();
    }
    state_.put(begin, buffer);
    progress_.add(bytes);
  }

  StateFileWriter& writer_;
  WriterState& state_;
  std::span<const TensorView> tensors_;
  std::vector<Task> tasks_;
  std::vector<std::optional<PiecesInOrder>> sums_;
  std::vector<std::vector<std::byte>> buffers_;
  ProgressCounter progress_;
};

}  // namespace
}  // namespace statefile

void StateFileWriter::write_all(std::span<const TensorView> tensors, const ProgressCallback& progress) {
  if (tensors.size() != state_->catalogue.tensors.size())
    statefile::refuse_writing(state_->file.path(), fmt::format("{} tensors were announced, and {} come",
                                                               state_->catalogue.tensors.size(), tensors.size()));
  for (std::size_t i = 0; i < tensors.size(); ++i) state_->check_announced(i, tensors[i]);
  state_->change([&] { statefile::WritingAll(*this, *state_, tensors, progress).write(); });
}

}  // namespace muster
