// SPDX-License-Identifier: Apache-2.0
#pragma once
// The layout of the roles, for callers that make the groups themselves.

#include "muster/compat/roles.hpp"

namespace muster::roles {

/// Returns the layout of the ranks of `group`. Collective over `group`. Throws on all ranks as
/// initialize_distributed_compute(). Rank 0 logs a warning if the layout ignores the hosts.
RankLayout agreed_layout(Group& group, const RoleSizes& sizes, const CollectiveOptions& options = {});

}  // namespace muster::roles
