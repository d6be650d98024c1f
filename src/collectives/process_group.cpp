// SPDX-License-Identifier: Apache-2.0
// What the calls of a ProcessGroup check, agree about and make of bytes; backends move them.

#include "muster/process_group.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <string>

#include "src/base/written.hpp"
#include "src/collectives/backend.hpp"
#include "src/collectives/packed_config.hpp"
#include "src/merge/reduce.hpp"
#include "src/sync/failing.hpp"
#include "src/sync/group.hpp"

namespace muster {
namespace collectives {

constexpr std::uint64_t largest_message = std::uint64_t{1} << 62;

static merge::Combine combine_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return merge::Combine::sum;
    case ReduceOp::product:
      return merge::Combine::product;
    case ReduceOp::min:
      return merge::Combine::min;
    case ReduceOp::max:
      return merge::Combine::max;
    case ReduceOp::average:
      return merge::Combine::average;
  }
  throw Error(ErrorKind::argument, "an operation of that number is none of ReduceOp");
}

/// What the ranks have to agree about.
struct What {
  const char* name;
  std::optional<ReduceOp> op = {};
  std::optional<int> root = {};
  DType dtype = DType::u8;
  const Shape* shape = nullptr;  // of Configs: none
  std::optional<std::size_t> dim = {};
  bool varies = false;  // the extent of that dimension may differ
  std::span<const std::int64_t> slices = {};

  [[nodiscard]] std::uint64_t hash() const {
    const auto number = [](const auto& value) { return value ? static_cast<std::uint64_t>(*value) + 1 : 0; };
    const std::array facts{XXH3_64bits(name, std::strlen(name)), number(op),  number(root),
                           static_cast<std::uint64_t>(dtype),    number(dim), std::uint64_t{slices.size()}};
    std::uint64_t hash = XXH3_64bits(facts.data(), sizeof facts);
    const auto add = [&](std::span<const std::int64_t> numbers) {
      hash = XXH3_64bits_withSeed(numbers.data(), numbers.size_bytes(), hash);
    };
    if (shape == nullptr) return hash;
    const std::span<const std::int64_t> all(*shape);
    add(all.first(varies ? *dim : all.size()));
    if (varies) add(all.subspan(*dim + 1));
    if (!slices.empty()) add(slices);
    return hash;
  }
  /// "all_reduce(sum) of F32 [4, 8]".
  [[nodiscard]] std::string words() const {
    std::string text = name;
    if (op) text += fmt::format("({})", merge::name_of(combine_of(*op)));
    if (root) text += fmt::format(", root {}", *root);
    if (shape != nullptr) text += fmt::format(" of {} {}", to_string(dtype), to_string(*shape));
    if (dim) text += fmt::format(" along dimension {}", *dim);
    if (!slices.empty()) text += fmt::format(" in slices {}", to_string(Shape(slices.begin(), slices.end())));
    return text;
  }
};

/// The dimension that a caller's number means.
static std::size_t dimension(const Shape& shape, int dim) {
  const auto dims = static_cast<int>(shape.size());
  if (dim < -dims || dim >= dims)
    throw Error(ErrorKind::argument, fmt::format("a tensor of shape {} has no dimension {}", to_string(shape), dim));
  return static_cast<std::size_t>(dim < 0 ? dim + dims : dim);
}

/// How many rows a tensor has that is cut along `dim`: what is joined or cut there lies together in each.
static std::uint64_t rows_before(const Shape& shape, std::size_t dim) {
  return static_cast<std::uint64_t>(std::accumulate(shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(dim),
                                                    std::int64_t{1}, std::multiplies{}));
}

/// Elements of packed types share bytes: a row must not end within one.
static void check_whole_bytes(DType dtype, const Shape& shape, std::size_t dim) {
  if (!is_packed(dtype)) return;
  std::int64_t row = 1;
  for (std::size_t i = dim; i < shape.size(); ++i) row *= shape[i];
  if (row % 2 != 0)
    throw Error(ErrorKind::argument, fmt::format("{} cannot be joined or cut along dimension {}: its rows end within a "
                                                 "byte",
                                                 to_string(TensorSpec{dtype, shape}), dim));
}

static Room room_of(const Tensor& tensor) {
  if (!tensor.view().is_contiguous()) throw Error(ErrorKind::argument, "a result must be contiguous");
  (void)tensor.view().host_data();
  if (tensor.nbytes() == 0) return {};
  return {tensor.mutable_data(), tensor.nbytes()};
}

static void check_same(const TensorView& tensor, const TensorView& other, const char* which) {
  if (tensor.dtype() == other.dtype() && tensor.shape() == other.shape()) return;
  throw Error(ErrorKind::argument,
              fmt::format("{} is {} {}, the tensor {} {}", which, to_string(tensor.dtype()), to_string(tensor.shape()),
                          to_string(other.dtype()), to_string(other.shape())));
}

/// The elements of a tensor without gaps: its own, or a copy.
class Contiguous {
 public:
  Contiguous() = default;
  explicit Contiguous(const TensorView& tensor) {
    (void)tensor.host_data();
    if (!tensor.is_contiguous()) copy_ = Tensor::copy_of(tensor);
    bytes_ = tensor.is_contiguous() ? tensor.bytes() : copy_.bytes();
  }
  /// Slices along a dimension, one behind the other.
  Contiguous(const TensorView& tensor, std::size_t dim, std::span<const std::int64_t> extents) {
    (void)tensor.host_data();
    if (rows_before(tensor.shape(), dim) <= 1) {
      *this = Contiguous(tensor);
      return;
    }
    copy_ = Tensor::allocate(tensor.dtype(), tensor.shape());
    std::byte* to = copy_.mutable_data();
    std::int64_t begin = 0;
    for (const std::int64_t extent : extents) {
      const TensorView slice = tensor.slice(dim, begin, begin + extent);
      copy_contiguous(slice, to);
      to += slice.nbytes();
      begin += extent;
    }
    bytes_ = copy_.bytes();
  }
  [[nodiscard]] Bytes bytes() const noexcept { return bytes_; }

 private:
  Tensor copy_;
  Bytes bytes_;
};

/// Parts that lie one behind the other, each of so many rows, as the rows of one tensor.
static Tensor joined(const Tensor& parts, std::span<const std::uint64_t> sizes, std::uint64_t rows) {
  if (rows <= 1 || parts.nbytes() == 0) return parts;
  const Tensor whole = Tensor::allocate(parts.dtype(), parts.shape());
  const std::uint64_t stride = parts.nbytes() / rows;
  const std::byte* from = parts.data();
  std::byte* begin = whole.mutable_data();
  for (const std::uint64_t size : sizes) {
    const std::uint64_t bytes = size / rows;
    for (std::uint64_t row = 0; row < rows && bytes != 0; ++row, from += bytes)
      std::memcpy(begin + row * stride, from, bytes);
    begin += bytes;
  }
  return whole;
}

class Engine {
 public:
  Engine(std::shared_ptr<SyncGroup> group, const CollectiveOptions& options) : group_(std::move(group)) {
    const sync::Use use(*group_);
    if (size() > 1) backend_ = shared_backend(inside(), waits(options, "process group"));
    if (!backend_) backend_ = message_backend(inside());
    ins_.resize(static_cast<std::size_t>(size()));
    outs_.resize(ins_.size());
  }

  [[nodiscard]] SyncGroup& group() const noexcept { return *group_; }
  [[nodiscard]] const Backend& backend() const noexcept { return *backend_; }
  [[nodiscard]] int rank() const noexcept { return group_->rank(); }
  [[nodiscard]] int size() const noexcept { return group_->size(); }

  void barrier(const CollectiveOptions& options) {
    const What what{"barrier"};
    run(
        what, options, [](Card&) {},
        [&](Call& call, const Opened& opened) { backend_->all_gather(call.card, opened, {}, outs_, call.waits); });
  }

  void all_reduce(const What& what, const Tensor& out, const TensorView& tensor, const CollectiveOptions& options) {
    Contiguous in;
    Room room;
    run(
        what, options,
        [&](Card& card) {
          merge::check_reducible(combine_of(*what.op), tensor.dtype());
          card.wants = !what.root || *what.root == rank() ? 1 : 0;
          if (card.wants != 0) {
            check_same(out, tensor, "the result");
            room = room_of(out);
          }
          in = Contiguous(tensor);
          card.bytes = in.bytes().size();
        },
        [&](Call& call, const Opened& opened) {
          backend_->all_reduce(call.card, opened, combine_of(*what.op), tensor.dtype(), in.bytes(), room, call.waits);
        });
  }

  void broadcast(const What& what, const Tensor& tensor, const CollectiveOptions& options) {
    Bytes in;
    run(
        what, options,
        [&](Card& card) {
          if (what.root != rank()) {
            outs_[static_cast<std::size_t>(*what.root)] = room_of(tensor);
            return;
          }
          in = tensor.bytes();
          card = {.bytes = in.size(), .largest = in.size(), .wants = 0};
        },
        [&](Call& call, const Opened& opened) { backend_->all_gather(call.card, opened, in, outs_, call.waits); });
  }

  /// The result is of no rank but `what.root`, if that is one. `what.slices`, if given: all ranks' extents.
  /// `into`, if given, has room for it.
  std::optional<Tensor> gather(What what, const TensorView& tensor, int dim, const CollectiveOptions& options,
                               const Tensor* into = nullptr) {
    std::size_t along = 0;
    Contiguous in;
    Tensor parts;
    std::vector<std::uint64_t> sizes;
    what.dtype = tensor.dtype();
    what.shape = &tensor.shape();
    run(
        what, options,
        [&](Card& card) {
          along = dimension(tensor.shape(), dim);
          check_whole_bytes(tensor.dtype(), tensor.shape(), along);
          in = Contiguous(tensor);
          card = {.bytes = in.bytes().size(), .largest = in.bytes().size(), .extent = tensor.shape()[along]};
          card.wants = !what.root || *what.root == rank() ? 1 : 0;
          what.dim = along;
          if (into != nullptr) {
            Shape shape = tensor.shape();
            shape[along] *= size();
            if (into->dtype() != tensor.dtype() || into->shape() != shape)
              throw Error(ErrorKind::argument,
                          fmt::format("the result is {} {}, not {} {}", to_string(into->dtype()),
                                      to_string(into->shape()), to_string(tensor.dtype()), to_string(shape)));
            (void)room_of(*into);
          }
          const std::span<const std::int64_t> extents = what.slices;
          if (!extents.empty() &&
              (extents.size() != ins_.size() || extents[static_cast<std::size_t>(rank())] != tensor.shape()[along]))
            throw Error(
                ErrorKind::argument,
                fmt::format("{} sizes for {} ranks, of which this rank's must be {}, its extent of dimension {}",
                            extents.size(), ins_.size(), tensor.shape()[along], along));
        },
        [&](Call& call, const Opened& opened) {
          const auto then = [&](std::span<const Card> cards) {
            if (call.card.wants == 0) return;
            Shape shape = tensor.shape();
            shape[along] = 0;
            for (const Card& card : cards) {
              shape[along] += card.extent;
              sizes.push_back(card.bytes);
            }
            parts = into != nullptr ? *into : Tensor::allocate(tensor.dtype(), std::move(shape));
            place(parts, sizes);
          };
          call.then.emplace(then);
          backend_->all_gather(call.card, opened, in.bytes(), outs_, call.waits);
        });
    if (what.root && *what.root != rank()) return std::nullopt;
    return joined(parts, sizes, rows_before(parts.shape(), along));
  }

  Tensor reduce_scatter(What what, const TensorView& tensor, std::optional<std::span<const std::int64_t>> sizes,
                        int dim, const CollectiveOptions& options) {
    Contiguous in;
    Tensor out;
    std::vector<std::int64_t> extents;
    std::vector<std::uint64_t> bounds(static_cast<std::size_t>(size()) + 1);
    what.dtype = tensor.dtype();
    what.shape = &tensor.shape();
    run(
        what, options,
        [&](Card& card) {
          const merge::Combine combine = combine_of(*what.op);
          merge::check_reducible(combine, tensor.dtype());
          const std::size_t along = dimension(tensor.shape(), dim);
          extents = slices_of(tensor.shape(), along, sizes);
          what.dim = along;
          what.slices = extents;
          in = Contiguous(tensor, along, extents);
          Shape shape = tensor.shape();
          for (std::size_t i = 0; i < extents.size(); ++i) {
            shape[along] = extents[i];
            const std::uint64_t bytes = byte_size(tensor.dtype(), shape);
            bounds[i + 1] = bounds[i] + bytes;
            card.largest = std::max(card.largest, bytes);
          }
          card.bytes = in.bytes().size();
          shape[along] = extents[static_cast<std::size_t>(rank())];
          out = Tensor::allocate(tensor.dtype(), std::move(shape));
        },
        [&](Call& call, const Opened& opened) {
          backend_->reduce_scatter(call.card, opened, combine_of(*what.op), tensor.dtype(), in.bytes(), bounds,
                                   {out.nbytes() == 0 ? nullptr : out.mutable_data(), out.nbytes()}, call.waits);
        });
    return out;
  }

  void scatter(const What& what, const Tensor& out, std::span<const TensorView> parts,
               const CollectiveOptions& options) {
    std::vector<Contiguous> given;
    run(
        what, options,
        [&](Card& card) {
          outs_[static_cast<std::size_t>(*what.root)] = room_of(out);
          const std::size_t wanted = what.root == rank() ? ins_.size() : 0;
          if (parts.size() != wanted)
            throw Error(ErrorKind::argument, fmt::format("scatter wants {} tensors of this rank (root {} gives one for "
                                                         "each rank, the others none), not {}",
                                                         wanted, *what.root, parts.size()));
          for (std::size_t i = 0; i < parts.size(); ++i) {
            check_same(parts[i], out, "a part");
            ins_[i] = given.emplace_back(parts[i]).bytes();
          }
          card.largest = out.nbytes();
        },
        [&](Call& call, const Opened& opened) { backend_->all_to_all(call.card, opened, ins_, outs_, call.waits); });
  }

  Tensor all_to_all(const TensorView& tensor, std::optional<std::span<const std::int64_t>> rows,
                    std::vector<std::int64_t>* received, const CollectiveOptions& options) {
    What what{rows ? "all_to_allv" : "all_to_all", {}, {}, tensor.dtype(), &tensor.shape()};
    Contiguous in;
    std::vector<std::int64_t> mine;
    std::vector<std::int64_t> theirs(ins_.size());
    std::uint64_t row_bytes = 0;
    const auto describe = [&] {
      (void)dimension(tensor.shape(), 0);
      mine = slices_of(tensor.shape(), 0, rows);
      what.dim = 0;
      what.varies = rows.has_value();
      Shape row = tensor.shape();
      row[0] = 1;
      check_whole_bytes(tensor.dtype(), row, 0);
      row_bytes = byte_size(tensor.dtype(), row);
      in = Contiguous(tensor);
    };
    if (rows)
      // How many rows come from each.
      run(
          what, options,
          [&](Card& card) {
            describe();
            card.largest = sizeof(std::int64_t);
            for (std::size_t i = 0; i < ins_.size(); ++i) {
              ins_[i] = std::as_bytes(std::span(&mine[i], 1));
              outs_[i] = std::as_writable_bytes(std::span(&theirs[i], 1));
            }
          },
          [&](Call& call, const Opened& opened) { backend_->all_to_all(call.card, opened, ins_, outs_, call.waits); });
    Tensor out;
    run(
        what, options,
        [&](Card& card) {
          if (!rows) {
            describe();
            theirs = mine;
          }
          Shape shape = tensor.shape();
          shape[0] = std::accumulate(theirs.begin(), theirs.end(), std::int64_t{0});
          out = Tensor::allocate(tensor.dtype(), std::move(shape));
          std::uint64_t at = 0;
          std::uint64_t to = 0;
          for (std::size_t i = 0; i < ins_.size(); ++i) {
            ins_[i] = in.bytes().subspan(at, static_cast<std::uint64_t>(mine[i]) * row_bytes);
            at += ins_[i].size();
            const std::uint64_t bytes = static_cast<std::uint64_t>(theirs[i]) * row_bytes;
            outs_[i] = bytes == 0 ? Room{} : Room{out.mutable_data() + to, bytes};
            to += bytes;
            card.largest = std::max<std::uint64_t>(card.largest, ins_[i].size());
          }
        },
        [&](Call& call, const Opened& opened) { backend_->all_to_all(call.card, opened, ins_, outs_, call.waits); });
    if (received != nullptr) *received = std::move(theirs);
    return out;
  }

  /// Of the ranks that give one: root alone (broadcast), or all, to all or to root.
  std::vector<Config> configs(const What& what, const Config& config, bool only_root_gives, bool only_root_gets,
                              const CollectiveOptions& options) {
    const bool gives = !only_root_gives || what.root == rank();
    const bool gets = only_root_gives ? what.root != rank() : !only_root_gets || what.root == rank();
    Tensor in;
    Tensor all;
    std::vector<std::uint64_t> sizes;
    run(
        what, options,
        [&](Card& card) {
          if (gives) in = packed(config);
          card.bytes = card.largest = in.nbytes();
          card.wants = gets ? 1 : 0;
        },
        [&](Call& call, const Opened& opened) {
          const auto then = [&](std::span<const Card> cards) {
            if (!gets) return;
            std::uint64_t bytes = 0;
            for (const Card& card : cards) bytes += sizes.emplace_back(card.bytes);
            all = Tensor::allocate(DType::u8, {static_cast<std::int64_t>(bytes)});
            place(all, sizes);
          };
          call.then.emplace(then);
          backend_->all_gather(call.card, opened, in.bytes(), outs_, call.waits);
        });
    std::vector<Config> received;
    std::uint64_t at = 0;
    for (const std::uint64_t size : sizes) {
      if (size != 0) received.push_back(unpacked(all, at, size));
      at += size;
    }
    return received;
  }

  void send(const Config& config, int to, int tag, const CollectiveOptions& options) {
    const sync::Use use(*group_);
    check_tag(tag);
    const Tensor message = packed(config);
    const std::int64_t number = tag;
    group_->send(to, std::as_bytes(std::span(&number, 1)), waits(options, "send"));
    group_->send(to, message.bytes(), waits(options, "send"));
  }

  Config receive(int from, int tag, const CollectiveOptions& options) {
    const sync::Use use(*group_);
    check_tag(tag);
    std::deque<Message>& early = early_[from];
    for (auto each = early.begin();; ++each) {
      if (each == early.end()) {
        Message message;
        const std::vector<std::byte> number = group_->receive(from, sizeof message.tag, waits(options, "recv"));
        std::memcpy(&message.tag, number.data(), std::min(number.size(), sizeof message.tag));
        const std::vector<std::byte> bytes = group_->receive(from, largest_message, waits(options, "recv"));
        message.bytes = Tensor::allocate(DType::u8, {static_cast<std::int64_t>(bytes.size())});
        std::ranges::copy(bytes, message.bytes.mutable_data());
        each = early.insert(early.end(), std::move(message));
      }
      if (each->tag != tag) continue;
      const Tensor bytes = each->bytes;
      early.erase(each);
      return unpacked(bytes, 0, bytes.nbytes());
    }
  }

  [[nodiscard]] std::shared_ptr<SyncGroup> split(const RankList& ranks, const CollectiveOptions& options) {
    return group_->split(ranks, waits(options, "split"));
  }

 private:
  struct Message {
    std::int64_t tag = 0;
    Tensor bytes;
  };
  struct Call {
    WaitOptions waits;
    Card card = {};
    std::optional<Error> trouble = {};  // of this rank's arguments
    std::optional<Opened> then = {};    // once all ranks agree; what it fails with is the failure of the group
  };

  [[nodiscard]] sync::Group& inside() const noexcept { return sync::inside(*group_); }
  static WaitOptions waits(const CollectiveOptions& options, const char* phase) {
    return {.timeout = options.timeout, .stop = options.stop, .phase = phase};
  }
  static void check_tag(int tag) {
    if (tag < 0) throw Error(ErrorKind::argument, fmt::format("a message cannot have the tag {}: 0 or more", tag));
  }

  /// `prepare` checks this rank's arguments and writes its card; `move` calls the backend.
  template <class Prepare, class Move>
  void run(const What& what, const CollectiveOptions& options, const Prepare& prepare, const Move& move) {
    const sync::Use use(*group_);
    Call call{waits(options, what.name)};
    std::ranges::fill(ins_, Bytes{});
    std::ranges::fill(outs_, Room{});
    call.trouble = sync::attempt(*group_, [&] {
      if (what.root && (*what.root < 0 || *what.root >= size()))
        throw Error(ErrorKind::argument, fmt::format("root {} is not in the group of {} ranks", *what.root, size()));
      prepare(call.card);
    });
    call.card.status = call.trouble ? 1 : 0;
    if (!call.trouble) call.card.agreed = what.hash();
    const auto opened = [&](std::span<const Card> cards) {
      for (const Card& card : cards)
        if (card.status != 0) inside().agree(call.trouble, call.waits);
      for (const Card& card : cards)
        if (card.agreed != cards.front().agreed) disagree(what, cards, call.waits);
      if (call.then) sync::or_fail(*group_, [&] { (*call.then)(cards); });
    };
    sync::unless_out_of_memory(*group_, [&] { move(call, opened); });
  }

  [[noreturn]] void disagree(const What& what, std::span<const Card> cards, const WaitOptions& options) const {
    using Words = std::array<char, 512>;
    Words mine;
    put_text(mine, what.words());
    std::vector<Words> all(cards.size());
    group_->all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)), options);
    const auto other = std::ranges::find_if(cards, [&](const Card& card) { return card.agreed != cards[0].agreed; });
    const auto rank = static_cast<std::size_t>(other - cards.begin());
    throw sync::error_of(group_->info(static_cast<int>(rank)), ErrorKind::rank_mismatch,
                         fmt::format("{} calls {}, {} {}: all ranks of a group make the same calls in the same order",
                                     sync::name_of(group_->info(0)), get_text(all[0]),
                                     sync::name_of(group_->info(static_cast<int>(rank))), get_text(all[rank])));
  }

  /// The extents of all ranks' slices.
  std::vector<std::int64_t> slices_of(const Shape& shape, std::size_t dim,
                                      std::optional<std::span<const std::int64_t>> sizes) const {
    const std::int64_t extent = shape[dim];
    if (!sizes) {
      if (extent % size() != 0)
        throw Error(ErrorKind::argument,
                    fmt::format("dimension {} of a tensor of shape {} is not a multiple of {} ranks", dim,
                                to_string(shape), size()));
      return std::vector<std::int64_t>(static_cast<std::size_t>(size()), extent / size());
    }
    bool fits = sizes->size() == static_cast<std::size_t>(size());
    std::int64_t left = extent;
    for (const std::int64_t size : *sizes) {
      fits = fits && size >= 0 && size <= left;
      if (fits) left -= size;
    }
    if (!fits || left != 0)
      throw Error(ErrorKind::argument,
                  fmt::format("{} slices do not make up dimension {} of a tensor of shape {} for {} ranks: one a rank, "
                              "none negative, together its extent",
                              sizes->size(), dim, to_string(shape), size()));
    return {sizes->begin(), sizes->end()};
  }

  /// Rooms for all ranks' bytes, one behind the other.
  void place(const Tensor& all, std::span<const std::uint64_t> sizes) {
    std::uint64_t at = 0;
    for (std::size_t rank = 0; rank < outs_.size(); ++rank) {
      outs_[rank] = sizes[rank] == 0 ? Room{} : Room{all.mutable_data() + at, sizes[rank]};
      at += sizes[rank];
    }
  }

  std::shared_ptr<SyncGroup> group_;
  std::unique_ptr<Backend> backend_;
  std::map<int, std::deque<Message>> early_;  // have come before they were asked for, by rank
  // Of the call.
  std::vector<Bytes> ins_;
  std::vector<Room> outs_;
};

}  // namespace collectives

using collectives::What;

ProcessGroup::ProcessGroup(std::shared_ptr<SyncGroup> group, const CollectiveOptions& options)
    : engine_(std::make_unique<collectives::Engine>(std::move(group), options)) {}

ProcessGroup::ProcessGroup(SyncGroup& group, const CollectiveOptions& options)
    : ProcessGroup(group.duplicate({.timeout = options.timeout, .stop = options.stop, .phase = "process group"}),
                   options) {}

ProcessGroup::ProcessGroup(ProcessGroup&&) noexcept = default;
ProcessGroup& ProcessGroup::operator=(ProcessGroup&&) noexcept = default;
ProcessGroup::~ProcessGroup() = default;

int ProcessGroup::rank() const noexcept {
  return engine_->rank();
}
int ProcessGroup::size() const noexcept {
  return engine_->size();
}
int ProcessGroup::global_rank(int rank) const {
  return group().info(rank).rank;
}
std::optional<int> ProcessGroup::rank_of_global(int global) const noexcept {
  for (int rank = 0; rank < size(); ++rank)
    if (group().info(rank).rank == global) return rank;
  return std::nullopt;
}
std::string_view ProcessGroup::backend() const noexcept {
  return engine_->backend().name();
}
SyncGroup& ProcessGroup::group() const noexcept {
  return engine_->group();
}

std::unique_ptr<ProcessGroup> ProcessGroup::split(const RankList& ranks, const CollectiveOptions& options) {
  auto part = engine_->split(ranks, options);
  if (!part) return nullptr;
  return std::unique_ptr<ProcessGroup>(new ProcessGroup(std::move(part), options));
}

void ProcessGroup::barrier(const CollectiveOptions& options) {
  engine_->barrier(options);
}

void ProcessGroup::all_reduce(const Tensor& tensor, ReduceOp op, const CollectiveOptions& options) {
  engine_->all_reduce({"all_reduce", op, {}, tensor.dtype(), &tensor.shape()}, tensor, tensor.view(), options);
}

void ProcessGroup::all_reduce_into(const Tensor& out, const TensorView& tensor, ReduceOp op,
                                   const CollectiveOptions& options) {
  engine_->all_reduce({"all_reduce", op, {}, tensor.dtype(), &tensor.shape()}, out, tensor, options);
}

void ProcessGroup::reduce(const Tensor& tensor, int root, ReduceOp op, const CollectiveOptions& options) {
  engine_->all_reduce({"reduce", op, root, tensor.dtype(), &tensor.shape()}, tensor, tensor.view(), options);
}

void ProcessGroup::broadcast(const Tensor& tensor, int root, const CollectiveOptions& options) {
  engine_->broadcast({"broadcast", {}, root, tensor.dtype(), &tensor.shape()}, tensor, options);
}

Tensor ProcessGroup::reduce_scatter(const TensorView& tensor, int dim, ReduceOp op, const CollectiveOptions& options) {
  return engine_->reduce_scatter({"reduce_scatter", op}, tensor, {}, dim, options);
}

Tensor ProcessGroup::reduce_scatterv(const TensorView& tensor, std::span<const std::int64_t> sizes, int dim,
                                     ReduceOp op, const CollectiveOptions& options) {
  return engine_->reduce_scatter({"reduce_scatterv", op}, tensor, sizes, dim, options);
}

Tensor ProcessGroup::all_gather(const TensorView& tensor, int dim, const CollectiveOptions& options) {
  return *engine_->gather({"all_gather"}, tensor, dim, options);
}

void ProcessGroup::all_gather_into(const Tensor& out, const TensorView& tensor, const CollectiveOptions& options) {
  (void)engine_->gather({"all_gather"}, tensor, 0, options, &out);
}

Tensor ProcessGroup::all_gatherv(const TensorView& tensor, int dim, std::span<const std::int64_t> sizes,
                                 const CollectiveOptions& options) {
  return *engine_->gather({.name = "all_gatherv", .varies = true, .slices = sizes}, tensor, dim, options);
}

std::optional<Tensor> ProcessGroup::gather(const TensorView& tensor, int root, int dim,
                                           const CollectiveOptions& options) {
  return engine_->gather({"gather", {}, root}, tensor, dim, options);
}

std::optional<Tensor> ProcessGroup::gatherv(const TensorView& tensor, int root, int dim,
                                            const CollectiveOptions& options) {
  return engine_->gather({.name = "gatherv", .root = root, .varies = true}, tensor, dim, options);
}

void ProcessGroup::scatter(const Tensor& out, std::span<const TensorView> parts, int root,
                           const CollectiveOptions& options) {
  engine_->scatter({"scatter", {}, root, out.dtype(), &out.shape()}, out, parts, options);
}

Tensor ProcessGroup::all_to_all(const TensorView& tensor, const CollectiveOptions& options) {
  return engine_->all_to_all(tensor, {}, nullptr, options);
}

Tensor ProcessGroup::all_to_allv(const TensorView& tensor, std::span<const std::int64_t> rows,
                                 std::vector<std::int64_t>* received, const CollectiveOptions& options) {
  return engine_->all_to_all(tensor, rows, received, options);
}

Config ProcessGroup::broadcast_config(const Config& config, int root, const CollectiveOptions& options) {
  std::vector<Config> received = engine_->configs({"broadcast_config", {}, root}, config, true, false, options);
  return received.empty() ? config : std::move(received.front());
}

std::vector<Config> ProcessGroup::all_gather_config(const Config& config, const CollectiveOptions& options) {
  return engine_->configs({"all_gather_config"}, config, false, false, options);
}

std::vector<Config> ProcessGroup::gather_config(const Config& config, int root, const CollectiveOptions& options) {
  return engine_->configs({"gather_config", {}, root}, config, false, true, options);
}

void ProcessGroup::send(const TensorView& tensor, int to, int tag, const CollectiveOptions& options) {
  engine_->send(Config(Tensor::borrow(tensor)), to, tag, options);
}

void ProcessGroup::send_config(const Config& config, int to, int tag, const CollectiveOptions& options) {
  engine_->send(config, to, tag, options);
}

void ProcessGroup::recv(const Tensor& out, int from, int tag, const CollectiveOptions& options) {
  const collectives::Room room = collectives::room_of(out);
  const Config message = engine_->receive(from, tag, options);
  const TensorSpec wanted{out.dtype(), out.shape()};
  if (!message.is_tensor() || TensorSpec{message.as_tensor().dtype(), message.as_tensor().shape()} != wanted)
    throw Error(ErrorKind::rank_mismatch,
                fmt::format("rank {} has sent {} where {} was to be received", global_rank(from),
                            message.is_tensor()
                                ? to_string(TensorSpec{message.as_tensor().dtype(), message.as_tensor().shape()})
                                : "a Config",
                            to_string(wanted)),
                {.rank = global_rank(from)});
  if (!room.empty()) std::memcpy(room.data(), message.as_tensor().data(), room.size());
}

Config ProcessGroup::recv_config(int from, int tag, const CollectiveOptions& options) {
  return engine_->receive(from, tag, options);
}

}  // namespace muster
