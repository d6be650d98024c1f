// SPDX-License-Identifier: Apache-2.0
// Locations of elements, for W ranks:
//
//  - Stages 1 and 2: a group of parameters is one run, cut into W equal parts, one per rank. param_shapes of the
//    model's file has the parameters of each group in their order. The remainder at the end is padding: less than 2 W
//    elements.
//  - Stage 3: a rank's groups are one run. Each parameter takes ceil(elements / W) of each rank's run, in sequence.
//
// Further data is in the model's files: buffers, weights that are not trained, and other names of the same weights.

#include "src/checkpoint/thirdparty/deepspeed.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <unordered_set>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/thirdparty/torch_weights.hpp"
#include "src/os/process.hpp"

namespace muster::thirdparty {
namespace {

constexpr std::string_view optim_ending = "_optim_states.pt";

/// A range of a rank's file.
struct FlatRun {
  std::uint32_t file = 0;
  std::uint64_t begin = 0;
  std::uint64_t elements = 0;
  StoredBytes stored = {};
};
/// A sequence of runs, addressed as one.
class FlatLine {
 public:
  void add(const FlatRun& run) {
    if (run.elements == 0) return;
    runs_.push_back(run);
    ends_.push_back(element_count() + run.elements);
  }
  [[nodiscard]] std::uint64_t element_count() const { return ends_.empty() ? 0 : ends_.back(); }
  /// Adds boxes for the elements [from, from + count), the first of which is element `to` of the tensor.
  void add_boxes(PartedTensors& tensors, std::uint64_t from, std::uint64_t to, std::uint64_t count) const {
    if (from > element_count() || count > element_count() - from)
      refuse_foreign("its elements are out of range of the ranks' data");
    for (auto at = static_cast<std::size_t>(std::ranges::upper_bound(ends_, from) - ends_.begin()); count != 0; ++at) {
      const FlatRun& run = runs_[at];
      const std::uint64_t in_run = from - (ends_[at] - run.elements);
      const std::uint64_t now = std::min(count, run.elements - in_run);
      tensors.add_box(Shape{static_cast<std::int64_t>(to)}, Shape{static_cast<std::int64_t>(now)},
                      BoxPlace{run.file, run.begin + in_run * sizeof(float), {1}, run.stored});
      from += now;
      to += now;
      count -= now;
    }
  }

 private:
  std::vector<FlatRun> runs_;
  std::vector<std::uint64_t> ends_;
};

std::optional<std::uint64_t> number_after(std::string_view name, std::string_view word) {
  const std::size_t at = name.find(word);
  if (at == std::string_view::npos) return std::nullopt;
  std::uint64_t number = 0;
  const char* begin = name.data() + at + word.size();
  if (std::from_chars(begin, name.data() + name.size(), number).ec != std::errc()) return std::nullopt;
  return number;
}

class ZeroCheckpoint {
 public:
  ZeroCheckpoint(const FoundCheckpoint& found, std::vector<std::string>& notes) : found_(found), notes_(notes) {}

  std::shared_ptr<const PartedTensors> open() {
    os::allow_open_files(2 * found_.files.size() + 256);
    for (const std::string& name : found_.files) read_optimizer(join_path(found_.path, name));
    read_model();
    with_file("reading", found_.path, [&] { tensors_->finish(); });
    return tensors_;
  }

 private:
  using Ref = Pickle::Ref;
  [[nodiscard]] std::uint64_t ranks() const { return found_.files.size(); }

  /// Returns a number, or the value of an Enum.
  static std::uint64_t number_of(const Pickle& pickle, Ref node, std::string_view what) {
    if (pickle.is(node, PickleKind::object) && pickle.arguments(node).size() == 1) node = pickle.arguments(node)[0];
    const auto number = pickle.count(node);
    if (!number) refuse_foreign(fmt::format("{} is not a number", what));
    return *number;
  }

  void read_optimizer(const std::string& path) {
    const std::uint32_t file = tensors_->add_file(path);
    const TorchArchive archive = open_torch_file(tensors_->file(file));
    const Pickle& pickle = archive.pickle();
    with_file("reading", path, [&] {
      const Ref state = pickle.member(pickle.root(), "optimizer_state_dict");
      const std::uint64_t stage = number_of(pickle, pickle.member(state, "zero_stage"), "zero_stage");
      if (groups_.empty()) stage_ = stage;
      if (stage != stage_ || stage < 1 || stage > 3)
        refuse_foreign(fmt::format("the file has stage {}, and other ranks have stage {}", stage, stage_),
                       ErrorKind::rank_mismatch);
      const Ref count = pickle.member(state, "partition_count");
      std::uint64_t parts = 0;
      if (pickle.is(count, PickleKind::list))
        for (const Ref item : pickle.items(count)) parts = std::max(parts, number_of(pickle, item, "partition_count"));
      else
        parts = number_of(pickle, count, "partition_count");
      if (parts != ranks())
        refuse_foreign(fmt::format("the file belongs to a job of {} ranks, and {} ranks are present", parts, ranks()),
                       ErrorKind::not_found);
      const Ref flat = pickle.member(state, stage_ == 3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups");
      std::vector<FlatRun>& groups = groups_.emplace_back();
      for (const Ref group : pickle.items(flat)) {
        const TorchTensor tensor = archive.tensor(group);
        if (tensor.dtype != DType::f32 || tensor.shape.size() != 1 || (tensor.shape[0] > 1 && tensor.strides[0] != 1))
          refuse_foreign("the flat weights are not contiguous 32-bit numbers. Save the model with zero_to_fp32.py",
                         ErrorKind::unsupported);
        groups.push_back({file, tensor.begin, static_cast<std::uint64_t>(tensor.shape[0]), tensor.stored});
      }
      if (groups.size() != groups_.front().size())
        refuse_foreign("ranks have different numbers of groups", ErrorKind::rank_mismatch);
      if (const auto paddings = pickle.find(state, "param_alignment_paddings"); paddings && groups_.size() == 1)
        for (const Ref group : pickle.items(*paddings)) {
          std::vector<std::uint64_t>& sizes = paddings_.emplace_back();
          for (const Ref size : pickle.items(group)) sizes.push_back(number_of(pickle, size, "padding"));
        }
    });
  }

  [[nodiscard]] std::string model_file(std::uint64_t rank) const {
    return join_path(found_.path, stage_ == 3 ? fmt::format("zero_pp_rank_{}_mp_rank_00_model_states.pt", rank)
                                              : std::string("mp_rank_00_model_states.pt"));
  }

  void read_model() {
    const std::string path = model_file(0);
    const std::uint32_t file = tensors_->add_file(path);
    const TorchArchive archive = open_torch_file(tensors_->file(file));
    const Pickle& pickle = archive.pickle();
    with_file("reading", path, [&] {
      const auto world = pickle.find(pickle.root(), "dp_world_size");
      if (const auto said = world ? pickle.count(*world) : std::nullopt; said && *said != ranks())
        refuse_foreign(
            fmt::format("the file belongs to a job of {} ranks, and the files of the optimizer belong to one of {}",
                        *said, ranks()),
            ErrorKind::rank_mismatch);
      add_parameters(pickle, pickle.member(pickle.root(), "param_shapes"));
      add_frozen(archive, file);
      add_shared(pickle);
      add_buffers(archive, file);
      add_rest(archive, file);
    });
  }

  /// Calls work(name, shape, elements, group, place) for the parameters in their order.
  template <class Work>
  static void for_each_parameter(const Pickle& pickle, Ref groups, const Work& work) {
    for (std::size_t group = 0; group < pickle.items(groups).size(); ++group) {
      const std::span<const Ref> pairs = pickle.items(pickle.items(groups)[group]);
      for (std::size_t i = 0; i + 1 < pairs.size(); i += 2) {
        const Shape shape = shape_of(pickle, pairs[i + 1]);
        work(std::string(pickle.text(pairs[i])), shape, static_cast<std::uint64_t>(element_count(shape)), group, i / 2);
      }
    }
  }

  void begin_flat(const std::string& name, const Shape& shape, std::uint64_t elements) {
    if (!names_.insert(name).second) refuse_foreign(fmt::format("tensor {}: the name is duplicated", in_quotes(name)));
    tensors_->add_tensor(name, DType::f32, shape, Shape{static_cast<std::int64_t>(elements)});
  }

  void add_parameters(const Pickle& pickle, Ref shapes) {
    // Stage 3 has a dict where the other stages have a list of them.
    if (!pickle.is(shapes, PickleKind::list))
      refuse_foreign("param_shapes is not a list. Save the model with zero_to_fp32.py", ErrorKind::unsupported);
    if (stage_ == 3) return add_parted(pickle, shapes);
    if (pickle.items(shapes).size() != groups_.front().size())
      refuse_foreign("param_shapes and the groups of the optimizer differ");
    std::vector<FlatLine> lines(groups_.front().size());
    for (const std::vector<FlatRun>& rank : groups_)
      for (std::size_t group = 0; group < rank.size(); ++group) lines[group].add(rank[group]);
    std::vector<std::uint64_t> used(lines.size(), 0);
    for_each_parameter(
        pickle, shapes,
        [&](const std::string& name, const Shape& shape, std::uint64_t elements, std::size_t group, std::size_t place) {
          begin_flat(name, shape, elements);
          lines[group].add_boxes(*tensors_, used[group], 0, elements);
          used[group] += elements;
          if (group < paddings_.size() && place < paddings_[group].size()) used[group] += paddings_[group][place];
        });
    const std::uint64_t step = 2 * ranks();
    for (std::size_t group = 0; group < lines.size(); ++group)
      if ((used[group] + step - 1) / step != (lines[group].element_count() + step - 1) / step)
        refuse_foreign(fmt::format("group {} has {} elements, and the ranks have {}", group, used[group],
                                   lines[group].element_count()));
  }

  void add_parted(const Pickle& pickle, Ref shapes) {
    std::vector<FlatLine> lines(groups_.size());
    for (std::size_t rank = 0; rank < groups_.size(); ++rank)
      for (const FlatRun& run : groups_[rank]) lines[rank].add(run);
    std::uint64_t used = 0;
    for_each_parameter(
        pickle, shapes,
        [&](const std::string& name, const Shape& shape, std::uint64_t elements, std::size_t, std::size_t) {
          begin_flat(name, shape, elements);
          const std::uint64_t part = (elements + ranks() - 1) / ranks();
          for (std::uint64_t rank = 0; rank < ranks() && part * rank < elements; ++rank)
            lines[rank].add_boxes(*tensors_, used, part * rank, std::min(part, elements - part * rank));
          used += part;
        });
    for (const FlatLine& line : lines)
      if (line.element_count() != used)
        refuse_foreign(fmt::format("a rank has {} elements, expected {}", line.element_count(), used));
  }

  void add_whole(const TorchArchive& archive, std::uint32_t file, const std::string& name, Ref ref) {
    if (!names_.insert(name).second) return;
    add_torch_tensor(*tensors_, file, archive, name, ref);
  }

  /// Adds weights that are not trained, which the optimizer's files lack.
  void add_frozen(const TorchArchive& archive, std::uint32_t file) {
    const Pickle& pickle = archive.pickle();
    const auto shapes = pickle.find(pickle.root(), "frozen_param_shapes");
    if (!shapes || pickle.items(*shapes).empty()) return;
    const auto fragments = pickle.find(pickle.root(), "frozen_param_fragments");
    const std::span<const Ref> pairs = pickle.items(*shapes);
    if (stage_ == 3) return add_frozen_parts(pickle, *shapes);
    for (std::size_t i = 0; i + 1 < pairs.size(); i += 2) {
      const std::string name(pickle.text(pairs[i]));
      std::optional<Ref> tensor = fragments ? pickle.find(*fragments, name) : std::nullopt;
      if (!tensor) tensor = pickle.find(pickle.member(pickle.root(), "module"), name);
      if (!tensor) refuse_foreign(fmt::format("tensor {} does not exist", in_quotes(name)));
      add_whole(archive, file, name, *tensor);
    }
  }

  void add_frozen_parts(const Pickle& first, Ref shapes) {
    std::vector<std::pair<std::uint32_t, TorchArchive>> archives;
    for (std::uint64_t rank = 0; rank < ranks(); ++rank) {
      const std::uint32_t file = tensors_->add_file(model_file(rank));
      archives.emplace_back(file, open_torch_file(tensors_->file(file)));
    }
    const std::span<const Ref> pairs = first.items(shapes);
    for (std::size_t i = 0; i + 1 < pairs.size(); i += 2) {
      const std::string name(first.text(pairs[i]));
      const Shape shape = shape_of(first, pairs[i + 1]);
      const auto elements = static_cast<std::uint64_t>(element_count(shape));
      const std::uint64_t part = (elements + ranks() - 1) / ranks();
      bool is_first = true;
      for (std::uint64_t rank = 0; rank < ranks(); ++rank) {
        const auto& [file, archive] = archives[rank];
        const Pickle& pickle = archive.pickle();
        const auto fragment = pickle.find(pickle.member(pickle.root(), "frozen_param_fragments"), name);
        if (!fragment) refuse_foreign(fmt::format("rank {} has no part of the tensor {}", rank, in_quotes(name)));
        const TorchTensor tensor = archive.tensor(*fragment);
        if (is_first) tensors_->add_tensor(name, tensor.dtype, shape, Shape{static_cast<std::int64_t>(elements)});
        is_first = false;
        if (part * rank >= elements) continue;
        const std::uint64_t count = std::min(part, elements - part * rank);
        if (tensor.shape.size() != 1 || static_cast<std::uint64_t>(tensor.shape[0]) < count)
          refuse_foreign(
              fmt::format("rank {}: its part of the tensor {} has an unexpected size", rank, in_quotes(name)));
        tensors_->add_box(Shape{static_cast<std::int64_t>(part * rank)}, Shape{static_cast<std::int64_t>(count)},
                          tensor.place_in(file));
      }
      names_.insert(name);
    }
  }

  void add_buffers(const TorchArchive& archive, std::uint32_t file) {
    const Pickle& pickle = archive.pickle();
    const auto names = pickle.find(pickle.root(), "buffer_names");
    if (!names || pickle.items(*names).empty()) return;
    const Ref module = pickle.member(pickle.root(), "module");
    for (const Ref item : pickle.items(*names))
      if (const auto tensor = pickle.find(module, pickle.text(item)); tensor && archive.is_tensor(*tensor))
        add_whole(archive, file, std::string(pickle.text(item)), *tensor);
    notes_.push_back(
        "buffers and weights that are not trained keep the dtype of the model, and all trained weights are F32");
  }

  /// Stage 1 does not record weights that are not trained, but its module contains them. A tensor at the same location
  /// as another one of the module is an alias of it.
  void add_rest(const TorchArchive& archive, std::uint32_t file) {
    const Pickle& pickle = archive.pickle();
    const auto module = pickle.find(pickle.root(), "module");
    if (stage_ == 3 || !module) return;
    std::map<std::pair<std::uint64_t, Shape>, std::string> known;
    const auto place_of = [&](Ref ref) {
      TorchTensor tensor = archive.tensor(ref);
      return std::pair(tensor.begin, std::move(tensor.shape));
    };
    for_each_tensor(archive, {*module}, [&](const std::string& name, Ref ref) {
      if (names_.contains(name)) known.emplace(place_of(ref), name);
    });
    for_each_tensor(archive, {*module}, [&](const std::string& name, Ref ref) {
      const auto other = known.find(place_of(ref));
      if (other == known.end())
        add_whole(archive, file, name, ref);
      else if (names_.insert(name).second)
        tensors_->add_alias(name, other->second);
    });
  }

  void add_shared(const Pickle& pickle) {
    const auto shared = pickle.find(pickle.root(), "shared_params");
    if (!shared) return;
    const std::span<const Ref> items = pickle.items(*shared);
    const bool is_dict = pickle.is(*shared, PickleKind::dict);
    for (std::size_t i = 0; i + (is_dict ? 1 : 0) < items.size(); i += is_dict ? 2 : 1) {
      const std::span<const Ref> pair = is_dict ? items.subspan(i, 2) : pickle.items(items[i]);
      if (pair.size() != 2) refuse_foreign("shared_params does not consist of pairs");
      const std::string name(pickle.text(pair[0]));
      if (names_.insert(name).second) tensors_->add_alias(name, std::string(pickle.text(pair[1])));
    }
  }

  const FoundCheckpoint& found_;
  std::vector<std::string>& notes_;
  std::shared_ptr<PartedTensors> tensors_ = std::make_shared<PartedTensors>();
  std::uint64_t stage_ = 0;
  std::vector<std::vector<FlatRun>> groups_;          // by rank
  std::vector<std::vector<std::uint64_t>> paddings_;  // by group and parameter
  std::unordered_set<std::string> names_;
};

/// Returns the tag in the file `latest`, if the file exists.
std::optional<std::string> tag_of(const std::string& directory, const std::vector<std::string>& names) {
  constexpr std::uint64_t longest_tag = 1024;
  const std::string path = join_path(directory, "latest");
  std::error_code error;
  if (std::ranges::find(names, "latest") == names.end()) return std::nullopt;
  // Other programs have a link to a directory with that name.
  if (!std::filesystem::is_regular_file(path, error) || std::filesystem::file_size(path, error) > longest_tag)
    return std::nullopt;
  std::string tag = read_text(path, longest_tag);
  while (!tag.empty() && (tag.back() == '\n' || tag.back() == ' ')) tag.pop_back();
  return tag;
}

}  // namespace

void check_deepspeed_tag(const std::string& directory, const std::vector<std::string>& names) {
  const std::optional<std::string> tag = tag_of(directory, names);
  std::error_code error;
  if (!tag || !tag->starts_with("global_step") || std::filesystem::is_directory(join_path(directory, *tag), error))
    return;
  throw file_error(ErrorKind::not_found, "reading", join_path(directory, "latest"),
                   fmt::format("the recorded directory {} does not exist", in_quotes(join_path(directory, *tag))));
}

std::optional<FoundCheckpoint> find_deepspeed(const std::string& directory, const std::vector<std::string>& names) {
  FoundCheckpoint found{.kind = CheckpointKind::deepspeed, .path = directory};
  std::vector<std::string> files = names;
  if (const std::optional<std::string> tag = tag_of(directory, names)) {
    std::error_code error;
    found.path = join_path(directory, *tag);
    if (!is_name_beside(*tag) || !std::filesystem::is_directory(found.path, error)) return std::nullopt;
    files = files_in(found.path);
  }
  std::map<std::uint64_t, std::string> ranks;
  for (const std::string& name : files) {
    if (!name.ends_with(optim_ending)) continue;
    const auto rank = number_after(name, "zero_pp_rank_");
    const auto model = number_after(name, "mp_rank_");
    if (!rank || !model) continue;
    if (*model != 0)
      throw file_error(
          ErrorKind::unsupported, "reading", found.path,
          fmt::format("{} belongs to a second model-parallel rank, which Muster cannot read", in_quotes(name)));
    if (!ranks.try_emplace(*rank, name).second)
      throw file_error(ErrorKind::invalid_argument, "reading", found.path,
                       fmt::format("rank {} is duplicated. Move one of its files away", *rank));
  }
  if (ranks.empty()) return std::nullopt;
  for (const auto& [rank, name] : ranks) {
    if (rank != found.files.size())
      throw file_error(ErrorKind::not_found, "reading", found.path,
                       fmt::format("the optimizer file of rank {} does not exist", found.files.size()));
    found.files.push_back(name);
  }
  return found;
}

std::shared_ptr<const PartedTensors> open_deepspeed(const FoundCheckpoint& found, std::vector<std::string>& notes) {
  return ZeroCheckpoint(found, notes).open();
}

}  // namespace muster::thirdparty
