// SPDX-License-Identifier: Apache-2.0
// Measures the collectives of the library. Prints one line per size, "OPERATION BYTES MICROSECONDS". BYTES is the size
// of the whole buffer: the result of all_gather, the input of reduce_scatter, or a message of the queue. Queue messages
// of 64 KiB or more are a Config with one tensor. The script bench/collectives runs it together with its peers.

#include <sched.h>

#include <thread>
#include <vector>

#include "bench/collectives_loop.hpp"
#include "bench/harness/options.hpp"
#include "bench/harness/ranks.hpp"
#include "bench/ours.hpp"
#include "muster/message_queue.hpp"
#include "muster/process_group.hpp"
#include "muster/shared_arena.hpp"

namespace {

struct Settings {
  int ranks = 4;
  std::string operation = "all_reduce";
  std::string dtype = "F32";
  bool in_arena = false;
  bool in_world = false;
  double milliseconds = 200;
  std::vector<std::size_t> sizes = {64, 1024, 16384, 65536, 262144, 1U << 20, 16U << 20};
};

void run(const std::shared_ptr<muster::Group>& group, const Settings& settings) {
  using muster::Config;
  using muster::Tensor;
  using muster::TensorView;
  // Bind each rank to a core, as MPI launchers do, if there are enough cores.
  if (group->size() <= static_cast<int>(std::thread::hardware_concurrency())) {
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(group->rank(), &own);
    ::sched_setaffinity(0, sizeof own, &own);
  }
  muster::ProcessGroup ranks(*group);
  const muster::DType dtype = muster::dtype_from_string(settings.dtype).value();
  const auto n = static_cast<std::size_t>(ranks.size());
  const std::size_t most = settings.sizes.empty() ? 0 : *std::max_element(settings.sizes.begin(), settings.sizes.end());
  muster::SharedArena arena(most + (1 << 20));
  const Tensor placed = arena.allocate(muster::DType::u8, {static_cast<std::int64_t>(most + 4096)});
  char* const in = settings.in_arena ? reinterpret_cast<char*>(placed.mutable_data()) : bench::buffer(most + 4096);
  char* const out = bench::buffer(most + 4096);
  const auto tensor = [&](char* at, std::size_t bytes) {
    const TensorView view(dtype, {static_cast<std::int64_t>(bytes / muster::itemsize(dtype))}, at);
    return Tensor(view, nullptr, reinterpret_cast<std::byte*>(at));
  };
  bench::Loop loop{ranks.rank(), [&] { ranks.barrier(); },
                   [&](double mine) {
                     const Tensor all = Tensor::take(std::vector<double>{mine});
                     ranks.all_reduce(all, muster::ReduceOp::max);
                     return all.values<double>()[0];
                   }};
  loop.warm_up();
  for (const std::size_t bytes : settings.sizes) {
    const double seconds = settings.milliseconds * 1e-3;
    const Tensor whole = tensor(in, bytes);
    const Tensor part = tensor(in, bytes / n);
    const Tensor result = tensor(out, bytes);
    const Tensor gathered = tensor(out, bytes / n * n);
    const Tensor slice = tensor(out, bytes / n);
    double took = 0;
    if (settings.operation == "all_reduce") {
      took = loop.time(seconds, in, bytes, [&] { ranks.all_reduce_into(result, whole); });
    } else if (settings.operation == "all_reduce_shared") {
      took = loop.time(seconds, in, bytes, [&] { (void)ranks.all_reduce_shared(whole); });
    } else if (settings.operation == "all_gather_shared") {
      took = loop.time(seconds, in, bytes / n, [&] { (void)ranks.all_gather_shared(part); });
    } else if (settings.operation == "all_gather") {
      took = loop.time(seconds, in, bytes / n, [&] { ranks.all_gather_into(gathered, part); });
    } else if (settings.operation == "reduce_scatter") {
      took = loop.time(seconds, in, bytes, [&] { ranks.reduce_scatter_into(slice, whole); });
    } else if (settings.operation == "queue") {
      muster::MessageQueue queue(*group);
      took = loop.time(seconds, in, 0, [&] {
        const bool is_large = bytes >= 64 << 10;
        if (ranks.rank() == 0)
          is_large ? queue.put_config(Config(whole)) : queue.put(whole.bytes());
        else
          (void)(is_large ? queue.get_config() : Config(queue.get().size()));
      });
    } else {
      int root = 0;
      took = loop.time(seconds, out, bytes, [&] { ranks.broadcast(result, root++ % static_cast<int>(ranks.size())); });
    }
    loop.report(settings.operation, bytes, took);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  bench::Options options("Collectives of the library");
  options.add("--ranks", settings.ranks, "", bench::Range{1, 64});
  options.add(
      "--operation", settings.operation, "",
      {"all_reduce", "all_reduce_shared", "all_gather", "all_gather_shared", "reduce_scatter", "broadcast", "queue"});
  options.add("--arena", settings.in_arena, "inputs in a SharedArena");
  options.add("--world", settings.in_world, "this process is one rank of a job that has been started");
  options.add("--dtype", settings.dtype);
  options.add("--milliseconds", settings.milliseconds, "for each size");
  options.add("--sizes", settings.sizes, "in bytes");
  options.parse(argc, argv);
  if (settings.in_world) {
    run(muster::world(), settings);
    return 0;
  }
  const auto of_rank = [&](bench::Meeting& meeting) { run(bench::make_group(meeting), settings); };
  return bench::run_ranks(settings.ranks, of_rank) ? 0 : 1;
}
