// SPDX-License-Identifier: Apache-2.0
#include "src/rendezvous/address_file.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <span>

#include "muster/error.hpp"
#include "src/os/file.hpp"
#include "src/os/publish.hpp"

namespace muster::tcp {

namespace {

constexpr std::string_view first_line = "muster meeting 1";
constexpr std::size_t longest_file = 64 << 10;
constexpr std::size_t number_digits = 32;

/// Returns the rest of a line that begins with `begin`.
std::optional<std::string_view> behind(std::string_view line, std::string_view begin) {
  if (!line.starts_with(begin)) return std::nullopt;
  return line.substr(begin.size());
}

bool is_number(std::string_view text) {
  return text.size() == number_digits &&
         std::ranges::all_of(text, [](unsigned char c) { return std::isxdigit(c) != 0; });
}

}  // namespace

std::optional<Endpoint> parse_endpoint(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return std::nullopt;
  std::string_view host = text.substr(0, colon);
  const std::string_view digits = text.substr(colon + 1);
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc{} || end != digits.data() + digits.size() || port == 0) return std::nullopt;
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  error_code failure;
  const asio::ip::address address = asio::ip::make_address(std::string(host), failure);
  if (failure) return std::nullopt;
  return Endpoint(address, port);
}

std::string text_of(const PublishedAddress& address) {
  std::string text = fmt::format("{}\nnumber {}\n", first_line, address.number);
  for (const Endpoint& endpoint : address.endpoints) text += fmt::format("at {}\n", text_of(endpoint));
  return text;
}

std::optional<PublishedAddress> parse_published(std::string_view text) {
  PublishedAddress address;
  for (std::size_t line_number = 0; !text.empty(); ++line_number) {
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos) return std::nullopt;
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 1);
    if (line_number == 0) {
      if (line != first_line) return std::nullopt;
    } else if (line_number == 1) {
      const auto number = behind(line, "number ");
      if (!number || !is_number(*number)) return std::nullopt;
      address.number = *number;
    } else {
      const auto endpoint = parse_endpoint(behind(line, "at ").value_or(""));
      if (!endpoint) return std::nullopt;
      address.endpoints.push_back(*endpoint);
    }
  }
  return address.endpoints.empty() ? std::nullopt : std::optional(std::move(address));
}

void publish(const std::string& path, const PublishedAddress& address) {
  const std::string text = text_of(address);
  os::publish(path, std::as_bytes(std::span(text)), {});
}

std::optional<PublishedAddress> read_published(const std::string& path) {
  try {
    const std::vector<std::byte> bytes = os::read_small_file(path, longest_file);
    return parse_published({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::not_found) return std::nullopt;
    throw;
  }
}

}  // namespace muster::tcp
