// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/assembly/assembly.hpp"

#include <type_traits>
#include <unordered_map>

#include "muster/error.hpp"
#include "src/base/byte_archive.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/formats/safetensors.hpp"

namespace muster {
namespace {

// Longer runs are written directly from their source, because joining them in memory would cost more than the
// additional calls.
constexpr std::uint64_t longest_short_run = 256 << 10;
// Reductions need whole elements.
constexpr std::uint64_t alignment = 64;

/// An item that is being filled.
struct OpenItem {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t scratch = 0;  // offset in its window of the next contribution to a reduction
  bool has_gaps = false;
  std::map<int, std::vector<merge::Rectangle>> copies;  // by process
  std::vector<ReduceStep> reductions;
};

class Planning {
 public:
  Planning(std::span<const RankSources> ranks, const AssemblyShape& shape)
      : ranks_(ranks),
        shape_(shape),
        long_run_(std::min(longest_short_run, shape.window_bytes / 2)),
        work_(static_cast<std::size_t>(shape.processes)) {
    for (ProcessWork& work : work_) {
      work.window_bytes = shape.window_bytes;
      work.depth = shape.depth;
    }
  }

  void add_comparison(std::uint32_t set, const std::vector<SourceRef>& sources) {
    if (!compared_.insert(set).second) return;
    for (const SourceRef& ref : sources) {
      Step step;
      step.kind = StepKind::hash;
      step.file = set;
      step.copies.push_back({.source = place_of(ref),
                             .from = ref.begin,
                             .from_stride = ref.stride,
                             .bytes = ref.bytes,
                             .rows = ref.rows});
      work_[static_cast<std::size_t>(ranks_[static_cast<std::size_t>(ref.rank)].process)].steps.push_back(
          std::move(step));
    }
  }

  void add_file(std::uint32_t number, const FilePlan& file, std::span<const MergedTensor* const> tensors,
                std::span<const std::vector<SourceRef>> equal, int writer) {
    file_ = number;
    choose_writers(file, tensors, writer);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      for (const std::uint32_t set : tensors[i]->equal) add_comparison(set, equal[set]);
      add_tensor(*tensors[i], file.tensors[i].offset);
    }
    flush();
  }

  [[nodiscard]] std::vector<ProcessWork> take() { return std::move(work_); }

 private:
  [[nodiscard]] int process_of(const MergedTensor& tensor, int source) const {
    return ranks_[static_cast<std::size_t>(tensor.sources[static_cast<std::size_t>(source)].rank)].process;
  }
  [[nodiscard]] int place_of(const SourceRef& ref) const {
    return static_cast<int>(ranks_[static_cast<std::size_t>(ref.rank)].first + ref.index);
  }
  [[nodiscard]] int place_of(const MergedTensor& tensor, int source) const {
    return place_of(tensor.sources[static_cast<std::size_t>(source)]);
  }

  // Chooses the processes that may write to the file.
  void choose_writers(const FilePlan& file, std::span<const MergedTensor* const> tensors, int writer) {
    writers_.clear();
    if (writer >= 0) {
      writers_.push_back(writer);
      return;
    }
    const int only = shape_.one_host_a_file ? host_for(file, tensors) : -1;
    for (int process = 0; process < shape_.processes; ++process)
      if (only < 0 || shape_.host_of(process) == only) writers_.push_back(process);
  }

  // Returns the host that has most of the file; among hosts with similar amounts, the one that has written least.
  [[nodiscard]] int host_for(const FilePlan& file, std::span<const MergedTensor* const> tensors) const {
    struct HostLoad {
      std::uint64_t has = 0;
      std::uint64_t writes = 0;
    };
    std::map<int, HostLoad> hosts;
    for (int process = 0; process < shape_.processes; ++process)
      hosts[shape_.host_of(process)].writes += work_[static_cast<std::size_t>(process)].written;
    for (const MergedTensor* tensor : tensors) {
      if (shape_.all_have_all) break;
      for (const merge::Band& band : merge::bands_of(tensor->layout))
        for (const merge::Run& run : band.rows.runs)
          hosts[shape_.host_of(process_of(*tensor, run.source))].has += run.bytes * band.rows.count;
    }
    std::uint64_t most = 0;
    for (const auto& [number, host] : hosts) most = std::max(most, host.has);
    const std::uint64_t about_as_much = most - std::min(most, file.bytes / 4);
    const auto is_better = [&](const auto& a, const auto& b) {
      const bool a_has = a.second.has >= about_as_much;
      const bool b_has = b.second.has >= about_as_much;
      return a_has != b_has ? a_has : a.second.writes < b.second.writes;
    };
    return std::ranges::min_element(hosts, is_better)->first;
  }

  void add_tensor(const MergedTensor& tensor, std::uint64_t offset) {
    if (tensor.layout.combine != merge::Combine::copy) {
      add_reduced(tensor, merge::rows_of(tensor.layout), offset);
      return;
    }
    for (const merge::Band& band : merge::bands_of(tensor.layout)) add_rows(tensor, band.rows, offset + band.at);
  }

  void add_rows(const MergedTensor& tensor, const merge::Rows& rows, std::uint64_t offset) {
    std::set<int> processes;
    std::uint64_t shortest = UINT64_MAX;
    for (const merge::Run& run : rows.runs) {
      processes.insert(process_of(tensor, run.source));
      shortest = std::min(shortest, run.bytes);
    }
    if (shape_.writers == Writers::all && processes.size() > 1 && shortest >= long_run_) {
      add_runs(tensor, rows, offset);
      return;
    }
    // Whole rows if they fit a window, because cutting a row costs every process one more copy.
    const std::uint64_t most = shape_.window_bytes;
    const std::uint64_t slice =
        rows.row_bytes <= most ? most / std::max<std::uint64_t>(rows.row_bytes, 1) * rows.row_bytes : most;
    for (std::uint64_t at = 0; at < rows.bytes(); at += slice)
      add_slice(tensor, rows, offset, at, std::min(rows.bytes(), at + slice));
  }

  // Each run is written by the process that has it.
  void add_runs(const MergedTensor& tensor, const merge::Rows& rows, std::uint64_t offset) {
    for (std::uint64_t row = 0; row < rows.count; ++row) {
      for (const merge::Run& run : rows.runs) {
        const std::uint64_t begin = row * rows.row_bytes + run.at;
        for (std::uint64_t at = 0; at < run.bytes; at += shape_.window_bytes)
          add_slice(tensor, rows, offset, begin + at, begin + std::min(run.bytes, at + shape_.window_bytes));
      }
    }
  }

  void add_slice(const MergedTensor& tensor, const merge::Rows& rows, std::uint64_t offset, std::uint64_t begin,
                 std::uint64_t end) {
    make_room(offset + begin, end - begin);
    const std::uint64_t to = item_.end - item_.begin;
    for (const merge::Rectangle& part : merge::rectangles(rows, begin, end))
      item_.copies[process_of(tensor, part.source)].push_back({place_of(tensor, part.source), part.from,
                                                               part.from_stride, to + part.to, part.to_stride,
                                                               part.bytes, part.rows});
    item_.has_gaps = item_.has_gaps || rows.has_gaps;
    item_.end += end - begin;
  }

  // The lower half of a window has the file's bytes, the upper half the contributions to reductions.
  void add_reduced(const MergedTensor& tensor, const merge::Rows& rows, std::uint64_t offset) {
    const std::uint64_t half = shape_.window_bytes / 2;
    const std::uint64_t most = std::max(half / rows.runs.size() / alignment, std::uint64_t{1}) * alignment;
    for (std::uint64_t begin = 0; begin < rows.bytes(); begin += most) {
      const std::uint64_t bytes = std::min(rows.bytes() - begin, most);
      if (is_open_ &&
          (item_.scratch + bytes * rows.runs.size() > shape_.window_bytes || item_.end - item_.begin + bytes > half))
        flush();
      make_room(offset + begin, bytes);
      ReduceStep reduction{tensor.layout.combine, tensor.layout.target.dtype, item_.end - item_.begin, bytes, {}};
      for (const merge::Run& run : rows.runs) {
        item_.copies[process_of(tensor, run.source)].push_back(
            {place_of(tensor, run.source), run.begin + begin, bytes, item_.scratch, bytes, bytes, 1});
        reduction.from.push_back(item_.scratch);
        item_.scratch += bytes;
      }
      item_.end += bytes;
      item_.reductions.push_back(std::move(reduction));
    }
  }

  /// Extends the open item by `bytes` at `offset`, or begins a new one.
  void make_room(std::uint64_t offset, std::uint64_t bytes) {
    const std::uint64_t most = item_.reductions.empty() ? shape_.window_bytes : shape_.window_bytes / 2;
    if (is_open_ && (item_.end != offset || item_.end - item_.begin + bytes > most || bytes >= long_run_ ||
                     item_.end - item_.begin >= long_run_))
      flush();
    if (is_open_) return;
    item_ = {offset, offset, shape_.window_bytes / 2, false, {}, {}};
    is_open_ = true;
  }

  void flush() {
    if (!is_open_) return;
    is_open_ = false;
    if (item_.copies.empty()) return;  // only zeros: new files consist of zeros
    // The process that reads an item also writes it.
    if (shape_.all_have_all) {
      auto all = item_.copies.extract(item_.copies.begin());
      all.key() = shape_.writers == Writers::rank0 ? 0 : least_loaded();
      item_.copies.insert(std::move(all));
    }
    const int only = item_.copies.size() == 1 ? item_.copies.begin()->first : -1;
    const int writer = shape_.writers == Writers::rank0 ? 0 : only >= 0 && may_write(only) ? only : least_loaded();
    const bool is_direct = only == writer;
    const std::uint64_t bytes = item_.end - item_.begin;
    Step step;
    step.kind = is_direct ? StepKind::direct : StepKind::window;
    step.has_gaps = item_.has_gaps ? 1 : 0;
    step.file = file_;
    step.offset = item_.begin;
    step.bytes = bytes;
    step.writer = static_cast<std::uint32_t>(writer);
    step.contributors = static_cast<std::uint32_t>(item_.copies.size());
    ProcessWork& own = work_[static_cast<std::size_t>(writer)];
    if (!is_direct) step.turn = own.turns++;
    own.written += bytes;
    std::vector<std::uint32_t> senders;
    for (const auto& [process, copies] : item_.copies)
      if (shape_.host_of(process) != shape_.host_of(writer)) senders.push_back(static_cast<std::uint32_t>(process));
    // The writer has a step even if it copies nothing.
    item_.copies.try_emplace(writer);
    for (auto& [process, copies] : item_.copies) {
      Step mine = step;
      mine.copies = std::move(copies);
      if (process == writer) {
        mine.reductions = std::move(item_.reductions);
        mine.senders = senders;
      }
      work_[static_cast<std::size_t>(process)].steps.push_back(std::move(mine));
    }
  }

  [[nodiscard]] bool may_write(int process) const { return std::ranges::find(writers_, process) != writers_.end(); }

  [[nodiscard]] int least_loaded() const {
    return *std::ranges::min_element(writers_, {},
                                     [this](int process) { return work_[static_cast<std::size_t>(process)].written; });
  }

  std::span<const RankSources> ranks_;
  const AssemblyShape& shape_;
  std::uint64_t long_run_;
  std::vector<ProcessWork> work_;
  std::vector<int> writers_;  // of the current file
  std::set<std::uint32_t> compared_;
  std::uint32_t file_ = 0;
  OpenItem item_;
  bool is_open_ = false;
};

template <class Archive, class Work>
void describe(Archive& archive, Work& work) {
  archive.values(work.turns, work.written, work.window_bytes, work.depth);
  archive.all(work.directory);
  archive.count(work.targets);
  for (auto& target : work.targets) {
    archive.all(target.name);
    archive.all(target.place);
    archive.all(target.ends);
  }
  archive.count(work.views);
  for (auto& view : work.views) {
    archive.all(view.name);
    archive.values(view.spec.dtype, view.stored, view.may_overflow);
    archive.all(view.spec.shape);
    archive.count(view.boxes);
    for (auto& box : view.boxes) {
      archive.values(box.source, box.from, box.to);
      archive.all(box.axes);
    }
  }
  constexpr std::size_t least_step = 40;  // size of its numbers and counts
  archive.count(work.steps, least_step);
  for (auto& step : work.steps) {
    archive.values(step.kind, step.has_gaps, step.file, step.offset, step.bytes, step.writer, step.turn,
                   step.contributors);
    archive.all(step.copies);
    archive.all(step.senders);
    archive.count(step.reductions);
    for (auto& reduction : step.reductions) {
      archive.values(reduction.combine, reduction.dtype, reduction.to, reduction.bytes);
      archive.all(reduction.from);
    }
  }
}

}  // namespace

std::vector<FilePlan> plan_files(std::span<const OutputFile> files) {
  std::vector<FilePlan> plans;
  for (const OutputFile& file : files) {
    FilePlan& planned = plans.emplace_back();
    planned.name = file.name;
    planned.metadata = file.metadata;
    for (const MergedTensor& tensor : file.tensors)
      planned.tensors.push_back({tensor.name, tensor.layout.target.dtype, tensor.layout.target.shape});
    planned.header = make_safetensors_header(planned.tensors, file.metadata, file.name);
    planned.bytes = planned.header.size();
    for (const TensorEntry& entry : planned.tensors) planned.bytes += entry.bytes;
    if (file.begin == 0) continue;
    for (TensorEntry& entry : planned.tensors) entry.offset += file.begin - planned.header.size();
    planned.bytes += file.begin - planned.header.size();
    planned.header.clear();
  }
  return plans;
}

AssemblyPlan plan_assembly(std::span<const OutputFile> files, std::span<const std::vector<SourceRef>> equal,
                           std::span<const RankSources> ranks, const AssemblyShape& shape,
                           const std::set<std::string>& there) {
  AssemblyPlan plan;
  plan.files = plan_files(files);
  Planning planning(ranks, shape);
  for (std::size_t number = 0; number < files.size(); ++number) {
    std::unordered_map<std::string_view, const MergedTensor*> by_name;
    for (const MergedTensor& tensor : files[number].tensors) by_name.emplace(tensor.name, &tensor);
    std::vector<const MergedTensor*> in_order;
    for (const TensorEntry& entry : plan.files[number].tensors) {
      in_order.push_back(by_name.at(entry.name));
      plan.bytes += entry.bytes;
    }
    if (there.contains(files[number].name)) {
      // The file exists, but the run that wrote it may have been killed before the tensors were compared.
      for (const MergedTensor* tensor : in_order)
        for (const std::uint32_t set : tensor->equal) planning.add_comparison(set, equal[set]);
      continue;
    }
    planning.add_file(static_cast<std::uint32_t>(number), plan.files[number], in_order, equal, files[number].writer);
  }
  plan.processes = planning.take();
  return plan;
}

std::vector<std::byte> encode_work(const ProcessWork& work) {
  ByteWriter out;
  describe(out, work);
  return out.take();
}

ProcessWork decode_work(std::span<const std::byte> bytes) {
  ByteReader in(bytes, "the work list of a rank");
  ProcessWork work;
  describe(in, work);
  in.end();
  return work;
}

}  // namespace muster
