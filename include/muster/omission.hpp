// SPDX-License-Identifier: Apache-2.0
#pragma once
// An omission is data that a reader found in a source and did not load. Every reader returns a list of its omissions,
// and every command that writes or compares uses that list: it fails if data was lost, and reports the other omissions.

#include <string>
#include <vector>

namespace muster {

/// Data of a source that a reader did not load.
struct Omission {
  std::string name;    ///< the name of a tensor or dataset, or the path of a file relative to the source's directory
  std::string reason;  ///< for messages: "its filter lzf is not read", "weights of another format"
  /// True if the data belongs to the requested model, but Muster cannot read it: a result without it would be
  /// incomplete. False if the data does not belong to that model (an optimizer, the weights of another model).
  bool is_lost = false;
};
/// The omissions of a reader.
using Omissions = std::vector<Omission>;

}  // namespace muster
