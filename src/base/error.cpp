// SPDX-License-Identifier: Apache-2.0
#include "muster/error.hpp"

#include <utility>

#include "src/base/escaped.hpp"

namespace muster {

std::string_view to_string(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::argument:
      return "argument";
    case ErrorKind::not_found:
      return "not found";
    case ErrorKind::corrupt:
      return "corrupt";
    case ErrorKind::version:
      return "version";
    case ErrorKind::timeout:
      return "timeout";
    case ErrorKind::peer_lost:
      return "peer lost";
    case ErrorKind::no_space:
      return "no space";
    case ErrorKind::io:
      return "io";
    case ErrorKind::unsupported:
      return "unsupported";
    case ErrorKind::rank_mismatch:
      return "rank mismatch";
    case ErrorKind::cancelled:
      return "cancelled";
  }
  return "unknown";
}

Error::Error(ErrorKind kind, const std::string& message, ErrorDetails details)
    : std::runtime_error(escaped(message)), kind_(kind), details_(std::move(details)) {}

Error Error::with_context(std::string_view context) const {
  return Error(kind_, std::string(context) + ": " + what(), details_);
}

}  // namespace muster
