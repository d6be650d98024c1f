// SPDX-License-Identifier: Apache-2.0
#pragma once
// The interface through which `muster doctor` calls libmuster-cuda, to which it is not linked.

#include "muster/cuda.hpp"

namespace muster::cuda {

inline constexpr const char* report_symbol = "muster_cuda_report";
/// Fills a report. Returns false if that failed for another reason than a missing driver.
using MakeReport = bool (*)(CudaReport& report);

}  // namespace muster::cuda
