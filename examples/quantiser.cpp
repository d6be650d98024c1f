// SPDX-License-Identifier: Apache-2.0
// A quantiser for tensor-parallel models. Every rank quantises its slice of one layer to int8, with one scale per
// output channel. The root gets all weights and all layer configs.
//
//   muster run -n 4 -- build/examples/quantiser

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "muster/config.hpp"
#include "muster/gather.hpp"

namespace {

constexpr std::int64_t channels = 256;
constexpr std::int64_t inputs = 1024;

std::vector<float> train(int rank) {  // the weights that a trainer would leave on this rank
  std::vector<float> weight(channels * inputs);
  for (std::size_t i = 0; i < weight.size(); ++i)
    weight[i] = std::sin(static_cast<float>(i) * 0.37F) * (1.0F + static_cast<float>(rank));
  return weight;
}

struct Quantised {
  muster::Tensor weight = muster::Tensor::allocate(muster::DType::i8, {channels, inputs});
  muster::Tensor scale = muster::Tensor::allocate(muster::DType::f32, {channels});
};

Quantised quantise(const std::vector<float>& weight) {
  Quantised layer;
  const auto values = layer.weight.mutable_values<std::int8_t>();
  const auto scales = layer.scale.mutable_values<float>();
  for (std::int64_t c = 0; c < channels; ++c) {
    const float* row = weight.data() + c * inputs;
    float amax = 0;
    for (std::int64_t i = 0; i < inputs; ++i) amax = std::max(amax, std::abs(row[i]));
    scales[c] = amax > 0 ? amax / 127 : 1;
    for (std::int64_t i = 0; i < inputs; ++i)
      values[c * inputs + i] = static_cast<std::int8_t>(std::lround(row[i] / scales[c]));
  }
  return layer;
}

}  // namespace

int main() try {
  const std::shared_ptr<muster::Group> group = muster::world();

  const Quantised layer = quantise(train(group->rank()));
  const muster::Config config =
      muster::Config::object({{"name", "model.layers.0.mlp.up_proj"},
                              {"quantization", muster::Config::object({{"bits", 8}, {"axis", 0}})},
                              {"weight_scale", layer.scale}});

  const muster::GatheredTensors weights = muster::get_tensors_parallel(layer.weight, muster::all_ranks, *group);
  const muster::GatheredConfigs configs = muster::get_configs_parallel(&config, muster::all_ranks, *group);

  for (const auto& [rank, gathered] : configs.present()) {  // empty on all ranks except the root
    const auto scales = gathered.at("weight_scale").as_tensor().values<float>();
    const muster::Tensor& weight = *weights[static_cast<std::size_t>(rank)];
    std::printf("rank %d: %s, %zu bytes of int8, largest scale %.5f\n", rank, gathered.at("name").as_string().c_str(),
                weight.nbytes(), static_cast<double>(*std::ranges::max_element(scales)));
  }
  if (group->rank() == 0) std::printf("%s\n", weights.explain().c_str());
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "quantiser: %s\n", error.what());
  return 2;
}
