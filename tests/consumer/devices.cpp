// SPDX-License-Identifier: Apache-2.0
// A program with tensors on devices, built against an installed Muster without a CUDA toolkit, and run with or without
// a device.

#include <muster/cuda.hpp>
#include <muster/error.hpp>

#include <cstdio>

int main() {
  if (muster::cuda_available()) {
    const muster::Tensor there = muster::cuda_allocate(muster::DType::f32, {4, 4}, 0);
    std::printf("%s\n",
                muster::to_string(muster::cuda_view(there.dtype(), there.shape(), there.data()).device()).c_str());
    return 0;
  }
  try {
    const float number = 1;
    (void)muster::cuda_view(muster::DType::f32, {}, &number);
  } catch (const muster::Error& error) {
    if (error.kind() == muster::ErrorKind::unsupported && muster::cuda_unavailable_reason() == error.what()) {
      std::puts("no device");
      return 0;
    }
  }
  return 1;
}
