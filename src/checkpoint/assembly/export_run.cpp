// SPDX-License-Identifier: Apache-2.0

#include "src/checkpoint/assembly/export_run.hpp"
#include <fmt/core.h>
#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include "muster/error.hpp"
#include "muster/log.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/checksums.hpp"
#include "src/checkpoint/assembly/rank_messages.hpp"
#include "src/checkpoint/assembly/shard_job.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/model/output_directory.hpp"
#include "src/group/error_propagation.hpp"
#include "src/os/directory.hpp"
#include "src/os/process.hpp"
#include "src/trace/span.hpp"
#include "src/workspace/discovery.hpp"

namespace muster {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::string folder_of(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).lexically_normal().parent_path();
  return folder.empty() ? "." : folder.string();
}

/// Throws Error(invalid_argument) if a name is not that of a file next to the weights.
void check_files(const std::map<std::string, std::string>& files) {
  for (const auto& [name, text] : files)
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos || is_weight_name(name) ||
        is_index_name(name) || is_journal_name(name) || name == written_files_name)
      throw Error(
          ErrorKind::invalid_argument,
          fmt::format("files: {} is not a name of a file next to the weights. Use a name such as \"config.json\"",
                      in_quotes(name)));
}

}  // namespace

bool is_spread(const Group& group) {
  for (int rank = 1; rank < group.size(); ++rank)
    if (group.host_of(rank) != group.host_of(0)) return true;
  return false;
}

void look_for_output(Group& group, const std::string& directory) {
  const auto longest = std::min<std::chrono::milliseconds>(group.timeout(), workspace::longest_lateness);
  try {
    workspace::patiently(directory, {.deadline = os::Clock::now() + longest, .check = [&] { group.progress(); }},
                         [&] { (void)os::open_directory(directory); });
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::not_found) throw;
    const RankInfo& own = group.info(group.rank());
    throw Error(ErrorKind::invalid_argument,
                fmt::format("output {1}: host {0} does not see the directory that rank 0 (host {2}) made. Pass an "
                            "output that all hosts mount, or let rank 0 write all files (--writers rank0)",
                            own.host, in_quotes(directory), group.info(0).host),
                {.path = directory});
  }
}

ExportRun::ExportRun(Group& group, Request request, std::string out, ExportOptions options, Open open)
    : group_(&group::inside(group)),
      options_(std::move(options)),
      request_(std::move(request)),
      out_(std::move(out)),
      open_(std::move(open)) {}

ExportReport ExportRun::run(trace::Span& span) {
  prepare(span);
  return complete();
}

std::optional<Fingerprint> ExportRun::take_fingerprint(trace::Span& span) {
  has_output_ = false;
  prepare(span);
  assemble_files();
  if (!is_first()) return std::nullopt;
  return fingerprint_.take({}, {}, {});
}

void ExportRun::prepare_delivery(trace::Span& span, std::function<void(ExportJob&)> divide) {
  has_output_ = false;
  divide_ = std::move(divide);
  prepare(span);
  if (source_->is_lasting()) compare_early();
}

void ExportRun::deliver(const ItemSink& sink) {
  assemble_files(sink);
}

std::unique_ptr<MergedTensors> ExportRun::take_merged() {
  std::vector<MergedTensor> tensors;
  for (OutputFile& file : job_->outputs.files)
    for (MergedTensor& tensor : file.tensors) tensors.push_back(std::move(tensor));
  // The tensors that must be equal were compared by prepare_delivery().
  for (MergedTensor& tensor : tensors) tensor.equal.clear();
  const std::shared_ptr<const TensorSource> elements(std::shared_ptr<const TensorSource>(), &source_->elements());
  return merged_of(elements, *job_, std::move(tensors));
}

void ExportRun::prepare(trace::Span& span) {
  std::vector<std::byte> mine;
  agree_on(*group_, "export: opening the shards", [&] {
    source_ = open_(*group_);
    if (options_.checksums) source_->check_stored();
    mine = encode_listings(*source_);
  });
  const std::vector<std::vector<std::byte>> told = gather_listings(*group_, std::move(mine));
  agree_on(*group_, "export: planning", [&] {
    if (is_first()) plan(read_listings(told, source_->whole(), rooms_));
  });
  hand_out_work();
  span.add_bytes(work_.written);
  if (is_spread(*group_))
    agree_on(*group_, "export: opening the output", [&] {
      if (work_.written != 0 && !work_.directory.empty()) look_for_output(*group_, work_.directory);
    });
  if (!source_->is_lasting()) compare_early();
}

ExportReport ExportRun::run_units(trace::Span& span) {
  agree_on(*group_, "export: planning", [&] {
    if (is_first()) open_growing();
  });
  for (std::uint64_t number = 0; list_unit(number); ++number) {
    hand_out_work();
    span.add_bytes(work_.written);
    if (is_spread(*group_))
      agree_on(*group_, "export: opening the output", [&] {
        if (work_.written != 0) look_for_output(*group_, work_.directory);
      });
    compare_early();
    assemble_files();
  }
  agree_on(*group_, "export: finishing", [&] {
    if (!is_first()) return;
    finish_units();
    finish();
  });
  report_.seconds = seconds_since(begin_);
  return std::move(report_);
}

// Runs on rank 0.
void ExportRun::open_growing() {
  check_files(options_.files);
  if (!options_.base_model.empty()) check_not_source(options_.base_model, out_);
  if (options_.dtype && !options_.cast_all)
    throw Error(
        ErrorKind::invalid_argument,
        "export_model: dtype: unit by unit, the other tensors of the model are unknown, which decide what remains "
        "F32. Set cast_all as well, or export all tensors in one call");
  report_.writers = writers_of(options_, false, is_spread(*group_) && os::file_system_of(folder_of(out_)).is_network);
  request_.is_balanced = report_.writers == Writers::all;
  output_.emplace(out_, choice());
  growing_.emplace(output_->partial(), options_.max_shard_size);
}

// Steps 1 to 3 for one unit. Returns false after the last one.
bool ExportRun::list_unit(std::uint64_t number) {
  std::vector<std::byte> mine;
  std::uint8_t has_unit = 0;
  agree_on(*group_, "export: opening a unit", [&] {
    std::unique_ptr<ExportSource> unit = open_(*group_);
    has_unit = unit ? 1 : 0;
    if (!unit) return;
    mine = encode_listings(*unit);
    source_ = std::move(unit);
  });
  std::vector<std::uint8_t> all(static_cast<std::size_t>(group_->size()));
  group_->all_gather(std::as_bytes(std::span(&has_unit, 1)), std::as_writable_bytes(std::span(all)),
                     {.phase = "export: counting units"});
  for (int rank = 1; rank < group_->size(); ++rank)
    if (all[static_cast<std::size_t>(rank)] != all.front())
      throw Error(ErrorKind::rank_mismatch,
                  fmt::format("the ranks pass different numbers of units: rank {} has {}, and rank {} has more. Return "
                              "the same number on all ranks",
                              all.front() == 0 ? 0 : rank, number, all.front() == 0 ? rank : 0),
                  {.rank = rank});
  if (has_unit == 0) return false;
  const std::vector<std::vector<std::byte>> told = gather_listings(*group_, std::move(mine));
  agree_on(*group_, "export: planning", [&] {
    if (!is_first()) return;
    found_.clear();
    Request request = request_;
    request.is_unit = true;
    job_.emplace(plan_job(request, *source_, read_listings(told, source_->whole(), rooms_)));
    for (const TensorMapping& tensor : job_->account.tensors)
      if (!request_.by_boxes) unit_of_[tensor.origin] = number;
    assign_work();
  });
  hashes_.clear();
  return true;
}

// Runs on rank 0. Gives the tensors of the unit their places in files.
std::vector<FileTarget> ExportRun::grow() {
  ExportManifest& account = job_->account;
  for (TensorMapping& tensor : account.tensors) units_.tensors.push_back(std::move(tensor));
  for (TensorMapping& tensor : account.dropped) units_.dropped.push_back(std::move(tensor));
  for (std::string& note : account.notes)
    if (std::ranges::find(units_.notes, note) == units_.notes.end()) units_.notes.push_back(std::move(note));
  units_.plan = account.plan;
  units_.source_layout = account.source_layout;
  units_.tensors_in += account.tensors_in;
  units_.bytes_in += account.bytes_in;
  units_.tensors_out += account.tensors_out;
  units_.bytes_out += account.bytes_out;
  std::vector<MergedTensor> tensors;
  for (OutputFile& file : job_->outputs.files)
    for (MergedTensor& tensor : file.tensors) tensors.push_back(std::move(tensor));
  job_->outputs.files.clear();
  return growing_->add(std::move(tensors), job_->outputs.files);
}

// A plan merges a scale as its weight was cut.
void ExportRun::check_scales() const {
  for (const auto& [name, unit] : unit_of_)
    for (const std::string& weight : weights_of_scale(name))
      if (const auto found = unit_of_.find(weight); found != unit_of_.end() && found->second != unit)
        throw Error(ErrorKind::invalid_argument,
                    fmt::format("tensor {}: it is in unit {}, and its weight {} in unit {}. Pass a weight and its "
                                "scales in one unit",
                                in_quotes(name), unit, in_quotes(weight), found->second));
}

// Runs on rank 0, after the last unit: checks the whole model, and gives the files their headers and names.
void ExportRun::finish_units() {
  if (!request_.by_boxes) {
    check_scales();
    std::set<std::size_t> used;
    for (const auto* const tensors : {&units_.tensors, &units_.dropped})
      for (const TensorMapping& tensor : *tensors) used.insert(tensor.rule);
    note_unused_rules(job_->plan, used, units_.notes);
  }
  const std::string stem(options_.base_model.empty() ? "model" : model_stem(options_.base_model));
  GrowingFiles::Finished finished = growing_->finish(stem);
  std::map<std::string_view, std::string_view> files(finished.weights.begin(), finished.weights.end());
  std::vector<NamedSpec> model;
  for (TensorMapping& tensor : units_.tensors) {
    tensor.file = files.at(tensor.name);
    model.push_back({tensor.name, tensor.spec});
  }
  std::ranges::sort(model, natural_less, &NamedSpec::name);
  job_->config_text = config_text_for(request_, model, units_.notes);
  units_.files = finished.files.size();
  job_->outputs.files = std::move(finished.files);
  job_->outputs.index = std::move(finished.index);
  job_->outputs.index_name = fmt::format("{}.safetensors.index.json", stem);
  job_->account = std::move(units_);
  work_.directory = output_->partial();
}

void ExportRun::move_to(Group& group) {
  group_ = &group::inside(group);
}

ExportReport ExportRun::complete() {
  assemble_files();
  if (source_->is_lasting()) compare();
  agree_on(*group_, "export: finishing", [&] {
    if (is_first()) finish();
  });
  report_.seconds = seconds_since(begin_);
  return std::move(report_);
}

std::vector<std::size_t> ExportRun::contributed() const {
  std::set<std::size_t> tensors;
  for (const Step& step : work_.steps) {
    for (const merge::Rectangle& copy : step.copies) {
      const auto index = static_cast<std::size_t>(copy.source);
      if (work_.views.empty()) {
        tensors.insert(index);
        continue;
      }
      for (const merge::StridedBox& box : work_.views.at(index).boxes)
        tensors.insert(static_cast<std::size_t>(box.source));
    }
  }
  return {tensors.begin(), tensors.end()};
}

// Runs step 3, on rank 0.
void ExportRun::plan(std::vector<ShardListing> listings) {
  const trace::Span span(trace::SpanKind::phase, "export: planning");
  if (has_output_) check_request();
  const bool by_network = has_output_ && is_spread(*group_) && os::file_system_of(folder_of(out_)).is_network;
  const bool all_have_all = !source_->whole().empty();
  report_.writers = writers_of(options_, all_have_all, by_network);
  request_.is_balanced = report_.writers == Writers::all;
  job_.emplace(plan_job(request_, *source_, std::move(listings)));
  if (has_output_) open_output();
  if (divide_) divide_(*job_);
  assign_work();
}

void ExportRun::check_request() const {
  if (!request_.path.empty()) check_not_source(request_.path, out_);
  check_files(options_.files);
  if (!options_.base_model.empty()) check_not_source(options_.base_model, out_);
  check_output(out_, choice());
  if (options_.checksums && options_.target_layout)
    throw Error(ErrorKind::invalid_argument, "--checksums: shards have no checksum file; only a checkpoint has one");
  if (options_.fingerprint && options_.target_layout)
    throw Error(
        ErrorKind::invalid_argument,
        "fingerprint: shards have parts of tensors. Leave it out, and take the fingerprint of the shards later");
}

void ExportRun::assign_work() {
  std::vector<std::size_t> counts;
  for (const RankTensors& rank : job_->ranks) counts.push_back(rank.tensors.size());
  sources_ = sources_by_rank(counts, group_->size());
  const WindowShape windows =
      shape_windows(options_.memory_budget, group_->size(), report_.writers, is_spread(*group_));
  const bool all_have_all = !source_->whole().empty();
  AssemblyShape shape{group_->size(), report_.writers, windows.bytes, windows.depth};
  shape.all_have_all = all_have_all;
  for (int rank = 0; rank < group_->size(); ++rank) shape.hosts.push_back(group_->host_of(rank));
  const std::string partial = has_output_ ? output_->partial() : std::string();
  shape.one_host_a_file = has_output_ && is_spread(*group_) && os::file_system_of(partial).is_network;
  std::vector<FileTarget> targets;
  if (growing_) targets = grow();
  assembly_ = plan_assembly(job_->outputs.files, job_->outputs.equal, sources_, shape, there_);
  check_memory();
  if (growing_) growing_->place(assembly_.files);
  for (std::size_t i = targets.size(); i < assembly_.files.size(); ++i) {
    const FilePlan& file = assembly_.files[i];
    if (!has_output_)
      targets.push_back({file.name, {}});
    else
      targets.push_back(there_.contains(file.name) ? FileTarget{partial + "/" + file.name, {}}
                                                   : grow_file(partial, file));
  }
  if (options_.fingerprint) ask_for_remainders(assembly_.files, there_, targets);
  for (ProcessWork& work : assembly_.processes) {
    work.directory = partial;
    work.targets = targets;
  }
  if (std::ranges::all_of(job_->views, [](const auto& views) { return views.empty(); })) return;
  if (shape.all_have_all) {
    for (ProcessWork& work : assembly_.processes) work.views = job_->views.front();
    return;
  }
  std::vector<std::vector<ViewedTensor>> views = views_by_process(job_->views, job_->counts, group_->size());
  for (std::size_t i = 0; i < views.size(); ++i) assembly_.processes[i].views = std::move(views[i]);
}

void ExportRun::open_output() {
  std::optional<FinishedFiles> journal;
  const auto is_useful = [&](const std::string& partial) {
    journal = read_journal(partial, job_->fingerprint);
    return journal.has_value();
  };
  if (options_.resume)
    output_.emplace(out_, choice(), is_useful);
  else
    output_.emplace(out_, choice());
  const std::string& partial = output_->partial();
  if (options_.resume) output_->keep_on_failure();
  if (journal) {
    verify_files(*journal);
    std::erase_if(*journal, [&](const auto& file) { return !there_.contains(file.first); });
    rewrite_journal(partial, *journal);
  } else if (source_->is_lasting()) {
    begin_journal(partial, job_->fingerprint);
  }
  remove_unfinished();
}

void ExportRun::verify_files(const FinishedFiles& journal) {
  for (FilePlan& file : plan_files(job_->outputs.files)) {
    const auto finished = journal.find(file.name);
    if (finished == journal.end()) continue;
    const std::string path = output_->partial() + "/" + file.name;
    std::error_code error;
    if (std::filesystem::file_size(path, error) == file.bytes) add_piece_checksums(file, path, [&] { go_on(*group_); });
    const std::string wrong = verify_file(path, file.header, file.bytes, finished->second);
    go_on(*group_);
    if (!wrong.empty()) {
      log(LogLevel::warning, fmt::format("{} is written again: {}", in_quotes(file.name), wrong));
      continue;
    }
    there_.insert(file.name);
    ++report_.files_resumed;
    report_.bytes_resumed += file.bytes;
  }
}

void ExportRun::remove_unfinished() const {
  std::vector<std::filesystem::path> others;
  for (const auto& entry : std::filesystem::directory_iterator(output_->partial())) {
    const std::string name = entry.path().filename().string();
    if (!is_journal_name(name) && !there_.contains(name)) others.push_back(entry.path());
  }
  for (const auto& other : others) std::filesystem::remove_all(other);
}

// At this point the size of all windows is known, and none is allocated yet.
void ExportRun::check_memory() const {
  std::vector<std::uint64_t> needed;
  for (const ProcessWork& work : assembly_.processes)
    needed.push_back(work.turns != 0 ? work.depth * work.window_bytes : 0);
  check_rooms(*group_, rooms_, needed, "shared memory for the windows of an export", "lower the memory budget");
}

// Runs step 4.
void ExportRun::hand_out_work() {
  const trace::Span span(trace::SpanKind::phase, "export: distributing");
  std::vector<std::vector<std::byte>> all;
  if (is_first()) {
    all.emplace_back();  // this rank needs no copy of its own work
    for (int rank = 1; rank < group_->size(); ++rank)
      all.push_back(encode_work(assembly_.processes[static_cast<std::size_t>(rank)]));
  }
  const std::vector<std::byte> mine =
      scatter_messages(*group_, std::move(all), {.phase = "export: distributing the work"});
  if (!is_first()) {
    work_ = decode_work(mine);
    return;
  }
  report_.bytes_written.resize(assembly_.processes.size());
  for (std::size_t i = 0; i < assembly_.processes.size(); ++i) {
    report_.bytes_written[i] += assembly_.processes[i].written;
    report_.windows += assembly_.processes[i].turns;
  }
  work_ = std::move(assembly_.processes.front());
}

// Runs step 5.
void ExportRun::assemble_files(const ItemSink& sink) {
  const trace::Span span(trace::SpanKind::phase, "export: writing");
  const std::shared_ptr<Group> assembling = group_->companion({.phase = "export: beginning"});
  const FailOnStop on_stop = fail_on_stop(*assembling, options_.stop);
  Assembled assembled;
  agree_on(*group_, *assembling, "export: writing", [&] {
    // Ranks that write nothing need no access to the output.
    std::optional<Journal> journal;
    WrittenCallback on_written;
    if (has_output_ && source_->is_lasting() && (is_first() || work_.written != 0)) {
      journal.emplace(work_.directory, group_->rank());
      on_written = [&](std::uint32_t file, const std::vector<WrittenPart>& parts) {
        journal->add_parts(std::filesystem::path(work_.targets[file].name).filename().string(), parts);
      };
    }
    const auto finish = [&](std::uint32_t file) { complete_file(file, journal ? &*journal : nullptr); };
    std::function<void(std::uint64_t)> progress;
    if (options_.progress && is_first())
      progress = [&](std::uint64_t bytes) {
        // The bytes of earlier units. Without units there are none, and assembly_.bytes includes resumed bytes.
        const std::uint64_t before = growing_ ? units_.bytes_out - assembly_.bytes : 0;
        options_.progress({before + bytes + report_.bytes_resumed, before + assembly_.bytes, seconds_since(begin_)});
      };
    std::optional<ViewedTensors> viewed;
    if (!work_.views.empty()) viewed.emplace(source_->elements(), work_.views);
    const TensorSource& source = viewed ? static_cast<const TensorSource&>(*viewed) : source_->elements();
    assembled = assemble(*assembling, work_, source, on_written, finish, progress, sink);
  });
  hashes_ = std::move(assembled.hashes);
  fingerprint_.gather(*group_, work_, std::move(assembled.remainders), assembly_.files);
}

// Runs on rank 0.
void ExportRun::complete_file(std::uint32_t number, Journal* journal) {
  FilePlan& file = assembly_.files[number];
  if (!has_output_ || growing_ || there_.contains(file.name)) return;
  add_piece_checksums(file, work_.targets[number].place, [&] { go_on(*group_); });
  finish_file(file, work_.targets[number]);
  os::sync_directory(work_.directory);
  if (journal != nullptr) journal->add_finished(file.name);
}

// Runs step 6 before anything is written.
void ExportRun::compare_early() {
  agree_on(*group_, "export: hashing", [&] {
    std::optional<ViewedTensors> viewed;
    if (!work_.views.empty()) viewed.emplace(source_->elements(), work_.views);
    const TensorSource& source = viewed ? static_cast<const TensorSource&>(*viewed) : source_->elements();
    for (const Step& step : work_.steps) {
      if (step.kind != StepKind::hash) continue;
      hashes_.push_back(hash_for(step, source));
      go_on(*group_);
    }
  });
  std::erase_if(work_.steps, [](const Step& step) { return step.kind == StepKind::hash; });
  compare();
}

// Runs step 6.
void ExportRun::compare() {
  const trace::Span span(trace::SpanKind::phase, "export: comparing");
  const auto own = std::as_bytes(std::span(hashes_));
  const auto all = gather_messages(*group_, {own.begin(), own.end()}, {.phase = "export: comparing"});
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    hashes_.resize(all[rank].size() / sizeof(TensorHash));
    if (!hashes_.empty()) std::memcpy(hashes_.data(), all[rank].data(), hashes_.size() * sizeof(TensorHash));
    note_hashes(static_cast<int>(rank));
  }
  agree_on(*group_, "export: comparing", [&] {
    for (std::size_t set = 0; is_first() && set < job_->outputs.equal.size(); ++set) compare_set(set);
  });
}

void ExportRun::note_hashes(int process) {
  for (const TensorHash& hash : hashes_) found_[{hash.set, process, hash.tensor}] = {hash.low, hash.high};
}

void ExportRun::compare_set(std::size_t set) {
  const std::vector<SourceRef>& sources = job_->outputs.equal[set];
  const auto name_of = [&](const SourceRef& ref) -> const std::string& {
    return job_->ranks[static_cast<std::size_t>(ref.rank)].tensors[ref.index].name;
  };
  const auto hash_of = [&](const SourceRef& ref) {
    const RankSources& at = sources_[static_cast<std::size_t>(ref.rank)];
    return found_.at({static_cast<std::uint32_t>(set), at.process, at.first + ref.index});
  };
  const auto first = hash_of(sources.front());
  std::string differing;
  for (const SourceRef& ref : sources)
    if (hash_of(ref) != first) differing += (differing.empty() ? "" : ", ") + std::to_string(ref.rank);
  if (differing.empty()) return;
  if (const auto tied =
          std::ranges::find_if(sources, [&](const SourceRef& ref) { return name_of(ref) != name_of(sources.front()); });
      tied != sources.end())
    throw Error(
        ErrorKind::rank_mismatch,
        fmt::format("tensor {} of rank {} and {} of rank {} have different values, but the plan or "
                    "\"tie_word_embeddings\" in config.json ties them",
                    in_quotes(name_of(*tied)), tied->rank, in_quotes(name_of(sources.front())), sources.front().rank));
  if (request_.by_boxes)
    throw Error(ErrorKind::rank_mismatch,
                fmt::format("tensor {}: rank {} and rank {} have different values in the elements that both have. Pass "
                            "equal values, or turn off check_replicas",
                            in_quotes(job_->outputs.equal_names[set]), sources.front().rank, differing));
  throw Error(ErrorKind::rank_mismatch,
              fmt::format("tensor {}: rank {} and rank {} have different values, but all ranks must have the same. "
                          "If each rank has a part of the tensor, change its rule to \"concat\"",
                          in_quotes(job_->outputs.equal_names[set]), sources.front().rank, differing));
}

// Runs step 7, on rank 0.
void ExportRun::finish() {
  const trace::Span span(trace::SpanKind::phase, "export: finishing");
  const bool has_base = !options_.base_model.empty();
  ExtraFiles carried =
      has_base ? extra_files_of(options_.base_model, options_.extra_files) : source_->carried(options_.extra_files);
  std::erase_if(carried.names, [&](const std::string& name) { return options_.files.contains(name); });
  const std::string& partial = work_.directory;
  copy_extra_files(has_base ? options_.base_model : request_.path, partial, carried.names, [&] { go_on(*group_); });
  for (const auto& [name, text] : options_.files) write_file(join_path(partial, name), text);
  if (!job_->config_text.empty()) write_file(partial + "/config.json", job_->config_text);
  report_.skipped = std::move(carried.skipped);
  if (!job_->outputs.index.empty()) write_file(join_path(partial, job_->outputs.index_name), job_->outputs.index);
  if (options_.fingerprint) report_.fingerprint = fingerprint_.take(partial, there_, [&] { go_on(*group_); });
  if (options_.checksums)
    write_checksums(partial, report_.fingerprint ? checksums_of(*report_.fingerprint)
                                                 : checksums_of(partial, job_->outputs.files, [&] { go_on(*group_); }));
  output_->commit([&] {
    go_on(*group_);
    is_written_ = true;
    // As late as possible: without the journal, the export cannot be resumed.
    if (source_->is_lasting()) remove_journal(partial);
  });
  report_.manifest = std::move(job_->account);
}

}  // namespace muster
