// SPDX-License-Identifier: Apache-2.0
#pragma once
// The address file of a rendezvous: rank 0 publishes its addresses to the other ranks in a shared directory.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/tcp/sockets.hpp"

namespace muster::tcp {

/// The contents of the address file. Its lines of text are:
///
///   muster meeting 1
///   number HEXADECIMAL
///   at ADDRESS:PORT           one line per address, in the order in which ranks try them
struct PublishedAddress {
  std::string number;  ///< random; a part of the token that a Hello must have
  std::vector<Endpoint> endpoints;
};

/// Parses "ADDRESS:PORT", both numeric. Returns nullopt for any other text.
std::optional<Endpoint> parse_endpoint(std::string_view text);

std::string text_of(const PublishedAddress& address);
/// Returns nullopt if the text is not a complete address file. The input may be any bytes.
std::optional<PublishedAddress> parse_published(std::string_view text);

/// Writes the address file, and replaces one of an earlier job. Throws Error(io | no_space | not_found).
void publish(const std::string& path, const PublishedAddress& address);
/// Returns nullopt if the file does not exist yet, or is not an address file. Throws Error(io).
std::optional<PublishedAddress> read_published(const std::string& path);

}  // namespace muster::tcp
