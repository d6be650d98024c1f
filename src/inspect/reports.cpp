// SPDX-License-Identifier: Apache-2.0

#include "src/inspect/reports.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <iterator>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"

namespace muster::inspect {
namespace {

/// "ranks 0-3 BF16 [32, 64]", or each shape if they differ.
std::string sources_text(const TensorMapping& tensor) {
  std::string text;
  for (auto begin = tensor.sources.begin(); begin != tensor.sources.end();) {
    const TensorSpec& spec = begin->spec;
    std::vector<int> ranks;
    for (; begin != tensor.sources.end() && begin->spec == spec; ++begin) ranks.push_back(begin->rank);
    std::ranges::sort(ranks);
    text += fmt::format("{}{} {}", text.empty() ? "" : "; ", ranks_text(ranks), to_string(spec));
  }
  return text;
}

ConfigArray tensors_tree(const std::vector<TensorMapping>& tensors) {
  return list_of(tensors, [](const TensorMapping& tensor) {
    Config item = Config::object({{"origin", tensor.origin},
                                  {"rule", tensor.rule},
                                  {"action", tensor.action},
                                  {"dtype", to_string(tensor.spec.dtype)},
                                  {"shape", extents_of(tensor.spec.shape)}});
    if (!tensor.name.empty()) item["name"] = tensor.name;
    if (!tensor.file.empty()) item["file"] = tensor.file;
    if (!tensor.reason.empty()) item["reason"] = tensor.reason;
    item["sources"] = list_of(tensor.sources, [](const SourceTensor& source) {
      return Config::object({{"rank", source.rank},
                             {"name", source.name},
                             {"dtype", to_string(source.spec.dtype)},
                             {"shape", extents_of(source.spec.shape)}});
    });
    return item;
  });
}

std::string_view kind_name(VerifiedKind kind) noexcept {
  constexpr std::array<std::string_view, 6> names = {"checkpoint", "shards", "file", "state", "workspace", "foreign"};
  return names[static_cast<std::size_t>(kind)];
}

using workspace::GcItem;
using workspace::GcReport;
using workspace::GcVerdict;
using workspace::Marked;
using workspace::Survey;
using workspace::SurveyEntry;
using workspace::SurveyJob;
using workspace::SurveyState;
using TimePoint = std::chrono::system_clock::time_point;

std::chrono::seconds age_of(TimePoint changed, TimePoint now) {
  return std::max(std::chrono::duration_cast<std::chrono::seconds>(now - changed), std::chrono::seconds(0));
}

double unix_time(TimePoint time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

std::string_view life_text(const SurveyEntry& entry) {
  if (entry.writer == os::Life::unknown) return entry.name && entry.name->writer ? "unknown" : "-";
  return entry.writer == os::Life::alive ? "alive" : "gone";
}

std::string_view kind_text(const SurveyEntry& entry) {
  return entry.name ? workspace::to_string(entry.name->kind) : "other";
}

std::string job_lines(const SurveyJob& job, TimePoint now, const OutputStyle& style) {
  const std::chrono::seconds age = age_of(job.changed, now);
  const std::string line = fmt::format("job {}: {}, {}, newest {}{}\n", job.nonce,
                                       counted(static_cast<std::uint64_t>(job.world_size), "rank"),
                                       human_bytes(job.bytes), age_text(age), age.count() < 1 ? "" : " ago");
  if (job.common_step)
    return line + coloured(style, Colour::good, fmt::format("step {} complete on all ranks", *job.common_step)) + "\n";
  if (!job.missing_ranks.empty())
    return line + coloured(style, Colour::bad, fmt::format("no complete state of {}", ranks_text(job.missing_ranks))) +
           "\n";
  return line + coloured(style, Colour::warning, "no generation is complete on all ranks") + "\n";
}

std::string step_text(const SurveyState& state) {
  return fmt::format("{}{}", state.entry.name && state.entry.name->kind == workspace::NameKind::kept ? "kept " : "",
                     state.step);
}

void append_states(std::string& out, const SurveyJob& job, TimePoint now, const OutputStyle& style) {
  TextTable table({{"RANK", Align::right},
                   {"STEP", Align::right},
                   {"STATE"},
                   {"TENSORS", Align::right},
                   {"TENSOR BYTES", Align::right},
                   {"SIZE", Align::right},
                   {"AGE", Align::right}},
                  {2});
  std::string problems;
  for (const std::vector<SurveyState>* states : {&job.states, &job.kept}) {
    for (const SurveyState& state : *states) {
      table.add({fmt::to_string(state.rank), step_text(state), state.complete ? "complete" : "not complete",
                 state.complete ? fmt::to_string(state.tensors) : "-",
                 state.complete ? human_bytes(state.tensor_bytes) : "-", human_bytes(state.entry.bytes),
                 age_text(age_of(state.entry.changed, now))});
      if (!state.problem.empty())
        fmt::format_to(std::back_inserter(problems), "rank {}, step {}: {}\n", state.rank, step_text(state),
                       escaped(state.problem));
    }
  }
  if (!table.empty()) table.append_to(out, style);
  out += problems;
}

void append_entries(std::string& out, const std::vector<SurveyEntry>& entries, std::string_view title, TimePoint now,
                    const OutputStyle& style) {
  if (entries.empty()) return;
  fmt::format_to(std::back_inserter(out), "\n{}\n", coloured(style, Colour::strong, title));
  TextTable table({{"FILE"}, {"KIND"}, {"SIZE", Align::right}, {"AGE", Align::right}, {"WRITER"}}, {0});
  for (const SurveyEntry& entry : entries)
    table.add({printable(entry.file), std::string(kind_text(entry)), human_bytes(entry.bytes),
               age_text(age_of(entry.changed, now)), std::string(life_text(entry))});
  table.append_to(out, style);
}

std::string_view marked_text(Marked marked) {
  return marked == Marked::by_mark ? "mark" : marked == Marked::by_names ? "names" : "empty";
}

std::string_view action_text(GcVerdict verdict) {
  return verdict == GcVerdict::remove ? "remove" : verdict == GcVerdict::keep ? "keep" : "failed";
}

}  // namespace

std::string account_line(const ExportManifest& account) {
  const auto ranks = static_cast<std::uint64_t>(account.source_layout.ranks());
  std::string text =
      fmt::format("{}{} ({}) {} {} ({} in {})", counted(account.tensors_in, "tensor"),
                  ranks == 1 ? "" : fmt::format(" of {}", counted(ranks, "rank")), human_bytes(account.bytes_in),
                  account.target_layout ? "split anew into" : "merged into", account.tensors_out,
                  human_bytes(account.bytes_out), counted(account.files, "file"));
  if (!account.dropped.empty()) text += fmt::format(", {} names dropped by rule", account.dropped.size());
  return text;
}

std::string account_table(const ExportManifest& account, const OutputStyle& style) {
  TextTable table({{"TENSOR"}, {"RULE"}, {"FROM"}, {"BECOMES"}, {"FILE"}}, {0, 2, 4});
  for (const TensorMapping& tensor : account.tensors) {
    std::string name = printable(tensor.name);
    if (tensor.name != tensor.origin) name += " (" + printable(tensor.origin) + ")";
    table.add({name, fmt::format("{} {}", tensor.rule, tensor.action), sources_text(tensor), to_string(tensor.spec),
               tensor.file.empty() ? fmt::format("{} shards", account.files) : tensor.file});
  }
  for (const TensorMapping& tensor : account.dropped)
    table.add({printable(tensor.origin), fmt::format("{} {}", tensor.rule, tensor.action), sources_text(tensor),
               tensor.reason.empty() ? "(dropped)" : fmt::format("(dropped: {})", printable(tensor.reason)), ""});
  std::string text;
  table.append_to(text, style);
  return text + account_line(account) + "\n";
}

Config account_tree(const ExportManifest& account) {
  return Config::object(
      {{"plan", account.plan},
       {"source_layout", to_string(account.source_layout)},
       {"target_layout", account.target_layout ? to_string(*account.target_layout) : Config()},
       {"in", Config::object({{"tensors", account.tensors_in}, {"bytes", account.bytes_in}})},
       {"out",
        Config::object({{"tensors", account.tensors_out}, {"bytes", account.bytes_out}, {"files", account.files}})},
       {"tensors", tensors_tree(account.tensors)},
       {"dropped", tensors_tree(account.dropped)},
       {"notes", ConfigArray(account.notes.begin(), account.notes.end())}});
}

std::string notes_lines(const std::vector<std::string>& notes) {
  std::string lines;
  for (const std::string& note : notes) lines += fmt::format("note: {}\n", escaped(note));
  return lines;
}

std::string skipped_line(const Omissions& skipped) {
  constexpr std::size_t most = 5;
  if (skipped.empty()) return {};
  std::string names;
  for (std::size_t i = 0; i < std::min(most, skipped.size()); ++i)
    names += fmt::format("{}{} ({})", i == 0 ? "" : ", ", in_quotes(skipped[i].name), skipped[i].reason);
  if (skipped.size() > most) names += fmt::format(" and {} more", skipped.size() - most);
  return fmt::format("skipped: {}. Select files with --extra-files.\n", names);
}

ConfigArray skipped_tree(const Omissions& skipped) {
  return list_of(skipped, [](const Omission& file) {
    return Config::object({{"file", file.name}, {"reason", file.reason}});
  });
}

ConfigArray omissions_tree(const Omissions& omissions) {
  return list_of(omissions, [](const Omission& omission) {
    return Config::object({{"name", omission.name}, {"reason", omission.reason}});
  });
}

std::string verify_text(const VerifyReport& report) {
  std::string out;
  for (const VerifyProblem& problem : report.problems)
    fmt::format_to(std::back_inserter(out), "{}: {}\n", to_string(problem.defect), escaped(problem.message));
  for (const Omission& left : report.left_out)
    fmt::format_to(std::back_inserter(out), "left out: {}: {}\n", printable(left.name), escaped(left.reason));
  if (report.problems_left_out != 0) fmt::format_to(std::back_inserter(out), "and {} more\n", report.problems_left_out);
  out += notes_lines(report.notes);
  const std::string seen = fmt::format("{} of {}, {}", counted(report.tensors, "tensor"), counted(report.files, "file"),
                                       human_bytes(report.bytes));
  std::string sums = report.checked != 0    ? fmt::format("; {} checked", counted(report.checked, "checksum"))
                     : report.has_checksums ? "; checksums not checked"
                     : report.kind == VerifiedKind::checkpoint ? "; no checksums"
                                                               : "";
  if (report.not_selected != 0) sums += fmt::format("; {} not selected", counted(report.not_selected, "tensor"));
  if (report.is_good())
    out += fmt::format("good: {}{}\n", seen, sums);
  else
    out += fmt::format("bad: {} ({}{})\n", counted(report.problems.size() + report.problems_left_out, "problem"), seen,
                       sums);
  return out;
}

Config verify_tree(const VerifyReport& report) {
  const auto problem_tree = [](const VerifyProblem& problem) {
    Config item = Config::object({{"defect", to_string(problem.defect)}});
    if (!problem.file.empty()) item["file"] = problem.file;
    if (!problem.tensor.empty()) item["tensor"] = problem.tensor;
    item["message"] = problem.message;
    return item;
  };
  return Config::object({{"good", report.is_good()},
                         {"path", report.path},
                         {"kind", kind_name(report.kind)},
                         {"files", report.files},
                         {"tensors", report.tensors},
                         {"bytes", report.bytes},
                         {"has_checksums", report.has_checksums},
                         {"checked", report.checked},
                         {"problems", list_of(report.problems, problem_tree)},
                         {"problems_left_out", report.problems_left_out},
                         {"left_out", omissions_tree(report.left_out)},
                         {"not_selected", report.not_selected},
                         {"notes", ConfigArray(report.notes.begin(), report.notes.end())}});
}

std::chrono::seconds parse_age(const std::string& text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  constexpr std::int64_t week = std::int64_t{7} * 24 * 3600;
  std::int64_t seconds = 0;
  for (const auto& [name, length] : {std::pair{"", std::int64_t{1}},
                                     {"s", 1},
                                     {"min", 60},
                                     {"h", 3600},
                                     {"d", std::int64_t{24} * 3600},
                                     {"w", week}})
    if (unit == name) seconds = length;
  constexpr std::int64_t most_years = 1000;
  if (error != std::errc() || number < 0 || seconds == 0 || number > most_years * 53 * week / seconds)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("{} is not a duration (examples: 90s, 30min, 12h, 2d, 1w)", in_quotes(text)));
  return std::chrono::seconds(number * seconds);
}

std::uint64_t parse_size(const std::string& text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  std::string unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  for (char& c : unit) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  unit.erase(0, unit.find_first_not_of(' ') == std::string::npos ? unit.size() : unit.find_first_not_of(' '));
  if (unit.ends_with('b')) unit.pop_back();
  const bool is_binary = unit.size() == 2 && unit[1] == 'i';
  constexpr std::string_view letters = "kmgtpe";
  const std::size_t power = unit.empty() ? 0 : letters.find(unit.front()) + 1;  // npos + 1 is 0
  const bool is_unit = unit.empty() || (power != 0 && (unit.size() == 1 || is_binary));
  const double bytes = number * std::pow(is_binary ? 1024.0 : 1000.0, static_cast<double>(power));
  constexpr double limit = 9.2e18;
  if (error != std::errc() || !is_unit || !(bytes >= 1) || bytes > limit)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("{} is not a size of at least 1 byte (examples: 500MB, 1.5GB, 2GiB)", in_quotes(text)));
  return static_cast<std::uint64_t>(bytes);
}

std::string survey_text(const Survey& survey, TimePoint now, const OutputStyle& style) {
  std::string out = fmt::format("{}: {}, {}, {}\n", printable(survey.path), counted(survey.jobs.size(), "job"),
                                counted(survey.files, "file"), human_bytes(survey.bytes));
  if (survey.marked == Marked::by_names)
    out += coloured(style, Colour::warning,
                    "muster-workspace.json is missing or empty; recognized as a workspace by file names") +
           "\n";
  for (const SurveyJob& job : survey.jobs) {
    out += "\n" + job_lines(job, now, style);
    append_states(out, job, now, style);
    append_entries(out, job.passing, "in use", now, style);
  }
  append_entries(out, survey.temporary, "temporary (muster gc deletes abandoned files)", now, style);
  append_entries(out, survey.foreign, "unknown files (muster gc keeps them)", now, style);
  return out;
}

Config survey_tree(const Survey& survey, TimePoint now) {
  const auto entry_tree = [&](const SurveyEntry& entry) {
    return Config::object({{"file", entry.file},
                           {"kind", kind_text(entry)},
                           {"bytes", entry.bytes},
                           {"files", entry.files},
                           {"age_seconds", age_of(entry.changed, now).count()},
                           {"changed", unix_time(entry.changed)},
                           {"writer", life_text(entry)}});
  };
  const auto state_tree = [&](const SurveyState& state) {
    return Config::object({{"file", state.entry.file},
                           {"rank", state.rank},
                           {"world_size", state.world_size},
                           {"step", state.step},
                           {"complete", state.complete},
                           {"problem", or_null(state.problem)},
                           {"tensors", state.tensors},
                           {"tensor_bytes", state.tensor_bytes},
                           {"compressed", state.compressed},
                           {"bytes", state.entry.bytes},
                           {"age_seconds", age_of(state.entry.changed, now).count()},
                           {"changed", unix_time(state.entry.changed)}});
  };
  const auto job_tree = [&](const SurveyJob& job) {
    return Config::object({{"job", job.nonce},
                           {"world_size", job.world_size},
                           {"bytes", job.bytes},
                           {"age_seconds", age_of(job.changed, now).count()},
                           {"common_step", job.common_step ? Config(*job.common_step) : Config()},
                           {"missing_ranks", ConfigArray(job.missing_ranks.begin(), job.missing_ranks.end())},
                           {"states", list_of(job.states, state_tree)},
                           {"kept", list_of(job.kept, state_tree)},
                           {"in_use", list_of(job.passing, entry_tree)}});
  };
  return Config::object({{"path", survey.path},
                         {"kind", "workspace"},
                         {"is_workspace", marked_text(survey.marked)},
                         {"files", survey.files},
                         {"bytes", survey.bytes},
                         {"jobs", list_of(survey.jobs, job_tree)},
                         {"temporary", list_of(survey.temporary, entry_tree)},
                         {"unknown_files", list_of(survey.foreign, entry_tree)}});
}

std::string gc_text(const GcReport& report, bool is_dry_run, const OutputStyle& style) {
  std::string out;
  std::uint64_t failed = 0;
  // On a terminal a reason has a line of its own, because a name and a reason rarely fit side by side.
  const bool is_narrow = style.width != 0;
  std::vector<TextTable::Column> columns = {{"ACTION"}, {"FILE"}, {"SIZE", Align::right}, {"AGE", Align::right}};
  if (!is_narrow) columns.push_back({"REASON"});
  TextTable table(std::move(columns), {1});
  for (const GcItem& item : report.items) {
    std::vector<std::string> cells = {std::string(action_text(item.verdict)), printable(item.file),
                                      human_bytes(item.bytes), age_text(item.age)};
    if (!is_narrow) cells.push_back(escaped(item.reason));
    table.add(cells);
    failed += item.verdict == GcVerdict::failed ? 1 : 0;
  }
  if (!table.empty()) {
    std::string rows;
    table.append_to(rows, style);
    std::size_t begin = rows.find('\n') + 1;
    out += rows.substr(0, begin);
    for (const GcItem& item : report.items) {
      const std::size_t end = rows.find('\n', begin) + 1;
      out += rows.substr(begin, end - begin);
      begin = end;
      if (is_narrow) out += "        " + coloured(style, Colour::faint, escaped(item.reason)) + "\n";
    }
    out += '\n';
  }
  if (report.removed_files == 0)
    out += "nothing to delete\n";
  else
    fmt::format_to(std::back_inserter(out), "{}, {} {}\n", counted(report.removed_files, "file"),
                   human_bytes(report.removed_bytes), is_dry_run ? "would be deleted (--yes deletes them)" : "deleted");
  if (failed != 0) out += coloured(style, Colour::bad, counted(failed, "failure")) + "\n";
  return out;
}

Config gc_tree(const GcReport& report, bool is_dry_run) {
  const auto item_tree = [](const GcItem& item) {
    return Config::object({{"file", item.file},
                           {"kind", workspace::to_string(item.kind)},
                           {"bytes", item.bytes},
                           {"files", item.files},
                           {"age_seconds", item.age.count()},
                           {"action", action_text(item.verdict)},
                           {"reason", item.reason}});
  };
  return Config::object({{"dry_run", is_dry_run},
                         {"removed_files", report.removed_files},
                         {"removed_bytes", report.removed_bytes},
                         {"items", list_of(report.items, item_tree)}});
}

}  // namespace muster::inspect
