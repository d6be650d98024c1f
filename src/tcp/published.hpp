// SPDX-License-Identifier: Apache-2.0
#pragma once
// The file that tells where rank 0 of a rendezvous listens.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/tcp/sockets.hpp"

namespace muster::tcp {

/// Where rank 0 listens, in a file that all hosts see. Lines of text:
///
///   muster meeting 1
///   number HEXADECIMAL
///   at ADDRESS:PORT           one per line, the first one to be tried first
struct PublishedAddress {
  std::string number;  ///< random, and a part of the token that hellos must have
  std::vector<Endpoint> endpoints;
};

/// "HOST:PORT" in numbers; nothing if it is not that.
std::optional<Endpoint> parse_endpoint(std::string_view text);

std::string text_of(const PublishedAddress& address);
/// Returns nothing if it is not such a file. Accepts any bytes.
std::optional<PublishedAddress> parse_published(std::string_view text);

/// Replaces the file of an earlier job. Throws Error(io | no_space | not_found).
void publish(const std::string& path, const PublishedAddress& address);
/// Returns nothing if there is no file yet, or another one. Throws Error(io).
std::optional<PublishedAddress> read_published(const std::string& path);

}  // namespace muster::tcp
