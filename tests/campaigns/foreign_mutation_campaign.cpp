// SPDX-License-Identifier: Apache-2.0
// Mutated HDF5 files through the sandboxed reader: `foreign_mutation_campaign COUNT SEED MAKER [FILE...]`. MAKER
// (tests/hostile/make_foreign_hdf5) makes valid files, and FILEs are further ones. The campaign flips bits, sets fields
// to harmful numbers, moves pieces and truncates files. It corrects the checksums of the new format, because otherwise
// no code after the checksum test would run. libhdf5 may do anything in its process. This process must return
// readable tensors or an Error, within the deadline and in bounded memory.

#include <fmt/core.h>

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

#include "tests/hostile/foreign_look.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;

namespace {

constexpr std::uint64_t most_memory = std::uint64_t{128} << 20;
constexpr double most_seconds = 3.5;      // CPU time of both processes, which other work on the machine does not affect
constexpr double most_wall_seconds = 30;  // the reader is killed after 10 s, whatever its CPU time
constexpr std::chrono::milliseconds deadline{2'000};

/// The result of opening one file.
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

/// A range [begin, end) that is followed by its checksum of 4 bytes: a superblock, object header or other structure of
/// the valid file.
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
    // Wrong checksums hide everything after them. In some cases they are not corrected.
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

  /// Returns an offset that is likely in a structure: zero bytes are mostly free space or elements.
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
      case 6:  // another address in the file, or a small number
        put(bytes, at, below(2) == 0 ? below(static_cast<unsigned>(size)) : place(bytes, sample), 8);
        return;
      case 7: {  // moves a piece to another offset
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

Verdict verdict_of(const Look& seen) {
  const auto has = [&](std::string_view begin) {
    return std::ranges::any_of(seen.lines, [&](const std::string& line) { return line.starts_with(begin); });
  };
  if (!seen.end.empty() || has("broken ")) return broken;
  if (has("error timeout")) return late;
  if (has("error ")) return seen.lines.front().find("cannot process the file") != std::string::npos ? crashed : refused;
  if (has("unreadable ")) return unreadable;
  return has("issue ") ? partly : shown;
}

/// Describes an exceeded limit, or how the process ended.
std::string problem_of(const Look& seen) {
  std::string words = seen.end;
  if (seen.cpu_seconds > most_seconds || seen.seconds > most_wall_seconds)
    words += fmt::format(" took {:.1f} s of CPU time, {:.1f} on the clock", seen.cpu_seconds, seen.seconds);
  if (seen.peak_bytes > most_memory) words += fmt::format(" took {} bytes", seen.peak_bytes);
  return words;
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
  const ForeignHdf5Options options{.deadline = deadline};
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
    if (const Verdict honest = verdict_of(look_from_outside(path, options)); honest != shown && honest != partly) {
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
    const Look seen = look_from_outside(mutant, options);
    const Verdict verdict = verdict_of(seen);
    const std::string words = problem_of(seen);
    ++verdicts[verdict];
    slowest = std::max(slowest, seen.cpu_seconds);
    largest = std::max(largest, seen.peak_bytes);
    if (verdict != broken && words.empty()) continue;
    ++failures;
    const std::string kept = fmt::format("foreign_mutant_{}_{}.h5", argv[2], i);
    std::filesystem::copy_file(mutant, kept, std::filesystem::copy_options::overwrite_existing);
    fmt::print("mutant {} of {}: {} {}; kept as {}\n", i, sample.name, verdict_words[verdict], words, kept);
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
