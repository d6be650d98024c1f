// SPDX-License-Identifier: Apache-2.0
// Mutated HDF5 files through the fenced reader: `foreign_mutation_campaign COUNT SEED MAKER [FILE...]`. MAKER
// (tests/hostile/make_foreign_hdf5) makes honest files, FILEs are more of them. Bits are flipped, fields set to
// numbers that hurt, pieces moved, files cut; checksums of the new format are made right again, or nothing
// behind them would ever be reached. Whatever libhdf5 does in its process, this one must answer: by tensors that can be
// read or an Error, within the deadline, in bounded memory.

#include <fmt/core.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "muster/error.hpp"
#include "src/checkpoint/foreign_hdf5.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t most_memory = std::uint64_t{128} << 20;
constexpr double most_seconds = 3.5;      // of CPU time, of both processes: other work of the machine does not count
constexpr double most_wall_seconds = 30;  // the reader is killed after 10, whatever CPU time it had
constexpr std::chrono::milliseconds deadline{2'000};

/// How one look ended, as a process tells it.
enum Verdict : int { shown = 0, partly = 1, refused = 2, crashed = 3, late = 4, unreadable = 5, broken = 6 };
constexpr std::array<const char*, 7> verdict_words = {"shown whole",
                                                      "shown with issues",
                                                      "refused by libhdf5 or here",
                                                      "libhdf5 crashed in its process",
                                                      "stopped at the deadline",
                                                      "shown, elements refused",
                                                      "BROKEN"};

/// Jenkins' lookup3, the checksum of HDF5's newer structures.
std::uint32_t lookup3(std::string_view bytes) {
  const auto rotate = [](std::uint32_t x, unsigned by) { return x << by | x >> (32U - by); };
  const auto word = [&bytes](std::size_t at, std::size_t count) {
    std::uint32_t value = 0;
    for (std::size_t i = 0; i < count; ++i)
      value |= static_cast<std::uint32_t>(static_cast<unsigned char>(bytes[at + i])) << (8 * i);
    return value;
  };
  std::uint32_t a = 0xdeadbeefU + static_cast<std::uint32_t>(bytes.size());
  std::uint32_t b = a;
  std::uint32_t c = a;
  std::size_t at = 0;
  std::size_t left = bytes.size();
  for (; left > 12; at += 12, left -= 12) {
    a += word(at, 4);
    b += word(at + 4, 4);
    c += word(at + 8, 4);
    a -= c, a ^= rotate(c, 4), c += b;
    b -= a, b ^= rotate(a, 6), a += c;
    c -= b, c ^= rotate(b, 8), b += a;
    a -= c, a ^= rotate(c, 16), c += b;
    b -= a, b ^= rotate(a, 19), a += c;
    c -= b, c ^= rotate(b, 4), b += a;
  }
  if (left == 0) return c;
  a += word(at, std::min<std::size_t>(left, 4));
  if (left > 4) b += word(at + 4, std::min<std::size_t>(left - 4, 4));
  if (left > 8) c += word(at + 8, left - 8);
  c ^= b, c -= rotate(b, 14);
  a ^= c, a -= rotate(c, 11);
  b ^= a, b -= rotate(a, 25);
  c ^= b, c -= rotate(b, 16);
  a ^= c, a -= rotate(c, 4);
  b ^= a, b -= rotate(a, 14);
  c ^= b, c -= rotate(b, 24);
  return c;
}

void put(std::string& bytes, std::size_t at, std::uint64_t value, std::size_t width) {
  for (std::size_t i = 0; i < width && at + i < bytes.size(); ++i)
    bytes[at + i] = static_cast<char>(static_cast<unsigned char>(value >> (8 * i)));
}

/// [begin, end) of what a checksum of 4 bytes follows: superblocks, object headers and other structures of the honest
/// file whose last four bytes are the checksum of what stands before.
struct Checked {
  std::size_t begin;
  std::size_t end;
};

std::vector<Checked> checked_parts(std::string_view bytes) {
  std::vector<Checked> parts;
  constexpr std::size_t longest = 4096;
  for (const std::string_view mark : {"\x89HDF", "OHDR", "OCHK", "FRHP", "FHDB", "FHIB", "BTHD", "BTLF", "BTIN", "FAHD",
                                      "FADB", "EAHD", "EAIB", "EASB", "EADB", "FSHD", "FSSE", "SMTB"}) {
    for (std::size_t at = bytes.find(mark); at != std::string_view::npos; at = bytes.find(mark, at + 1)) {
      for (std::size_t end = at + 8; end + 4 <= bytes.size() && end < at + longest; ++end) {
        std::uint32_t stored = 0;
        std::memcpy(&stored, bytes.data() + end, 4);
        if (stored == 0 || stored != lookup3(bytes.substr(at, end - at))) continue;
        parts.push_back({at, end});
        break;
      }
    }
  }
  return parts;
}

struct Sample {
  std::string name;
  std::string bytes;
  std::vector<Checked> checked;
};

class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  std::string operator()(const Sample& sample) {
    std::string bytes = sample.bytes;
    const unsigned changes = 1 + below(below(4) == 0 ? 24 : 4);
    for (unsigned i = 0; i < changes && !bytes.empty(); ++i) change(bytes, sample);
    // Checksums that are wrong hide everything behind them; sometimes they stay so.
    if (below(8) != 0) {
      for (const Checked& part : sample.checked)
        if (part.end + 4 <= bytes.size())
          put(bytes, part.end, lookup3(std::string_view(bytes).substr(part.begin, part.end - part.begin)), 4);
    }
    if (below(40) == 0) bytes.resize(below(static_cast<unsigned>(bytes.size()) + 1));
    return bytes;
  }

 private:
  unsigned below(unsigned limit) { return limit == 0 ? 0 : static_cast<unsigned>(random_() % limit); }

  /// Where structures are: bytes that are zero are mostly room or elements.
  std::size_t place(const std::string& bytes, const Sample& sample) {
    if (!sample.checked.empty() && below(2) == 0) {
      const Checked& part = sample.checked[below(static_cast<unsigned>(sample.checked.size()))];
      if (part.end <= bytes.size()) return part.begin + below(static_cast<unsigned>(part.end - part.begin));
    }
    std::size_t at = 0;
    do at = below(static_cast<unsigned>(bytes.size()));
    while (bytes[at] == 0 && below(4) != 0);
    return at;
  }

  void change(std::string& bytes, const Sample& sample) {
    const std::size_t at = place(bytes, sample);
    constexpr std::array<std::size_t, 4> widths = {1, 2, 4, 8};
    const std::size_t width = widths[below(4)];
    const std::uint64_t size = bytes.size();
    switch (below(9)) {
      case 0:
      case 1:
        bytes[at] = static_cast<char>(static_cast<unsigned char>(bytes[at]) ^ (1U << below(8)));
        return;
      case 2:
        bytes[at] = static_cast<char>(below(256));
        return;
      case 3:
        put(bytes, at, 0, width);
        return;
      case 4:
        put(bytes, at, ~std::uint64_t{0}, width);
        return;
      case 5: {
        const std::array<std::uint64_t, 10> numbers = {1,    0x7fffffff, 0x80000000, std::uint64_t{1} << 62,
                                                       size, size - 1,   size + 1,   ~std::uint64_t{0} - 7,
                                                       1024, 65536};
        put(bytes, at, numbers[below(10)], width);
        return;
      }
      case 6:  // another address of the file, or a number close by
        put(bytes, at, below(2) == 0 ? below(static_cast<unsigned>(size)) : place(bytes, sample), 8);
        return;
      case 7: {  // a piece of it somewhere else
        const std::size_t from = place(bytes, sample);
        const std::size_t count = std::min<std::size_t>({1 + below(64), bytes.size() - at, bytes.size() - from});
        std::memmove(bytes.data() + at, bytes.data() + from, count);
        return;
      }
      default: {
        std::uint64_t value = 0;
        std::memcpy(&value, bytes.data() + at, std::min<std::size_t>(width, bytes.size() - at));
        put(bytes, at, below(2) == 0 ? value + 1 + below(16) : value - 1 - below(16), width);
      }
    }
  }

  std::mt19937_64 random_;
};

Verdict look(const std::string& path) {
  constexpr std::uint64_t piece = std::uint64_t{256} << 10;
  try {
    const auto file = ForeignHdf5::open(path, {.deadline = deadline});
    bool is_unreadable = false;
    std::vector<std::byte> memory;
    for (std::size_t i = 0; i < file->tensors().size(); ++i) {
      const TensorEntry& tensor = file->tensors()[i];
      if (byte_size(tensor.dtype, tensor.shape) != tensor.bytes || file->find(tensor.name) != i) return broken;
      try {
        const std::uint64_t length = std::min(piece, tensor.bytes);
        (void)file->read_piece(i, 0, length, memory);
        (void)file->read_piece(i, tensor.bytes - length, length, memory);
      } catch (const Error&) {
        is_unreadable = true;
      }
    }
    if (is_unreadable) return unreadable;
    return file->issues().empty() ? shown : partly;
  } catch (const Error& error) {
    const std::string_view words = error.what();
    if (error.kind() == ErrorKind::timeout) return late;
    return words.find("does not survive") != std::string_view::npos ? crashed : refused;
  }
}

struct Outcome {
  Verdict verdict = broken;
  std::string words = {};
  double seconds = 0;
  std::uint64_t peak_bytes = 0;
};

Outcome look_from_outside(const std::string& path) {
  Outcome outcome;
  const auto began = Clock::now();
  const pid_t child = ::fork();
  if (child == 0) {
    Verdict verdict = broken;
    try {
      verdict = look(path);
    } catch (...) {
      // Anything but an Error.
    }
    ::_exit(verdict);
  }
  int status = 0;
  rusage used{};
  ::wait4(child, &status, 0, &used);
  const double wall = std::chrono::duration<double>(Clock::now() - began).count();
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  // Its own and that of the reader that it waited for.
  outcome.seconds = seconds(used.ru_utime) + seconds(used.ru_stime);
  outcome.peak_bytes = static_cast<std::uint64_t>(used.ru_maxrss) * 1024;
  if (WIFEXITED(status) && WEXITSTATUS(status) < broken) {
    outcome.verdict = static_cast<Verdict>(WEXITSTATUS(status));
  } else {
    outcome.words = WIFSIGNALED(status) ? fmt::format("ended by signal {}", WTERMSIG(status)) : "contradicts itself";
  }
  if (outcome.seconds > most_seconds || wall > most_wall_seconds)
    outcome.words += fmt::format(" took {:.1f} s of CPU time, {:.1f} on the clock", outcome.seconds, wall);
  if (outcome.peak_bytes > most_memory) outcome.words += fmt::format(" took {} bytes", outcome.peak_bytes);
  return outcome;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    fmt::print(stderr, "foreign_mutation_campaign COUNT SEED MAKER [FILE...]\n");
    return 2;
  }
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  fmt::print(
      "skipped: a sanitizer needs the address space that the reader is fenced in by, and libhdf5 takes gigabytes for "
      "some mutants without that fence\n");
  return 77;
#endif
  const int count = std::atoi(argv[1]);
  Mutator mutate(static_cast<unsigned>(std::atoi(argv[2])));
  const TemporaryDirectory work;
  std::filesystem::create_directory(work / "samples");
  const std::string make = fmt::format("'{}' samples '{}'", argv[3], work / "samples");
  if (std::system(make.c_str()) != 0) {  // NOLINT(bugprone-command-processor)
    fmt::print(stderr, "{} failed\n", make);
    return 2;
  }
  std::vector<std::string> paths(argv + 4, argv + argc);
  for (const auto& entry : std::filesystem::directory_iterator(work / "samples")) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Sample> samples;
  for (const std::string& path : paths) {
    const std::string bytes = read_text(path);
    samples.push_back({std::filesystem::path(path).filename(), bytes, checked_parts(bytes)});
    if (const Verdict honest = look(path); honest != shown && honest != partly) {
      fmt::print(stderr, "{} is {} before it is changed\n", path, verdict_words[honest]);
      return 2;
    }
  }

  std::map<Verdict, int> verdicts;
  int failures = 0;
  double slowest = 0;
  std::uint64_t largest = 0;
  const std::string mutant = work / "mutant.h5";
  for (int i = 0; i < count; ++i) {
    const Sample& sample = samples[static_cast<std::size_t>(i) % samples.size()];
    write_text(mutant, mutate(sample));
    const Outcome outcome = look_from_outside(mutant);
    ++verdicts[outcome.verdict];
    slowest = std::max(slowest, outcome.seconds);
    largest = std::max(largest, outcome.peak_bytes);
    if (outcome.verdict != broken && outcome.words.empty()) continue;
    ++failures;
    const std::string kept = fmt::format("foreign_mutant_{}_{}.h5", argv[2], i);
    std::filesystem::copy_file(mutant, kept, std::filesystem::copy_options::overwrite_existing);
    fmt::print("mutant {} of {}: {} {}; kept as {}\n", i, sample.name, verdict_words[outcome.verdict], outcome.words,
               kept);
  }
  for (const auto& [verdict, number] : verdicts) fmt::print("{:>7}  {}\n", number, verdict_words[verdict]);
  std::size_t checked = 0;
  for (const Sample& sample : samples) checked += sample.checked.size();
  fmt::print(
      "{} mutants of {} files ({} structures with a checksum), {} failures; the slowest look took {:.2f} s of CPU "
      "time, the "
      "largest {:.1f} MiB\n",
      count, samples.size(), checked, failures, slowest, static_cast<double>(largest) / (1 << 20));
  return failures == 0 ? 0 : 1;
}
