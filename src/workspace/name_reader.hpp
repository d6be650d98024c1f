// SPDX-License-Identifier: Apache-2.0
#pragma once
// Takes a name apart from left to right. Every value has one spelling, so that a name that was taken apart can be put
// together again.

#include <charconv>
#include <optional>
#include <string>
#include <string_view>

#include "src/workspace/names.hpp"

namespace muster::workspace {

/// Once something does not fit, nothing more is taken.
class NameReader {
 public:
  explicit NameReader(std::string_view text) : text_(text) {}

  NameReader& word(std::string_view expected) {
    ok_ = ok_ && text_.starts_with(expected);
    if (ok_) text_.remove_prefix(expected.size());
    return *this;
  }
  NameReader& hex(std::string& target, std::size_t digits) {
    const std::string_view part = text_.substr(0, digits);
    ok_ = ok_ && part.size() == digits && part.find_first_not_of("0123456789abcdef") == std::string_view::npos;
    if (!ok_) return *this;
    target = part;
    text_.remove_prefix(digits);
    return *this;
  }
  /// Decimal digits without leading zeros.
  template <class T>
  NameReader& number(T& target) {
    ok_ = ok_ && !text_.empty();
    if (!ok_) return *this;
    T value = 0;
    const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), value);
    const auto length = static_cast<std::size_t>(end - text_.data());
    ok_ = error == std::errc{} && text_.front() != '-' && (text_.front() != '0' || length == 1);
    if (!ok_) return *this;
    target = value;
    text_.remove_prefix(length);
    return *this;
  }
  /// All that is left but `end`.
  NameReader& rest(std::string& target, std::string_view end = {}) {
    ok_ = ok_ && text_.ends_with(end);
    if (!ok_) return *this;
    target = text_.substr(0, text_.size() - end.size());
    text_ = {};
    return *this;
  }
  /// All that is left but `end`, which is who wrote the file.
  NameReader& writer(os::ProcessIdentity& target, std::string_view end = {}) {
    std::string text;
    rest(text, end);
    const std::optional<os::ProcessIdentity> identity = ok_ ? parse_identity(text) : std::nullopt;
    ok_ = identity.has_value();
    if (ok_) target = *identity;
    return *this;
  }
  [[nodiscard]] bool is_whole() const { return ok_ && text_.empty(); }

 private:
  std::string_view text_;
  bool ok_ = true;
};

}  // namespace muster::workspace
