// SPDX-License-Identifier: Apache-2.0
// A rank of a job with a trace: 20 steps with an all_reduce. Rank 2 computes longer than the others.
#include <chrono>
#include <cstdio>
#include <thread>

#include "muster/process_group.hpp"
#include "muster/trace.hpp"

int main() {
  using namespace std::chrono_literals;
  try {
    const auto group = muster::world();
    muster::ProcessGroup ranks(*group);
    const muster::Tensor tensor = muster::Tensor::allocate(muster::DType::f32, {1000});
    for (int step = 0; step < 20; ++step) {
      {
        const muster::TraceSpan span("compute");
        std::this_thread::sleep_for(group->rank() == 2 ? 20ms : 2ms);
      }
      ranks.all_reduce(tensor);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
