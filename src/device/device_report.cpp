// SPDX-License-Identifier: Apache-2.0
#include "src/device/device_report.hpp"

#include <exception>

extern "C" bool muster_cuda_report(muster::CudaReport& report) {
  try {
    report = muster::examine_cuda();
    return true;
  } catch (const std::exception& error) {
    report.obstacle = error.what();
    return false;
  }
}
