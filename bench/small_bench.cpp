// SPDX-License-Identifier: Apache-2.0
// Measures exchanges whose cost does not depend on bytes: a config of 2 KiB, arena tensors of two sizes, and 10,000
// small tensors. Each of them is compared with all-gather rounds of the same group. Prints one JSON line per series.
// Every operation is timed in two ways: alone, from the arrival of the last rank, and in back-to-back batches, whose
// figures include no wake-up by the bench.

#include <fmt/core.h>

#include <algorithm>
#include <array>
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
#include "bench/harness/report.hpp"
#include "bench/ours.hpp"
#include "muster/gather.hpp"
#include "muster/shared_arena.hpp"

namespace {

constexpr std::size_t record_bytes = 128;
constexpr int batch = 64;

struct Settings {
  int ranks = 4;
  int repetitions = 101;
  int many_tensors = 10'000;
  std::uint64_t arena_small = 1U << 20;
  std::uint64_t arena_large = 1U << 30;
  std::vector<std::string> scenarios = {"small", "arena", "many"};
};

class SmallBench {
 public:
  SmallBench(bench::Meeting& meeting, const Settings& settings)
      : meeting_(meeting), settings_(settings), group_(bench::make_group(meeting)) {
    ranks_.resize(static_cast<std::size_t>(meeting.size()));
    std::iota(ranks_.begin(), ranks_.end(), 0);
    records_.resize(record_bytes * ranks_.size());
  }

  void run(const std::string& scenario) {
    if (scenario == "small") {
      config_of_2_kib();
    } else if (scenario == "arena") {
      // Both sizes are measured in the same repetitions, because they are compared with each other.
      arena();
    } else {
      many();
    }
  }

 private:
  void round() {
    static constexpr std::array<std::byte, record_bytes> mine{};
    group_->all_gather(mine, records_);
  }

  bench::Contender one_round() {
    bench::Contender made;
    made.name = "round";
    made.move = [this] { round(); };
    return made;
  }

  static bench::Contender repeated(const bench::Contender& once) {
    bench::Contender made;
    made.name = once.name + batch_suffix;
    made.move = [move = once.move, finish = once.finish] {
      for (int i = 0; i < batch; ++i) {
        move();
        if (finish) {
          finish();
        }
      }
    };
    return made;
  }

  void report(const bench::Case& what, std::vector<bench::Samples> all) const {
    if (!meeting_.is_first()) {
      return;
    }
    for (bench::Samples& samples : all) {
      if (samples.name.ends_with(batch_suffix)) {
        for (double& seconds : samples.access_seconds) {
          seconds /= batch;
        }
      }
    }
    bench::print_samples(what, all);
  }

  bench::Contender configs(const muster::Config& config, const std::shared_ptr<muster::GatheredConfigs>& result) {
    bench::Contender made;
    made.name = "muster-configs";
    made.move = [this, &config, result] { *result = muster::get_configs_parallel(&config, ranks_, *group_); };
    made.finish = [result] { *result = {}; };
    return made;
  }

  static muster::Tensor tensor_of(std::span<const std::byte> bytes) {
    return muster::Tensor::borrow({muster::DType::u8, {static_cast<std::int64_t>(bytes.size())}, bytes.data()});
  }

  // The config of a quantised layer: a few values and scales.
  void config_of_2_kib() {
    constexpr std::size_t payload = 2048;
    constexpr std::size_t part = payload / 4;
    const bench::Mapping memory(payload, bench::Mapping::Kind::ordinary);
    const auto bytes = memory.bytes();
    const muster::Config config = muster::Config::object({
        {"quantization", "fp8"},
        {"group_size", 128},
        {"weight_scale", tensor_of(bytes.subspan(0, part))},
        {"input_scale", tensor_of(bytes.subspan(part, part))},
        {"output_scale", tensor_of(bytes.subspan(2 * part, part))},
        {"bias", tensor_of(bytes.subspan(3 * part, part))},
    });
    const auto result = std::make_shared<muster::GatheredConfigs>();
    bench::Contender ours = configs(config, result);
    const bench::Contender batched = repeated(ours);
    ours.read = [result] {
      std::uint64_t sum = 0;
      for (const auto& [rank, layer] : result->present()) {
        for (const auto& [name, value] : layer.as_object()) {
          sum += value.is_tensor() ? bench::sum_words(value.as_tensor().bytes()) : 0;
        }
      }
      return sum;
    };
    const bench::Case what{"small", meeting_.size(), payload};
    report(what, bench::measure(meeting_, bytes, {one_round(), repeated(one_round()), ours, batched},
                                {.warm_up = 3, .repetitions = settings_.repetitions}));
  }

  void arena() {
    const std::uint64_t total =
        (settings_.arena_small + settings_.arena_large) * static_cast<std::uint64_t>(meeting_.size());
    if (total > bench::available_memory() / 10 * 9) {
      if (meeting_.is_first()) {
        bench::print_skipped({"arena", meeting_.size(), settings_.arena_large}, "muster-arena",
                             fmt::format("needs {} MiB of memory", total >> 20));
      }
      return;
    }
    meeting_.wait();  // before memory is allocated, because all ranks must make the same decision
    constexpr std::uint64_t slack = 1U << 20;
    muster::SharedArena arena(settings_.arena_small + settings_.arena_large + slack);
    const auto result = std::make_shared<muster::GatheredTensors>();
    std::vector<bench::Contender> contenders = {one_round(), repeated(one_round())};
    std::vector<muster::Tensor> tensors;
    for (const std::uint64_t bytes : {settings_.arena_small, settings_.arena_large}) {
      const muster::Tensor tensor = arena.allocate(muster::DType::u8, {static_cast<std::int64_t>(bytes)});
      std::memset(tensor.mutable_data(), meeting_.rank() + 1, bytes);
      bench::Contender ours;
      ours.name = fmt::format("muster-arena-{}", bytes);
      ours.move = [this, tensor, result] { *result = muster::get_tensors_parallel(tensor, ranks_, *group_); };
      ours.finish = [result] { *result = {}; };
      contenders.push_back(ours);
      contenders.push_back(repeated(ours));
      tensors.push_back(tensor);
    }
    report({"arena", meeting_.size(), settings_.arena_large},
           bench::measure(meeting_, {}, contenders, {.warm_up = 3, .repetitions = settings_.repetitions}));
    for (const muster::Tensor& tensor : tensors) {
      check(muster::get_tensors_parallel(tensor, ranks_, *group_), tensor.nbytes());
    }
    meeting_.wait();
  }

  // The figures are useless if the root reads other bytes than those that were written.
  static void check(const muster::GatheredTensors& result, std::uint64_t bytes) {
    for (const auto& [rank, tensor] : result.present()) {
      const auto expected = static_cast<std::byte>(rank + 1);
      if (tensor.nbytes() != bytes || tensor.data()[0] != expected || tensor.data()[bytes - 1] != expected) {
        throw std::runtime_error("arena: the first rank sees other bytes than were written");
      }
    }
  }

  void many() {
    constexpr std::size_t tensor_bytes = 1024;
    const auto count = static_cast<std::size_t>(settings_.many_tensors);
    const bench::Mapping memory(count * tensor_bytes, bench::Mapping::Kind::ordinary);
    muster::ConfigObject layers;
    layers.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      layers.insert(fmt::format("model.layers.{}.self_attn.{}.input_scale", i / 8, i % 8),
                    tensor_of(memory.bytes().subspan(i * tensor_bytes, tensor_bytes)));
    }
    const muster::Config config(std::move(layers));
    const auto result = std::make_shared<muster::GatheredConfigs>();
    bench::Contender ours = configs(config, result);
    ours.read = [result] {
      std::uint64_t sum = 0;
      for (const auto& [rank, tree] : result->present()) {
        for (const auto& [name, value] : tree.as_object()) {
          sum += bench::sum_words(value.as_tensor().bytes());
        }
      }
      return sum;
    };
    const auto phases = std::make_shared<bench::PhaseLog>();
    ours.finish = [result, phases] {
      phases->add(result->report());
      *result = {};
    };
    const bench::Case what{"many", meeting_.size(), count * tensor_bytes};
    report(what, bench::measure(meeting_, memory.bytes(), {one_round(), ours},
                                {.warm_up = 2, .repetitions = std::max(settings_.repetitions / 4, 1)}));
    if (meeting_.rank() <= 1) {
      phases->print(what, ours.name, meeting_.rank());
    }
    meeting_.wait();
  }

  static constexpr const char* batch_suffix = "-batch";

  bench::Meeting& meeting_;
  const Settings& settings_;
  std::shared_ptr<muster::Group> group_;
  std::vector<int> ranks_;
  std::vector<std::byte> records_;
};

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  bench::Options options("Small exchanges beside all-gather rounds; prints JSON lines for bench/run.");
  options.add("--ranks", settings.ranks, "Number of ranks", bench::Range{2, bench::max_ranks});
  options.add("--repetitions", settings.repetitions, "Of each measurement", bench::Range{});
  options.add("--many-tensors", settings.many_tensors, "Tensors of 1 KiB in one config", bench::Range{});
  options.add("--arena-small", settings.arena_small, "Bytes of the small arena tensor", bench::Range{});
  options.add("--arena-large", settings.arena_large, "Bytes of the large arena tensor", bench::Range{});
  options.add("--scenarios", settings.scenarios, "", {"small", "arena", "many"});
  options.parse(argc, argv);

  for (const std::string& scenario : settings.scenarios) {
    const bool good =
        bench::run_ranks(settings.ranks, [&](bench::Meeting& meeting) { SmallBench(meeting, settings).run(scenario); });
    if (!good) {
      std::fprintf(stderr, "bench: %s failed\n", scenario.c_str());
      return 2;
    }
  }
  return 0;
}
