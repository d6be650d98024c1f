// SPDX-License-Identifier: Apache-2.0
// State files, one or those of a workspace.

#include <fmt/core.h>

#include <filesystem>

#include "muster/error.hpp"
#include "muster/state_file.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/checkpoint/verification.hpp"
#include "src/core/progress_counter.hpp"
#include "src/core/quoted.hpp"
#include "src/workspace/survey.hpp"

namespace muster {
namespace {

/// Opens and checks one file. `done` is told of what was read.
void verify_one(const std::string& path, const std::string& name, bool with_checksums, const ProgressCallback& progress,
                VerifyReport& report, Verification& verification) {
  try {
    const StateFile file = StateFile::open(path);
    ++report.files;
    for (const StateTensor& tensor : file.tensors()) {
      ++report.tensors;
      report.bytes += tensor.bytes;
    }
    if (!with_checksums) return;
    for (const StateProblem& problem : file.check(progress))
      verification.add(Defect::checksum, name, problem.tensor,
                       problem.tensor.empty() ? fmt::format("{}: {}", in_quotes(name), problem.words)
                                              : fmt::format("the tensor {} in {}: {}", in_quotes(problem.tensor),
                                                            in_quotes(name), problem.words));
    report.checked += file.tensors().size();
  } catch (const Error& error) {
    // What is not there, or of another version, was not verified.
    if (error.kind() == ErrorKind::version || error.kind() == ErrorKind::not_found) throw;
    verification.add(Defect::file, name, "", error.what());
  }
}

/// The progress of one file after the other as one.
class WholeProgress {
 public:
  WholeProgress(const ProgressCallback& progress, std::uint64_t total) : counter_(progress, total) {}
  ProgressCallback of_next_file() {
    return [this, last = std::uint64_t{0}](const Progress& progress) mutable {
      counter_.add(progress.bytes - last);
      last = progress.bytes;
    };
  }

 private:
  ProgressCounter counter_;
};

void verify_job(const std::string& directory, const workspace::SurveyJob& job, const VerifyOptions& options,
                WholeProgress& progress, VerifyReport& report, Verification& verification) {
  const auto verify_state = [&](const workspace::SurveyState& state) {
    const std::string& name = state.entry.file;
    if (!state.complete) {
      verification.add(Defect::file, name, "", "the state is not complete: " + state.problem);
      return;
    }
    try {
      verify_one(join_path(directory, name), name, options.checksums,
                 options.progress ? progress.of_next_file() : ProgressCallback(), report, verification);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::not_found) throw;
      // A job that goes on replaces its older states.
    }
  };
  for (const workspace::SurveyState& state : job.states) verify_state(state);
  for (const workspace::SurveyState& state : job.kept) verify_state(state);
  if (job.states.empty()) return;
  for (const int rank : job.missing_ranks)
    verification.add(Defect::missing, "", "",
                     fmt::format("the job {} has no complete state of rank {}", job.nonce, rank));
}

}  // namespace

VerifyReport verify_state_file(const std::string& path, const VerifyOptions& options) {
  VerifyReport report{.path = path, .kind = VerifiedKind::state, .has_checksums = true};
  Verification verification(report);
  verify_one(path, std::filesystem::path(path).filename().string(), options.checksums, options.progress, report,
             verification);
  return report;
}

VerifyReport verify_workspace(const std::string& path, const VerifyOptions& options) {
  VerifyReport report{.path = path, .kind = VerifiedKind::workspace, .has_checksums = true};
  Verification verification(report);
  const workspace::Survey survey = workspace::survey(path);
  std::uint64_t total = 0;
  for (const workspace::SurveyJob& job : survey.jobs) {
    for (const workspace::SurveyState& state : job.states) total += state.complete ? state.tensor_bytes : 0;
    for (const workspace::SurveyState& state : job.kept) total += state.complete ? state.tensor_bytes : 0;
  }
  WholeProgress progress(options.progress, total);
  for (const workspace::SurveyJob& job : survey.jobs) verify_job(path, job, options, progress, report, verification);
  const auto find_left = [&](const workspace::SurveyEntry& entry) {
    if (entry.writer == os::Life::dead)
      verification.add(
          Defect::left, entry.file, "",
          fmt::format("{} was left by a process that is gone; muster gc --yes {}", in_quotes(entry.file),
                      entry.foreign.empty() ? "removes it" : "removes it when what is not Muster's is out of it"));
  };
  for (const workspace::SurveyEntry& entry : survey.foreign)
    if (const auto name = workspace::parse_name(entry.file))
      verification.add(
          Defect::file, entry.file, "",
          fmt::format("{} has the name of a {}, and is none", in_quotes(entry.file), workspace::to_string(name->kind)));
  for (const workspace::SurveyEntry& entry : survey.temporary) find_left(entry);
  for (const workspace::SurveyJob& job : survey.jobs)
    for (const workspace::SurveyEntry& entry : job.passing) find_left(entry);
  return report;
}

}  // namespace muster
