// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stop_token>

#include "muster/error.hpp"
#include "muster/fingerprint.hpp"
#include "muster/group.hpp"
#include "muster/progress.hpp"
#include "src/checkpoint/source.hpp"

namespace muster {

/// As the public function, for the path, the tensors and the dtype of a request.
Fingerprint fingerprint_of(const SourceOptions& request, const ProgressCallback& progress, const std::stop_token& stop);

/// Collective, with fingerprint(). Makes `failure` of this rank, whose arguments cannot be converted, the error of the
/// call on all ranks, and throws it. The group remains usable.
void refuse_fingerprint(Group& group, const Error& failure);

}  // namespace muster
