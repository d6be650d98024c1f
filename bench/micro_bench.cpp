// SPDX-License-Identifier: Apache-2.0
// Measures the components of an exchange one by one: copies, and the conversion between a config tree and its
// descriptor.

#include <benchmark/benchmark.h>
#include <fmt/core.h>

#include <cstring>

#include "bench/harness/copy_kernels.hpp"
#include "bench/harness/ranks.hpp"
#include "muster/state.hpp"
#include "muster/tensor.hpp"

namespace {

muster::Config tree(std::int64_t tensors) {
  static constexpr std::byte nothing[64]{};
  muster::ConfigObject object;
  object.reserve(static_cast<std::size_t>(tensors));
  for (std::int64_t i = 0; i < tensors; ++i) {
    object.insert(fmt::format("model.layers.{}.scale", i),
                  muster::Tensor::borrow({muster::DType::f32, {16}, static_cast<const void*>(nothing)}));
  }
  return muster::Config(std::move(object));
}

void split_config(benchmark::State& state) {
  const muster::Config config = tree(state.range(0));
  for (auto _ : state) {
    benchmark::DoNotOptimize(muster::split(config));
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void join_config(benchmark::State& state) {
  const muster::State parts = muster::split(tree(state.range(0)));
  for (auto _ : state) {
    benchmark::DoNotOptimize(muster::join(parts));
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void json_there_and_back(benchmark::State& state) {
  const muster::State parts = muster::split(tree(state.range(0)));
  for (auto _ : state) {
    benchmark::DoNotOptimize(muster::parse_json(muster::to_json(parts.config)));
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

template <class Copy>
void copy_with(benchmark::State& state, Copy copy) {
  const auto bytes = static_cast<std::size_t>(state.range(0));
  const bench::Mapping source(bytes, bench::Mapping::Kind::ordinary);
  const bench::Mapping target(bytes, bench::Mapping::Kind::shared);
  std::memset(source.bytes().data(), 1, bytes);
  std::memset(target.bytes().data(), 1, bytes);
  for (auto _ : state) {
    copy(target.bytes().data(), source.bytes().data(), bytes);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

void copy_memcpy(benchmark::State& state) {
  copy_with(state, [](std::byte* to, const std::byte* from, std::size_t bytes) { std::memcpy(to, from, bytes); });
}

void copy_nontemporal(benchmark::State& state) {
  copy_with(state, bench::copy_nontemporal);
}

// The copy function of the library, which handles any strides.
void copy_contiguous(benchmark::State& state) {
  copy_with(state, [](std::byte* to, const std::byte* from, std::size_t bytes) {
    muster::copy_contiguous({muster::DType::u8, {static_cast<std::int64_t>(bytes)}, from}, to);
  });
}

BENCHMARK(split_config)->Arg(100)->Arg(10'000);
BENCHMARK(join_config)->Arg(100)->Arg(10'000);
BENCHMARK(json_there_and_back)->Arg(100)->Arg(10'000);
BENCHMARK(copy_memcpy)->Range(64 << 10, 64 << 20);
BENCHMARK(copy_nontemporal)->Range(64 << 10, 64 << 20);
BENCHMARK(copy_contiguous)->Range(64 << 10, 64 << 20);

}  // namespace

BENCHMARK_MAIN();
