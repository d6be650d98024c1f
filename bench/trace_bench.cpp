// SPDX-License-Identifier: Apache-2.0
// Measures the cost of recording: a single span, and operations of ranks that write a trace in turns with the same
// operations without a trace. Prints one JSON line per figure.

#include <fmt/core.h>
#include <stdlib.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "bench/harness/measure.hpp"
#include "bench/harness/options.hpp"
#include "bench/harness/ranks.hpp"
#include "muster/gather.hpp"
#include "muster/process_group.hpp"
#include "muster/trace.hpp"

namespace {

struct Settings {
  int ranks = 4;
  int batches = 61;
  int batch = 100;
  std::string directory;
};

void trace_from_now_on(const Settings& settings) {
  ::setenv("MUSTER_TRACE", settings.directory.c_str(), 1);
}

void one_span(bench::Meeting& meeting, const Settings& settings) {
  // Rank 0 writes no trace.
  if (meeting.rank() == 1) trace_from_now_on(settings);
  constexpr int spans = 10'000;
  std::vector<double> took;
  for (int i = 0; i < settings.batches; ++i) {
    if (meeting.rank() != i % 2) {
      meeting.wait();
      continue;
    }
    const std::int64_t begin = bench::now_ns();
    for (int span = 0; span < spans; ++span) const muster::TraceSpan here("span");
    took.push_back(static_cast<double>(bench::now_ns() - begin) / spans);
    meeting.wait();
  }
  fmt::print("{{\"what\": \"span\", \"traced\": {}, \"nanoseconds\": {:.1f}}}\n", muster::is_tracing(),
             bench::median(took));
}

/// Half of the ranks write traces. The two halves take turns.
void operations(bench::Meeting& meeting, const Settings& settings) {
  const bool is_traced = meeting.rank() >= settings.ranks;
  if (is_traced) trace_from_now_on(settings);
  const auto group = muster::local_group({.key = fmt::format("muster-trace-bench-{}-{}", ::getppid(), is_traced),
                                          .rank = meeting.rank() % settings.ranks,
                                          .size = settings.ranks});
  muster::ProcessGroup ranks(*group);
  const muster::Tensor small = muster::Tensor::allocate(muster::DType::u8, {64 << 10});
  const muster::Tensor large = muster::Tensor::allocate(muster::DType::f32, {256 << 10});
  const auto measure = [&](const char* what, const std::function<void()>& operation) {
    std::vector<double> took;
    std::vector<double> ratios;
    for (int i = 0; i < 2 * settings.batches; ++i) {
      if ((i % 2 == 1) == is_traced) {
        group->barrier();
        const std::int64_t begin = bench::now_ns();
        for (int turn = 0; turn < settings.batch; ++turn) operation();
        took.push_back(static_cast<double>(bench::now_ns() - begin) / settings.batch);
        meeting.block().number[meeting.rank()] = static_cast<std::int64_t>(took.back());
      }
      meeting.wait();
      if (i % 2 == 1 && meeting.is_first())
        ratios.push_back(static_cast<double>(meeting.block().number[settings.ranks]) /
                         static_cast<double>(meeting.block().number[0]));
      meeting.wait();
    }
    if (meeting.is_first())
      fmt::print("{{\"what\": \"{}\", \"ranks\": {}, \"microseconds\": {:.2f}, \"traced_by_untraced\": {:.4f}}}\n",
                 what, settings.ranks, bench::median(took) / 1e3, bench::median(ratios));
  };
  measure("gather of 64 KiB", [&] { (void)muster::get_tensors_parallel(small, muster::all_ranks, *group); });
  measure("all_reduce of 1 MiB", [&] { ranks.all_reduce(large); });
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  bench::Options options("What recording costs");
  options.add("--ranks", settings.ranks, "", bench::Range{1, bench::max_ranks / 2});
  options.add("--batches", settings.batches, "", bench::Range{2, 10'000});
  options.add("--batch", settings.batch, "operations of one", bench::Range{1, 10'000});
  options.parse(argc, argv);
  std::string name = (std::filesystem::temp_directory_path() / "trace-bench-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) return 1;
  settings.directory = name;
  const bool is_done =
      bench::run_ranks(2, [&](bench::Meeting& meeting) { one_span(meeting, settings); }) &&
      bench::run_ranks(2 * settings.ranks, [&](bench::Meeting& meeting) { operations(meeting, settings); });
  std::filesystem::remove_all(name);
  return is_done ? 0 : 1;
}
