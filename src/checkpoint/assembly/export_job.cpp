// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/assembly/export_job.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/base_model.hpp"
#include "src/checkpoint/assembly/checksums.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/plan/box_arrangement.hpp"
#include "src/checkpoint/plan/model_config.hpp"
#include "src/checkpoint/plan/placement.hpp"
#include "src/checkpoint/plan/viewed_tensors.hpp"

namespace muster {
namespace {

constexpr std::uint64_t largest_window = 8 << 20;
constexpr std::uint64_t smallest_window = 64 << 10;
// Buffers of a process for its messages: one that is packed or copied, one that the group holds, and one in flight.
constexpr std::uint64_t copies_of_mail = 3;

/// Numbers the sets of an arrangement's tensors; `numbers[i]` are those of tensor i.
std::vector<std::vector<std::uint32_t>> number_sets(const Arrangement& arrangement, ExportOutputs& outputs) {
  std::vector<std::vector<std::uint32_t>> numbers;
  for (const ArrangedTensor& tensor : arrangement.tensors) {
    auto& mine = numbers.emplace_back();
    for (const auto& set : tensor.equal) {
      mine.push_back(static_cast<std::uint32_t>(outputs.equal.size()));
      outputs.equal.push_back(set);
      outputs.equal_names.push_back(tensor.origin);
    }
  }
  return numbers;
}

/// Returns the single source of a tensor; such a tensor can be cut along any dimension.
const merge::UnitRange* only_piece(const merge::Layout& layout) {
  if (layout.combine != merge::Combine::copy || layout.pieces.size() != 1) return nullptr;
  const merge::UnitRange& piece = layout.pieces.front();
  const std::int64_t units = layout.source_units[static_cast<std::size_t>(piece.source)];
  return piece.begin == 0 && piece.count == layout.target_units && units == layout.target_units ? &piece : nullptr;
}

/// Counts tensors that views left out, which are not among the tensors of any rank.
void account_for_left_out(const std::vector<ShardListing>& listings, std::span<const std::vector<LeftOut>> left_out,
                          ExportManifest& account) {
  for (std::size_t rank = 0; rank < listings.size(); ++rank)
    for (const LeftOut& left : left_out[rank]) {
      const NamedSpec& tensor = listings[rank].tensors[left.index];
      account.dropped.push_back({{},
                                 tensor.name,
                                 left.view,
                                 "drop",
                                 tensor.spec,
                                 {{listings[rank].rank, tensor.name, tensor.spec}},
                                 {},
                                 left.reason});
      ++account.tensors_in;
      account.bytes_in += byte_size(tensor.spec.dtype, tensor.spec.shape);
    }
}

/// `ranks` are the inputs of the arrangement. Throws Error(corrupt) if a tensor of a rank is in no file of the result.
/// That would be a bug of Muster, and failing is better than an incomplete checkpoint.
ExportManifest account_for(const MergePlan& plan, const ParallelLayout& layout, std::span<const RankTensors> ranks,
                           const Arrangement& arrangement, const ExportOutputs& outputs,
                           const std::optional<ParallelLayout>& to) {
  ExportManifest account{plan.name(), layout, to, {}, {}, 0, 0, 0, 0, outputs.files.size(), {}};
  for (const RankTensors& rank : ranks) {
    account.tensors_in += rank.tensors.size();
    for (const NamedSpec& tensor : rank.tensors) account.bytes_in += byte_size(tensor.spec.dtype, tensor.spec.shape);
  }
  std::unordered_map<std::string_view, std::string_view> files;
  for (const OutputFile& file : outputs.files) {
    account.tensors_out += file.tensors.size();
    for (const MergedTensor& tensor : file.tensors) {
      account.bytes_out += byte_size(tensor.layout.target.dtype, tensor.layout.target.shape);
      if (!to) files.emplace(tensor.name, file.name);
    }
  }
  std::vector<std::vector<bool>> seen;
  for (const RankTensors& rank : ranks) seen.emplace_back(rank.tensors.size(), false);
  const auto add = [&](TensorMapping& item, const std::vector<SourceRef>& refs) {
    for (const SourceRef& ref : refs) {
      const auto rank = static_cast<std::size_t>(ref.rank);
      if (seen[rank][ref.index]) continue;
      seen[rank][ref.index] = true;
      const NamedSpec& tensor = ranks[rank].tensors[ref.index];
      item.sources.push_back({ref.rank, tensor.name, tensor.spec});
    }
  };
  for (const ArrangedTensor& tensor : arrangement.tensors) {
    TensorMapping& item = account.tensors.emplace_back(
        TensorMapping{to ? tensor.origin : tensor.name,
                      tensor.origin,
                      tensor.rule->number,
                      std::string(plan.name() == by_boxes_name ? by_boxes_name : action_name(tensor.rule->action)),
                      tensor.layout.target,
                      {},
                      {}});
    if (const auto file = files.find(tensor.name); file != files.end()) item.file = file->second;
    add(item, tensor.sources);
    for (const auto& set : tensor.equal) add(item, set);
    add(item, tensor.unused);
  }
  for (const DroppedTensor& tensor : arrangement.dropped) {
    TensorMapping& item = account.dropped.emplace_back(TensorMapping{{},
                                                                     tensor.origin,
                                                                     tensor.rule->number,
                                                                     std::string(action_name(tensor.rule->action)),
                                                                     {},
                                                                     {},
                                                                     {},
                                                                     tensor.reason});
    add(item, tensor.sources);
    if (!item.sources.empty()) item.spec = item.sources.front().spec;
  }
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    for (std::size_t i = 0; i < seen[rank].size(); ++i)
      if (!seen[rank][i])
        throw Error(ErrorKind::corrupt,
                    fmt::format("internal error: tensor {} of rank {} is in no file of the result. Nothing is written; "
                                "please report this",
                                in_quotes(ranks[rank].tensors[i].name), rank),
                    {.rank = static_cast<int>(rank)});
  return account;
}

std::string fingerprint_of(const std::vector<ShardListing>& listings, const ExportJob& job) {
  const ExportOutputs& outputs = job.outputs;
  std::string text = "muster export 1\n";
  for (const ShardListing& listing : listings) text += listing.identity + "\n";
  for (const auto& views : job.views)
    for (const ViewedTensor& view : views) {
      text += fmt::format("{} {} ", view.name, to_string(view.spec));
      for (const merge::StridedBox& box : view.boxes) {
        text += fmt::format("{}:{}>{}", box.source, box.from, box.to);
        for (const merge::BoxAxis& axis : box.axes) text += fmt::format(",{}:{}>{}", axis.count, axis.from, axis.to);
      }
      text += '\n';
    }
  for (const FilePlan& file : plan_files(outputs.files)) text += file.name + file.header;
  for (const OutputFile& file : outputs.files) {
    for (const MergedTensor& tensor : file.tensors) {
      text += fmt::format("\n{} {} ", tensor.name, static_cast<int>(tensor.layout.combine));
      for (const merge::UnitRange& piece : tensor.layout.pieces) {
        const SourceRef& ref = tensor.sources[static_cast<std::size_t>(piece.source)];
        text += fmt::format("{}.{}:{}+{}>{} ", ref.rank, ref.index, piece.begin, piece.count, piece.at);
      }
    }
  }
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

/// Leaves out tensors that the request does not select.
void keep_selected(Arrangement& arrangement, const Request& request) {
  const TensorSelection selection(request);
  if (selection.is_all()) return;
  std::vector<ArrangedTensor> kept;
  for (ArrangedTensor& tensor : arrangement.tensors) {
    if (selection.has(tensor.name)) {
      kept.push_back(std::move(tensor));
      continue;
    }
    arrangement.dropped.push_back(to_dropped(std::move(tensor), "it was not selected"));
  }
  arrangement.tensors = std::move(kept);
  if (arrangement.tensors.empty() && !request.is_unit) refuse_selection(request);
}

std::vector<NamedSpec> specs_of(const Arrangement& arrangement) {
  std::vector<NamedSpec> specs;
  for (const ArrangedTensor& tensor : arrangement.tensors) specs.push_back({tensor.name, tensor.layout.target});
  return specs;
}

/// The casts of a request. Scales and other parts of quantised weights are not cast. Neither are tensors that the base
/// keeps in F32 among tensors of another dtype, such as a router's bias or A_log. Without a base, the source itself
/// decides.
class Casting {
 public:
  Casting(const Request& request, const Arrangement& arrangement, const BaseTensors& base)
      : request_(request), base_(base), model_(specs_of(arrangement)), parts_(model_) {
    std::vector<NamedSpec> reference = model_;
    for (NamedSpec& tensor : reference) tensor.spec = reference_of(tensor);
    usual_ = most_used_float(reference);
  }

  /// Sets the dtypes of the sources of every selected tensor. They are arranged again after that.
  void operator()(ExportJob& job, const Arrangement& arrangement, std::vector<std::string>& notes) {
    for (std::size_t rank = 0; rank < job.ranks.size(); ++rank)
      if (job.views[rank].empty())
        for (const NamedSpec& tensor : job.ranks[rank].tensors)
          job.views[rank].push_back(as_it_lies(tensor, job.views[rank].size()));
    const TensorSelection selection(request_);
    for (std::size_t i = 0; i < arrangement.tensors.size(); ++i) {
      const ArrangedTensor& tensor = arrangement.tensors[i];
      if (!selection.has(tensor.name)) continue;
      const std::optional<DType> dtype = dtype_of(model_[i]);
      if (!dtype) continue;
      cast(job, tensor, tensor.sources, *dtype);
      for (const auto& set : tensor.equal) cast(job, tensor, set, *dtype);
      cast(job, tensor, tensor.unused, *dtype);
    }
    note_names(notes, scales_, "parts of quantised weights keep their dtype");
    note_names(
        notes, wide_,
        fmt::format("these tensors are F32 among {1} in the {0}, and remain F32. Pass --cast-all to cast them as well",
                    base_.empty() ? "source" : "base model", to_string(usual_.value_or(DType::f32))));
  }

 private:
  [[nodiscard]] TensorSpec reference_of(const NamedSpec& tensor) const {
    const auto there = base_.find(tensor.name);
    return there != base_.end() && there->second ? *there->second : tensor.spec;
  }

  std::optional<DType> dtype_of(const NamedSpec& tensor) {
    const DType dtype = tensor.spec.dtype;
    if (parts_.has(tensor) && (!is_quantised_dtype(dtype) || !weights_of_scale(tensor.name).empty())) {
      if (is_wide_float(dtype) && dtype != request_.dtype) scales_.push_back(tensor.name);
      return std::nullopt;
    }
    const bool is_kept = !request_.cast_all && usual_ && usual_ != DType::f32 && is_wide_float(dtype) &&
                         reference_of(tensor).dtype == DType::f32;
    if (!is_kept || request_.dtype == DType::f32) return request_.dtype;
    wide_.push_back(tensor.name);
    return DType::f32;
  }

  static void cast(ExportJob& job, const ArrangedTensor& tensor, std::span<const SourceRef> refs, DType dtype) {
    for (const SourceRef& ref : refs) {
      const auto rank = static_cast<std::size_t>(ref.rank);
      ViewedTensor& view = job.views[rank][ref.index];
      try {
        cast_view(view, dtype);
      } catch (const Error& error) {
        throw error.with_context(fmt::format("tensor {}", in_quotes(tensor.name)));
      }
      job.ranks[rank].tensors[ref.index].spec = view.spec;
    }
  }

  const Request& request_;
  const BaseTensors& base_;
  std::vector<NamedSpec> model_;
  PackedParts parts_;
  std::optional<DType> usual_;
  std::vector<std::string> scales_;
  std::vector<std::string> wide_;
};

/// Sets the job's tensors of all ranks, as its plan views them.
void view_shards(const Request& request, ExportJob& job, const std::vector<ShardListing>& listings,
                 const ParallelLayout& layout) {
  // The shapes of a unit may not determine the numbers of heads, so that units might guess differently.
  if (!listings.empty() && !request.is_unit) fit_to(job.plan, listings.front().tensors, layout.tensor);
  for (const ShardListing& listing : listings) {
    for (std::size_t i = 0; !request.by_boxes && i < listing.places.size(); ++i)
      if (listing.places[i].whole != listing.tensors[i].spec.shape)
        throw Error(ErrorKind::invalid_argument,
                    fmt::format("tensor {} of rank {}: it has a whole shape and an offset, but the plan describes the "
                                "parts. Pass an empty plan, or leave both out",
                                in_quotes(listing.tensors[i].name), listing.rank),
                    {.rank = listing.rank});
    // Boxes have no views.
    ViewedRank viewed = request.by_boxes ? ViewedRank{to_rank_tensors(listing), {}, {}}
                                         : view_rank(job.plan, layout, to_rank_tensors(listing));
    job.counts.push_back(listing.tensors.size());
    job.ranks.push_back(std::move(viewed.tensors));
    job.views.push_back(std::move(viewed.views));
    job.left_out.push_back(std::move(viewed.left_out));
  }
}

Arrangement arranged(const Request& request, const ExportJob& job, const ParallelLayout& layout) {
  if (request.by_boxes)
    return arrange_boxes(job.plan, job.ranks,
                         {.is_balanced = request.is_balanced, .check_replicas = request.check_replicas});
  Arrangement arrangement = arrange(job.plan, layout, job.ranks, request.is_unit ? Extent::unit : Extent::model);
  if (request.check_replicas) return arrangement;
  const auto name_of = [&](const SourceRef& ref) -> const std::string& {
    return job.ranks[static_cast<std::size_t>(ref.rank)].tensors[ref.index].name;
  };
  for (ArrangedTensor& tensor : arrangement.tensors) {
    // Tied tensors have several names. They are no replicas: the result has only one of them.
    const auto replicas = std::ranges::stable_partition(tensor.equal, [&](const std::vector<SourceRef>& set) {
      return std::ranges::any_of(set, [&](const SourceRef& ref) { return name_of(ref) != name_of(set.front()); });
    });
    for (const auto& set : replicas) tensor.unused.insert(tensor.unused.end(), set.begin(), set.end());
    tensor.equal.erase(replicas.begin(), replicas.end());
  }
  return arrangement;
}

/// Returns shards of the arranged model, cut by a separate plan.
ExportOutputs shards_by_another_plan(const Request& request, const Arrangement& arrangement, const Config* config,
                                     const Metadata& metadata, std::vector<std::string>& notes) {
  MergePlan plan = MergePlan::load(request.to_plan.empty() ? "auto" : request.to_plan, config);
  if (has_views(plan))
    throw Error(ErrorKind::invalid_argument,
                fmt::format("plan {}: a plan with views cannot be the target plan of an export. Run muster shard {} "
                            "--plan PLAN --to-plan {} in one process instead",
                            in_quotes(plan.name()), request.path, plan.name()));
  fit_to(plan, specs_of(arrangement));
  const std::vector<WholeTensor> wholes = wholes_of(plan, specs_of(arrangement));
  Arrangement anew = arrangement;
  for (std::size_t i = 0; i < wholes.size(); ++i) {
    anew.tensors[i].origin = wholes[i].origin;
    anew.tensors[i].rule = wholes[i].rule;
  }
  notes.push_back(fmt::format("the shards have the plan {}", in_quotes(plan.name())));
  return shard_outputs(anew, plan, *request.target_layout, metadata);
}

/// Throws if the model has names that belong to ranks, before the plan's views.
void check_names(const MergePlan& plan, std::span<const NamedSpec> model) {
  for (const NamedSpec& tensor : model)
    if (std::ranges::any_of(plan.views(), [&](const ViewRule& view) { return view.pattern.matches(tensor.name); }) &&
        !plan.origin(tensor.name))
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("tensor {}: the name is one that the plan {} gives to ranks. Pass that plan as --plan, "
                              "and the plan of the result as --to-plan",
                              in_quotes(tensor.name), in_quotes(plan.name())));
}

}  // namespace

ExportOutputs checkpoint_outputs(const Arrangement& arrangement, std::uint64_t max_shard_size, const Metadata& metadata,
                                 std::string_view stem) {
  ExportOutputs outputs;
  const auto sets = number_sets(arrangement, outputs);
  std::vector<TensorEntry> entries;
  for (const ArrangedTensor& tensor : arrangement.tensors)
    entries.push_back({tensor.name, tensor.layout.target.dtype, tensor.layout.target.shape});
  FileLayout shards = split_into_files(entries, max_shard_size, stem);
  outputs.index = std::move(shards.index);
  outputs.index_name = fmt::format("{}.safetensors.index.json", stem);
  for (CheckpointFile& file : shards.files) {
    OutputFile& output = outputs.files.emplace_back();
    output.name = std::move(file.name);
    output.metadata = metadata;
    // Loaders of other projects check this key before they read a file.
    output.metadata.try_emplace("format", "pt");
    for (const std::size_t i : file.tensors) {
      const ArrangedTensor& tensor = arrangement.tensors[i];
      output.tensors.push_back({tensor.name, tensor.layout, tensor.sources, sets[i]});
    }
  }
  return outputs;
}

ExportOutputs shard_outputs(const Arrangement& arrangement, const MergePlan& plan, const ParallelLayout& layout,
                            const Metadata& metadata) {
  ExportOutputs outputs;
  const auto sets = number_sets(arrangement, outputs);
  std::vector<WholeTensor> wholes;
  for (const ArrangedTensor& tensor : arrangement.tensors)
    wholes.push_back({tensor.origin, tensor.rule, tensor.layout.target});
  Placement placement = place(plan, layout, wholes);
  outputs.notes = std::move(placement.notes);
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    OutputFile& output = outputs.files.emplace_back();
    output.name = shard_file_name(rank, layout.ranks());
    output.metadata = metadata;
    output.metadata[std::string(shard_metadata_key)] = shard_facts_text({rank,
                                                                         layout.ranks(),
                                                                         placement.padded[at],
                                                                         layout,
                                                                         {plan.name(), plan.text()},
                                                                         placement.heads[at],
                                                                         placement.blocked[at]});
    for (const PlacedTensor& placed : placement.ranks[at]) {
      const ArrangedTensor& tensor = arrangement.tensors[placed.whole];
      const merge::Cut& cut = placement.cuts[placed.whole];
      if (const merge::UnitRange* piece = only_piece(tensor.layout))
        output.tensors.push_back({placed.name,
                                  merge::part_of(cut, placed.part),
                                  {tensor.sources[static_cast<std::size_t>(piece->source)]},
                                  sets[placed.whole]});
      else
        output.tensors.push_back(
            {placed.name, merge::compose(tensor.layout, cut, placed.part), tensor.sources, sets[placed.whole]});
    }
    if (!make_room_for_checksums(output) && rank == 0)
      outputs.notes.push_back(
          "the shards have no checksums, because the headers would be too long for the number of tensors");
  }
  return outputs;
}

bool make_room_for_checksums(OutputFile& file) {
  // The size of an entry without its name: dtype, shape and offsets.
  constexpr std::uint64_t entry_bytes = 160;
  std::string sums = piece_checksums_text(no_piece_checksums(file.tensors));
  std::uint64_t bytes = to_json(Config(sums)).size();
  for (const MergedTensor& tensor : file.tensors) bytes += tensor.name.size() + entry_bytes;
  for (const auto& [key, text] : file.metadata) bytes += key.size() + text.size();
  if (bytes > max_safetensors_header) return false;
  file.metadata[std::string(piece_checksums_key)] = std::move(sums);
  return true;
}

Arrangement arrange_model(const MergePlan& plan, std::span<const NamedSpec> model) {
  Arrangement arrangement;
  const std::vector<WholeTensor> wholes = wholes_of(plan, model);
  for (std::uint32_t index = 0; index < wholes.size(); ++index) {
    const WholeTensor& whole = wholes[index];
    arrangement.tensors.push_back({model[index].name,
                                   whole.origin,
                                   whole.rule,
                                   merge::join(merge::First{}, std::span(&whole.spec, 1)),
                                   {{0, index}},
                                   {},
                                   {}});
  }
  note_unused_rules(plan, rules_used(arrangement), arrangement.notes);
  return arrangement;
}

Request request_of(const std::string& path, const std::string& plan, const ExportOptions& options) {
  return {.path = path,
          .plan = plan,
          .source_layout = options.source_layout,
          .target_layout = options.target_layout,
          .to_plan = options.to_plan,
          .base_model = options.base_model,
          .states = {{}, options.step, options.job_id},
          .thirdparty = {options.key, options.file_pattern},
          .select = options.select,
          .exclude = options.exclude,
          .dtype = options.dtype,
          .cast_all = options.cast_all,
          .max_shard_size = options.max_shard_size,
          .files = options.files,
          .check_replicas = options.check_replicas};
}

ExportJob plan_job(const Request& request, const ExportSource& source, std::vector<ShardListing> listings) {
  std::ranges::sort(listings, {}, &ShardListing::rank);
  std::vector<std::string> notes = source.notes();
  ModelFacts facts = request.is_unit && request.by_boxes ? ModelFacts() : source.facts(request, notes);
  const Config* const config = facts.config ? &*facts.config : nullptr;
  const Config* const own = facts.is_own ? config : nullptr;
  const bool is_whole = !request.looks_only && !request.is_unit;
  const bool has_base = !request.base_model.empty() && is_whole;
  const BaseTensors base = has_base ? base_tensors(request.base_model, notes) : BaseTensors();
  ExportJob job{.plan = request.by_boxes ? plan_of_boxes(config) : plan_of(listings, request.plan, config, notes)};
  if (!request.target_layout && !request.is_cut && !request.to_plan.empty())
    throw Error(ErrorKind::invalid_argument, "--to-plan needs a layout. Pass --to LAYOUT");
  if (request.target_layout && request.to_plan.empty() && job.plan.name() == as_it_is)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("{} is a whole model, and sharding it for {} ranks needs a plan. Pass --to-plan auto "
                            "(chosen by config.json), the name of a built-in plan, or a file",
                            in_quotes(request.path), request.target_layout->ranks()),
                {.path = request.path});
  remove_wrappers(job.plan, listings, base, notes);
  const ParallelLayout layout = layout_of(listings, request.source_layout);
  view_shards(request, job, listings, layout);
  Arrangement arrangement = arranged(request, job, layout);
  if (request.dtype) {
    Casting(request, arrangement, base)(job, arrangement, notes);
    arrangement = arranged(request, job, layout);
  }
  if (!request.is_unit) {
    fit_to(job.plan, specs_of(arrangement));
    check_against_config(job.plan, specs_of(arrangement));
  }
  keep_selected(arrangement, request);
  if (is_whole) {
    const std::vector<NamedSpec> model = specs_of(arrangement);
    // Precedes the comparison with the base: names of ranks would not match the base either, but this error has the
    // remedy.
    if (request.is_cut && !request.to_plan.empty()) check_names(MergePlan::load(request.to_plan, own), model);
    const bool has_config_file = request.files.contains("config.json");
    const bool updates =
        own && !request.target_layout && !request.is_cut && (request.dtype || has_base || has_config_file);
    if (updates && TensorSelection(request).is_all()) {
      check_base(*own, model);
      const bool is_base_complete = std::ranges::all_of(
          arrangement.tensors, [&](const ArrangedTensor& tensor) { return base.contains(tensor.name); });
      if (!request.is_version || !is_base_complete) leave_out_tied_head(*own, base, arrangement, notes);
    }
    if (!request.is_version) compare_with_base(request, config, specs_of(arrangement), base, notes);
    if (updates && !has_config_file) {
      const std::string& around = request.base_model.empty() ? request.path : request.base_model;
      if (auto text = updated_config(read_model_config_text(around).value_or(""), model, notes))
        job.config_text = std::move(*text);
    }
  }
  if (!request.target_layout)
    job.outputs = checkpoint_outputs(arrangement, request.max_shard_size, source.metadata(),
                                     model_stem(request.base_model.empty() ? request.path : request.base_model));
  else if (request.to_plan.empty() && !has_views(job.plan))
    job.outputs = shard_outputs(arrangement, job.plan, *request.target_layout, source.metadata());
  else
    job.outputs = shards_by_another_plan(request, arrangement, config, source.metadata(), notes);
  job.account = account_for(job.plan, layout, job.ranks, arrangement, job.outputs, request.target_layout);
  account_for_left_out(listings, job.left_out, job.account);
  for (const std::vector<std::string>& more : {arrangement.notes, job.outputs.notes})
    notes.insert(notes.end(), more.begin(), more.end());
  job.account.notes = std::move(notes);
  job.fingerprint = fingerprint_of(listings, job);
  job.config = std::move(facts.config);
  return job;
}

std::string config_text_for(const Request& request, std::span<const NamedSpec> model, std::vector<std::string>& notes) {
  const std::optional<Config> config = config_of(request);
  MergePlan plan = plan_of_boxes(config ? &*config : nullptr);
  fit_to(plan, model);
  check_against_config(plan, model);
  const BaseTensors base = request.base_model.empty() ? BaseTensors() : base_tensors(request.base_model, notes);
  if (config && TensorSelection(request).is_all()) check_base(*config, model);
  compare_with_base(request, config ? &*config : nullptr, model, base, notes);
  if (!config || request.files.contains("config.json")) return {};
  return updated_config(read_model_config_text(request.base_model).value_or(""), model, notes).value_or("");
}

Writers writers_of(const ExportOptions& options, bool all_have_all, bool by_network) {
  return options.writers.value_or(all_have_all || by_network ? Writers::all : Writers::rank0);
}

WindowShape shape_windows(std::uint64_t budget, int processes, Writers writers, bool spread) {
  const auto count = static_cast<std::uint64_t>(processes);
  const WindowShape shape{0, writers == Writers::rank0 ? 4U : 2U};
  const std::uint64_t pieces = shape.pieces(processes, writers);
  const std::uint64_t mail = spread ? count * copies_of_mail : 0;
  const auto total = [&](std::uint64_t window) { return pieces * window + mail * WindowMail::piece_bytes(window); };
  std::uint64_t bytes = std::min(budget / pieces / 4096 * 4096, largest_window);
  while (bytes >= smallest_window && total(bytes) > budget) bytes -= 4096;
  if (bytes < smallest_window)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("memory budget: {} bytes are too few for {} ranks. At least {} bytes are needed", budget,
                            processes, total(smallest_window)));
  return {bytes, shape.depth};
}

ExportManifest plan_export(const std::string& shards_dir, const std::string& plan, const ExportOptions& options) {
  const Request request = request_of(shards_dir, plan, options);
  const ShardSet shards(request.path, 0, 1, request.states, request.thirdparty);
  return plan_job(request, shards, shards.listings()).account;
}

}  // namespace muster
