// SPDX-License-Identifier: Apache-2.0
// Trees as JSON text:
//
//  1. Values are JSON values. Numbers with "." or "e" are reals, and others are integers. Reals are written with the
//     fewest digits that restore the same bits.
//  2. A real that JSON cannot represent is {"$float": TEXT}: "nan" (bits 0x7ff8000000000000), "inf", "-inf", else the
//     bits as "0x" and 16 digits.
//  3. A user's object that looks like this ("$float" with any number of "$", no other member) gets one more "$".
//  4. A string may be one level deeper than any other value, so that the text of such an object always fits.

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <variant>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/formats/json_text.hpp"

namespace muster {
namespace {

constexpr std::size_t deepest = max_config_depth;
constexpr std::uint64_t plain_nan = 0x7ff8000000000000ULL;

class Writer {
 public:
  explicit Writer(int indent) : indent_(indent) {}

  void value(const Config& config, std::size_t depth) {
    detail::check_config_depth(static_cast<int>(depth) - (config.is_string() ? 1 : 0));
    switch (config.type()) {
      case Config::Type::null:
        text_ += "null";
        return;
      case Config::Type::boolean:
        text_ += config.as_bool() ? "true" : "false";
        return;
      case Config::Type::integer:
        return number(config.as_int());
      case Config::Type::unsigned_integer:
        return number(config.as_uint());
      case Config::Type::real:
        return real(config.as_double());
      case Config::Type::string:
        return string(config.as_string());
      case Config::Type::array:
        return array(config.as_array(), depth);
      case Config::Type::object:
        return object(config.as_object(), depth);
      case Config::Type::tensor:
        throw Error(ErrorKind::invalid_argument,
                    "writing JSON: the config has a tensor, which JSON cannot represent. Split the config first");
    }
  }

  std::string take() { return std::move(text_); }

 private:
  template <class Number>
  void number(Number value) {
    std::array<char, 32> digits{};
    const auto [end, status] = std::to_chars(digits.data(), digits.data() + digits.size(), value);
    text_.append(digits.data(), end);
  }

  void real(double value) {
    if (std::isfinite(value)) {
      const std::size_t begin = text_.size();
      number(value);
      if (text_.find_first_of(".e", begin) == std::string::npos) text_ += ".0";
      return;
    }
    text_ += indent_ < 0 ? R"({"$float":")" : R"({"$float": ")";
    const auto bits = std::bit_cast<std::uint64_t>(value);
    if (std::isinf(value)) {
      text_ += value < 0 ? "-inf" : "inf";
    } else if (bits == plain_nan) {
      text_ += "nan";
    } else {
      text_ += "0x";
      for (int shift = 60; shift >= 0; shift -= 4) text_ += "0123456789abcdef"[(bits >> shift) & 15];
    }
    text_ += "\"}";
  }

  void string(std::string_view value) {
    if (!is_utf8(value))
      throw Error(ErrorKind::invalid_argument, "writing JSON: a key or string of a config is not valid UTF-8");
    text_ += '"';
    std::size_t done = 0;
    for (std::size_t at = 0; at < value.size(); ++at) {
      const char c = value[at];
      if (c != '"' && c != '\\' && static_cast<unsigned char>(c) >= 0x20) continue;
      text_.append(value, done, at - done);
      escape(c);
      done = at + 1;
    }
    text_.append(value, done);
    text_ += '"';
  }

  void escape(char c) {
    constexpr std::string_view special = "\"\\\b\f\n\r\t";
    text_ += '\\';
    if (const std::size_t at = special.find(c); at != std::string_view::npos) {
      text_ += R"("\bfnrt)"[at];
      return;
    }
    text_ += "u00";
    text_ += "01"[(c >> 4) & 1];
    text_ += "0123456789abcdef"[c & 15];
  }

  void array(const ConfigArray& items, std::size_t depth) {
    text_ += '[';
    bool first = true;
    for (const Config& item : items) {
      next_line(first, depth + 1);
      value(item, depth + 1);
    }
    close(']', first, depth);
  }

  void object(const ConfigObject& members, std::size_t depth) {
    const bool is_escaped = core::reserved_dollars(members, core::float_word) != 0;
    text_ += '{';
    bool first = true;
    for (const auto& [key, member] : members) {
      next_line(first, depth + 1);
      if (is_escaped)
        string('$' + key);
      else
        string(key);
      text_ += indent_ < 0 ? ":" : ": ";
      value(member, depth + 1);
    }
    close('}', first, depth);
  }

  void next_line(bool& first, std::size_t depth) {
    if (!first) text_ += ',';
    first = false;
    line(depth);
  }
  void close(char bracket, bool is_empty, std::size_t depth) {
    if (!is_empty) line(depth);
    text_ += bracket;
  }
  void line(std::size_t depth) {
    if (indent_ < 0) return;
    text_ += '\n';
    text_.append(depth * static_cast<std::size_t>(indent_), ' ');
  }

  int indent_;
  std::string text_;
};

/// An iterator that records how far the text was read, because the parser's events do not include positions.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, const char** read) : at_(at), read_(read) {}
  const char& operator*() const { return *at_; }
  CountingIterator& operator++() {
    *read_ = ++at_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  friend bool operator==(const CountingIterator& a, const CountingIterator& b) { return a.at_ == b.at_; }

 private:
  const char* at_;
  const char** read_;
};

/// Receives the events of nlohmann's parser, which checks the syntax, and builds the tree from the inside out.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text), read_(text.data()) {}
  JsonReader(std::string_view text, std::string_view key, std::vector<std::size_t>& lines)
      : text_(text), read_(text.data()), key_(key), lines_(&lines), counted_(text.data()) {}
  JsonReader(std::string_view text, const core::MemberVisit& visit) : text_(text), read_(text.data()), visit_(&visit) {}

  /// Makes the reader use the last of several equal keys.
  void allow_equal_keys() { allows_equal_keys_ = true; }

  Config whole() {
    // The parser treats a NUL as the end of the text and would ignore the rest.
    if (const std::size_t nul = text_.find('\0'); nul != std::string_view::npos) {
      read_ = text_.data() + nul + 1;
      defect("a NUL byte");
    }
    const char* end = text_.data() + text_.size();
    nlohmann::json::sax_parse(CountingIterator(text_.data(), &read_), CountingIterator(end, &read_), this);
    return std::move(*whole_);
  }

  // Callbacks of the parser; each returns whether to continue.
  bool null() { return leaf(Config()); }
  bool boolean(bool value) { return leaf(value); }
  bool number_integer(std::int64_t value) { return leaf(value); }
  bool number_unsigned(std::uint64_t value) { return leaf(value); }
  bool number_float(double value, const std::string& text) {
    if (text.find_first_of(".eE") == std::string::npos) defect("an integer does not fit into 64 bits");
    return leaf(value);
  }
  bool string(std::string& value) {
    if (frames_.size() > deepest + 1) too_deep();
    note_line();
    return add(std::move(value));
  }
  bool binary(const nlohmann::json::binary_t&) { defect("binary data"); }
  bool start_object(std::size_t) { return open(ConfigObject()); }
  bool key(std::string& name) {
    JsonFrame& frame = frames_.back();
    if (!allows_equal_keys_ && std::get<ConfigObject>(frame.container).find(name) != nullptr)
      defect("the key " + in_quotes(name) + " is duplicated");
    frame.key = std::move(name);
    return true;
  }
  bool end_object() {
    ConfigObject object = std::move(std::get<ConfigObject>(frames_.back().container));
    frames_.pop_back();
    const std::size_t dollars = visit_ == nullptr ? core::reserved_dollars(object, core::float_word) : 0;
    // Third-party texts do not contain such objects, except those that strict_text() has written.
    const bool is_ours = !allows_equal_keys_ || (dollars == 1 && object.begin()->second.is_string());
    if (dollars == 0 || !is_ours) return add(std::move(object));
    if (dollars == 1) return add(special_float(object.begin()->second));
    ConfigObject own;
    own.insert(object.begin()->first.substr(1), std::move(*object.find(object.begin()->first)));
    return add(std::move(own));
  }
  bool start_array(std::size_t) { return open(ConfigArray()); }
  bool end_array() {
    ConfigArray items = std::move(std::get<ConfigArray>(frames_.back().container));
    frames_.pop_back();
    return add(std::move(items));
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception& error) {
    // The message has the form "[json.exception...] parse error at line 1, column 2: PROBLEM; last read: '...'". The
    // last part may be of any length.
    std::string_view words = error.what();
    const auto skip = [&](std::string_view mark) {
      if (const std::size_t at = words.find(mark); at != std::string_view::npos) words.remove_prefix(at + mark.size());
    };
    skip("] ");
    if (words.starts_with("parse error")) skip(": ");
    defect(std::string(words.substr(0, std::min<std::size_t>(words.find("; last read"), 200))));
  }

 private:
  struct JsonFrame {
    std::variant<ConfigArray, ConfigObject> container;
    std::string key;  ///< key of the current member
  };

  [[noreturn]] void defect(const std::string& what) const {
    // The error is at the byte that was read last, or after the end of the text.
    const char* at = read_ == text_.data() || what.find("end of input") != std::string::npos ? read_ : read_ - 1;
    const auto line = std::count(text_.data(), at, '\n') + 1;
    const char* begin = at;
    while (begin != text_.data() && begin[-1] != '\n') --begin;
    throw Error(ErrorKind::corrupt,
                "JSON line " + std::to_string(line) + ", column " + std::to_string(at - begin + 1) + ": " + what);
  }
  [[noreturn]] void too_deep() const { defect("nesting is deeper than " + std::to_string(deepest) + " levels"); }

  template <class Container>
  bool open(Container container) {
    if (frames_.size() > deepest) too_deep();
    note_line();
    frames_.push_back({std::move(container), {}});
    return true;
  }

  bool leaf(Config value) {
    if (frames_.size() > deepest) too_deep();
    note_line();
    return add(std::move(value));
  }

  // Called at an item's first bracket, or after the item if it has none (no other value spans several lines).
  void note_line() {
    if (lines_ == nullptr || frames_.size() != 2 || frames_[0].key != key_) return;
    if (!std::holds_alternative<ConfigArray>(frames_[1].container)) return;
    // The reader may have read one byte beyond the value.
    line_ += static_cast<std::size_t>(std::count(counted_, read_ - 1, '\n'));
    counted_ = read_ - 1;
    lines_->push_back(line_);
  }

  bool add(Config value) {
    if (frames_.empty()) {
      whole_ = std::move(value);
      return true;
    }
    JsonFrame& frame = frames_.back();
    if (auto* items = std::get_if<ConfigArray>(&frame.container))
      items->push_back(std::move(value));
    else if (visit_ != nullptr && frames_.size() == 1)
      (*visit_)(frame.key, value);
    else if (allows_equal_keys_)
      std::get<ConfigObject>(frame.container)[frame.key] = std::move(value);
    else
      std::get<ConfigObject>(frame.container).insert(std::move(frame.key), std::move(value));
    return true;
  }

  Config special_float(const Config& value) const {
    const std::string_view text = value.is_string() ? std::string_view(value.as_string()) : std::string_view();
    if (text == "nan") return std::bit_cast<double>(plain_nan);
    if (text == "inf") return HUGE_VAL;
    if (text == "-inf") return -HUGE_VAL;
    std::uint64_t bits = 0;
    const bool has_form = text.size() == 18 && text.starts_with("0x");
    if (!has_form || std::from_chars(text.data() + 2, text.data() + 18, bits, 16).ptr != text.data() + 18)
      defect(R"("$float" is not "nan", "inf", "-inf" or "0x" and 16 hexadecimal digits)");
    return std::bit_cast<double>(bits);
  }

  std::string_view text_;
  const char* read_;
  std::vector<JsonFrame> frames_;
  std::optional<Config> whole_;
  // Line numbers of the items of one array, if they are requested.
  std::string_view key_;
  std::vector<std::size_t>* lines_ = nullptr;
  const char* counted_ = nullptr;
  std::size_t line_ = 1;
  bool allows_equal_keys_ = false;
  // Visits the members of the outermost object instead of building it; may be null.
  const core::MemberVisit* visit_ = nullptr;
};

/// Returns the end of the string that begins at a quote.
std::size_t string_end(std::string_view text, std::size_t at) {
  for (++at; at < text.size() && text[at] != '"'; ++at)
    if (text[at] == '\\') ++at;
  return std::min(at + 1, text.size());
}

/// Returns the code unit of "\uXXXX"; nullopt if there is none at this position.
std::optional<unsigned> escaped_unit(std::string_view text, std::size_t at) {
  unsigned unit = 0;
  if (!text.substr(at).starts_with("\\u") || text.size() < at + 6) return std::nullopt;
  const char* end = text.data() + at + 6;
  if (std::from_chars(text.data() + at + 2, end, unit, 16).ptr != end) return std::nullopt;
  return unit;
}

/// Appends a string, which includes its quotes, with every lone surrogate replaced.
void append_without_surrogates(std::string_view text, std::string& out) {
  const auto is_high = [](std::optional<unsigned> unit) { return unit && *unit >= 0xd800 && *unit < 0xdc00; };
  const auto is_low = [](std::optional<unsigned> unit) { return unit && *unit >= 0xdc00 && *unit < 0xe000; };
  std::size_t done = 0;
  for (std::size_t at = text.find('\\'); at != std::string_view::npos; at = text.find('\\', at)) {
    const std::optional<unsigned> unit = escaped_unit(text, at);
    const bool is_pair = is_high(unit) && is_low(escaped_unit(text, at + 6));
    if (!is_pair && (is_high(unit) || is_low(unit))) {
      out.append(text, done, at - done);
      out += "\\ufffd";
      done = at + 6;
    }
    at += is_pair ? 12 : unit ? 6 : 2;
  }
  out.append(text, std::min(done, text.size()));
}

/// Appends a number or a literal in valid JSON.
void append_word(std::string_view word, std::string& out) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 3> specials = {
      {{"NaN", "nan"}, {"Infinity", "inf"}, {"-Infinity", "-inf"}}};
  const auto append_special = [&](std::string_view name) { out.append(R"({"$float":")").append(name).append("\"}"); };
  for (const auto& [name, ours] : specials)
    if (word == name) return append_special(ours);
  const bool is_negative = word.starts_with('-');
  const std::string_view digits = word.substr(is_negative ? 1 : 0);
  const bool is_number = !digits.empty() && digits[0] >= '0' && digits[0] <= '9';
  double value = 0;
  const char* end = word.data() + word.size();
  // Numbers that are too small become zero, which nlohmann's parser does itself.
  const auto [last, range] = std::from_chars(word.data(), end, value);
  const bool is_beyond = is_number && last == end && range == std::errc::result_out_of_range &&
                         word.find("e-") == std::string_view::npos && word.find("E-") == std::string_view::npos;
  if (is_beyond) return append_special(is_negative ? "-inf" : "inf");
  out += word;
  if (!is_number || word.find_first_not_of("0123456789", is_negative ? 1 : 0) != std::string_view::npos) return;
  std::uint64_t whole = 0;
  std::int64_t negative = 0;
  const auto [place, status] =
      is_negative ? std::from_chars(word.data(), end, negative) : std::from_chars(word.data(), end, whole);
  if (status == std::errc::result_out_of_range) out += ".0";
}

/// Returns the same tree in valid JSON.
std::string strict_text(std::string_view text) {
  constexpr std::string_view words = "+-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  constexpr std::string_view byte_order_mark = "\xef\xbb\xbf";
  if (text.starts_with(byte_order_mark)) text.remove_prefix(byte_order_mark.size());
  std::string out;
  out.reserve(text.size() + 64);
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t begin = at;
    if (text[at] == '"') {
      at = string_end(text, at);
      append_without_surrogates(text.substr(begin, at - begin), out);
    } else if (words.find(text[at]) != std::string_view::npos) {
      at = std::min(text.find_first_not_of(words, at), text.size());
      append_word(text.substr(begin, at - begin), out);
    } else {
      out += text[at++];
    }
  }
  return out;
}

}  // namespace

std::string to_json(const Config& config, int indent) {
  Writer writer(indent);
  writer.value(config, 0);
  return writer.take();
}

Config parse_json(std::string_view text) {
  return JsonReader(text).whole();
}

Config core::parse_tolerantly(std::string_view text) {
  const std::string strict = strict_text(text);
  JsonReader reader(strict);
  reader.allow_equal_keys();
  return reader.whole();
}

std::vector<core::JsonMember> core::members_of(std::string_view text, std::size_t begin) {
  std::vector<JsonMember> members;
  int depth = 0;
  bool is_key = true;
  for (std::size_t at = text.find('{', begin); at < text.size(); ++at) {
    const char c = text[at];
    const bool is_space = c == ' ' || c == '\n' || c == '\t' || c == '\r';
    const bool is_end = depth == 1 && (c == ',' || c == '}');
    // A value ends with its last byte that is not white space.
    if (depth >= 1 && !is_key && !is_end && !is_space && c != ':') {
      if (members.back().value == 0) members.back().value = at;
      members.back().end = at + 1;
    }
    if (is_end) is_key = true;
    if (c == '"') {
      const std::size_t end = string_end(text, at);
      if (depth == 1 && is_key) {
        members.push_back({parse_tolerantly(text.substr(at, end - at)).as_string(), at, 0, 0});
        is_key = false;
      } else {
        members.back().end = end;
      }
      at = end - 1;
    }
    depth += c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
    if (depth == 0) break;
  }
  return members;
}

void core::visit_members(std::string_view text, const MemberVisit& visit) {
  JsonReader(text, visit).whole();
}

Config core::parse_json_lines(std::string_view text, std::string_view key, std::vector<std::size_t>& lines) {
  lines.clear();
  return JsonReader(text, key, lines).whole();
}

}  // namespace muster
