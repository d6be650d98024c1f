// SPDX-License-Identifier: Apache-2.0
#pragma once
// What files and directories are called that have no name of their own yet, so that what a dead process left can be
// proved to be nobody's. Made and taken apart here and nowhere else.
//
//   PATH.partial-NONCE@WRITER     it grows, and will be PATH; or it was PATH, and is being removed
//   PATH.replaced-NONCE@WRITER    it was PATH until PATH.partial-NONCE@WRITER takes the name
//
// NONCE is 16 hexadecimal digits, WRITER the process (identity.hpp). A WRITER with the pid 0 has let go of it. The name
// says all of this from the first moment to the last: a record inside could be torn, or be gone before the rest. Of a
// name that would become too long, the end is replaced by a hash.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/os/identity.hpp"

namespace muster::os {

/// Beside `path`, other for every call.
std::string partial_name(const std::string& path);
/// Whether a file name is what a writer that was killed left behind; as 0.1.0 called them (no WRITER), too.
bool is_partial_name(std::string_view name) noexcept;

struct Unfinished {
  std::string path;
  std::string tail;  ///< "NONCE@WRITER"
  bool is_replaced = false;
  ProcessIdentity writer;
};
/// All that are beside `path` and were to become it, whoever made them. Throws Error(not_found | io).
std::vector<Unfinished> unfinished_of(const std::string& path);
/// The name where what has the name PATH is kept while `partial` takes it.
std::string replaced_name(const std::string& partial);
/// The name of what this process leaves for another to go on with.
std::string released_name(const std::string& partial);

/// Removes the files that were to become `path` and whose writers are proved dead, as far as that can be done.
void remove_dead_partials(const std::string& path) noexcept;

}  // namespace muster::os
