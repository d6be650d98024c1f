// SPDX-License-Identifier: Apache-2.0
// Measures the memory of the root of a stream or an export over several hosts: `hosts_campaign stream|export MIB
// BUDGET_MIB DIRECTORY`, started as the ranks of a job (streams_over_hosts.sh). MIB is the size of all ranks' data,
// which is generated during the run. The root alone writes the received data to the directory, reads it back and
// compares it.

#include <fmt/core.h>
#include <malloc.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "muster/export.hpp"
#include "muster/gather_each.hpp"
#include "muster/safetensors.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/os/file.hpp"

using namespace muster;
namespace fs = std::filesystem;

namespace {

std::int64_t layers = 16;  // the largest number that the plan knows

struct Task {
  std::string directory;
  std::uint64_t layer_bytes = 0;  ///< bytes of one layer on one rank
  std::uint64_t budget = 0;
};

/// Memory that must not grow with the model: messages, page tables, buffers of MPI.
constexpr std::uint64_t small_change = 48_MiB;
constexpr std::uint64_t allowed_beside = 256_MiB;

std::uint64_t word_at(int rank, std::int64_t layer, std::uint64_t index) {
  return (index + (static_cast<std::uint64_t>(rank) << 56) + (static_cast<std::uint64_t>(layer) << 48)) *
         0x9e3779b97f4a7c15ULL;
}

Tensor make_layer(int rank, std::int64_t layer, const Shape& shape) {
  Tensor tensor = Tensor::allocate(DType::u64, shape);
  auto* words = reinterpret_cast<std::uint64_t*>(tensor.mutable_data());
  for (std::uint64_t i = 0; i < tensor.nbytes() / 8; ++i) words[i] = word_at(rank, layer, i);
  return tensor;
}

/// Returns the memory that only this process uses, or that it shares: anonymous pages, and shared memory that it has
/// mapped or opened, whichever is larger. Mapped files do not count, because the system can reclaim them.
std::uint64_t memory_now() {
  std::ifstream status("/proc/self/status");
  std::uint64_t own = 0;
  std::uint64_t mapped = 0;
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:")) own = std::strtoull(line.c_str() + 8, nullptr, 10) << 10;
    if (line.starts_with("RssShmem:")) mapped = std::strtoull(line.c_str() + 9, nullptr, 10) << 10;
  }
  std::uint64_t open = 0;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    if (!fs::read_symlink(entry.path(), error).string().starts_with("/memfd:")) continue;
    struct ::stat facts {};
    if (::stat(entry.path().c_str(), &facts) == 0) open += static_cast<std::uint64_t>(facts.st_blocks) * 512;
  }
  return own + std::max(mapped, open);
}

/// Samples memory_now() during its lifetime.
class Sampling {
 public:
  [[nodiscard]] std::uint64_t begin() const { return begin_; }
  std::uint64_t end() {
    thread_.request_stop();
    thread_.join();
    return peak_;
  }

 private:
  std::uint64_t begin_ = memory_now();
  std::uint64_t peak_ = begin_;
  std::jthread thread_{[this](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      peak_ = std::max(peak_, memory_now());
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }};
};

void expect(bool condition, const std::string& words) {
  if (!condition) throw std::runtime_error(words);
}

void judge(const std::string& what, Sampling& sampling, std::uint64_t own, const Task& task, std::uint64_t bytes,
           double seconds) {
  const std::uint64_t peak = sampling.end();
  fmt::print(
      "{} of {} MiB, budget {} MiB: first rank {} MiB at most, {} before it began, {} of its own layer; {:.1f} s\n",
      what, bytes >> 20, task.budget >> 20, peak >> 20, sampling.begin() >> 20, own >> 20, seconds);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // Sanitizers keep freed memory. The root's own layer is additional, whatever its size.
  expect(peak <= task.budget + std::max(allowed_beside, own + small_change), "more memory than budget and 256 MiB");
  expect(peak <= sampling.begin() + own + task.budget + small_change, "more memory than the budget and small change");
#endif
}

void stream(SyncGroup& group, const Task& task) {
  const auto words = static_cast<std::int64_t>(task.layer_bytes / 8);
  const auto size = static_cast<std::uint64_t>(group.size());
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  std::int64_t given = 0;
  const auto source = [&]() -> std::optional<Config> {
    if (given == layers) return std::nullopt;
    const std::int64_t layer = given++;
    return Config::object({{"w", make_layer(group.rank(), layer, {words / 64, 64})}, {"layer", layer}});
  };
  const std::string path = task.directory + "/streamed";
  const std::uint64_t total = task.layer_bytes * size * static_cast<std::uint64_t>(layers);
  std::optional<os::WritableFile> file;
  if (group.rank() == 0) {
    file = os::WritableFile::create(path, path);
    file->reserve(total);
  }
  const auto consume = [&](LayerPart& part) {
    for (const auto& [rank, config] : part.present()) {
      if (!config.at("w").is_tensor()) continue;
      const Tensor& piece = config.at("w").as_tensor();
      std::uint64_t first = 0;
      for (const TensorSlice& slice : part.slices)
        if (slice.rank == rank) first = static_cast<std::uint64_t>(slice.first);
      const std::uint64_t at = (part.layer * size + static_cast<std::uint64_t>(rank)) * task.layer_bytes + first * 8;
      file->write_at(at, piece.bytes());
      file->start_writeback(at, piece.nbytes());
    }
  };
  std::optional<Sampling> sampling;
  if (group.rank() == 0) sampling.emplace();
  const StreamReport report = gather_each(source, ranks, group, consume, {.memory_budget = task.budget});
  if (group.rank() != 0) return;
  judge(fmt::format("gather_each by {}", to_string(report.route)), *sampling, task.layer_bytes, task, total,
        report.seconds);
  file->close();
  const os::ReadableFile written = os::ReadableFile::open(path);
  std::vector<std::uint64_t> chunk(1 << 17);
  for (std::uint64_t at = 0; at < total; at += chunk.size() * 8) {
    written.read_at(at, std::as_writable_bytes(std::span(chunk)));
    for (std::uint64_t i = 0; i < chunk.size(); ++i) {
      const std::uint64_t place = at / 8 + i;
      const std::uint64_t tensor = place * 8 / task.layer_bytes;
      const std::uint64_t expected = word_at(static_cast<int>(tensor % size), static_cast<std::int64_t>(tensor / size),
                                             place - tensor * (task.layer_bytes / 8));
      if (chunk[i] != expected) throw std::runtime_error(fmt::format("word {} is wrong", place));
    }
  }
}

std::string layer_name(std::int64_t layer) {
  return fmt::format("layer.{:02}", layer);
}

/// Writes each rank's shard: columns of every second layer, rows of the others, and a full tensor where the merge is a
/// maximum.
void write_shard(const SyncGroup& group, const Task& task, const Shape& shape) {
  std::vector<TensorEntry> entries;
  for (std::int64_t layer = 0; layer < layers; ++layer) entries.push_back({layer_name(layer), DType::u64, shape});
  SafetensorsWriter writer(task.directory + "/shards/" + shard_file_name(group.rank(), group.size()), entries);
  for (std::int64_t layer = 0; layer < layers; ++layer)
    writer.write(layer_name(layer), make_layer(group.rank(), layer, shape).view());
  writer.commit();
}

void check_export(int size, const Task& task, const Shape& shape) {
  const auto rows = static_cast<std::uint64_t>(shape[0]);
  const auto columns = static_cast<std::uint64_t>(shape[1]);
  for (const auto& entry : fs::directory_iterator(task.directory + "/out")) {
    if (entry.path().extension() != ".safetensors") continue;
    const SafetensorsFile file = SafetensorsFile::open(entry.path());
    for (std::size_t at = 0; at < file.tensors().size(); ++at) {
      const std::int64_t layer = std::atol(file.tensors()[at].name.substr(6).c_str());
      const Tensor tensor = file.tensor(at);
      expect(tensor.nbytes() == task.layer_bytes * static_cast<std::uint64_t>(size), "a tensor has another size");
      const std::byte* words = tensor.data();
      for (std::uint64_t i = 0; i < tensor.nbytes() / 8; ++i) {
        std::uint64_t word = 0;
        std::memcpy(&word, words + i * 8, 8);
        const std::uint64_t row = i / (columns * static_cast<std::uint64_t>(size));
        const std::uint64_t column = i % (columns * static_cast<std::uint64_t>(size));
        const std::uint64_t rank = layer % 2 == 0 ? column / columns : i / (rows * columns);
        const std::uint64_t index = layer % 2 == 0 ? row * columns + column % columns : i % (rows * columns);
        if (word != word_at(static_cast<int>(rank), layer, index))
          throw std::runtime_error(fmt::format("word {} of layer {} is wrong", i, layer));
      }
    }
  }
}

void export_all(SyncGroup& group, const Task& task) {
  const Shape shape = {static_cast<std::int64_t>(task.layer_bytes / 8 / 1024), 1024};
  if (group.rank() == 0) {
    fs::create_directory(task.directory + "/shards");
    std::ofstream(task.directory + "/plan.json") << R"({"muster_plan": 1, "rules": [
      {"match": "layer.{00,02,04,06,08,10,12,14}", "action": "concat", "dim": 1}, {"match": "layer.*", "action": "concat", "dim": 0}]})";
  }
  group.barrier();
  write_shard(group, task, shape);
  group.barrier();
  std::optional<Sampling> sampling;
  if (group.rank() == 0) sampling.emplace();
  const ExportReport report =
      export_model(task.directory + "/shards", task.directory + "/out", task.directory + "/plan.json", group,
                   {.memory_budget = task.budget, .writers = Writers::first});
  if (group.rank() != 0) return;
  judge("export by the first rank", *sampling, 0, task, report.account.bytes_out, report.seconds);
  check_export(group.size(), task, shape);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5 && argc != 6) {
    fmt::print(stderr, "usage: hosts_campaign stream|export MIB BUDGET_MIB DIRECTORY [LAYERS]\n");
    return 2;
  }
  // Generated data is returned to the system when it is freed. Otherwise the test would measure the allocator's free
  // memory.
  ::mallopt(M_MMAP_THRESHOLD, 1 << 20);
  try {
    const std::shared_ptr<SyncGroup> group = world();
    const std::uint64_t bytes = std::strtoull(argv[2], nullptr, 10) << 20;
    if (argc == 6) layers = std::clamp(std::atol(argv[5]), 1L, layers);
    const std::uint64_t parts = static_cast<std::uint64_t>(group->size()) * static_cast<std::uint64_t>(layers);
    const Task task{argv[4], bytes / parts / 65536 * 65536, std::strtoull(argv[3], nullptr, 10) << 20};
    if (std::string_view(argv[1]) == "stream")
      stream(*group, task);
    else
      export_all(*group, task);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
  return 0;
}
