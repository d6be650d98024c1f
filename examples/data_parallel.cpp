// SPDX-License-Identifier: Apache-2.0
// Data-parallel training of a small network. Each rank has its own examples. The gradients are averaged, so all ranks
// have the same weights after every step. The loss decreases.
//
//   build/tools/muster run -n 4 -- build/examples/data_parallel

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "muster/process_group.hpp"

namespace {

constexpr std::size_t inputs = 2;
constexpr std::size_t hidden = 16;
constexpr std::size_t weights = hidden * (inputs + 2) + 1;  // first layer, its biases, second layer, its bias

/// Returns the loss of one example, and adds its gradient to `gradient`.
float learn(std::span<const float> weight, const float (&x)[inputs], float wanted, std::span<float> gradient) {
  const auto first = weight.first(hidden * inputs);
  const auto bias = weight.subspan(hidden * inputs, hidden);
  const auto second = weight.subspan(hidden * (inputs + 1), hidden);
  float active[hidden];
  float got = weight.back();
  for (std::size_t i = 0; i < hidden; ++i) {
    active[i] = std::tanh(first[2 * i] * x[0] + first[2 * i + 1] * x[1] + bias[i]);
    got += second[i] * active[i];
  }
  const float error = got - wanted;
  for (std::size_t i = 0; i < hidden; ++i) {
    const float back = error * second[i] * (1 - active[i] * active[i]);
    gradient[2 * i] += back * x[0];
    gradient[2 * i + 1] += back * x[1];
    gradient[hidden * inputs + i] += back;
    gradient[hidden * (inputs + 1) + i] += error * active[i];
  }
  gradient.back() += error;
  return error * error / 2;
}

void train() {
  muster::ProcessGroup ranks(*muster::world());
  std::mt19937 random(static_cast<unsigned>(ranks.rank()));
  std::uniform_real_distribution<float> uniform(-1, 1);

  // Each rank begins with its own weights, and the broadcast replaces them with those of rank 0.
  const muster::Tensor weight = muster::Tensor::allocate(muster::DType::f32, {weights});
  for (float& value : weight.mutable_values<float>()) value = uniform(random);
  ranks.broadcast(weight, 0);

  // The last element is the loss.
  const muster::Tensor gradient = muster::Tensor::allocate(muster::DType::f32, {weights + 1});
  constexpr int batch = 32;
  for (int step = 0; step <= 500; ++step) {
    const std::span<float> sums = gradient.mutable_values<float>();
    std::ranges::fill(sums, 0.0F);
    for (int i = 0; i < batch; ++i) {
      const float x[inputs] = {uniform(random), uniform(random)};
      const float wanted = std::sin(3 * x[0]) * x[1];
      sums.back() += learn(weight.values<float>(), x, wanted, sums.first(weights)) / batch;
    }
    ranks.all_reduce(gradient, muster::ReduceOp::average);
    for (std::size_t i = 0; i < weights; ++i) weight.mutable_values<float>()[i] -= 0.2F / batch * sums[i];
    if (ranks.rank() == 0 && step % 100 == 0)
      std::printf("step %3d: loss %.4f over %d ranks\n", step, static_cast<double>(sums.back()), ranks.size());
  }
}

}  // namespace

int main() {
  try {
    train();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "data_parallel: %s\n", error.what());
    return 2;
  }
  return 0;
}
