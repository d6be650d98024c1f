// SPDX-License-Identifier: Apache-2.0
// The index of a checkpoint, read without believing it: ModelDir refuses a bad one at its first defect, this lists all.

#include <fmt/core.h>
#include <re2/re2.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "muster/config.hpp"
#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/checkpoint/verification.hpp"
#include "src/core/quoted.hpp"
#include "src/os/file.hpp"

namespace muster {
namespace {

constexpr std::uint64_t most_index_bytes = std::uint64_t{1} << 28;

bool is_beside(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

std::optional<Config> read_json(const std::string& directory, const std::string& name, Verification& verification) {
  try {
    const auto file = os::MappedFile::open(join_path(directory, name));
    const std::span<const std::byte> bytes = file->bytes();
    if (bytes.size() > most_index_bytes)
      throw Error(ErrorKind::corrupt, fmt::format("{} bytes are too many for an index", bytes.size()));
    return parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  } catch (const Error& error) {
    verification.add(Defect::index, name, "", fmt::format("the index {}: {}", in_quotes(name), error.what()));
    return std::nullopt;
  }
}

void verify_total(const Config& index, const std::string& name, const Places& places, Verification& verification) {
  const Config* metadata = index.as_object().find("metadata");
  const Config* total =
      metadata != nullptr && metadata->is_object() ? metadata->as_object().find("total_size") : nullptr;
  if (total == nullptr) return;  // it may be left out
  std::uint64_t bytes = 0;
  for (const auto& [tensor, place] : places) bytes += place.first->file.tensors()[place.second].bytes;
  // Some writers have it as a real number.
  const bool is_number = total->type() == Config::Type::integer || total->type() == Config::Type::real;
  if (!is_number || total->as_double() != static_cast<double>(bytes)) {
    verification.add(Defect::index, name, "",
                     fmt::format("the index {}: \"total_size\" is {}, and the tensors have {} bytes", in_quotes(name),
                                 is_number ? to_json(*total) : "no number", bytes));
  }
}

struct Numbered {
  std::string prefix;
  std::uint64_t number = 0;
  std::uint64_t count = 0;
};

// PREFIX-NNNNN-of-NNNNN.safetensors
std::optional<Numbered> parse_numbered(const std::string& name) {
  static const re2::RE2 pattern(R"((?s)(.*)-(\d{5})-of-(\d{5})\.safetensors)", re2::RE2::Latin1);
  Numbered out;
  if (!re2::RE2::FullMatch(name, pattern, &out.prefix, &out.number, &out.count)) return std::nullopt;
  return out;
}

}  // namespace

void verify_index(const std::string& directory, const std::string& index_name, const std::vector<std::string>& names,
                  const std::vector<OpenedFile>& files, const Places& places, Verification& verification) {
  const std::optional<Config> index = read_json(directory, index_name, verification);
  if (!index) return;
  const auto problem = [&](Defect defect, const std::string& file, const std::string& tensor,
                           const std::string& words) {
    verification.add(defect, file, tensor, fmt::format("the index {}: {}", in_quotes(index_name), words));
  };
  const Config* map = index->is_object() ? index->as_object().find("weight_map") : nullptr;
  if (map == nullptr || !map->is_object())
    return problem(Defect::index, index_name, "", "it has no object \"weight_map\"");
  verify_total(*index, index_name, places, verification);

  std::unordered_map<std::string_view, const OpenedFile*> opened;
  for (const OpenedFile& file : files) opened.emplace(file.name, &file);
  std::set<std::string_view> named;
  std::unordered_set<std::string_view> indexed;
  for (const auto& [tensor, value] : map->as_object()) {
    indexed.insert(tensor);
    if (!value.is_string() || !is_beside(value.as_string())) {
      problem(Defect::index, index_name, tensor,
              fmt::format("the tensor {} is in {}, which is no name of a file beside it", in_quotes(tensor),
                          value.is_string() ? in_quotes(value.as_string()) : "what is no string"));
      continue;
    }
    const std::string& name = value.as_string();
    const bool is_new = named.insert(name).second;
    if (!std::binary_search(names.begin(), names.end(), name)) {
      if (is_new) problem(Defect::missing, name, "", fmt::format("it names {}, which is not there", in_quotes(name)));
      continue;
    }
    const auto file = opened.find(name);
    if (file == opened.end() || file->second->file.find(tensor)) continue;  // told when it could not be opened
    const auto elsewhere = places.find(tensor);
    problem(Defect::index, name, tensor,
            fmt::format("the tensor {} is not in {}{}", in_quotes(tensor), in_quotes(name),
                        elsewhere == places.end() ? ", nor in any other file"
                                                  : ", but in " + in_quotes(elsewhere->second.first->name)));
  }
  for (const std::string& name : names)
    if (!named.contains(name))
      problem(Defect::unindexed, name, "", fmt::format("it does not name {}", in_quotes(name)));
  for (const auto& [tensor, place] : places) {
    if (indexed.contains(tensor) || !named.contains(place.first->name)) continue;
    problem(Defect::unindexed, place.first->name, std::string(tensor),
            fmt::format("it lacks the tensor {}, which {} has", in_quotes(tensor), in_quotes(place.first->name)));
  }
}

bool verify_numbering(const std::vector<std::string>& names, Verification& verification) {
  struct Set {
    std::set<std::uint64_t> numbers;
    std::string first;
  };
  std::map<std::string, std::map<std::uint64_t, Set>> sets;
  for (const std::string& name : names) {
    const std::optional<Numbered> numbered = parse_numbered(name);
    if (!numbered) continue;
    Set& set = sets[numbered->prefix][numbered->count];
    set.numbers.insert(numbered->number);
    if (set.first.empty()) set.first = name;
  }
  for (const auto& [prefix, counts] : sets) {
    if (counts.size() > 1) {
      std::string list;
      for (const auto& [count, set] : counts)
        list += fmt::format("{}{}", list.empty() ? "" : ", ", in_quotes(set.first));
      verification.add(Defect::numbering, counts.begin()->second.first, "",
                       fmt::format("files of sets of different sizes: {}", list));
    }
    for (const auto& [count, set] : counts) {
      const auto name_of = [&, prefix = prefix, count = count](std::uint64_t number) {
        return fmt::format("{}-{:05}-of-{:05}.safetensors", prefix, number, count);
      };
      for (const std::uint64_t number : set.numbers)
        if (number < 1 || number > count)
          verification.add(Defect::numbering, name_of(number), "",
                           fmt::format("{} is no number from 1 to {}", in_quotes(name_of(number)), count));
      verification.find_holes(set.numbers, 1, count, "number", name_of);
    }
  }
  return !sets.empty();
}

}  // namespace muster
