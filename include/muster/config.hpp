// SPDX-License-Identifier: Apache-2.0
#pragma once
// Config: a tree of JSON values whose leaves may also be tensors. It describes a layer.

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

/// An object: members in insertion order, with unique keys. Beyond a few members, a hash index speeds up lookups.
class ConfigObject {
 public:
  /// A key and its value.
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
  /// Returns the value of the key, or null if the key is missing.
  [[nodiscard]] const Config* find(std::string_view key) const noexcept;
  /// Returns the value of the key for modification, or null if the key is missing.
  [[nodiscard]] Config* find(std::string_view key) noexcept;
  /// Returns whether the object has the key.
  [[nodiscard]] bool contains(std::string_view key) const noexcept { return find(key) != nullptr; }
  /// Returns the value of the key. A missing key is inserted with a null value.
  Config& operator[](std::string_view key);
  /// Appends a member. If the key already exists, returns false and changes nothing.
  bool insert(std::string key, Config value);
  /// Removes a member and keeps the order of the others. Returns false if the key is missing. The time is proportional
  /// to the number of members.
  bool erase(std::string_view key);
  /// Allocates memory for that number of members.
  void reserve(std::size_t members);

 private:
  std::vector<Member> members_;
  std::vector<std::uint32_t> index_;  // open addressing over members_, empty while a linear search is as fast
  void reindex(std::size_t buckets);
  [[nodiscard]] std::size_t position(std::string_view key) const noexcept;
};

/// The items of an array.
using ConfigArray = std::vector<Config>;

/// All integer types of C++ except bool and the character types.
template <class T>
concept ConfigInteger = std::integral<T> && sizeof(T) <= sizeof(std::int64_t) && !std::same_as<T, bool> &&
                        !std::same_as<T, char> && !std::same_as<T, wchar_t> && !std::same_as<T, char8_t> &&
                        !std::same_as<T, char16_t> && !std::same_as<T, char32_t>;

/// A JSON value or a tensor. Integers are stored exactly: as std::int64_t if they fit, otherwise as std::uint64_t.
/// Pointers do not convert, except null-terminated text.
class Config {
 public:
  /// The type of a value. An integer that fits into std::int64_t is an `integer`, and a larger one an
  /// `unsigned_integer`.
  enum class Type : std::uint8_t { null, boolean, integer, unsigned_integer, real, string, array, object, tensor };

  Config() noexcept = default;
  /// Creates a null value.
  Config(std::nullptr_t) noexcept {}
  /// Creates a boolean value.
  template <std::same_as<bool> Boolean>
  Config(Boolean value) noexcept : value_(value) {}
  /// Creates a boolean value from an element of a std::vector<bool>.
  Config(std::vector<bool>::reference value) noexcept : value_(static_cast<bool>(value)) {}
  /// Creates an integer value.
  template <ConfigInteger Integer>
  Config(Integer value) noexcept {
    if (std::in_range<std::int64_t>(value))
      value_ = static_cast<std::int64_t>(value);
    else
      value_ = static_cast<std::uint64_t>(value);
  }
  /// Creates a real value, stored as a double.
  template <std::floating_point Real>
  Config(Real value) noexcept : value_(static_cast<double>(value)) {}
  /// Throws Error(invalid_argument) if `value` is a null pointer.
  Config(const char* value);
  /// Creates a string value from a copy of the text.
  Config(std::string_view value) : value_(std::string(value)) {}
  /// Creates a string value.
  Config(std::string value) noexcept : value_(std::move(value)) {}
  /// Creates an array.
  Config(ConfigArray value) noexcept : value_(std::move(value)) {}
  /// Creates an object.
  Config(ConfigObject value) noexcept : value_(std::move(value)) {}
  /// Creates a leaf that is a tensor; it shares the memory of `value`.
  Config(Tensor value) noexcept : value_(std::move(value)) {}

  /// Returns an array of these items.
  static Config array(std::initializer_list<Config> items = {});
  /// Returns an object of these members. Throws Error(invalid_argument) if a key occurs twice.
  static Config object(std::initializer_list<std::pair<std::string_view, Config>> members = {});

  /// Returns the type of the value.
  [[nodiscard]] Type type() const noexcept { return static_cast<Type>(value_.index()); }
  /// Returns whether the value is null.
  [[nodiscard]] bool is_null() const noexcept { return type() == Type::null; }
  /// Returns whether the value is an object.
  [[nodiscard]] bool is_object() const noexcept { return type() == Type::object; }
  /// Returns whether the value is an array.
  [[nodiscard]] bool is_array() const noexcept { return type() == Type::array; }
  /// Returns whether the value is a string.
  [[nodiscard]] bool is_string() const noexcept { return type() == Type::string; }
  /// Returns whether the value is a tensor.
  [[nodiscard]] bool is_tensor() const noexcept { return type() == Type::tensor; }

  // Each of these throws Error(invalid_argument) with both type names if the value has another type.
  /// Returns the boolean. Like the other functions of this kind, it throws Error(invalid_argument) with both type names
  /// if the value has another type.
  [[nodiscard]] bool as_bool() const;
  /// Returns the integer. Throws as as_bool(), also if the integer exceeds the range of std::int64_t.
  [[nodiscard]] std::int64_t as_int() const;
  /// Returns the integer. Throws as as_bool(), also if the integer is negative.
  [[nodiscard]] std::uint64_t as_uint() const;
  [[nodiscard]] double as_double() const;  ///< also converts integers
  /// Returns the string. Throws as as_bool().
  [[nodiscard]] const std::string& as_string() const;
  /// Returns the items of the array. Throws as as_bool().
  [[nodiscard]] const ConfigArray& as_array() const;
  /// Returns the items of the array, for modification. Throws as as_bool().
  [[nodiscard]] ConfigArray& as_array();
  /// Returns the object. Throws as as_bool().
  [[nodiscard]] const ConfigObject& as_object() const;
  /// Returns the object, for modification. Throws as as_bool().
  [[nodiscard]] ConfigObject& as_object();
  /// Returns the tensor. Throws as as_bool().
  [[nodiscard]] const Tensor& as_tensor() const;

  /// Returns the value as a T: bool, an integer, float, double or std::string. Throws Error(invalid_argument) if the
  /// value has another type, or is an integer that T cannot represent.
  template <class T>
  [[nodiscard]] T as() const;
  /// Returns a member of an object as a T, or `otherwise` if the key is missing. Throws as as() and as_object().
  template <class T>
  requires(!std::convertible_to<T, std::string_view> || std::same_as<T, std::string>) [[nodiscard]] T
      value_or(std::string_view key, T otherwise) const {
    const Config* found = as_object().find(key);
    return found == nullptr ? std::move(otherwise) : found->as<T>();
  }
  /// Returns a member that is a string, or `otherwise` if the key is missing. Throws as the function above.
  [[nodiscard]] std::string value_or(std::string_view key, std::string_view otherwise) const {
    return value_or(key, std::string(otherwise));
  }
  /// Returns a member that is a string, or the null-terminated text `otherwise` if the key is missing. Throws as the
  /// functions above.
  [[nodiscard]] std::string value_or(std::string_view key, const char* otherwise) const {
    return value_or(key, Config(otherwise).as_string());
  }

  /// Returns whether this is an object that has the member.
  [[nodiscard]] bool contains(std::string_view key) const noexcept { return find(key) != nullptr; }
  /// Returns the member, or null if it is missing or this is not an object. Valid until the object changes.
  [[nodiscard]] const Config* find(std::string_view key) const noexcept;
  /// Removes a member of an object. Returns false if it is missing. Throws Error(invalid_argument) if this is not an
  /// object.
  bool erase(std::string_view key) { return as_object().erase(key); }
  /// Returns a member. Throws Error(not_found) if it is missing.
  [[nodiscard]] const Config& at(std::string_view key) const;
  /// Returns an item of an array. Throws Error(not_found) if `index` is not less than size().
  [[nodiscard]] const Config& at(std::size_t index) const;
  /// Returns a member, which is inserted if it is missing. A null value first becomes an empty object.
  Config& operator[](std::string_view key);
  /// Appends to an array. A null value first becomes an empty array.
  void push_back(Config item);
  /// Returns the number of members or items; 0 for a leaf.
  [[nodiscard]] std::size_t size() const noexcept;

  /// Compares two trees bit by bit: a NaN equals the same NaN, and -0.0 differs from 0.0. Tensors are compared with
  /// bitwise_equal(). The order of members does not matter.
  friend bool operator==(const Config& a, const Config& b);

 private:
  [[noreturn]] void does_not_fit() const;
  std::variant<std::monostate, bool, std::int64_t, std::uint64_t, double, std::string, ConfigArray, ConfigObject,
               Tensor>
      value_;
};

/// Returns the name of a type, as in error messages.
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

/// The deepest nesting of a tree. Deeper trees are rejected wherever a tree is read, written or sent, with
/// Error(invalid_argument) or Error(corrupt).
inline constexpr int max_config_depth = 256;

namespace detail {
/// Throws Error(invalid_argument) if `depth` exceeds max_config_depth.
void check_config_depth(int depth);
}  // namespace detail

/// Calls visit(const Config&) for each leaf of the tree in tree order. A leaf is neither an array nor an object. Throws
/// Error(invalid_argument) if the nesting exceeds max_config_depth.
template <class Visit>
void for_each_leaf(const Config& config, const Visit& visit, int depth = 0) {
  detail::check_config_depth(depth);
  if (config.is_array()) {
    for (const Config& item : config.as_array()) for_each_leaf(item, visit, depth + 1);
  } else if (config.is_object()) {
    for (const auto& [key, member] : config.as_object()) for_each_leaf(member, visit, depth + 1);
  } else {
    visit(config);
  }
}

/// Returns a copy of the tree in which replace(const Config&) has replaced each leaf, called in tree order. Throws as
/// for_each_leaf().
template <class Replace>
Config map_leaves(const Config& config, const Replace& replace, int depth = 0) {
  detail::check_config_depth(depth);
  if (config.is_array()) {
    ConfigArray items;
    items.reserve(config.size());
    for (const Config& item : config.as_array()) items.push_back(map_leaves(item, replace, depth + 1));
    return items;
  }
  if (config.is_object()) {
    ConfigObject members;
    members.reserve(config.size());
    for (const auto& [key, member] : config.as_object()) members.insert(key, map_leaves(member, replace, depth + 1));
    return members;
  }
  return replace(config);
}

}  // namespace muster
