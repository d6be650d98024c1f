// SPDX-License-Identifier: Apache-2.0
#pragma once
// How `muster doctor` asks libmuster-cuda, which it does not link.

#include "muster/cuda.hpp"

namespace muster::cuda {

inline constexpr const char* report_symbol = "muster_cuda_report";
/// Fills a report; false where that failed otherwise than for want of a driver.
using MakeReport = bool (*)(CudaReport& report);

}  // namespace muster::cuda
