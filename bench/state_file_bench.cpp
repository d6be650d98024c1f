// SPDX-License-Identifier: Apache-2.0
// Measures state files and their lower bounds in one process, in turns. Prints JSON lines for bench/state_file and
// bench/state_file_listing.
//   state_file_bench speed --directory D --mebibytes 512 --rounds 5     write and read twelve BF16 tensors
//   state_file_bench zstd --directory D --mebibytes 64 --rounds 5      normally distributed BF16, F32, F8_E4M3
//   state_file_bench make FILE --tensors 10000 --mebibytes 4096       make a sparse file, which is then listed
//   state_file_bench open FILE --rounds 21                            how long the library takes to open it

#include <fcntl.h>
#include <fmt/core.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "bench/harness/options.hpp"
#include "muster/state_file.hpp"

namespace {

using namespace muster;

struct Settings {
  std::string directory = ".";
  std::string file;
  std::uint64_t mebibytes = 512;
  int tensors = 10'000;
  int rounds = 5;
  int settle = 1;
};

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double processor_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void say(const std::string& series, double seconds, std::uint64_t bytes, const std::string& more = "") {
  fmt::print("{{\"series\": \"{}\", \"seconds\": {:.6f}, \"bytes\": {}{}}}\n", series, seconds, bytes, more);
  std::fflush(stdout);
}

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

/// Returns normally distributed weights, which are computed once. Their distribution matters, and not the time to
/// compute them.
std::vector<float> normal_values() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.02F);
  std::vector<float> values(1 << 20);
  for (float& value : values) value = normal(random);
  return values;
}

std::uint16_t bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/// Returns the code of the nearest finite E4M3 value.
std::uint8_t e4m3(float value) {
  static const std::vector<float> all = [] {
    std::vector<float> finite;
    for (int code = 0; code < 127; ++code) {
      const int exponent = code >> 3;
      const float mantissa = static_cast<float>(code & 7) / 8;
      finite.push_back(exponent == 0 ? std::ldexp(mantissa, -6) : std::ldexp(1 + mantissa, exponent - 7));
    }
    return finite;
  }();
  const float size = std::fabs(value);
  auto above = std::ranges::lower_bound(all, size) - all.begin();
  if (above == 127) above = 126;
  if (above > 0 && size - all[static_cast<std::size_t>(above - 1)] < all[static_cast<std::size_t>(above)] - size)
    --above;
  return static_cast<std::uint8_t>(above | (value < 0 ? 128 : 0));
}

template <class Element>
Tensor filled(DType dtype, Shape shape, unsigned seed, const std::function<Element(float)>& convert) {
  static const std::vector<float> values = normal_values();
  std::vector<Element> table(values.size());
  std::ranges::transform(values, table.begin(), convert);
  Tensor tensor = Tensor::allocate(dtype, std::move(shape));
  auto* elements = reinterpret_cast<Element*>(tensor.mutable_data());
  std::mt19937_64 random(seed);
  for (std::int64_t i = 0; i < tensor.view().element_count(); ++i) elements[i] = table[random() % table.size()];
  return tensor;
}

std::vector<NamedTensor> twelve(std::uint64_t mebibytes) {
  std::vector<NamedTensor> tensors;
  const auto columns = static_cast<std::int64_t>((mebibytes << 20) / 12 / 4096 / 2);
  for (unsigned i = 0; i < 12; ++i)
    tensors.emplace_back(fmt::format("model.layers.{}.mlp.weight", i),
                         filled<std::uint16_t>(DType::bf16, {4096, std::max<std::int64_t>(columns, 1)}, i, bf16));
  return tensors;
}

std::uint64_t bytes_of(const std::vector<NamedTensor>& tensors) {
  std::uint64_t bytes = 0;
  for (const auto& [name, tensor] : tensors) bytes += tensor.nbytes();
  return bytes;
}

/// The lower bound: one thread writes the same bytes sequentially into one file.
void write_plainly(const std::string& path, const std::vector<NamedTensor>& tensors, bool reserve, bool sync) {
  constexpr std::size_t piece = std::size_t{8} << 20;
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  require(fd >= 0, "creating the floor's file");
  if (reserve) require(::posix_fallocate(fd, 0, static_cast<off_t>(bytes_of(tensors))) == 0, "reserving");
  off_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    auto bytes = tensor.bytes();
    while (!bytes.empty()) {
      const ssize_t written = ::pwrite(fd, bytes.data(), std::min(piece, bytes.size()), offset);
      require(written > 0, "pwrite");
      offset += written;
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
  }
  require(!sync || ::fsync(fd) == 0, "fsync");
  require(::close(fd) == 0, "close");
}

std::uint64_t added_up(std::span<const std::byte> bytes) {
  std::uint64_t sum = 0;
  for (std::size_t at = 0; at + 8 <= bytes.size(); at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, 8);
    sum += word;
  }
  return sum;
}

std::uint64_t read_plainly(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  require(fd >= 0, "opening the floor's file");
  struct stat status {};
  require(::fstat(fd, &status) == 0, "fstat");
  const auto size = static_cast<std::size_t>(status.st_size);
  void* memory = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  require(memory != MAP_FAILED, "mmap");
  ::close(fd);
  const std::uint64_t sum = added_up({static_cast<const std::byte*>(memory), size});
  ::munmap(memory, size);
  return sum;
}

void settle(const Settings& settings) {
  ::sync();
  std::this_thread::sleep_for(std::chrono::seconds(settings.settle));
}

void speed(const Settings& settings) {
  const std::vector<NamedTensor> tensors = twelve(settings.mebibytes);
  const std::uint64_t bytes = bytes_of(tensors);
  const std::string ours = settings.directory + "/ours.h5";
  const std::string floor = settings.directory + "/floor";
  std::vector<std::function<void()>> turns;
  const auto turn = [&](const std::string& series, const std::string& path, std::function<void()> work) {
    turns.push_back([&settings, bytes, series, path, work = std::move(work)] {
      std::filesystem::remove(path);
      settle(settings);
      say(series, seconds_of(work), bytes);
    });
  };
  turn("floor, synced", floor, [&] { write_plainly(floor, tensors, false, true); });
  turn("floor, reserved and synced", floor, [&] { write_plainly(floor, tensors, true, true); });
  turn("write, synced", ours, [&] { write_state_file(ours, {}, tensors); });
  turn("floor", floor, [&] { write_plainly(floor, tensors, false, false); });
  turn("write", ours, [&] { write_state_file(ours, {}, tensors, {.durable = false}); });
  std::mt19937 random(static_cast<unsigned>(::getpid()));
  for (int round = 0; round < settings.rounds; ++round) {
    std::ranges::shuffle(turns, random);
    for (const auto& take : turns) take();
  }
  std::uint64_t expected = 0;
  for (const auto& [name, tensor] : tensors) expected += added_up(tensor.bytes());
  // Both files are in the page cache now. The first round is not counted.
  for (int round = 0; round <= settings.rounds; ++round) {
    std::uint64_t sum = 0;
    const double plain = seconds_of([&] { sum = read_plainly(floor); });
    std::uint64_t own = 0;
    double access = 0;
    const double mapped = seconds_of([&] {
      const auto begin = std::chrono::steady_clock::now();
      const StateFile file = StateFile::open(ours, FileAccess::map);
      std::vector<Tensor> all;
      for (std::size_t i = 0; i < tensors.size(); ++i) all.push_back(file.tensor(i));
      access = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      for (const Tensor& tensor : all) own += added_up(tensor.bytes());
    });
    if (own != expected || sum != expected) throw std::runtime_error("what was read is not what was written");
    if (round == 0) continue;
    say("floor, mapped and added up", plain, bytes);
    say("mapped and added up", mapped, bytes);
    say("mapped", access, bytes);
  }
  std::filesystem::remove(ours);
  std::filesystem::remove(floor);
}

void run_on_one_core() {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<std::size_t>(::sched_getcpu()), &set);
  require(::sched_setaffinity(0, sizeof set, &set) == 0, "sched_setaffinity");
}

void zstd(const Settings& settings) {
  const auto bytes = static_cast<std::int64_t>(settings.mebibytes << 20);
  const std::vector<NamedTensor> all = {
      {"BF16", filled<std::uint16_t>(DType::bf16, {bytes / 2 / 1024, 1024}, 1, bf16)},
      {"F32", filled<float>(DType::f32, {bytes / 4 / 1024, 1024}, 2, [](float value) { return value; })},
      {"F8_E4M3", filled<std::uint8_t>(DType::f8_e4m3fn, {bytes / 1024, 1024}, 3,
                                       [](float value) { return e4m3(value * 4480); })}};
  cpu_set_t cores;
  require(::sched_getaffinity(0, sizeof cores, &cores) == 0, "sched_getaffinity");
  for (const NamedTensor& tensor : all) {
    // The peer uses the same values.
    const std::string raw = settings.directory + "/" + tensor.first + ".raw";
    std::ofstream(raw, std::ios::binary)
        .write(reinterpret_cast<const char*>(tensor.second.data()),
               static_cast<std::streamsize>(tensor.second.nbytes()));
    const std::string path = settings.directory + "/zstd.h5";
    for (int round = 0; round < settings.rounds; ++round) {
      for (const bool is_one_core : {true, false}) {
        if (is_one_core) run_on_one_core();
        const double before = processor_seconds();
        const double seconds =
            seconds_of([&] { write_state_file(path, {}, std::span(&tensor, 1), {.zstd_level = 1, .durable = false}); });
        const double processor = processor_seconds() - before;
        const std::uint64_t stored = StateFile::open(path).tensors()[0].stored_bytes;
        const std::string more = fmt::format(", \"stored\": {}, \"processor\": {:.6f}", stored, processor);
        say(fmt::format("zstd {}, {}", tensor.first, is_one_core ? "one core" : "all cores"), seconds,
            tensor.second.nbytes(), more);
        const StateFile file = StateFile::open(path);
        Tensor back;
        const double reading = seconds_of([&] { back = file.tensor(0); });
        if (!bitwise_equal(back, tensor.second)) throw std::runtime_error("what was read is not what was written");
        say(fmt::format("unzstd {}, {}", tensor.first, is_one_core ? "one core" : "all cores"), reading,
            tensor.second.nbytes());
        require(::sched_setaffinity(0, sizeof cores, &cores) == 0, "sched_setaffinity");
      }
    }
    std::filesystem::remove(path);
  }
}

void make(const Settings& settings) {
  std::vector<StateFileWriter::Entry> entries;
  const auto columns =
      static_cast<std::int64_t>((settings.mebibytes << 20) / 2 / 64 / static_cast<unsigned>(settings.tensors));
  for (int i = 0; i < settings.tensors; ++i)
    entries.push_back({fmt::format("model.layers.{}.mlp.experts.{}.down_proj.weight", i / 20, i % 20),
                       DType::bf16,
                       {64, std::max<std::int64_t>(columns, 1)}});
  StateFileInfo info{.step = 1};
  info.job.fill(std::byte{0x11});
  StateFileWriter writer(settings.file, Config::object({{"bench", true}}), std::move(entries),
                         {.info = info, .durable = false});
  // Holes contain zeros, which is sufficient for a listing.
  for (int i = 0; i < settings.tensors; ++i) writer.mark_written(static_cast<std::size_t>(i));
  writer.commit();
}

void open_again(const Settings& settings) {
  for (int round = 0; round < settings.rounds; ++round) {
    std::size_t tensors = 0;
    const double seconds = seconds_of([&] { tensors = StateFile::open(settings.file).tensors().size(); });
    say("open", seconds, std::filesystem::file_size(settings.file), fmt::format(", \"tensors\": {}", tensors));
  }
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  std::string work;
  bench::Options options("State files beside their floors");
  options.add("WORK", work, "", {"speed", "zstd", "make", "open"});
  options.add("FILE", settings.file, "of make and open");
  options.add("--directory", settings.directory, "of speed and zstd");
  options.add("--mebibytes", settings.mebibytes);
  options.add("--rounds", settings.rounds);
  options.add("--settle", settings.settle, "seconds of rest for the disk before each of speed");
  options.add("--tensors", settings.tensors, "of make");
  options.parse(argc, argv);
  try {
    (work == "speed" ? speed : work == "zstd" ? zstd : work == "make" ? make : open_again)(settings);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "state_file_bench: {}\n", error.what());
    return 1;
  }
}
