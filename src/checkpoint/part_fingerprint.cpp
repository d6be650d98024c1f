// SPDX-License-Identifier: Apache-2.0
// The fingerprint of tensors in the memory of several ranks. With a plan or a dtype, or if a tensor is on a GPU, it is
// that of an export without an output (export_run.hpp). Otherwise no elements are sent:
//
// 1. Every rank checks its parts, and sends rank 0 their names, dtypes and boxes.
// 2. Rank 0 checks that the boxes of each tensor cover it, and cuts boxes that overlap partially. It sends each rank
//    its jobs: boxes inside its parts.
// 3. Every rank sends rank 0 the remainder of each job (merge/box_remainder.hpp), 8 bytes.
// 4. Rank 0 compares the remainders of equal boxes, adds one of each, and sends all ranks the fingerprint.

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>

#include "muster/error.hpp"
#include "muster/fingerprint.hpp"
#include "src/base/byte_archive.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/agreement.hpp"
#include "src/checkpoint/assembly/base_model.hpp"
#include "src/checkpoint/assembly/export_job.hpp"
#include "src/checkpoint/assembly/export_run.hpp"
#include "src/checkpoint/assembly/listing_exchange.hpp"
#include "src/checkpoint/assembly/live_tensors.hpp"
#include "src/checkpoint/fingerprint.hpp"
#include "src/core/crc64.hpp"
#include "src/core/thread_pool.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/group.hpp"
#include "src/merge/box_remainder.hpp"
#include "src/merge/boxes.hpp"
#include "src/trace/span.hpp"

namespace muster {
namespace {

constexpr std::uint64_t longest_answer = std::uint64_t{1} << 32;
constexpr std::size_t most_overlaps = 1'000'000;
// Large enough that tables and calls cost little, small enough that threads share one tensor.
constexpr std::size_t dense_bytes = 4 << 20;
constexpr std::size_t strided_bytes = 256 << 10;
constexpr const char* first_phase = "fingerprint: checking the parts";

/// A part of a rank, without its elements.
struct PartBox {
  int rank = 0;
  std::size_t part = 0;  // its index on the rank
  TensorSpec spec;       // of the whole tensor
  merge::OwnedBox box;
};

/// A box of one part, whose remainder a rank computes.
struct BoxJob {
  std::size_t part = 0;
  merge::OwnedBox box;
};

/// Jobs of equal boxes, as ranks and the numbers of their jobs.
struct EqualJobs {
  std::size_t tensor = 0;
  merge::OwnedBox box;
  bool is_added = true;  // false: they are only compared, because another set has the same elements
  std::vector<std::pair<int, std::size_t>> jobs;
};

std::vector<std::int64_t> numbers_in(const std::vector<std::byte>& message) {
  std::vector<std::int64_t> numbers(message.size() / sizeof(std::int64_t));
  if (!numbers.empty()) std::memcpy(numbers.data(), message.data(), numbers.size() * sizeof(std::int64_t));
  return numbers;
}

merge::OwnedBox box_of(const TensorPart& part) {
  const Shape& extents = part.tensor.shape();
  return {part.offset.empty() ? Shape(extents.size(), 0) : part.offset, extents};
}

// The jobs of a rank: indices of parts, and boxes.
template <class Archive, class Jobs>
void describe(Archive& archive, Jobs& jobs) {
  constexpr std::size_t least_job = 3 * sizeof(std::uint64_t);
  archive.count(jobs, least_job);
  for (auto& job : jobs) {
    archive.values(job.part);
    archive.all(job.box.begin);
    archive.all(job.box.extents);
  }
}

/// On rank 0: the tensors of all ranks, their jobs, and the result.
class PartTensors {
 public:
  PartTensors(const Group& group, const FingerprintOptions& options)
      : group_(group),
        selection_(Request{.select = options.select, .exclude = options.exclude}),
        jobs_(static_cast<std::size_t>(group.size())) {}

  void add(const ShardListing& listing) {
    for (std::size_t i = 0; i < listing.tensors.size(); ++i) {
      const auto& [name, spec] = listing.tensors[i];
      if (!selection_.has(name)) continue;
      const PartPlace& place = listing.places.at(i);
      tensors_[name].push_back({listing.rank, i, {spec.dtype, place.whole}, {place.offset, spec.shape}});
    }
  }

  void plan() {
    if (tensors_.empty() && !selection_.is_all())
      throw Error(ErrorKind::not_found, "fingerprint: no tensor has a selected name. Change the patterns");
    std::size_t number = 0;
    for (const auto& [name, boxes] : tensors_) {
      check_specs(name, boxes);
      plan_tensor(number++, name, boxes);
    }
  }

  [[nodiscard]] const std::vector<BoxJob>& jobs(int rank) const { return jobs_[static_cast<std::size_t>(rank)]; }

  /// `remainders` has those of each rank's jobs.
  [[nodiscard]] Fingerprint result(std::span<const std::vector<std::uint64_t>> remainders) const {
    const auto remainder_of = [&](const std::pair<int, std::size_t>& job) {
      return remainders[static_cast<std::size_t>(job.first)].at(job.second);
    };
    std::vector<std::uint64_t> sums(tensors_.size());
    for (const EqualJobs& set : sets_) {
      const std::uint64_t first = remainder_of(set.jobs.front());
      for (const auto& job : set.jobs)
        if (remainder_of(job) != first) refuse_difference(set, job.first);
      if (set.is_added) sums[set.tensor] ^= first;
    }
    Fingerprint fingerprint;
    for (const auto& [name, boxes] : tensors_) {
      const TensorSpec& spec = boxes.front().spec;
      const std::uint64_t sum = sums[fingerprint.tensors.size()];
      fingerprint.tensors.push_back({name, spec, crc64_of_remainder(sum, byte_size(spec.dtype, spec.shape))});
    }
    return fingerprint;
  }

 private:
  [[nodiscard]] int named(int rank) const { return group_.info(rank).global_rank; }

  void check_specs(const std::string& name, const std::vector<PartBox>& boxes) const {
    for (const PartBox& box : boxes)
      if (box.spec != boxes.front().spec)
        throw Error(
            ErrorKind::rank_mismatch,
            fmt::format("tensor {}: it is {} on rank {}, and {} on rank {}. Pass the same dtype and whole shape "
                        "on all ranks",
                        in_quotes(name), to_string(boxes.front().spec), named(boxes.front().rank), to_string(box.spec),
                        named(box.rank)),
            {.rank = box.rank});
  }

  [[noreturn]] void refuse_difference(const EqualJobs& set, int rank) const {
    const auto& [name, boxes] = *std::next(tensors_.begin(), static_cast<std::ptrdiff_t>(set.tensor));
    throw Error(
        ErrorKind::rank_mismatch,
        fmt::format("tensor {}: rank {} and rank {} have different values of the elements {}, but must have the "
                    "same",
                    in_quotes(name), named(set.jobs.front().first), named(rank), merge::box_text(set.box.view())),
        {.rank = rank});
  }

  std::pair<int, std::size_t> add_job(const PartBox& on, const merge::OwnedBox& box) {
    std::vector<BoxJob>& jobs = jobs_[static_cast<std::size_t>(on.rank)];
    jobs.push_back({on.part, box});
    return {on.rank, jobs.size() - 1};
  }

  void plan_tensor(std::size_t number, const std::string& name, const std::vector<PartBox>& boxes) {
    // Replicas are one box.
    std::map<std::pair<Shape, Shape>, std::vector<const PartBox*>> by_box;
    for (const PartBox& box : boxes)
      if (merge::volume(box.box.extents) != 0) by_box[{box.box.begin, box.box.extents}].push_back(&box);
    std::vector<const PartBox*> distinct;
    std::vector<merge::BoxView> views;
    for (const auto& [box, holders] : by_box) {
      distinct.push_back(holders.front());
      views.push_back(holders.front()->box.view());
    }
    const merge::Cover cover = merge::cover_of(views, most_overlaps);
    if (!cover.is_known || cover.overlaps.size() == most_overlaps)
      throw Error(
          ErrorKind::unsupported,
          fmt::format("tensor {}: it has too many parts that overlap. Pass each element once", in_quotes(name)));
    std::uint64_t elements = cover.elements;
    if (!cover.overlaps.empty()) elements = plan_overlaps(number, distinct, cover);
    for (const auto& [box, holders] : by_box) {
      if (!cover.overlaps.empty() && holders.size() == 1) continue;
      EqualJobs& set = sets_.emplace_back(EqualJobs{number, holders.front()->box, cover.overlaps.empty(), {}});
      for (const PartBox* const holder : holders) set.jobs.push_back(add_job(*holder, holder->box));
    }
    const std::uint64_t all = merge::volume(boxes.front().spec.shape);
    if (elements != all)
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("tensor {}: the parts of all ranks cover {} of {} elements of {}. Pass all parts",
                              in_quotes(name), elements, all, to_string(boxes.front().spec)));
  }

  /// Plans boxes that overlap partially, and returns the number of elements that are covered.
  std::uint64_t plan_overlaps(std::size_t number, std::span<const PartBox* const> distinct, const merge::Cover& cover) {
    std::vector<merge::SourceBox> sources;
    for (std::size_t i = 0; i < distinct.size(); ++i)
      sources.push_back({static_cast<int>(i), distinct[i]->box, distinct[i]->box});
    std::vector<merge::CommonBox> common;
    std::uint64_t elements = 0;
    for (const merge::SourceBox& piece : merge::cut_overlaps(std::move(sources), cover.overlaps, common)) {
      elements += merge::volume(piece.box.extents);
      const PartBox& on = *distinct[static_cast<std::size_t>(piece.source)];
      sets_.push_back({number, piece.box, true, {add_job(on, piece.box)}});
    }
    for (const merge::CommonBox& shared : common) {
      const PartBox& a = *distinct[static_cast<std::size_t>(shared.source)];
      const PartBox& b = *distinct[static_cast<std::size_t>(shared.other)];
      sets_.push_back({number, shared.box, false, {add_job(a, shared.box), add_job(b, shared.box)}});
    }
    return elements;
  }

  const Group& group_;
  const TensorSelection selection_;
  std::map<std::string, std::vector<PartBox>> tensors_;
  std::vector<std::vector<BoxJob>> jobs_;  // by rank
  std::vector<EqualJobs> sets_;
};

void check_options(const FingerprintOptions& options) {
  if (!options.job_id.empty() || options.step || options.rank || !options.key.empty() || !options.file_pattern.empty())
    throw Error(ErrorKind::unsupported,
                "fingerprint: job_id, step, rank, key and file_pattern are for files, not for tensors in memory. Leave "
                "them out");
}

class PartFingerprint {
 public:
  PartFingerprint(std::span<const TensorPart> parts, Group& group, const FingerprintOptions& options)
      : parts_(parts), group_(group::inside(group)), options_(options) {}

  /// `listing` is that of this rank's parts. Returns the fingerprint on rank 0.
  std::optional<Fingerprint> run(std::vector<std::byte> listing) {
    const std::vector<std::vector<std::byte>> told = gather_listings(group_, std::move(listing));
    agree_on(group_, "fingerprint: planning", [&] {
      if (!is_first()) return;
      tensors_.emplace(group_, options_);
      std::vector<RankRoom> rooms;
      for (const ShardListing& rank : read_listings(told, {}, rooms)) tensors_->add(rank);
      tensors_->plan();
    });
    hand_out_jobs();
    agree_on(group_, "fingerprint: reading", [&] { read(); });
    gather_remainders();
    std::optional<Fingerprint> fingerprint;
    agree_on(group_, "fingerprint: comparing", [&] {
      if (is_first()) fingerprint = tensors_->result(all_remainders_);
    });
    return fingerprint;
  }

 private:
  [[nodiscard]] bool is_first() const { return group_.rank() == 0; }

  void send(int rank, std::span<const std::byte> message) {
    group_.send(rank, message, {.phase = "fingerprint"}, group::Subject::exchange);
  }
  std::vector<std::byte> receive(int rank) {
    return group_.receive(rank, longest_answer, {.phase = "fingerprint"}, group::Subject::exchange);
  }

  // Runs step 2.
  void hand_out_jobs() {
    if (is_first()) {
      jobs_ = tensors_->jobs(0);
      for (int rank = 1; rank < group_.size(); ++rank) {
        ByteWriter out;
        describe(out, tensors_->jobs(rank));
        send(rank, out.take());
      }
      return;
    }
    const std::vector<std::byte> message = receive(0);
    or_fail(group_, [&] {
      ByteReader in(message, "the work of a fingerprint");
      describe(in, jobs_);
      in.end();
      for (const BoxJob& job : jobs_)
        if (job.part >= parts_.size() || !is_in_part(job)) in.refuse();
    });
  }

  [[nodiscard]] bool is_in_part(const BoxJob& job) const {
    const merge::OwnedBox part = box_of(parts_[job.part]);
    if (job.box.begin.size() != part.begin.size()) return false;
    Shape inside = job.box.begin;
    for (std::size_t dim = 0; dim < inside.size(); ++dim) inside[dim] -= part.begin[dim];
    return merge::is_inside({inside, job.box.extents}, part.extents);
  }

  void read() {
    std::vector<merge::PlacedBox> pieces;
    std::vector<std::size_t> job_of;  // of each piece
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < jobs_.size(); ++i) {
      const TensorPart& part = parts_[jobs_[i].part];
      const merge::OwnedBox all = box_of(part);
      merge::PlacedBox placed{part.tensor, part.whole.empty() ? all.extents : part.whole, all.begin};
      for (std::size_t dim = 0; dim < placed.begin.size(); ++dim) {
        // Packed tensors refuse even a slice of everything in a dimension that ends inside a byte.
        if (jobs_[i].box.extents[dim] == all.extents[dim]) continue;
        const std::int64_t begin = jobs_[i].box.begin[dim] - placed.begin[dim];
        placed.view = placed.view.slice(dim, begin, begin + jobs_[i].box.extents[dim]);
        placed.begin[dim] += begin;
      }
      const std::size_t most = placed.view.is_contiguous() ? dense_bytes : strided_bytes;
      merge::cut_box(merge::in_bytes(std::move(placed), part.name), most, pieces);
      job_of.resize(pieces.size(), i);
    }
    for (const merge::PlacedBox& piece : pieces) total += piece.view.nbytes();
    ProgressCounter counter(options_.progress, total);
    std::vector<std::atomic<std::uint64_t>> remainders(jobs_.size());
    std::vector<std::vector<std::byte>> memory(copy_workers(group::ranks_of_host(group_)));
    parallel_for(pieces.size(), memory.size(), [&](std::size_t index, std::size_t worker) {
      remainders[job_of[index]] ^= merge::box_remainder(pieces[index], memory[worker]);
      counter.add(pieces[index].view.nbytes());
      go_on(group_);
    });
    remainders_.assign(remainders.begin(), remainders.end());
  }

  // Runs step 3.
  void gather_remainders() {
    if (!is_first()) return send(0, std::as_bytes(std::span(remainders_)));
    all_remainders_.push_back(std::move(remainders_));
    for (int rank = 1; rank < group_.size(); ++rank) {
      const std::vector<std::int64_t> numbers = numbers_in(receive(rank));
      all_remainders_.emplace_back(numbers.begin(), numbers.end());
    }
  }

  const std::span<const TensorPart> parts_;
  group::BaseGroup& group_;
  const FingerprintOptions& options_;
  // Used on rank 0.
  std::optional<PartTensors> tensors_;
  std::vector<std::vector<std::uint64_t>> all_remainders_;  // by rank
  // Used on all ranks.
  std::vector<BoxJob> jobs_;
  std::vector<std::uint64_t> remainders_;
};

/// Collective. Returns, on all ranks, whether rank 0 wants a plan or a dtype, or a rank has a tensor on a GPU.
bool needs_windows(std::span<const TensorPart> parts, Group& group, const FingerprintOptions& options) {
  const bool is_changed = group.rank() == 0 && (!options.plan.empty() || options.dtype);
  const bool has_device =
      std::ranges::any_of(parts, [](const TensorPart& part) { return !part.tensor.device().is_host(); });
  return group::inside(group).any(is_changed || has_device, {.phase = first_phase});
}

std::optional<Fingerprint> fingerprint_through_windows(std::span<const TensorPart> parts, Group& group,
                                                       const FingerprintOptions& options, trace::Span& span) {
  const ExportOptions wanted{.writers = Writers::all,
                             .source_layout = options.source_layout,
                             .dtype = options.dtype,
                             .cast_all = options.cast_all,
                             .base_model = options.base_model,
                             .select = options.select,
                             .exclude = options.exclude,
                             .fingerprint = true,
                             .progress = options.progress};
  Request request = request_of({}, options.plan, wanted);
  request.by_boxes = options.plan.empty();
  request.looks_only = true;
  ExportRun run(group, request, {}, wanted, [&](Group& ranks) { return std::make_unique<LiveTensors>(parts, ranks); });
  return run.take_fingerprint(span);
}

/// Collective. Returns the fingerprint of rank 0 on all ranks.
Fingerprint spread(group::BaseGroup& group, std::optional<Fingerprint> fingerprint) {
  const WaitOptions wait{.phase = "fingerprint"};
  if (group.rank() != 0) {
    const std::vector<std::byte> text = group.receive(0, longest_answer, wait, group::Subject::exchange);
    return parse_fingerprint({reinterpret_cast<const char*>(text.data()), text.size()});
  }
  const std::string text = group.size() == 1 ? std::string() : fingerprint->text();
  for (int rank = 1; rank < group.size(); ++rank)
    group.send(rank, std::as_bytes(std::span(text)), wait, group::Subject::exchange);
  return std::move(*fingerprint);
}

}  // namespace

void refuse_fingerprint(Group& group, const Error& failure) {
  const group::GroupLock use(group);
  const trace::Span span(trace::SpanKind::phase, "fingerprint", group::inside(group).operations().next());
  agree(group::inside(group), failure, first_phase);
}

Fingerprint fingerprint(std::span<const TensorPart> parts, Group& group, const FingerprintOptions& options) {
  const group::GroupLock use(group);
  trace::Span span(trace::SpanKind::phase, "fingerprint", group::inside(group).operations().next());
  const FailOnStop on_stop = fail_on_stop(group, options.stop);
  std::vector<std::byte> listing;
  agree_on(group::inside(group), first_phase, [&] {
    if (group.rank() == 0) check_options(options);
    listing = encode_listings(LiveTensors(parts, group));
  });
  return spread(group::inside(group), needs_windows(parts, group, options)
                                          ? fingerprint_through_windows(parts, group, options, span)
                                          : PartFingerprint(parts, group, options).run(std::move(listing)));
}

}  // namespace muster
