// SPDX-License-Identifier: Apache-2.0
#pragma once
// Data that a reader found in a source and did not take. Every reader returns a list of its omissions, and every
// command that writes or compares uses that list: it refuses data that is lost, and reports the rest.

#include <string>
#include <vector>

namespace muster {

struct Omission {
  std::string name;    ///< a tensor or a dataset, or a file below the source's directory
  std::string reason;  ///< "its filter lzf is not read", "weights of another format"
  /// The source itself has this data, and no reader here can give it: a result without it would be incomplete. False:
  /// the data does not belong to the model that was requested, such as an optimizer or the weights of another model.
  bool is_lost = false;
};
using Omissions = std::vector<Omission>;

}  // namespace muster
