// SPDX-License-Identifier: Apache-2.0
// Compares the library with the floor (the memcpy baseline): N ranks on this host send one tensor each to the root.
// Prints one JSON line per series. Pooled memory is measured twice: once if the floor's memory is allocated first, and
// once if the library's is. Memory that is allocated later can be up to a tenth faster. The tables use the worse ratio.

#include <fmt/core.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "bench/harness/floor.hpp"
#include "bench/harness/measure.hpp"
#include "bench/harness/options.hpp"
#include "bench/harness/ranks.hpp"
#include "bench/harness/report.hpp"
#include "bench/ours.hpp"

namespace {

struct Settings {
  std::vector<int> ranks = {2, 4, 8};
  std::vector<std::uint64_t> bytes = {64U << 10, 1U << 20, 16U << 20, 64U << 20, 512U << 20};
  std::vector<std::string> scenarios = {"gather", "first"};
  int repetitions = 0;
};

constexpr const char* floor_first = "floor first";
constexpr const char* library_first = "library first";

std::vector<bench::Contender> pooled(bench::Meeting& meeting, std::span<std::byte> source, const bench::Mapping& area,
                                     const bench::Case& what, const std::shared_ptr<bench::PhaseLog>& phases) {
  const auto floors = [&] {
    return bench::floor_contenders(meeting, source, area.bytes(),
                                   [&](std::size_t offset, std::size_t length) { area.prefault(offset, length); });
  };
  if (what.placement == library_first) {
    const bench::Contender ours = bench::pooled_contender(meeting, source, phases, 2);
    auto contenders = floors();
    contenders.push_back(ours);
    return contenders;
  }
  auto contenders = floors();
  contenders.push_back(bench::pooled_contender(meeting, source, phases, 2));
  return contenders;
}

bool run_case(const bench::Case& what, const Settings& settings) {
  const bool first = what.scenario == "first";
  // The memory of the sources, the floor or the library's pool, and the memory that the first exchange keeps until its
  // group is destroyed.
  const std::uint64_t needed = 3 * what.bytes * static_cast<std::uint64_t>(what.ranks);
  if (needed > bench::available_memory() / 10 * 9) {
    bench::print_skipped(what, "muster", fmt::format("needs {} MiB of memory", needed >> 20));
    return true;
  }
  int repetitions = settings.repetitions > 0
                        ? settings.repetitions
                        : bench::default_repetitions(what.bytes * static_cast<std::uint64_t>(what.ranks));
  if (!first) {
    repetitions = (repetitions + 1) / 2;  // per placement
  }
  const bench::Mapping area(first ? 1 : bench::floor_memory(what.ranks, what.bytes), bench::Mapping::Kind::shared);
  return bench::run_ranks(what.ranks, [&](bench::Meeting& meeting) {
    const bench::Mapping memory(what.bytes, bench::Mapping::Kind::ordinary);
    const std::span<std::byte> source = memory.bytes();
    std::memset(source.data(), 1, source.size());
    const auto phases = std::make_shared<bench::PhaseLog>();
    std::vector<bench::Contender> contenders;
    if (first) {
      contenders = bench::fresh_floor_contenders(meeting, source);
      contenders.push_back(bench::first_contender(meeting, source, phases));
    } else {
      contenders = pooled(meeting, source, area, what, phases);
    }
    // In a first exchange only the memory of the source needs a warm-up.
    const bench::MeasureOptions options{.warm_up = first ? 1 : 2, .repetitions = repetitions};
    const auto samples = bench::measure(meeting, source, contenders, options);
    if (meeting.is_first()) {
      bench::print_samples(what, samples);
    }
    if (meeting.rank() <= 1) {
      phases->print(what, first ? "muster-first" : "muster", meeting.rank());
    }
    meeting.wait();
  });
}

bool run_placements(bench::Case what, const Settings& settings) {
  if (what.scenario == "first") {
    return run_case(what, settings);
  }
  for (const char* const placement : {floor_first, library_first}) {
    what.placement = placement;
    if (!run_case(what, settings)) {
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  bench::Options options("Gathers a tensor of each rank, beside the floor; prints JSON lines for bench/run.");
  options.add("--ranks", settings.ranks, "Numbers of ranks", bench::Range{2, bench::max_ranks});
  options.add("--bytes", settings.bytes, "Bytes of one rank's tensor", bench::Range{});
  options.add("--scenarios", settings.scenarios, "gather: pooled memory; first: a new group each time",
              {"gather", "first"});
  options.add("--repetitions", settings.repetitions, "Of each measurement (default: by size)");
  options.parse(argc, argv);

  for (const std::string& scenario : settings.scenarios) {
    for (const int ranks : settings.ranks) {
      for (const std::uint64_t bytes : settings.bytes) {
        if (!run_placements({scenario, ranks, bytes}, settings)) {
          std::fprintf(stderr, "bench: %s of %d ranks failed\n", scenario.c_str(), ranks);
          return 2;
        }
      }
    }
  }
  return 0;
}
