// SPDX-License-Identifier: Apache-2.0
// Copies tensors from devices to the host and to the root's device, and compares them with the driver's plain copy of
// the same number of bytes in the same run. The plain copies are one cuMemcpyDtoHAsync to page-locked memory, and one
// cuMemcpyDtoDAsync between the same devices. The root receives and has no tensor, the other ranks send one each. The
// root measures both. Prints one JSON line per size and destination, with medians in seconds; `bytes` is the size of
// one tensor. The first gather also allocates and locks memory; it is not in the median. `ratio` is the time of the
// plain copy divided by that of Muster, the fraction of the plain copy's speed. The lines name the device; figures of
// the fake driver of the tests are not measurements. If there is no device the program reports that and exits with 77.

#include <fmt/core.h>

#include <chrono>
#include <cstdio>
#include <numeric>
#include <optional>
#include <vector>

#include "bench/harness/measure.hpp"
#include "bench/harness/options.hpp"
#include "bench/harness/ranks.hpp"
#include "muster/cuda.hpp"
#include "muster/error.hpp"
#include "muster/gather.hpp"
#include "src/cuda/copy_queue.hpp"
#include "src/cuda/driver.hpp"
#include "src/cuda/memory_pool.hpp"

namespace {

using namespace muster;
using Clock = std::chrono::steady_clock;

constexpr int skipped = 77;

struct Settings {
  std::vector<std::uint64_t> bytes = {1U << 20, 16U << 20, 256U << 20, 1U << 30};
  int repetitions = 21;
  int senders = 1;
};

double seconds_of(const auto& work) {
  const Clock::time_point begin = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Queues a copy and polls until it is complete. This is the lower bound.
double plain_copy(cuda::CopyStream& stream, const auto& queue) {
  const cuda::Current current(stream.device());
  cuda::Event event(stream.device());
  return seconds_of([&] {
    queue();
    event.record(stream.handle());
    while (!event.has_passed()) {
    }
  });
}

double plain_to_host(const Tensor& source, cuda::MemoryPool& pinned, cuda::CopyStream& stream) {
  const cuda::Current current(stream.device());
  const cuda::MemoryPool::Buffer target = pinned.take(source.nbytes());
  if (!target.is_locked) throw Error(ErrorKind::out_of_space, "no page-locked memory for the floor");
  return plain_copy(stream, [&] {
    cuda::check(cuda::driver().copy_to_host(target.data.get(), cuda::device_pointer(source.data()), source.nbytes(),
                                            stream.handle()),
                "copying to the host");
  });
}

double plain_to_device(const Tensor& source, const Tensor& target, cuda::CopyStream& stream) {
  return plain_copy(stream, [&] {
    cuda::check(cuda::driver().copy_on_device(cuda::device_pointer(target.data()), cuda::device_pointer(source.data()),
                                              source.nbytes(), stream.handle()),
                "copying to a device");
  });
}

std::vector<int> ranks_of(const Group& group) {
  std::vector<int> ranks(static_cast<std::size_t>(group.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

void run_case(bench::Meeting& meeting, Group& group, const Settings& settings, std::uint64_t bytes,
              Destination landing) {
  const bool sends = group.rank() != 0;
  const int mine = group.rank() % cuda::device_count();
  const auto extent = static_cast<std::int64_t>(bytes);
  const std::int64_t total = extent * settings.senders;
  std::optional<Tensor> source;  // of the plain copy
  std::optional<Tensor> target;
  std::optional<Config> config;
  if (sends) {
    config = cuda_allocate(DType::u8, {extent}, mine);
  } else {
    source = cuda_allocate(DType::u8, {total}, 1 % cuda::device_count());
    if (landing == Destination::device) target = cuda_allocate(DType::u8, {total}, 0);
  }
  const std::shared_ptr<cuda::MemoryPool> pinned = cuda::make_pinned_pool();
  cuda::CopyStream stream(1 % cuda::device_count());
  GatherOptions options;
  options.devices.destination = landing;
  std::vector<double> plain;
  std::vector<double> ours;
  double first = 0;
  const cuda::Current current(sends ? mine : 0);
  for (int round = -2; round < settings.repetitions; ++round) {
    meeting.wait();
    double copy = 0;
    if (!sends) copy = target ? plain_to_device(*source, *target, stream) : plain_to_host(*source, *pinned, stream);
    meeting.wait();
    GatheredConfigs all;
    const double gather =
        seconds_of([&] { all = get_configs_parallel(sends ? &*config : nullptr, ranks_of(group), group, options); });
    meeting.wait();
    if (round == -2) first = gather;
    if (round < 0) continue;
    plain.push_back(copy);
    ours.push_back(gather);
  }
  if (sends) return;
  const double floor = bench::median(plain);
  const double median = bench::median(ours);
  fmt::print(
      "{{\"device\": \"{}\", \"senders\": {}, \"bytes\": {}, \"landing\": \"{}\", \"plain_seconds\": {:.6g}, "
      "\"muster_seconds\": {:.6g}, \"first_muster_seconds\": {:.6g}, \"ratio\": {:.3f}}}\n",
      cuda::device_name(0), settings.senders, bytes, landing == Destination::host ? "host" : "device", floor, median,
      first, floor / median);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  bench::Options options("Tensors on devices beside the driver's plain copy");
  options.add("--bytes", settings.bytes, "Of each sender's tensor");
  options.add("--senders", settings.senders, "The number of ranks that send");
  options.add("--repetitions", settings.repetitions, "Of each size");
  options.parse(argc, argv);
  // Checked in a child: a process that has initialised the driver cannot fork children that use devices.
  const bench::Mapping answer(64, bench::Mapping::Kind::shared);
  auto& found = reinterpret_cast<int&>(answer.bytes().front());
  bench::run_ranks(1, [&](bench::Meeting&) {
    const std::string obstacle = cuda_unavailable_reason();
    if (obstacle.empty())
      found = 1;
    else
      std::printf("SKIPPED: nothing was measured on a device: %s\n", obstacle.c_str());
    std::fflush(stdout);
  });
  if (found == 0) return skipped;
  const std::string key = fmt::format("device-bench-{}", Clock::now().time_since_epoch().count());
  const bool went_well = bench::run_ranks(settings.senders + 1, [&](bench::Meeting& meeting) {
    const auto group = local_group({.key = key, .rank = meeting.rank(), .size = meeting.size()});
    for (const std::uint64_t bytes : settings.bytes)
      for (const Destination landing : {Destination::host, Destination::device})
        run_case(meeting, *group, settings, bytes, landing);
  });
  return went_well ? 0 : 1;
}
