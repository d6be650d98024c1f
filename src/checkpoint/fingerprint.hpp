// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stop_token>

#include "muster/fingerprint.hpp"
#include "muster/progress.hpp"
#include "src/checkpoint/source.hpp"

namespace muster {

/// As the public function, for the path, the tensors and the dtype of a request.
Fingerprint fingerprint_of(const SourceOptions& request, const ProgressCallback& progress, const std::stop_token& stop);

}  // namespace muster
