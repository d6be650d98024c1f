// SPDX-License-Identifier: Apache-2.0
#include "src/report/report.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iterator>
#include <utility>

#include "muster/error.hpp"
#include "muster/publish.hpp"
#include "muster/version.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/inspect/output.hpp"
#include "src/inspect/reports.hpp"
#include "src/inspect/version_reports.hpp"
#include "src/os/directory.hpp"
#include "src/report/page.hpp"
#include "src/report/sections.hpp"
#include "src/trace/rings.hpp"
#include "src/versions/unfinished.hpp"
#include "src/workspace/survey.hpp"

namespace muster::report {
namespace {

bool has_traces(const std::string& directory) {
  return std::ranges::any_of(os::list_directory(directory),
                             [](const os::DirectoryEntry& entry) { return entry.name.ends_with(trace::file_suffix); });
}

/// Returns `tree` as a section: "section" comes first.
Config as_section(const char* kind, const Config& tree) {
  Config section = Config::object({{"section", kind}});
  for (const auto& [key, value] : tree.as_object()) section[key] = value;
  return section;
}

/// Returns the reason why the states of a workspace are not one model; empty if they are.
std::string no_model_reason(const Config& survey, const std::string& job) {
  std::vector<std::string> complete;
  for (const Config& one : survey.at("jobs").as_array()) {
    const ConfigArray& states = one.at("states").as_array();
    if (std::ranges::any_of(states, [](const Config& state) { return state.at("complete").as_bool(); }))
      complete.push_back(one.at("job").as_string());
  }
  if (complete.empty()) return "no state is complete";
  if (complete.size() > 1 && job.empty())
    return fmt::format("{} jobs have complete states. Choose one with --job-id", complete.size());
  return {};
}

/// Adds the timeline of a workspace, and the tensors of its newest states if they are one model.
void add_workspace(ConfigArray& sections, const std::string& path, const ReportOptions& options) {
  Config section = workspace_section(path);
  const std::string reason = no_model_reason(section, options.source.states.job);
  section["model_error"] = inspect::or_null(reason);
  for (Config& job : section["jobs"].as_array())
    for (const char* list : {"states", "kept", "in_use"}) limit_list(job, list);
  for (const char* list : {"jobs", "temporary", "unknown_files"}) limit_list(section, list);
  sections.push_back(std::move(section));
  if (reason.empty()) sections.push_back(model_section(open_source(path, options.source), options));
}

/// A directory may have traces beside a workspace, versions or a model.
void add_sections(ConfigArray& sections, const std::string& path, const ReportOptions& options) {
  const std::size_t before = sections.size();
  std::error_code error;
  PathContents::Kind kind = PathContents::Kind::model;
  if (std::filesystem::is_directory(path, error)) {
    kind = contents_of(path, options.source.thirdparty).kind;
    if (has_traces(path)) sections.push_back(trace_section(path));
    if (versions::is_version_directory(path)) sections.push_back(versions_section(path));
    if (kind == PathContents::Kind::workspace) return add_workspace(sections, path, options);
  }
  if (kind != PathContents::Kind::other || sections.size() == before)
    sections.push_back(model_section(open_source(path, options.source), options));
}

}  // namespace

void limit_list(Config& object, const std::string& key) {
  ConfigArray& list = object[key].as_array();
  const std::size_t kept = std::min(list.size(), most_items);
  object[key + "_left_out"] = list.size() - kept;
  object[key].as_array().resize(kept);
}

Config workspace_section(const std::string& path) {
  return as_section("workspace", inspect::survey_tree(workspace::survey(path), std::chrono::system_clock::now()));
}

Config versions_section(const std::string& path) {
  Config section =
      as_section("versions", inspect::log_tree(read_versions(path), false, std::chrono::system_clock::now()));
  for (const char* list : {"versions", "unfinished", "other_names", "problems"}) limit_list(section, list);
  return section;
}

Config report_tree(const std::vector<std::string>& paths, const ReportOptions& options) {
  if (options.is_diff && paths.size() != 2)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("a diff compares two paths, but {} given. Name the two sides",
                            paths.size() == 1 ? "one is" : fmt::format("{} are", paths.size())));
  if (options.is_diff && (!options.has_values || options.has_checksums || options.layout))
    throw Error(ErrorKind::invalid_argument,
                "a diff compares all values, without checksums and without a layout. Leave these options out");
  if (options.has_checksums && !options.has_values)
    throw Error(ErrorKind::invalid_argument, "checksums are compared by reading the values. Leave one option out");
  constexpr std::size_t most_bins = 1000;
  if (options.bins < 1 || options.bins > most_bins)
    throw Error(ErrorKind::invalid_argument, fmt::format("bins: {} is not from 1 to {}", options.bins, most_bins));
  if (paths.empty()) throw Error(ErrorKind::invalid_argument, "report: no path is given. Name at least one");
  ConfigArray sections;
  if (options.is_diff)
    sections.push_back(diff_section(paths[0], paths[1], options));
  else
    for (const std::string& path : paths) add_sections(sections, path, options);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return Config::object({{"format", "muster-report"},
                         {"format_version", 1},
                         {"muster_version", version()},
                         {"created", std::chrono::duration<double>(now).count()},
                         {"sections", std::move(sections)}});
}

std::string report_page(const Config& tree) {
  const std::string json = inspect::json_report(tree, -1);
  std::string page(page_head);
  page.reserve(page_head.size() + json.size() + page_tail.size() + json.size() / 50);
  // These characters occur only within strings of JSON. Escaped, they cannot end the element of the data.
  for (const char c : json) {
    if (c == '<' || c == '>' || c == '&')
      fmt::format_to(std::back_inserter(page), "\\u{:04x}", static_cast<unsigned>(c));
    else
      page += c;
  }
  page += page_tail;
  return page;
}

}  // namespace muster::report
