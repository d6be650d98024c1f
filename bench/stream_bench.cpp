// SPDX-License-Identifier: Apache-2.0
// Compares gather_each with a loop of get_configs_parallel over the same layers: time, and the peak of shared memory.
// Each is measured twice: the root only gets access to every layer, or it reads every byte of a layer before it
// releases it. Prints the samples as JSON lines, then one line with GiB/s (the senders' bytes divided by the median
// time), ratios and peaks.

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <vector>

#include "bench/harness/copy_kernels.hpp"
#include "bench/harness/measure.hpp"
#include "bench/harness/options.hpp"
#include "bench/harness/ranks.hpp"
#include "bench/harness/report.hpp"
#include "bench/ours.hpp"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"

namespace {

struct Settings {
  int ranks = 4;
  int layers = 16;
  std::uint64_t bytes = 32U << 20;  // per rank and layer
  std::uint64_t budget = 256U << 20;
  int depth = 2;
  int tensors = 8;  // per layer
  int repetitions = 11;
};

class StreamBench {
 public:
  StreamBench(bench::Meeting& meeting, const Settings& settings)
      : meeting_(meeting), settings_(settings), memory_(settings.bytes, bench::Mapping::Kind::ordinary) {
    ranks_.resize(static_cast<std::size_t>(meeting.size()));
    std::iota(ranks_.begin(), ranks_.end(), 0);
    muster::ConfigObject members;
    const std::uint64_t each = settings.bytes / static_cast<std::uint64_t>(settings.tensors);
    for (int i = 0; i < settings.tensors; ++i) {
      const auto part = memory_.bytes().subspan(static_cast<std::uint64_t>(i) * each, each);
      members.insert(
          fmt::format("weight{}", i),
          muster::Tensor::borrow({muster::DType::u8, {static_cast<std::int64_t>(part.size() / 64), 64}, part.data()}));
    }
    layer_ = std::move(members);
  }

  void run() {
    const auto stream = std::make_shared<Way>(Way{bench::make_group(meeting_)});
    const auto gather = std::make_shared<Way>(Way{bench::make_group(meeting_)});
    std::vector<bench::Contender> contenders = {streamed(stream, false), gathered(gather, false),
                                                streamed(stream, true), gathered(gather, true)};
    const bench::Case what{"stream", meeting_.size(), settings_.bytes};
    const auto all = bench::measure(meeting_, memory_.bytes(), contenders,
                                    {.warm_up = 1, .repetitions = settings_.repetitions, .seconds_each = 60});
    const std::uint64_t peak_of_stream = sum_of_all(stream->peak);
    const std::uint64_t peak_of_gather = sum_of_all(gather->peak);
    if (!meeting_.is_first()) {
      return;
    }
    bench::print_samples(what, all);
    const double moved = static_cast<double>(settings_.bytes) * settings_.layers * (meeting_.size() - 1) / (1U << 30);
    const auto rate = [&](std::size_t which) { return moved / bench::median(all[which].access_seconds); };
    std::vector<double> ratio;
    std::vector<double> ratio_read;
    for (std::size_t i = 0; i < std::min({all[0].access_seconds.size(), all[1].access_seconds.size(),
                                          all[2].access_seconds.size(), all[3].access_seconds.size()});
         ++i) {
      ratio.push_back(all[1].access_seconds[i] / all[0].access_seconds[i]);
      ratio_read.push_back(all[3].access_seconds[i] / all[2].access_seconds[i]);
    }
    fmt::print(R"({{"scenario":"stream-summary","ranks":{},"layers":{},"bytes":{},"budget":{},"depth":{},)"
               R"("stream_gib_s":{:.2f},"gather_gib_s":{:.2f},"speedup":{:.2f},)"
               R"("stream_read_gib_s":{:.2f},"gather_read_gib_s":{:.2f},"speedup_read":{:.2f},)"
               R"("stream_peak_bytes":{},"gather_peak_bytes":{},"peak_ratio":{:.3f}}})"
               "\n",
               meeting_.size(), settings_.layers, settings_.bytes, settings_.budget, settings_.depth, rate(0), rate(1),
               bench::median(ratio), rate(2), rate(3), bench::median(ratio_read), peak_of_stream, peak_of_gather,
               static_cast<double>(peak_of_stream) / static_cast<double>(std::max<std::uint64_t>(peak_of_gather, 1)));
  }

 private:
  struct Way {
    std::shared_ptr<muster::Group> group;
    std::uint64_t peak = 0;  // shared memory of this rank
    std::uint64_t sum = 0;   // checksum of the last layer
  };

  static std::uint64_t sum_of(const muster::Config& layer) {
    std::uint64_t sum = 0;
    for (const auto& [name, value] : layer.as_object()) {
      sum += value.is_tensor() ? bench::sum_words(value.as_tensor().bytes()) : 0;
    }
    return sum;
  }

  bench::Contender streamed(const std::shared_ptr<Way>& way, bool reads) {
    bench::Contender made;
    made.name = reads ? "gather_each-read" : "gather_each";
    made.move = [this, way, reads] {
      int given = 0;
      const auto source = [&]() -> std::optional<muster::Config> {
        if (given++ == settings_.layers) {
          return std::nullopt;
        }
        return layer_;
      };
      const auto consume = [&](muster::LayerPart& part) {
        if (!reads) {
          return;
        }
        way->sum = part.part == 0 ? 0 : way->sum;
        for (const auto& [rank, config] : part.present()) {
          way->sum += sum_of(config);
        }
      };
      const muster::StreamReport report = muster::gather_each(
          source, ranks_, *way->group, consume, {.memory_budget = settings_.budget, .pipeline_depth = settings_.depth});
      way->peak = std::max(way->peak, report.peak_slot_bytes);
    };
    if (reads) {
      made.read = [way] { return way->sum; };
    }
    return made;
  }

  bench::Contender gathered(const std::shared_ptr<Way>& way, bool reads) {
    bench::Contender made;
    made.name = reads ? "get_configs-read" : "get_configs";
    made.move = [this, way, reads] {
      for (int i = 0; i < settings_.layers; ++i) {
        const muster::GatheredConfigs result = muster::get_configs_parallel(&layer_, ranks_, *way->group);
        way->peak = std::max(way->peak, result.report().pool_bytes);
        if (!reads) {
          continue;
        }
        way->sum = 0;
        for (const auto& [rank, config] : result.present()) {
          way->sum += sum_of(config);
        }
      }
    };
    if (reads) {
      made.read = [way] { return way->sum; };
    }
    return made;
  }

  std::uint64_t sum_of_all(std::uint64_t mine) {
    meeting_.block().number[meeting_.rank()] = static_cast<std::int64_t>(mine);
    meeting_.wait();
    std::uint64_t sum = 0;
    for (int rank = 0; rank < meeting_.size(); ++rank) {
      sum += static_cast<std::uint64_t>(meeting_.block().number[rank]);
    }
    meeting_.wait();
    return sum;
  }

  bench::Meeting& meeting_;
  const Settings& settings_;
  bench::Mapping memory_;
  std::vector<int> ranks_;
  muster::Config layer_;
};

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  bench::Options options("Layers by gather_each beside the same by get_configs_parallel; prints JSON lines.");
  options.add("--ranks", settings.ranks, "Number of ranks", bench::Range{2, bench::max_ranks});
  options.add("--layers", settings.layers, "Layers of one stream", bench::Range{});
  options.add("--bytes", settings.bytes, "Of one rank in one layer", bench::Range{4096, 1 << 30});
  options.add("--budget", settings.budget, "Of shared memory of all senders", bench::Range{});
  options.add("--depth", settings.depth, "Parts that a sender may have under way", bench::Range{});
  options.add("--tensors", settings.tensors, "Of one layer", bench::Range{1, 64});
  options.add("--repetitions", settings.repetitions, "Of each measurement", bench::Range{});
  options.parse(argc, argv);
  // Every tensor consists of whole rows of 64 bytes.
  const auto unit = static_cast<std::uint64_t>(settings.tensors) * 64;
  settings.bytes = std::max(settings.bytes / unit * unit, unit);
  const bool good =
      bench::run_ranks(settings.ranks, [&](bench::Meeting& meeting) { StreamBench(meeting, settings).run(); });
  return good ? 0 : 2;
}
