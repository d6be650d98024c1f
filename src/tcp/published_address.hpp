// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where rank 0 of a meeting listens, in a file that all hosts see. Lines of text:
//
//   muster meeting 1
//   number HEXADECIMAL
//   at ADDRESS:PORT           one a line, the one to be tried first in front

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/tcp/sockets.hpp"

namespace muster::tcp {

struct PublishedAddress {
  std::string number;  ///< of the meeting: no other has it
  std::vector<Endpoint> endpoints;
};

/// "HOST:PORT" of numbers; none of what is not.
std::optional<Endpoint> parse_endpoint(std::string_view text);

std::string text_of(const PublishedAddress& address);
/// None of what is no such file. Any bytes.
std::optional<PublishedAddress> parse_published(std::string_view text);

/// In place of what an earlier meeting has left. Throws Error(io | no_space | not_found).
void publish(const std::string& path, const PublishedAddress& address);
/// None if it is not there yet, or none. Throws Error(io).
std::optional<PublishedAddress> read_published(const std::string& path);

}  // namespace muster::tcp
