// SPDX-License-Identifier: Apache-2.0
#pragma once
// Live exports: a rank whose arguments cannot be converted takes part in the call of the other ranks.

#include <cstdint>

#include "muster/error.hpp"
#include "muster/group.hpp"

namespace muster {

/// The call that the other ranks make.
enum class ExportForm : std::uint8_t {
  blocking,      ///< export_model() of tensors, all at once or unit by unit
  asynchronous,  ///< export_model_async()
};

/// Collective, with that call. Makes `failure` of this rank the error of the call on all ranks, and throws it. The
/// group remains usable.
void refuse_export(Group& group, const Error& failure, ExportForm form);

}  // namespace muster
