// SPDX-License-Identifier: Apache-2.0
// Fingerprints of tensors in memory, compared with memcpy by the same number of threads. Prints one JSON line per case:
// the median GB/s over the rounds, and its ratio to the median of memcpy.
//   fingerprint_bench [MIB] [ROUNDS]

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "muster/fingerprint.hpp"
#include "src/core/thread_pool.hpp"

namespace {

using namespace muster;

struct Case {
  std::string name;
  std::function<void()> run;
  std::vector<double> seconds = {};
};

/// Returns the parts of a BF16 tensor of rows of `row_bytes`, cut into columns for `ranks` ranks. Every part has memory
/// of its own, as on its rank.
std::vector<TensorPart> columns(const std::vector<std::byte>& bytes, std::int64_t row_bytes, std::int64_t ranks) {
  const auto rows = static_cast<std::int64_t>(bytes.size()) / row_bytes;
  const std::int64_t width = row_bytes / 2 / ranks;
  std::vector<TensorPart> parts;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const std::byte* const begin = bytes.data() + rank * rows * width * 2;
    parts.push_back(
        {"weight", Tensor::borrow({DType::bf16, {rows, width}, begin}), {rows, width * ranks}, {0, rank * width}});
  }
  return parts;
}

void copy(const std::vector<std::byte>& from, std::vector<std::byte>& to) {
  constexpr std::size_t piece = 4 << 20;
  parallel_for((from.size() + piece - 1) / piece, copy_workers(), [&](std::size_t i, std::size_t) {
    std::memcpy(to.data() + i * piece, from.data() + i * piece, std::min(piece, from.size() - i * piece));
  });
}

}  // namespace

int main(int argc, char** argv) try {
  const std::size_t size = (argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 512) << 20;
  const std::size_t rounds = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 11;
  std::mt19937_64 random(1);
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i + 8 <= size; i += 8) {
    const std::uint64_t word = random();
    std::memcpy(&bytes[i], &word, sizeof word);
  }
  std::vector<std::byte> target(size);
  const auto group = single_group();
  std::vector<Case> cases{{"memcpy", [&] { copy(bytes, target); }}};
  const auto add = [&](const std::string& name, std::vector<TensorPart> parts) {
    cases.push_back({name, [&group, parts = std::move(parts)] { (void)fingerprint(parts, *group); }});
  };
  add("dense", columns(bytes, 16384, 1));
  for (const std::int64_t run : {1024, 2816, 8192})
    add(fmt::format("columns, runs of {}", run), columns(bytes, 4 * run, 4));
  const auto side = static_cast<std::int64_t>(16384);
  const TensorView matrix(DType::bf16, {static_cast<std::int64_t>(size) / 2 / side, side}, bytes.data());
  add("transposed", {{"weight", Tensor::borrow(matrix.transposed())}});
  for (std::size_t round = 0; round < rounds + 1; ++round) {
    std::vector<std::size_t> order(cases.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::ranges::shuffle(order, random);
    for (const std::size_t i : order) {
      const auto begin = std::chrono::steady_clock::now();
      cases[i].run();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      if (round != 0) cases[i].seconds.push_back(took.count());
    }
  }
  const auto speed = [&](Case& each) {
    std::ranges::sort(each.seconds);
    return static_cast<double>(size) / each.seconds.at(each.seconds.size() / 2) / 1e9;
  };
  const double plain = speed(cases.front());
  for (Case& each : cases)
    fmt::print("{{\"case\": \"{}\", \"threads\": {}, \"gb_per_second\": {:.2f}, \"ratio\": {:.2f}}}\n", each.name,
               copy_workers(), speed(each), speed(each) / plain);
} catch (const Error& error) {
  fmt::print(stderr, "{}\n", error.what());
  return 1;
}
