// SPDX-License-Identifier: Apache-2.0
// An export, step by step. All ranks go through all steps; a failure in 1, 3 or 6 is agreed on before anybody goes on.
//
// 1. Every rank maps its own shard.
// 2. Every rank tells rank 0 what its shard has: names, dtypes, shapes, padding. No elements.
// 3. Rank 0 reads the plan, lays out the merged tensors, puts them into files and batches, and makes OUT.partial-NONCE.
// 4. Rank 0 sends each rank its part of the batches: which of its tensors travel when.
// 5. A batch after the other is gathered.
// 6. Rank 0 writes batch k while batch k + 1 is gathered, so that it holds at most two.
// 7. Rank 0 writes the index and the files that are no weights, and gives the directory its name.

#include "muster/export.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "muster/gather.hpp"
#include "muster/safetensors.hpp"
#include "src/checkpoint/agreement.hpp"
#include "src/checkpoint/export_layout.hpp"
#include "src/checkpoint/export_writer.hpp"
#include "src/checkpoint/output_directory.hpp"
#include "src/checkpoint/quoted.hpp"
#include "src/checkpoint/shard_files.hpp"

namespace muster {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

class Export {
 public:
  Export(const std::string& shards_dir, const std::string& out, const std::string& plan, SyncGroup& group,
         const ExportOptions& options)
      : shards_dir_(shards_dir), out_(out), plan_(plan), group_(group), options_(options) {
    ranks_.resize(static_cast<std::size_t>(group.size()));
    std::iota(ranks_.begin(), ranks_.end(), 0);
  }

  ExportReport run() {
    const auto begin = Clock::now();
    agree_on(group_, "export: opening the shards", [&] { open_shard(); });
    GatheredConfigs listings = [&] {
      const Config mine = shard_listing(*shard_, facts_.padded);
      return get_configs_parallel(&mine, ranks_, group_);
    }();
    agree_on(group_, "export: planning", [&] {
      if (is_first()) plan_output(listings);
    });
    listings.release();
    hand_out_schedules();
    move_batches();
    agree_on(group_, "export: writing", [&] {
      if (is_first()) finish();
    });
    report_.seconds = seconds_since(begin);
    return std::move(report_);
  }

 private:
  [[nodiscard]] bool is_first() const { return group_.rank() == 0; }

  void open_shard() {
    const int count = count_shards(shards_dir_);
    if (count != group_.size()) {
      throw Error(ErrorKind::argument,
                  fmt::format("{} has {} shards, but this job has {} rank{}; start it with muster run -n {}",
                              in_quotes(shards_dir_), count, group_.size(), group_.size() == 1 ? "" : "s", count),
                  {.path = shards_dir_});
    }
    const std::string path = shards_dir_ + "/" + shard_file_name(group_.rank(), count);
    shard_.emplace(SafetensorsFile::open(path));
    try {
      if (auto facts = parse_shard_facts(shard_->metadata()))
        facts_ = std::move(*facts);
      else
        facts_ = {group_.rank(), count, {}};
      if (facts_.rank != group_.rank() || facts_.ranks != count) {
        throw Error(ErrorKind::corrupt, fmt::format("it says that it is rank {} of {}; it has been renamed or mixed up",
                                                    facts_.rank, facts_.ranks));
      }
    } catch (const Error& error) {
      throw error.with_context(fmt::format("shard {}", in_quotes(path)));
    }
  }

  // Rank 0.
  void plan_output(const GatheredConfigs& gathered) {
    const MergePlan plan = MergePlan::load(plan_);
    check_output(out_, options_.force);
    check_not_source(shards_dir_, out_);
    std::vector<ShardListing> listings;
    listings.reserve(gathered.size());
    for (const auto& [rank, listing] : gathered.present()) listings.push_back(parse_shard_listing(rank, listing));
    layout_.emplace(plan, std::move(listings), options_.batch_bytes);
    report_.tensors_in = layout_->tensors_in();
    report_.tensors_out = layout_->merged().size();
    output_.emplace(out_, options_.force);
    writer_.emplace(*layout_, shards_dir_, output_->partial(), options_.max_shard_size, shard_->metadata(), group_);
  }

  void hand_out_schedules() {
    if (!is_first()) {
      schedule_ = decode_schedule(group_.receive(0, max_schedule_bytes, {.phase = "export: schedule"}),
                                  shard_->tensors().size());
      return;
    }
    for (int rank = 1; rank < group_.size(); ++rank) {
      group_.send(rank, encode_schedule(layout_->schedule(rank)), {.phase = "export: schedule"});
    }
    schedule_ = layout_->schedule(0);
  }

  void move_batches() {
    std::future<void> writing;  // waits at its end: nothing it uses goes before it
    for (std::size_t batch = 0; batch < schedule_.size(); ++batch) {
      ConfigArray tensors;
      tensors.reserve(schedule_[batch].size());
      for (const std::uint32_t index : schedule_[batch]) tensors.emplace_back(shard_->tensor(index));
      const Config mine(std::move(tensors));
      const auto begin = Clock::now();
      GatheredConfigs gathered = get_configs_parallel(&mine, ranks_, group_);
      report_.gather_seconds += seconds_since(begin);
      ++report_.exchanges;
      agree_on(group_, "export: writing", [&] {
        if (writing.valid()) writing.get();
      });
      if (!is_first()) continue;
      if (batch + 1 == schedule_.size()) report_.explain = gathered.explain();
      writing = std::async(std::launch::async, [this, batch, result = std::move(gathered)]() mutable {
        writer_->write(batch, result);
        result.release();
      });
    }
    agree_on(group_, "export: writing", [&] {
      if (writing.valid()) writing.get();
    });
  }

  // Rank 0.
  void finish() {
    writer_->finish();
    output_->commit();
    report_.bytes_in = writer_->bytes_in();
    report_.bytes_out = writer_->bytes_out();
    report_.files = writer_->files();
  }

  const std::string& shards_dir_;
  const std::string& out_;
  const std::string& plan_;
  SyncGroup& group_;
  const ExportOptions& options_;
  std::vector<int> ranks_;
  std::optional<SafetensorsFile> shard_;
  ShardFacts facts_;
  Schedule schedule_;
  ExportReport report_;
  // Rank 0's; the writer's files go before the directory that they are in.
  std::optional<ExportLayout> layout_;
  std::optional<OutputDirectory> output_;
  std::optional<ExportWriter> writer_;
};

}  // namespace

ExportReport export_model(const std::string& shards_dir, const std::string& out, const std::string& plan,
                          SyncGroup& group, const ExportOptions& options) {
  const SyncGroup::Use use(group);
  return Export(shards_dir, out, plan, group, options).run();
}

}  // namespace muster
