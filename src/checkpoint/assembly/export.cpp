// SPDX-License-Identifier: Apache-2.0
// The export of shards in files, and the words for omissions.

#include "muster/export.hpp"
#include <fmt/core.h>
#include <algorithm>
#include <memory>
#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/export.hpp"
#include "src/checkpoint/assembly/export_run.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/model/model_files.hpp"

namespace muster {

std::string_view to_string(Writers writers) noexcept {
  return writers == Writers::rank0 ? "rank0" : "all";
}

ExportReport export_model(const std::string& shards_dir, const std::string& out, const std::string& plan, Group& group,
                          const ExportOptions& options) {
  const group::GroupLock use(group);
  trace::Span span(trace::SpanKind::export_model, "export_model", group::inside(group).operations().next());
  const Request request = request_of(shards_dir, plan, options);
  ExportRun run(group, request, out, options, [&](Group& ranks) {
    return std::make_unique<ShardSet>(request.path, ranks.rank(), ranks.size(), request.states, request.thirdparty);
  });
  const FailOnStop on_stop = fail_on_stop(group, options.stop, &run.is_written());
  return run.run(span);
}

namespace {

constexpr std::size_t most_omissions_named = 3;

}  // namespace

std::size_t count_lost(const Omissions& omissions) noexcept {
  return static_cast<std::size_t>(std::ranges::count(omissions, true, &Omission::is_lost));
}

std::string omission_words(const Omissions& omissions, bool lost_only) {
  std::string words;
  std::size_t count = 0;
  for (const Omission& omission : omissions) {
    if ((lost_only && !omission.is_lost) || ++count > most_omissions_named) continue;
    words += fmt::format("{}{} ({})", count == 1 ? "" : ", ", in_quotes(omission.name), omission.reason);
  }
  if (count > most_omissions_named) words += fmt::format(" and {} more", count - most_omissions_named);
  return words;
}

void refuse_lost(const Omissions& omissions, std::string_view doing, const std::string& path, std::string_view remedy) {
  const std::size_t lost = count_lost(omissions);
  if (lost == 0) return;
  throw file_error(ErrorKind::unsupported, doing, path,
                   fmt::format("{} item{} cannot be read: {}. {}", lost, lost == 1 ? "" : "s",
                               omission_words(omissions, true), remedy));
}

std::vector<std::string> omission_notes(const Omissions& omissions) {
  std::vector<std::string> notes;
  for (const Omission& omission : omissions)
    if (!omission.is_lost)
      notes.push_back(fmt::format("{} is left out: {}", in_quotes(omission.name), omission.reason));
  return notes;
}

}  // namespace muster
