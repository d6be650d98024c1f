// SPDX-License-Identifier: Apache-2.0
#pragma once
// Config: a tree of JSON values whose leaves may also be tensors. It is what a layer says about itself.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "muster/tensor.hpp"

namespace muster {

class Config;

/// Members in the order of insertion, keys unique; look-up is by hash once there are more than a few.
class ConfigObject {
 public:
  using Member = std::pair<std::string, Config>;

  ConfigObject();
  ConfigObject(const ConfigObject&);
  ConfigObject(ConfigObject&&) noexcept;
  ConfigObject& operator=(const ConfigObject&);
  ConfigObject& operator=(ConfigObject&&) noexcept;
  ~ConfigObject();

  [[nodiscard]] std::size_t size() const noexcept;
  [[nodiscard]] bool empty() const noexcept;
  [[nodiscard]] std::vector<Member>::const_iterator begin() const noexcept;
  [[nodiscard]] std::vector<Member>::const_iterator end() const noexcept;
  /// Null if the key is not there.
  [[nodiscard]] const Config* find(std::string_view key) const noexcept;
  [[nodiscard]] Config* find(std::string_view key) noexcept;
  [[nodiscard]] bool contains(std::string_view key) const noexcept { return find(key) != nullptr; }
  /// The value of the key, made (null) where it was not there.
  Config& operator[](std::string_view key);
  /// Appends; false, and nothing changes, where the key is there already.
  bool insert(std::string key, Config value);
  /// Removes a member, the others keep their order; false if the key is not there. Takes time in proportion to the
  /// number of members.
  bool erase(std::string_view key);
  void reserve(std::size_t members);

 private:
  std::vector<Member> members_;
  std::vector<std::uint32_t> index_;  // open addressing over members_, empty while a linear search is as fast
  void reindex(std::size_t buckets);
  [[nodiscard]] std::size_t position(std::string_view key) const noexcept;
};

using ConfigArray = std::vector<Config>;

/// The integers of C++, whatever they are called; characters and booleans are none.
template <class T>
concept ConfigInteger = std::integral<T> && sizeof(T) <= sizeof(std::int64_t) && !std::same_as<T, bool> &&
                        !std::same_as<T, char> && !std::same_as<T, wchar_t> && !std::same_as<T, char8_t> &&
                        !std::same_as<T, char16_t> && !std::same_as<T, char32_t>;

/// A value. Integers are kept exactly: as std::int64_t where they fit, else as std::uint64_t. A pointer is no value,
/// but for text that ends with a zero.
class Config {
 public:
  enum class Type : std::uint8_t { null, boolean, integer, unsigned_integer, real, string, array, object, tensor };

  Config() noexcept = default;
  Config(std::nullptr_t) noexcept {}
  template <std::same_as<bool> Boolean>
  Config(Boolean value) noexcept : value_(value) {}
  Config(std::vector<bool>::reference value) noexcept : value_(static_cast<bool>(value)) {}
  template <ConfigInteger Integer>
  Config(Integer value) noexcept {
    if (std::in_range<std::int64_t>(value))
      value_ = static_cast<std::int64_t>(value);
    else
      value_ = static_cast<std::uint64_t>(value);
  }
  template <std::floating_point Real>
  Config(Real value) noexcept : value_(static_cast<double>(value)) {}
  /// Throws Error(argument) on a null pointer.
  Config(const char* value);
  Config(std::string_view value) : value_(std::string(value)) {}
  Config(std::string value) noexcept : value_(std::move(value)) {}
  Config(ConfigArray value) noexcept : value_(std::move(value)) {}
  Config(ConfigObject value) noexcept : value_(std::move(value)) {}
  Config(Tensor value) noexcept : value_(std::move(value)) {}

  static Config array(std::initializer_list<Config> items = {});
  static Config object(std::initializer_list<std::pair<std::string_view, Config>> members = {});

  [[nodiscard]] Type type() const noexcept { return static_cast<Type>(value_.index()); }
  [[nodiscard]] bool is_null() const noexcept { return type() == Type::null; }
  [[nodiscard]] bool is_object() const noexcept { return type() == Type::object; }
  [[nodiscard]] bool is_array() const noexcept { return type() == Type::array; }
  [[nodiscard]] bool is_string() const noexcept { return type() == Type::string; }
  [[nodiscard]] bool is_tensor() const noexcept { return type() == Type::tensor; }

  // Each throws Error(argument) that names both types if the value is of another one.
  [[nodiscard]] bool as_bool() const;
  [[nodiscard]] std::int64_t as_int() const;
  [[nodiscard]] std::uint64_t as_uint() const;
  [[nodiscard]] double as_double() const;  ///< integers convert
  [[nodiscard]] const std::string& as_string() const;
  [[nodiscard]] const ConfigArray& as_array() const;
  [[nodiscard]] ConfigArray& as_array();
  [[nodiscard]] const ConfigObject& as_object() const;
  [[nodiscard]] ConfigObject& as_object();
  [[nodiscard]] const Tensor& as_tensor() const;

  /// Likewise, as bool, an integer, float, double or std::string. Throws Error(argument) on another type, and on an
  /// integer that T cannot hold.
  template <class T>
  [[nodiscard]] T as() const;
  /// The member of an object as a T; `otherwise` where the key is not there. Throws as as() and as_object().
  template <class T>
  requires(!std::convertible_to<T, std::string_view> || std::same_as<T, std::string>) [[nodiscard]] T
      value_or(std::string_view key, T otherwise) const {
    const Config* found = as_object().find(key);
    return found == nullptr ? std::move(otherwise) : found->as<T>();
  }
  [[nodiscard]] std::string value_or(std::string_view key, std::string_view otherwise) const {
    return value_or(key, std::string(otherwise));
  }
  [[nodiscard]] std::string value_or(std::string_view key, const char* otherwise) const {
    return value_or(key, Config(otherwise).as_string());
  }

  /// Whether this is an object that has the member.
  [[nodiscard]] bool contains(std::string_view key) const noexcept { return find(key) != nullptr; }
  /// The member; null if it is not there, or this is no object. Valid until the object changes.
  [[nodiscard]] const Config* find(std::string_view key) const noexcept;
  /// Removes a member of an object; false if it is not there. Throws Error(argument) if this is no object.
  bool erase(std::string_view key) { return as_object().erase(key); }
  /// A member; throws Error(not_found) if it is not there.
  [[nodiscard]] const Config& at(std::string_view key) const;
  /// An item; throws Error(not_found) past the end.
  [[nodiscard]] const Config& at(std::size_t index) const;
  /// A member, made if it is not there; a null becomes an object first.
  Config& operator[](std::string_view key);
  /// Appends to an array; a null becomes one first.
  void push_back(Config item);
  /// Members, items, or 0 for a leaf.
  [[nodiscard]] std::size_t size() const noexcept;

  /// The same tree, bit for bit: NaN equals the same NaN, -0.0 differs from 0.0, tensors by bitwise_equal. The order of
  /// members does not matter.
  friend bool operator==(const Config& a, const Config& b);

 private:
  [[noreturn]] void does_not_fit() const;
  std::variant<std::monostate, bool, std::int64_t, std::uint64_t, double, std::string, ConfigArray, ConfigObject,
               Tensor>
      value_;
};

std::string_view to_string(Config::Type type) noexcept;

template <class T>
T Config::as() const {
  if constexpr (std::same_as<T, bool>) {
    return as_bool();
  } else if constexpr (ConfigInteger<T>) {
    const auto fitting = [this](auto value) {
      if (!std::in_range<T>(value)) does_not_fit();
      return static_cast<T>(value);
    };
    return type() == Type::unsigned_integer ? fitting(as_uint()) : fitting(as_int());
  } else if constexpr (std::floating_point<T>) {
    return static_cast<T>(as_double());
  } else {
    static_assert(std::same_as<T, std::string>, "a config value is a bool, an integer, a real or a string");
    return as_string();
  }
}

/// Nesting deeper than this is refused wherever a tree is read, written or sent (Error(argument) or Error(corrupt)).
inline constexpr int max_config_depth = 256;

namespace detail {
/// Throws Error(argument) if that is too deep.
void check_config_depth(int depth);
}  // namespace detail

/// Calls visit(const Config&) with each leaf of the tree (what is neither array nor object), in its order. Throws
/// Error(argument) on nesting beyond max_config_depth.
template <class Visit>
void visit_leaves(const Config& config, const Visit& visit, int depth = 0) {
  detail::check_config_depth(depth);
  if (config.is_array()) {
    for (const Config& item : config.as_array()) visit_leaves(item, visit, depth + 1);
  } else if (config.is_object()) {
    for (const auto& [key, member] : config.as_object()) visit_leaves(member, visit, depth + 1);
  } else {
    visit(config);
  }
}

/// The same tree with what replace(const Config&) makes of each leaf, asked in the order of the tree. Throws likewise.
template <class Replace>
Config with_leaves(const Config& config, const Replace& replace, int depth = 0) {
  detail::check_config_depth(depth);
  if (config.is_array()) {
    ConfigArray items;
    items.reserve(config.size());
    for (const Config& item : config.as_array()) items.push_back(with_leaves(item, replace, depth + 1));
    return items;
  }
  if (config.is_object()) {
    ConfigObject members;
    members.reserve(config.size());
    for (const auto& [key, member] : config.as_object()) members.insert(key, with_leaves(member, replace, depth + 1));
    return members;
  }
  return replace(config);
}

}  // namespace muster
