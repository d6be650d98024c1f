// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `muster verify` says.

#include <string>

#include "muster/config.hpp"
#include "muster/verify.hpp"

namespace muster::inspect {

/// A line for each problem and one for the whole. Lines end with '\n'.
std::string verify_text(const VerifyReport& report);

/// {"good", "path", "kind", "files", "tensors", "bytes", "has_checksums", "checked", "problems": [{"defect", "file",
/// "tensor", "words"}], "problems_left_out"}.
Config verify_tree(const VerifyReport& report);

}  // namespace muster::inspect
