// SPDX-License-Identifier: Apache-2.0
// A rank's tensor records its position:
//
//  - DTensor (FSDP2): the local tensor, the placements and the whole size. For Shard(d) over W ranks, rank R has the
//    elements from min(size, c * R) on, with c = ceil(size / W). The rank is that of the file's name, and of the mesh
//    if the mesh records one. With several dimensions of a mesh (HSDP, FSDP2 over tensor parallelism), each one cuts
//    the result of the previous one; for Replicate, all ranks have the same.
//  - ShardedTensor (FSDP1): each local part records its offsets.

#include "src/checkpoint/thirdparty/fsdp.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/thirdparty/torch_weights.hpp"
#include "src/os/process.hpp"

namespace muster::thirdparty {
namespace {

struct RankBox {
  Shape begin;
  Shape extents;
  BoxPlace place;
};
struct PartedTensor {
  DType dtype = DType::u8;
  Shape shape;
  std::vector<RankBox> parts;
};

/// The parts in one file, by the names of tensors.
class RankFile {
 public:
  RankFile(const TorchArchive& archive, std::uint32_t file, int rank, int ranks)
      : archive_(archive), pickle_(archive.pickle()), file_(file), rank_(rank), ranks_(ranks) {}

  void add(PartedTensor& whole, Pickle::Ref ref) const {
    ref = archive_.unwrapped(ref);
    const std::span<const Pickle::Ref> arguments = pickle_.arguments(ref);
    const bool is_wrapped = pickle_.name(ref) == "torch._tensor._rebuild_from_type_v2" && arguments.size() == 4;
    const std::string_view type = is_wrapped ? pickle_.name(arguments[1]) : std::string_view();
    if (type.starts_with("torch.distributed") && type.ends_with(".DTensor")) return add_dtensor(whole, arguments[3]);
    if (type.starts_with("torch.distributed") && type.ends_with(".ShardedTensor"))
      return add_sharded(whole, arguments[3]);
    // All ranks have the same tensor, so the first rank's is used.
    if (rank_ != 0) return;
    const TorchTensor tensor = archive_.tensor(ref);
    begin_tensor(whole, tensor.dtype, tensor.shape);
    add_part(whole, Shape(tensor.shape.size(), 0), tensor);
  }

 private:
  void begin_tensor(PartedTensor& whole, DType dtype, const Shape& shape) const {
    if (rank_ == 0) {
      whole.dtype = dtype;
      whole.shape = shape;
    }
    if (whole.dtype != dtype || whole.shape != shape)
      refuse_foreign(
          fmt::format("it is {} on rank 0 and {} on rank {}", to_string(TensorSpec{whole.dtype, whole.shape}),
                      to_string(TensorSpec{dtype, shape}), rank_),
          ErrorKind::rank_mismatch);
  }

  void add_part(PartedTensor& whole, Shape begin, const TorchTensor& tensor) const {
    if (tensor.dtype != whole.dtype) refuse_foreign(fmt::format("its part on rank {} has a different dtype", rank_));
    if (tensor.shape.empty()) begin = {0};
    whole.parts.push_back({std::move(begin), box_extents(tensor.shape), tensor.place_in(file_)});
  }

  void add_dtensor(PartedTensor& whole, Pickle::Ref state) const {
    const TorchTensor local = archive_.tensor(pickle_.member(state, "_local_tensor"));
    const Pickle::Ref spec = pickle_.member(state, "_spec");
    const auto mesh = pickle_.find(spec, "mesh");
    const auto said = mesh ? pickle_.find(*mesh, "_rank") : std::nullopt;
    if (const auto rank = said ? pickle_.integer(*said) : std::nullopt; rank && *rank != rank_)
      refuse_foreign(
          fmt::format("the file was renamed or swapped: its part belongs to rank {}, and its name has rank {}", *rank,
                      rank_),
          ErrorKind::rank_mismatch);
    const std::span<const Pickle::Ref> meta = pickle_.arguments(pickle_.member(spec, "tensor_meta"));
    if (meta.empty()) refuse_foreign("the size of the whole tensor is missing");
    const Shape shape = shape_of(pickle_, meta[0]);
    begin_tensor(whole, local.dtype, shape);
    const std::vector<MeshAxis> axes = mesh_axes(spec, shape.size());
    // If several ranks have the same part, the first rank's is used.
    if (std::ranges::any_of(axes, [](const MeshAxis& axis) { return !axis.dim && axis.place != 0; })) return;
    Shape begin(shape.size(), 0);
    Shape extents = shape;
    for (const MeshAxis& axis : axes) {
      if (!axis.dim) continue;
      std::int64_t& size = extents[*axis.dim];
      const std::int64_t step = (size + axis.count - 1) / axis.count;
      const std::int64_t first = std::min(size, step * axis.place);
      begin[*axis.dim] += first;
      size = std::min(size, first + step) - first;
    }
    if (local.shape != extents)
      refuse_foreign(fmt::format("rank {} has {} of {}, expected {}", rank_, to_string(local.shape), to_string(shape),
                                 to_string(extents)));
    add_part(whole, std::move(begin), local);
  }

  /// The ranks along one dimension of the mesh either cut a dimension of the tensor, or have the same elements.
  struct MeshAxis {
    std::optional<std::size_t> dim;
    std::int64_t count = 1;
    std::int64_t place = 0;  // position of this rank
    std::optional<std::int64_t> split_factor = {};
  };

  /// Returns the axes in the order in which they cut.
  [[nodiscard]] std::vector<MeshAxis> mesh_axes(Pickle::Ref spec, std::size_t dims) const {
    const std::span<const Pickle::Ref> placements = pickle_.items(pickle_.member(spec, "placements"));
    const std::vector<std::int64_t> sizes = mesh_sizes(spec, placements.size());
    std::vector<MeshAxis> axes;
    std::vector<MeshAxis> strided;
    std::int64_t rest = rank_;
    std::int64_t below = ranks_;
    for (std::size_t i = 0; i < placements.size(); ++i) {
      below /= sizes[i];
      MeshAxis axis{{}, sizes[i], rest / below};
      rest %= below;
      const std::string_view placement = pickle_.name(placements[i]);
      const bool is_strided = placement.ends_with("placement_types._StridedShard");
      if (!is_strided && !placement.ends_with("placement_types.Shard") &&
          !placement.ends_with("placement_types.Replicate"))
        refuse_foreign(fmt::format("unsupported placement {}. Save the model with torch.distributed.checkpoint",
                                   in_quotes(placement)),
                       ErrorKind::unsupported);
      if (!placement.ends_with("Replicate")) {
        axis.dim = pickle_.count(pickle_.member(placements[i], "dim"));
        if (!axis.dim || *axis.dim >= dims) refuse_foreign("the dimension of its shards is out of range");
      }
      if (is_strided) axis.split_factor = pickle_.integer(pickle_.member(placements[i], "split_factor"));
      // A strided axis cuts the results of the axes after it: FSDP2 over tensor parallelism.
      for (MeshAxis& earlier : strided)
        if (earlier.dim == axis.dim && earlier.split_factor)
          earlier.split_factor = *earlier.split_factor % axis.count == 0 ? *earlier.split_factor / axis.count : 0;
      if (is_strided && std::ranges::any_of(axes, [&](const MeshAxis& earlier) { return earlier.dim == axis.dim; }))
        refuse_foreign(
            "it is split along one dimension by Shard and then by _StridedShard, which Muster cannot read. Save the "
            "model with torch.distributed.checkpoint",
            ErrorKind::unsupported);
      (is_strided ? strided : axes).push_back(axis);
    }
    for (const MeshAxis& axis : strided)
      if (axis.split_factor != 1)
        refuse_foreign(
            "the split_factor of its _StridedShard contradicts the mesh, which Muster cannot read. Save the model with "
            "torch.distributed.checkpoint",
            ErrorKind::unsupported);
    axes.insert(axes.end(), strided.rbegin(), strided.rend());
    return axes;
  }

  [[nodiscard]] std::vector<std::int64_t> mesh_sizes(Pickle::Ref spec, std::size_t count) const {
    if (count == 1) return {ranks_};
    const auto refuse = [&](const char* words) {
      refuse_foreign(
          fmt::format(
              "it is placed along {} dimensions of a mesh, {}. Save the model with torch.distributed.checkpoint", count,
              words),
          ErrorKind::unsupported);
    };
    const Pickle::Ref mesh = pickle_.member(spec, "mesh");
    const auto layout = pickle_.find(mesh, "_layout");
    const auto axes = layout ? pickle_.find(*layout, "axes") : std::nullopt;
    const auto map = pickle_.find(mesh, "_flatten_rank_map");
    if (!axes || !map) refuse("which Muster cannot read from this older PyTorch");
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
    for (const Pickle::Ref axis : pickle_.items(*axes)) {
      const Shape shape = shape_of(pickle_, pickle_.member(axis, "shape"));
      const Shape stride = shape_of(pickle_, pickle_.member(axis, "stride"));
      if (shape.size() != 1 || stride.size() != 1) refuse("some of which are nested, which Muster cannot read");
      sizes.push_back(shape[0]);
      strides.push_back(stride[0]);
    }
    const Shape ranks = shape_of(pickle_, *map);
    bool is_in_order = sizes.size() == count && static_cast<int>(ranks.size()) == ranks_;
    std::int64_t below = 1;
    for (std::size_t i = sizes.size(); is_in_order && i-- > 0; below *= sizes[i])
      is_in_order = strides[i] == below && sizes[i] > 0 && sizes[i] <= ranks_;
    for (std::size_t i = 0; is_in_order && i < ranks.size(); ++i)
      is_in_order = ranks[i] == static_cast<std::int64_t>(i);
    if (!is_in_order || below != ranks_)
      refuse("which do not have all ranks in ascending order: Muster cannot read that");
    return sizes;
  }

  void add_sharded(PartedTensor& whole, Pickle::Ref state) const {
    const std::span<const Pickle::Ref> items = pickle_.items(state);
    if (items.size() < 2 || !pickle_.is(items[0], PickleKind::list)) refuse_foreign("the list of its parts is missing");
    const Shape shape = shape_of(pickle_, pickle_.member(items[1], "size"));
    const auto properties = pickle_.find(items[1], "tensor_properties");
    std::optional<DType> dtype;
    if (properties && pickle_.state(*properties)) {
      const std::span<const Pickle::Ref> values = pickle_.items(*pickle_.state(*properties));
      if (!values.empty()) dtype = dtype_of_torch(pickle_.name(values[0]));
    }
    for (const Pickle::Ref shard : pickle_.items(items[0])) {
      const TorchTensor local = archive_.tensor(pickle_.member(shard, "tensor"));
      const Shape begin = shape_of(pickle_, pickle_.member(pickle_.member(shard, "metadata"), "shard_offsets"));
      if (!dtype) dtype = local.dtype;
      if (whole.parts.empty() && rank_ != 0 && whole.shape.empty()) whole = {*dtype, shape, {}};
      begin_tensor(whole, *dtype, shape);
      add_part(whole, begin, local);
    }
    // A rank may have no elements of a small tensor.
    if (dtype) begin_tensor(whole, *dtype, shape);
  }

  const TorchArchive& archive_;
  const Pickle& pickle_;
  std::uint32_t file_;
  int rank_;
  int ranks_;
};

}  // namespace

std::vector<std::string> fsdp_files(const std::string& directory, const std::vector<std::string>& names) {
  constexpr std::string_view prefix = "model_world_size_";
  std::map<int, std::map<int, std::string>> jobs;  // by number of ranks
  for (const std::string& name : names) {
    if (!name.starts_with(prefix) || !name.ends_with(".pt")) continue;
    int ranks = 0;
    int rank = -1;
    const char* end = name.data() + name.size();
    const auto [after, error] = std::from_chars(name.data() + prefix.size(), end, ranks);
    constexpr std::string_view middle = "_rank_";
    if (error != std::errc() || !std::string_view(after, end).starts_with(middle)) continue;
    const auto [dot, other_error] = std::from_chars(after + middle.size(), end, rank);
    if (other_error != std::errc() || std::string_view(dot, end) != ".pt" || rank < 0 || rank >= ranks) continue;
    jobs[ranks][rank] = name;
  }
  if (jobs.empty()) return {};
  if (jobs.size() > 1)
    throw file_error(ErrorKind::invalid_argument, "reading", directory,
                     fmt::format("the directory has files of two jobs, of {} and {} ranks. Move one set away",
                                 jobs.begin()->first, jobs.rbegin()->first));
  const auto& [ranks, files] = *jobs.begin();
  std::vector<std::string> out;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto file = files.find(rank);
    if (file == files.end())
      throw file_error(ErrorKind::not_found, "reading", directory,
                       fmt::format("model_world_size_{}_rank_{}.pt does not exist ({} of {} ranks are present)", ranks,
                                   rank, files.size(), ranks));
    out.push_back(file->second);
  }
  return out;
}

std::shared_ptr<const PartedTensors> open_fsdp(const FoundCheckpoint& found, const Choice& choice) {
  auto tensors = std::make_shared<PartedTensors>();
  os::allow_open_files(found.files.size() + 256);
  std::map<std::string, PartedTensor> wholes;
  std::vector<std::string> order;
  const int ranks = static_cast<int>(found.files.size());
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string path = join_path(found.path, found.files[static_cast<std::size_t>(rank)]);
    const std::uint32_t file = tensors->add_file(path);
    const TorchArchive archive = open_torch_file(tensors->file(file));
    with_file("reading", path, [&] {
      std::size_t count = 0;
      const RankFile parts(archive, file, rank, ranks);
      const TensorWork add = [&](const std::string& name, Pickle::Ref ref) {
        const auto [whole, is_new] = wholes.try_emplace(name);
        if (is_new && rank != 0)
          throw Error(ErrorKind::rank_mismatch,
                      fmt::format("rank {} has the tensor {}, which does not exist on rank 0", rank, in_quotes(name)));
        if (is_new) order.push_back(name);
        ++count;
        try {
          parts.add(whole->second, ref);
        } catch (const Error& error) {
          throw Error(error.kind(), fmt::format("tensor {}: {}", in_quotes(name), error.what()));
        }
      };
      Omissions left_out;
      for_each_tensor(archive, find_weights(archive, choice.key), add, rank == 0 ? &left_out : nullptr);
      for (Omission& left : left_out) tensors->add_omission(std::move(left));
      if (count != order.size())
        throw Error(ErrorKind::rank_mismatch,
                    fmt::format("rank {} has {} tensors, and rank 0 has {}", rank, count, order.size()));
    });
  }
  with_file("reading", found.path, [&] {
    for (const std::string& name : order) {
      const PartedTensor& whole = wholes.at(name);
      tensors->add_tensor(name, whole.dtype, whole.shape);
      for (const RankBox& part : whole.parts) tensors->add_box(part.begin, part.extents, part.place);
    }
    tensors->finish();
  });
  return tensors;
}

}  // namespace muster::thirdparty
