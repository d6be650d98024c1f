// SPDX-License-Identifier: Apache-2.0
// Compares a merge during the gather with the alternatives. N ranks concatenate one bf16 matrix each. Rank 0 is an
// additional process, which is idle in all contenders except "moved":
//
//   merge       merge_tensor_parallel by ranks 1 to N, into one tensor on rank 1
//   moved       get_tensors_parallel to rank 0 from ranks 1 to N: copies as many bytes as the merge
//   same call   get_tensors_parallel by ranks 1 to N: rank 1's own tensor, one N-th of the data, is not copied
//   then fresh  the same call, then one loop of memcpy on rank 1 into newly allocated heap memory
//   then warm   the same call and loop, into heap memory that is reused
//
// All of them take turns in one run. Prints medians, each time as a multiple of the merge, and the merge as a multiple
// of each.

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "bench/harness/copy_kernels.hpp"
#include "bench/harness/measure.hpp"
#include "bench/harness/options.hpp"
#include "bench/harness/ranks.hpp"
#include "bench/ours.hpp"
#include "muster/merge_gather.hpp"

namespace {

struct Settings {
  std::vector<int> ranks = {2, 4};
  std::vector<std::uint64_t> bytes = {16U << 20, 64U << 20};
  std::vector<std::uint64_t> rows = {0, 512, 4U << 10, 64U << 10};
  std::vector<std::string> scenarios = {"steady", "first"};
  int repetitions = 0;
};

struct What {
  int ranks = 0;
  std::uint64_t bytes = 0;
  std::uint64_t row = 0;  // bytes per row of one rank; 0 for concat(0)
  bool first = false;     // a new group for each exchange
  int repetitions = 0;
};

/// One method to merge the tensors. `move` is collective over all N + 1 ranks.
struct Way {
  const char* name;
  int receiver;
  std::function<void()> move;
  std::function<std::uint64_t()> read;  // on the receiver; returns the sum of all words
  std::function<void()> finish;
};

std::uint64_t sum_of(const muster::GatheredTensors& result) {
  std::uint64_t sum = 0;
  for (const auto& [rank, tensor] : result.present()) sum += bench::sum_words(tensor.bytes());
  return sum;
}

/// The loop that an author of an exporter writes after a gather.
void concatenate(const muster::GatheredTensors& result, std::uint64_t row, std::byte* target) {
  const auto parts = result.present();
  if (row == 0) {
    for (const auto& [rank, tensor] : parts) {
      std::memcpy(target, tensor.data(), tensor.nbytes());
      target += tensor.nbytes();
    }
    return;
  }
  const std::uint64_t rows = parts.front().second.nbytes() / row;
  for (std::uint64_t i = 0; i < rows; ++i) {
    for (const auto& [rank, tensor] : parts) {
      std::memcpy(target, tensor.data() + i * row, row);
      target += row;
    }
  }
}

struct Results {
  muster::MergeResult merged;
  muster::GatheredTensors gathered;
  std::unique_ptr<std::byte[]> memory;
};

std::vector<Way> ways(const What& what, std::span<std::byte> source, std::shared_ptr<muster::Group>& group,
                      Results& held) {
  std::vector<int> all(static_cast<std::size_t>(what.ranks) + 1);
  std::iota(all.begin(), all.end(), 0);
  const std::vector<int> members(all.begin() + 1, all.end());
  const std::uint64_t row = what.row == 0 ? 4096 : what.row;
  const muster::TensorView view(muster::DType::bf16,
                                {static_cast<std::int64_t>(what.bytes / row), static_cast<std::int64_t>(row / 2)},
                                source.data());
  const muster::Merge merge = muster::merge::concat(what.row == 0 ? 0 : 1);
  const std::uint64_t total = what.bytes * static_cast<std::uint64_t>(what.ranks);

  const auto gather = [&group, &held, view](const std::vector<int>& list) {
    held.gathered = muster::get_tensors_parallel(view, list, *group);
  };
  const auto read_gathered = [&held] { return sum_of(held.gathered); };
  const auto release = [&held] { held.gathered = {}; };
  const auto read_memory = [&held, total] { return bench::sum_words({held.memory.get(), total}); };
  auto warm = std::make_shared<std::unique_ptr<std::byte[]>>();
  return {
      {"merge", 1,
       [&group, &held, view, merge, members] {
         held.merged = muster::merge_tensor_parallel(view, merge, members, *group);
       },
       [&held] { return bench::sum_words(held.merged.tensor()->bytes()); }, [&held] { held.merged = {}; }},
      {"moved", 0, [gather, all] { gather(all); },
       // The receiver's own tensor was not copied.
       [&held] { return sum_of(held.gathered) - bench::sum_words(held.gathered[0]->bytes()); }, release},
      {"same call", 1, [gather, members] { gather(members); }, read_gathered, release},
      {"then fresh", 1,
       [gather, members, &held, total, what] {
         gather(members);
         if (held.gathered.empty()) return;
         held.memory.reset(new std::byte[total]);
         concatenate(held.gathered, what.row, held.memory.get());
       },
       read_memory,
       [&held] {
         held.gathered = {};
         held.memory.reset();
       }},
      {"then warm", 1,
       [gather, members, &held, total, what, warm] {
         gather(members);
         if (held.gathered.empty()) return;
         if (!*warm) warm->reset(new std::byte[total]);
         held.memory = std::move(*warm);
         concatenate(held.gathered, what.row, held.memory.get());
       },
       read_memory,
       [&held, warm] {
         held.gathered = {};
         *warm = std::move(held.memory);
       }},
  };
}

struct Times {
  std::vector<double> access;
  std::vector<double> read;
};

void run_way(bench::Meeting& meeting, const What& what, const Way& way, std::span<std::byte> source,
             std::shared_ptr<muster::Group>& group, Times* times) {
  bench::MeetingBlock& block = meeting.block();
  const int me = meeting.rank();
  if (what.first) group = bench::make_group(meeting);
  block.expected_sum[me] += bench::touch(source, 1);
  const std::int64_t start = meeting.wait();
  way.move();
  if (me == way.receiver) {
    const std::int64_t access = bench::now_ns();
    const std::uint64_t sum = way.read();
    const std::int64_t read = bench::now_ns();
    std::uint64_t expected = 0;
    for (int rank = 1; rank < meeting.size(); ++rank) expected += block.expected_sum[rank];
    if (sum != expected) throw std::runtime_error(fmt::format("{}: other bytes were read than were sent", way.name));
    block.number[0] = access - start;
    block.number[1] = read - start;
  }
  meeting.wait();
  if (times != nullptr && meeting.is_first()) {
    times->access.push_back(static_cast<double>(block.number[0]) * 1e-6);
    times->read.push_back(static_cast<double>(block.number[1]) * 1e-6);
  }
  way.finish();
  if (what.first) group.reset();
  meeting.wait();
}

void print(const What& what, const std::vector<Way>& all, const std::vector<Times>& times) {
  const double merge = bench::median(times.front().access);
  const double merge_read = bench::median(times.front().read);
  std::string line = fmt::format("{:6} {} ranks {:4} MiB {:>9}", what.first ? "first" : "steady", what.ranks,
                                 what.bytes >> 20, what.row == 0 ? "concat(0)" : fmt::format("row {}", what.row));
  for (std::size_t i = 0; i < all.size(); ++i) {
    const double access = bench::median(times[i].access);
    const double read = bench::median(times[i].read);
    line += fmt::format(" | {} {:.2f} ms, read {:.2f}", all[i].name, access, read);
    if (i != 0) line += fmt::format(" (merge x{:.2f}, read x{:.2f})", merge / access, merge_read / read);
  }
  std::puts(line.c_str());
  std::fflush(stdout);
}

bool run_case(const What& what) {
  return bench::run_ranks(what.ranks + 1, [&](bench::Meeting& meeting) {
    const bench::Mapping memory(what.bytes, bench::Mapping::Kind::ordinary);
    const std::span<std::byte> source = memory.bytes();
    for (std::size_t at = 0; at + sizeof(std::uint64_t) <= source.size(); at += sizeof(std::uint64_t)) {
      const std::uint64_t word = at * 0x9e3779b97f4a7c15U + static_cast<std::uint64_t>(meeting.rank());
      std::memcpy(source.data() + at, &word, sizeof word);
    }
    meeting.block().expected_sum[meeting.rank()] = bench::sum_words(source);
    std::shared_ptr<muster::Group> group;
    if (!what.first) group = bench::make_group(meeting);
    Results held;
    std::vector<Way> all = ways(what, source, group, held);
    std::vector<Times> times(all.size());
    const int warm_up = what.first ? 0 : 2;
    for (int repetition = -warm_up; repetition < what.repetitions; ++repetition) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        const std::size_t which = (i + static_cast<std::size_t>(repetition + warm_up)) % all.size();
        run_way(meeting, what, all[which], source, group, repetition < 0 ? nullptr : &times[which]);
      }
    }
    if (meeting.is_first()) print(what, all, times);
    meeting.wait();
  });
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  bench::Options options("Merges a matrix of each rank while gathering, beside gathering and concatenating after.");
  options.add("--ranks", settings.ranks, "Numbers of ranks that merge", bench::Range{2, bench::max_ranks - 1});
  options.add("--bytes", settings.bytes, "Bytes of one rank's tensor (a multiple of 64 KiB)");
  options.add("--rows", settings.rows, "Bytes of one rank's row in concat(1); 0: concat(0)");
  options.add("--scenarios", settings.scenarios, "steady: from the third exchange on; first: a new group each time",
              {"steady", "first"});
  options.add("--repetitions", settings.repetitions, "Of each measurement (default: by size)");
  options.parse(argc, argv);
  for (const std::uint64_t bytes : settings.bytes) {
    if (bytes == 0 || bytes % (64U << 10) != 0) {
      std::fputs("bench: --bytes must be multiples of 65536\n", stderr);
      return 2;
    }
  }
  for (const std::string& scenario : settings.scenarios) {
    for (const int ranks : settings.ranks) {
      for (const std::uint64_t bytes : settings.bytes) {
        for (const std::uint64_t row : settings.rows) {
          What what{ranks, bytes, row, scenario == "first", settings.repetitions};
          if (what.repetitions <= 0) {
            what.repetitions =
                std::min(what.first ? 9 : 31, bench::default_repetitions(bytes * static_cast<unsigned>(ranks)));
          }
          if (!run_case(what)) return 2;
        }
      }
    }
  }
  return 0;
}
