// SPDX-License-Identifier: Apache-2.0
#pragma once
// Conversions between Config and nlohmann::json, for programs that use the latter. This is the only public header that
// includes that library. Programs that need only text use to_json() and parse_json() (muster/state.hpp).

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "muster/config.hpp"
#include "muster/error.hpp"

namespace muster {
namespace detail {

inline void check_json_depth(int depth) {
  if (depth > max_config_depth)
    throw Error(ErrorKind::invalid_argument,
                "converting JSON: it is nested more than " + std::to_string(max_config_depth) + " deep");
}

template <class Json>
Config config_from_json(const Json& json, int depth) {
  check_json_depth(depth);
  using Kind = typename Json::value_t;
  switch (json.type()) {
    case Kind::null:
      return {};
    case Kind::boolean:
      return json.template get<bool>();
    case Kind::number_integer:
      return json.template get<std::int64_t>();
    case Kind::number_unsigned:
      return json.template get<std::uint64_t>();
    case Kind::number_float:
      return json.template get<double>();
    case Kind::string:
      return std::string_view(json.template get_ref<const typename Json::string_t&>());
    case Kind::array: {
      ConfigArray items;
      items.reserve(json.size());
      for (const Json& item : json) items.push_back(config_from_json(item, depth + 1));
      return items;
    }
    case Kind::object: {
      ConfigObject members;
      members.reserve(json.size());
      for (auto member = json.begin(); member != json.end(); ++member)
        if (!members.insert(member.key(), config_from_json(*member, depth + 1)))
          throw Error(ErrorKind::invalid_argument, "converting JSON: the key '" + member.key() + "' is there twice");
      return members;
    }
    default:
      throw Error(ErrorKind::invalid_argument,
                  std::string("converting JSON: a config has no value of the type ") + json.type_name());
  }
}

template <class Json>
Json config_to_json(const Config& config, int depth) {
  check_json_depth(depth);
  switch (config.type()) {
    case Config::Type::null:
      return nullptr;
    case Config::Type::boolean:
      return config.as_bool();
    case Config::Type::integer:
      return config.as_int();
    case Config::Type::unsigned_integer:
      return config.as_uint();
    case Config::Type::real:
      return config.as_double();
    case Config::Type::string:
      return config.as_string();
    case Config::Type::array: {
      Json items = Json::array();
      items.template get_ref<typename Json::array_t&>().reserve(config.size());
      for (const Config& item : config.as_array()) items.push_back(config_to_json<Json>(item, depth + 1));
      return items;
    }
    case Config::Type::object: {
      typename Json::object_t members;
      for (const auto& [key, member] : config.as_object()) {
        // The map of ordered_json is a vector with linear search. Keys are already unique, so append.
        if constexpr (requires { members.emplace_back(key, Json()); })
          members.emplace_back(key, config_to_json<Json>(member, depth + 1));
        else
          members.emplace(key, config_to_json<Json>(member, depth + 1));
      }
      return members;
    }
    case Config::Type::tensor:
      break;
  }
  throw Error(ErrorKind::invalid_argument,
              "converting to JSON: a config holds a tensor, which has no JSON: split it first");
}

}  // namespace detail

/// Converts an nlohmann::json or nlohmann::ordered_json to a Config. Real numbers that are not finite are preserved.
/// Throws Error(invalid_argument) on binary and discarded values, and if the nesting exceeds max_config_depth.
template <class Json>
Config from_nlohmann(const Json& json) {
  return detail::config_from_json(json, 0);
}

/// Converts a Config to an nlohmann::ordered_json, which keeps the order of members, or to an nlohmann::json. Throws
/// Error(invalid_argument) if a leaf is a tensor (see split()), or if the nesting exceeds max_config_depth.
template <class Json = nlohmann::ordered_json>
Json to_nlohmann(const Config& config) {
  return detail::config_to_json<Json>(config, 0);
}

}  // namespace muster
