// SPDX-License-Identifier: Apache-2.0
// Compares MPI with the floor in one run: a copy into a shared window, MPI_Gather, MPI_Gather in place, and the library
// in a group of MPI ranks. The last one should be as fast as the library in a local group. The program is started by
// mpiexec. Ranks use the futex barrier of the bench before each start, so that ranks that spin in an MPI barrier do not
// slow MPI down.

#include <mpi.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

#include "bench/harness/copy_kernels.hpp"
#include "bench/harness/floor.hpp"
#include "bench/harness/measure.hpp"
#include "bench/harness/options.hpp"
#include "bench/harness/ranks.hpp"
#include "bench/harness/report.hpp"
#include "bench/ours.hpp"
#include "muster/mpi.hpp"

namespace {

// A window of shared memory that rank 0 allocates. Every rank maps all of it.
class SharedWindow {
 public:
  explicit SharedWindow(std::size_t bytes) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    void* own = nullptr;
    MPI_Win_allocate_shared(rank == 0 ? static_cast<MPI_Aint>(bytes) : 0, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &own,
                            &window_);
    MPI_Aint size = 0;
    int unit = 0;
    void* start = nullptr;
    MPI_Win_shared_query(window_, 0, &size, &unit, &start);
    bytes_ = {static_cast<std::byte*>(start), bytes};
    MPI_Win_lock_all(MPI_MODE_NOCHECK, window_);
  }
  SharedWindow(const SharedWindow&) = delete;
  SharedWindow& operator=(const SharedWindow&) = delete;
  ~SharedWindow() {
    MPI_Win_unlock_all(window_);
    MPI_Win_free(&window_);
  }

  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }
  [[nodiscard]] MPI_Win get() const { return window_; }

 private:
  MPI_Win window_ = MPI_WIN_NULL;
  std::span<std::byte> bytes_;
};

// The copy of the floor, with MPI's synchronisation after it.
bench::Contender window_contender(const bench::Contender& floor, bench::Meeting& meeting, std::span<std::byte> source,
                                  const SharedWindow& window, bool streaming) {
  bench::Contender made;
  made.name = streaming ? "mpi-window-nontemporal" : "mpi-window";
  const std::size_t step = bench::floor_memory(2, source.size());
  made.move = [&meeting, source, &window, step, streaming] {
    if (!meeting.is_first()) {
      std::byte* const slot = window.bytes().data() + static_cast<std::size_t>(meeting.rank() - 1) * step;
      if (streaming) {
        bench::copy_nontemporal(slot, source.data(), source.size());
      } else {
        std::memcpy(slot, source.data(), source.size());
      }
    }
    MPI_Win_sync(window.get());
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_sync(window.get());
  };
  made.read = floor.read;
  return made;
}

bench::Contender gather_contender(bench::Meeting& meeting, std::span<std::byte> source, std::span<std::byte> target,
                                  bool in_place) {
  const int count = static_cast<int>(source.size());
  bench::Contender made;
  made.name = in_place ? "mpi-gather-in-place" : "mpi-gather";
  if (in_place) {
    // The root's bytes are already at the place where MPI expects them, as in a real caller.
    made.prepare = [&meeting, source, target] {
      if (meeting.is_first()) {
        std::memcpy(target.data(), source.data(), source.size());
        bench::touch(target.first(source.size()), 1);
      }
    };
  }
  made.move = [&meeting, source, target, count, in_place] {
    const void* const from = in_place && meeting.is_first() ? MPI_IN_PLACE : source.data();
    MPI_Gather(from, count, MPI_BYTE, target.data(), count, MPI_BYTE, 0, MPI_COMM_WORLD);
  };
  made.read = [target] { return bench::sum_words(target); };
  return made;
}

void run_case(const bench::Case& what, int repetitions) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (what.bytes > INT_MAX) {
    throw std::runtime_error("MPI_Gather counts in int: at most 2 GiB a rank");
  }
  // The memory of sources, window, target of the gather, MPI's own buffers, and the library's pool.
  const std::uint64_t needed = 5 * what.bytes * static_cast<std::uint64_t>(what.ranks);
  int enough = needed < bench::available_memory() / 10 * 9 ? 1 : 0;
  MPI_Bcast(&enough, 1, MPI_INT, 0, MPI_COMM_WORLD);
  if (enough == 0) {
    if (rank == 0) {
      bench::print_skipped(what, "mpi", "not enough memory");
    }
    return;
  }
  const SharedWindow block_memory(sizeof(bench::MeetingBlock));
  if (rank == 0) {
    new (block_memory.bytes().data()) bench::MeetingBlock{};
  }
  MPI_Barrier(MPI_COMM_WORLD);
  bench::Meeting meeting(*reinterpret_cast<bench::MeetingBlock*>(block_memory.bytes().data()), rank, what.ranks);
  const SharedWindow area(bench::floor_memory(what.ranks, what.bytes));
  const bench::Mapping memory(what.bytes, bench::Mapping::Kind::ordinary);
  const bench::Mapping target(rank == 0 ? what.bytes * static_cast<std::uint64_t>(what.ranks) : 1,
                              bench::Mapping::Kind::ordinary);
  std::memset(target.bytes().data(), 1, target.bytes().size());

  auto contenders = bench::floor_contenders(
      meeting, memory.bytes(), area.bytes(),
      [&](std::size_t offset, std::size_t length) { std::memset(area.bytes().data() + offset, 1, length); });
  const bench::Contender floor = contenders.front();
  contenders.push_back(window_contender(floor, meeting, memory.bytes(), area, false));
  contenders.push_back(window_contender(floor, meeting, memory.bytes(), area, true));
  contenders.push_back(gather_contender(meeting, memory.bytes(), target.bytes(), false));
  contenders.push_back(gather_contender(meeting, memory.bytes(), target.bytes(), true));
  {
    const auto phases = std::make_shared<bench::PhaseLog>();
    contenders.push_back(
        bench::pooled_contender(meeting, memory.bytes(), phases, 2, muster::mpi_group(MPI_COMM_WORLD)));
    contenders.back().name = "mpi-muster";
  }
  const auto samples = bench::measure(meeting, memory.bytes(), contenders, {.warm_up = 2, .repetitions = repetitions});
  if (meeting.is_first()) {
    bench::print_samples(what, samples);
  }
  meeting.wait();
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  std::vector<std::uint64_t> sizes = {1U << 20};
  int repetitions = 0;
  bench::Options options("MPI beside the floor; start with mpiexec -n N. Prints JSON lines for bench/run.");
  options.add("--bytes", sizes, "Bytes of one rank", bench::Range{});
  options.add("--repetitions", repetitions, "Of each measurement (default: by size)");
  options.parse(argc, argv);

  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  try {
    if (ranks < 2 || ranks > bench::max_ranks) {
      throw std::runtime_error("start me with mpiexec -n 2 (at most 16)");
    }
    for (const std::uint64_t bytes : sizes) {
      // A quarter of the floor's repetitions, because some of these are a hundred times slower.
      run_case({"gather", ranks, bytes},
               repetitions > 0
                   ? repetitions
                   : std::max(5, bench::default_repetitions(bytes * static_cast<std::uint64_t>(ranks)) / 4));
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mpi_peer: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  MPI_Finalize();
  return 0;
}
