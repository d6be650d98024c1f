// SPDX-License-Identifier: Apache-2.0
#pragma once
// The steps of an export. All ranks take part in each step, and agree on failures before the next step begins.
//
// 1. Every rank opens its own shards, or lists the tensors in its memory.
// 2. Every rank sends rank 0 the names, dtypes, shapes and padding of its tensors, but no elements.
// 3. Rank 0 reads the plan, and computes the files and each rank's work (export_job.hpp, assembly.hpp). It creates
//    OUT.partial-NONCE@WRITER with all files in it, each at its final length, so that a full disk is detected before
//    the work. With `resume` it looks for such a directory of an earlier run, and verifies the finished files in it
//    (output_directory.hpp).
// 4. Rank 0 sends each rank its work. If ranks are on several hosts, those that will write check that the directory of
//    rank 0 is visible to them.
// 5. All ranks assemble the files (assembly.hpp); rank 0 writes the header and the name of each complete file.
// 6. Every rank sends rank 0 the hashes of tensors that must be equal on several ranks; rank 0 compares them.
//    If the tensors are in memory, this step precedes step 5, so that nothing is written if they differ.
// 7. Rank 0 writes the index and the files other than weights, and gives the directory its final name.
//
// The steps up to 4 (with the comparison, for tensors in memory) may run with one group, and the others later, on
// another thread, with a duplicate of it.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "muster/export.hpp"
#include "src/checkpoint/assembly/agreement.hpp"
#include "src/checkpoint/assembly/assembly.hpp"
#include "src/checkpoint/assembly/export_fingerprint.hpp"
#include "src/checkpoint/assembly/export_job.hpp"
#include "src/checkpoint/assembly/export_source.hpp"
#include "src/checkpoint/assembly/growing_files.hpp"
#include "src/checkpoint/assembly/listing_exchange.hpp"
#include "src/checkpoint/model/output_directory.hpp"
#include "src/group/group.hpp"
#include "src/trace/span.hpp"

namespace muster {

/// Waits until the directory that rank 0 has made is visible to this rank. Its name is new on every host, so no other
/// directory can be mistaken for it. Throws Error(invalid_argument) with the remedy if it does not appear.
void look_for_output(Group& group, const std::string& directory);

/// Whether some ranks do not share memory. All ranks get the same answer.
bool is_spread(const Group& group);

/// One export on one rank.
class ExportRun {
 public:
  /// Opens the source of this rank; it runs before the ranks agree for the first time.
  using Open = std::function<std::unique_ptr<ExportSource>(Group&)>;

  ExportRun(Group& group, Request request, std::string out, ExportOptions options, Open open);
  ExportRun& operator=(ExportRun&&) = delete;

  /// Runs all steps. Collective. Throws as export_model.
  ExportReport run(trace::Span& span);

  /// The same for tensors that arrive unit by unit: each call of Open returns the next unit, or null after the last
  /// one. Steps 1 to 6 run for each unit, whose tensors are appended to files (growing_files.hpp).
  ExportReport run_units(trace::Span& span);

  /// Runs the steps 1 to 6 without an output, and returns the fingerprint of the result on rank 0. `out` is not
  /// used, and ExportOptions::fingerprint must be set. Collective. Throws as run().
  std::optional<Fingerprint> take_fingerprint(trace::Span& span);

  // Versions of weights (src/versions/publish.cpp) make files of another format from the tensors of the result.

  /// Runs the steps 1 to 4 without an output, and compares the tensors that must be equal. On rank 0, `divide` may
  /// change the files of the result and the ranks that write them. Throws as run(), and exceptions of `divide`.
  void prepare_delivery(trace::Span& span, std::function<void(ExportJob&)> divide);
  /// Runs step 5: `sink` receives the bytes of the files that this rank writes. For groups of several ranks.
  void deliver(const ItemSink& sink);
  /// For a group of one rank: returns the tensors of the result, which are assembled while they are read. The source
  /// must outlive it.
  [[nodiscard]] std::unique_ptr<MergedTensors> take_merged();
  /// The plan of the export; on rank 0 only, after step 3.
  [[nodiscard]] ExportJob& job() { return *job_; }

  /// Runs the steps up to 4. Throws as run().
  void prepare(trace::Span& span);
  /// The other steps use this group.
  void move_to(Group& group);
  /// Runs the other steps.
  ExportReport complete();

  /// Becomes true when it is too late to stop.
  [[nodiscard]] const std::atomic<bool>& is_written() const noexcept { return is_written_; }
  [[nodiscard]] ExportSource& source() noexcept { return *source_; }
  /// Returns the tensors of the source, by index, whose bytes this rank contributes. Call it after prepare().
  [[nodiscard]] std::vector<std::size_t> contributed() const;

 private:
  using Clock = std::chrono::steady_clock;

  [[nodiscard]] bool is_first() const { return group_->rank() == 0; }
  [[nodiscard]] OutputChoice choice() const { return {options_.force, options_.stale_after}; }
  void plan(std::vector<ShardListing> listings);
  void check_request() const;
  void assign_work();
  void open_growing();
  bool list_unit(std::uint64_t number);
  std::vector<FileTarget> grow();
  void check_scales() const;
  void finish_units();
  void open_output();
  void verify_files(const FinishedFiles& journal);
  void remove_unfinished() const;
  void check_memory() const;
  void hand_out_work();
  void compare_early();
  void assemble_files(const ItemSink& sink = {});
  void complete_file(std::uint32_t number, Journal* journal);
  void compare();
  void note_hashes(int process);
  void compare_set(std::size_t set);
  void finish();

  group::BaseGroup* group_;
  const ExportOptions options_;
  Request request_;
  const std::string out_;
  Open open_;
  bool has_output_ = true;
  std::function<void(ExportJob&)> divide_;  // set by prepare_delivery()
  std::atomic<bool> is_written_ = false;
  const Clock::time_point begin_ = Clock::now();
  std::unique_ptr<ExportSource> source_;
  ProcessWork work_;
  std::vector<TensorHash> hashes_;
  ExportReport report_;
  // Used on rank 0.
  std::vector<RankRoom> rooms_;
  std::optional<ExportJob> job_;
  AssemblyPlan assembly_;
  std::vector<RankSources> sources_;
  std::optional<OutputDirectory> output_;
  std::optional<GrowingFiles> growing_;  // set if tensors arrive unit by unit
  ExportManifest units_;                 // of all units
  /// With a plan: the units of tensors, by the names on their ranks.
  std::map<std::string, std::uint64_t, std::less<>> unit_of_;
  ExportFingerprint fingerprint_;  // of all files that are written
  std::set<std::string> there_;    // names of files that already exist and are verified
  /// Hashes by set, process and index in its list.
  std::map<std::tuple<std::uint32_t, int, std::uint32_t>, std::pair<std::uint64_t, std::uint64_t>> found_;
};

}  // namespace muster
