// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/listing.hpp"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>

#include "muster/state.hpp"
#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/shard_files.hpp"
#include "src/inspect/names.hpp"
#include "src/inspect/printable.hpp"
#include "src/inspect/tensor_source.hpp"
#include "src/inspect/workspace_output.hpp"

namespace muster::inspect {
namespace {

/// A directory with neither a model nor shards is looked at as a workspace: then it is told what it lacks.
bool is_for_survey(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return false;
  if (is_workspace_directory(path)) return true;
  for (std::filesystem::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json")) return false;
  }
  return true;
}

/// For people numbers count by their value; scripts get the order of the file, and sort as they like.
std::vector<std::size_t> ordered(const TensorSource& source, const OutputStyle& style) {
  std::vector<std::size_t> places = matching(source, "");
  if (style.width == 0) return places;
  std::sort(places.begin(), places.end(), [&](std::size_t a, std::size_t b) {
    return natural_less(source.tensors()[a].name, source.tensors()[b].name);
  });
  return places;
}

}  // namespace

std::string list_text(const std::string& path, const ListOptions& options) {
  if (is_for_survey(path))
    return survey_text(workspace::survey(path, {.open_states = !options.names_only}), std::chrono::system_clock::now(),
                       options.style);
  const std::unique_ptr<TensorSource> source = open_source(path, {.plan = options.plan});
  std::string out;
  for (const std::size_t place : ordered(*source, options.style))
    out += printable(source->tensors()[place].name) + "\n";
  return out;
}

std::string list_json(const std::string& path, const ListOptions& options) {
  if (is_for_survey(path))
    return survey_json(workspace::survey(path, {.open_states = !options.names_only}), std::chrono::system_clock::now());
  const std::unique_ptr<TensorSource> source = open_source(path, {.plan = options.plan});
  ConfigArray names;
  for (const std::size_t place : ordered(*source, {})) names.emplace_back(json_text(source->tensors()[place].name));
  return printable_json(to_json(Config::object({{"path", Config(json_text(path))},
                                                {"kind", Config(source->kind())},
                                                {"names", Config(std::move(names))}}),
                                2)) +
         "\n";
}

}  // namespace muster::inspect
