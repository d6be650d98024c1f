// SPDX-License-Identifier: Apache-2.0
// Routes between real processes: what is forced is taken and told, what cannot be is refused on all ranks with the same
// words before any byte moves, and the group goes on.

#include <cstdlib>
#include <cstring>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/log.hpp"
#include "muster/merge_gather.hpp"
#include "src/core/descriptor.hpp"
#include "src/gather/policy.hpp"
#include "src/gather/route.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;

namespace {

constexpr Device cuda_0{Device::Kind::cuda, 0};
constexpr Device cuda_1{Device::Kind::cuda, 1};

/// Ordinary memory under the name of a device: whoever takes it for the host's is found out by the words.
Config on(const Device& device, const Tensor& tensor) {
  return Tensor::borrow(TensorView(tensor.dtype(), tensor.shape(), tensor.data(), {}, device));
}

/// The call must fail on every rank of the group with the same words, which it returns, and leave the group usable.
std::string same_words(SyncGroup& group, ErrorKind kind, const std::function<void()>& call) {
  std::string words;
  try {
    call();
  } catch (const Error& error) {
    words = error.what();
    if (error.kind() != kind) throw RankFailure("another kind: " + words);
  }
  if (words.empty()) throw RankFailure("nothing was thrown");
  std::array<char, SyncGroup::max_record> mine{};
  std::memcpy(mine.data(), words.data(), std::min(words.size(), mine.size()));
  std::vector<char> all(mine.size() * static_cast<std::size_t>(group.size()));
  group.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  for (int rank = 0; rank < group.size(); ++rank)
    if (std::memcmp(all.data() + static_cast<std::size_t>(rank) * mine.size(), mine.data(), mine.size()) != 0)
      throw RankFailure("other words on rank " + std::to_string(rank) + ": " +
                        std::string(all.data() + static_cast<std::size_t>(rank) * mine.size()));
  // Nothing of the refused call is in the way of the next one.
  const Tensor tensor = pattern(DType::u8, {999}, static_cast<std::uint64_t>(group.rank()));
  const GatheredTensors well = get_tensors_parallel(tensor, ranks_from(0, group.size()), group);
  for (const auto& [rank, value] : well.present())
    RANK_CHECK(bitwise_equal(value, pattern(DType::u8, {999}, static_cast<std::uint64_t>(rank))));
  return words;
}

void wants(const std::string& words, std::initializer_list<std::string_view> parts) {
  for (const std::string_view part : parts)
    if (words.find(part) == std::string::npos) throw RankFailure("no \"" + std::string(part) + "\" in: " + words);
}

std::string refused(SyncGroup& group, const Config* value, const GatherOptions& options,
                    ErrorKind kind = ErrorKind::unsupported) {
  return same_words(group, kind,
                    [&] { (void)get_configs_parallel(value, ranks_from(0, group.size()), group, options); });
}

/// A device route without a device: bytes go as messages.
class FakeTransfer final : public gather::Transfer {
 public:
  explicit FakeTransfer(const gather::Call& call) : call_(call) {}

  void offer(gather::Record& record) override {
    if (!call_.is_sender() || call_.value == nullptr) return;
    body_ = core::encode_descriptor(*call_.value, [&](const Tensor& tensor) {
      const std::byte* at = tensor.data();
      elements_.insert(elements_.end(), at, at + tensor.nbytes());
      return std::optional<core::Place>();
    });
    record.descriptor_bytes = body_.size();
    record.descriptor_hash = body_.size();
    record.payload_bytes = record.moving_bytes = elements_.size();
  }
  void move(std::span<const gather::Record> records, ExchangeReport&) override {
    const WaitOptions wait = call_.wait("fake device");
    if (call_.is_sender() && call_.value != nullptr) {
      call_.group->send(call_.first(), body_, wait);
      call_.group->send(call_.first(), elements_, wait);
    }
    if (!call_.is_first()) return;
    entries_.resize(call_.list.size());
    for (std::size_t position = 1; position < call_.list.size(); ++position) {
      const int sender = call_.list[position];
      if (!records[static_cast<std::size_t>(sender)].has_value) continue;
      const auto body = call_.group->receive(sender, 1 << 20, wait);
      const auto elements = call_.group->receive(sender, 1 << 20, wait);
      std::size_t taken = 0;
      entries_[position] =
          core::decode_descriptor(body, [&](DType dtype, const Shape& shape, std::uint64_t bytes, core::Place) {
            Tensor copy = Tensor::allocate(dtype, shape);
            std::memcpy(copy.mutable_data(), elements.data() + taken, bytes);
            taken += bytes;
            return copy;
          });
    }
  }
  void commit() noexcept override {}
  std::vector<std::optional<Config>> deliver() override { return std::move(entries_); }
  std::vector<std::unique_ptr<gather::Obligation>> obligations() override { return {}; }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override { return 0; }

 private:
  const gather::Call& call_;
  std::vector<std::byte> body_;
  std::vector<std::byte> elements_;
  std::vector<std::optional<Config>> entries_;
};

class FakeRoute final : public gather::RouteDriver {
 public:
  [[nodiscard]] Route route() const noexcept override { return Route::device; }
  [[nodiscard]] bool is_usable(const gather::Call&) const override { return true; }
  [[nodiscard]] std::string reason(const gather::Call&) const override { return "somebody has a device"; }
  std::unique_ptr<gather::Transfer> begin(const gather::Call& call) const override {
    return std::make_unique<FakeTransfer>(call);
  }
  std::uint64_t settle(SyncGroup&, Keep) const override { return 0; }
  std::uint64_t trim(SyncGroup&) const override { return 0; }
  void clean_up(SyncGroup&) const noexcept override {}
};

void load_fake_route() {
  gather::RouteTable::instance().add(std::make_unique<FakeRoute>());
}

}  // namespace

TEST_CASE("what is forced is taken, and told") {
  const TemporaryDirectory directory;
  run_ranks(3, [&](SyncGroup& group) {
    const Tensor mine = pattern(DType::u8, {3000}, static_cast<std::uint64_t>(group.rank()));
    const auto gathered = [&](const GatherOptions& options) {
      return get_tensors_parallel(mine, ranks_from(0, 3), group, options);
    };
    const auto tells = [&](const GatheredTensors& all, Route route, const std::string& reason) {
      RANK_CHECK(all.report().route == route);
      RANK_CHECK(all.report().reason == reason);
      RANK_CHECK(all.explain().starts_with("route " + std::string(to_string(route)) + " (" + reason + ")"));
    };
    tells(gathered({}), Route::shm, "all ranks of the list share memory");
    tells(gathered({.route = Route::shm}), Route::shm, "forced by the caller");
    tells(gathered({.workspace = {.path = directory / "w"}}), Route::workspace, "forced by workspace.path");
    ::setenv("MUSTER_ROUTE", "shm", 1);
    std::string logged;
    set_log_hook([&](LogLevel, std::string_view message) { logged = message; }, LogLevel::debug);
    tells(gathered({}), Route::shm, "forced by MUSTER_ROUTE");
    set_log_hook({});
    RANK_CHECK(logged == "rank " + std::to_string(group.rank()) +
                             ": get_tensors_parallel: 9000 bytes by shm (forced by MUSTER_ROUTE)");
    const Merged whole = merge_tensor_parallel(mine, merge::concat(0), ranks_from(0, 3), group);
    RANK_CHECK(whole.report().reason == "forced by MUSTER_ROUTE");
    // Different causes, one route.
    tells(gathered({.route = group.rank() == 1 ? Route::shm : Route::automatic}), Route::shm,
          group.rank() == 1 ? "forced by the caller" : "forced by MUSTER_ROUTE");
    int layers = 2;
    const StreamReport stream = gather_each(
        [&]() -> std::optional<Config> {
          if (layers-- == 0) return std::nullopt;
          return Config(mine);
        },
        ranks_from(0, 3), group, [](LayerPart&) {});
    RANK_CHECK(stream.route == Route::shm);
    RANK_CHECK(stream.reason == "forced by MUSTER_ROUTE");
    ::unsetenv("MUSTER_ROUTE");
  });
}

TEST_CASE("a forced route that cannot be is refused on all ranks with what could be") {
  run_ranks(3, [](SyncGroup& group) {
    const Config mine = pattern(DType::u8, {100}, 1);
    wants(refused(group, &mine, {.route = Route::mpi}),
          {"the route 'mpi' is forced by the caller", "3 of the 3 ranks of the list [0, 1, 2]", "libmuster-mpi",
           "All of them can go by: shm"});
    wants(refused(group, &mine, {.route = Route::local}), {"'local' is forced by the caller", "lists of one rank"});
    wants(refused(group, &mine, {.route = Route::workspace}), {"no workspace.path is given"});
    wants(refused(group, &mine, {.route = Route::device}),
          {"'device' is forced by the caller", "on the host", "rank 2: the host", "force no route"});
    wants(refused(group, nullptr, {.route = Route::device}), {"libmuster-cuda is not loaded"});
    ::setenv("MUSTER_ROUTE", "local", 1);
    try {
      (void)get_configs_parallel(&mine, ranks_from(0, 3), group);
      throw RankFailure("nothing was thrown");
    } catch (const Error& error) {
      wants(error.what(), {"'local' is forced by MUSTER_ROUTE"});
    }
    ::unsetenv("MUSTER_ROUTE");
    // One list is refused, beside one that is well.
    const std::vector<int> list = group.rank() == 2 ? std::vector{2} : std::vector{0, 1};
    wants(same_words(group, ErrorKind::unsupported,
                     [&] { (void)get_configs_parallel(&mine, list, group, {.route = Route::local}); }),
          {"the list [0, 1]"});
    // Streams.
    const auto stream = [&](Route route) {
      return same_words(group, ErrorKind::unsupported, [&] {
        (void)gather_each([] { return std::optional<Config>(); }, ranks_from(0, 3), group, [](LayerPart&) {},
                          {.route = route});
      });
    };
    wants(stream(Route::mpi), {"gather_each", "'mpi' is forced by the caller", "All of them can go by: shm"});
    wants(stream(Route::device), {"gather_each takes tensors of the host"});
  });
}

TEST_CASE("tensors on devices, and nobody who could take them from there") {
  const TemporaryDirectory directory;
  run_ranks(3, [&](SyncGroup& group) {
    const Tensor tensor = pattern(DType::f32, {64}, 1);
    const Config device = on(cuda_1, tensor);
    const Config host = Tensor(tensor);
    const bool is_one = group.rank() == 1;
    // One rank's are enough, the others need not have any.
    wants(refused(group, is_one ? &device : nullptr, {}),
          {"tensors of the list [0, 1, 2] are on devices", "libmuster-cuda is not loaded", "to the host first"});
    wants(refused(group, is_one ? &device : &host, {}, ErrorKind::argument),
          {"some tensors of the list [0, 1, 2] are on the host", "rank 0: the host", "rank 1: cuda:1",
           "rank 2: the host"});
    const Config both = Config::object({{"a", device}, {"b", host}});
    wants(refused(group, is_one ? &both : nullptr, {}, ErrorKind::argument), {"rank 1: cuda:1 and the host"});
    for (const Route route : {Route::shm, Route::local, Route::mpi})
      wants(refused(group, &device, {.route = route}), {"which takes tensors of the host", "rank 0: cuda:1"});
    wants(refused(group, &device, {.workspace = {.path = directory / "w"}}),
          {"the route 'workspace' is forced by workspace.path", "to the host first"});
    wants(
        same_words(group, ErrorKind::unsupported,
                   [&] { (void)merge_tensor_parallel(device.as_tensor(), merge::concat(0), ranks_from(0, 3), group); }),
        {"merges read tensors of the host", "rank 2: cuda:1"});
    // In a stream they are found when they come.
    int layer = 0;
    wants(same_words(group, ErrorKind::unsupported,
                     [&] {
                       (void)gather_each(
                           [&]() -> std::optional<Config> { return layer++ == 2 && is_one ? device : host; },
                           ranks_from(0, 3), group, [](LayerPart&) {});
                     }),
          {"layer 2 has tensors on cuda:1", "let the source copy them to the host first"});
    // No elements, no place.
    const Config empty = Tensor::borrow(TensorView(DType::f32, {0, 4}, nullptr, {}, cuda_0));
    const GatheredConfigs all = get_configs_parallel(&empty, ranks_from(0, 3), group);
    RANK_CHECK(all.report().route == Route::shm);
  });
}

TEST_CASE("ranks without tensors follow those that have them on devices") {
  run_ranks(4, [](SyncGroup& group) {
    load_fake_route();
    const auto tensor_of = [](int rank) { return pattern(DType::u8, {500 + rank}, static_cast<std::uint64_t>(rank)); };
    const Tensor tensor = tensor_of(group.rank());
    const Config device = Config::object({{"name", "w"}, {"weight", on(cuda_0, tensor)}});
    const Config words = Config::object({{"name", "nothing"}, {"layers", Config::array({1, 2, 3})}});
    for (const int first : {0, 1, 2, 3}) {
      // Rank 0 has nothing, rank 1 a config without tensors, the others have tensors.
      const Config* mine = group.rank() == 0 ? nullptr : group.rank() == 1 ? &words : &device;
      const GatheredConfigs all = get_configs_parallel(mine, ranks_from(first, 4), group);
      RANK_CHECK(all.report().route == Route::device);
      RANK_CHECK(all.report().reason == "somebody has a device");
      RANK_CHECK(all.report().rounds == 2);
      if (group.rank() != first) continue;
      for (const auto& [rank, config] : all.present()) {
        RANK_CHECK(rank != 0);
        if (rank == 1) RANK_CHECK(config == words);
        if (rank >= 2 && rank != first) RANK_CHECK(config.at("weight") == Config(tensor_of(rank)));
      }
      RANK_CHECK(all.present().size() == 3);
    }
    // Forced, where nobody has tensors, it is taken, too.
    const GatheredConfigs forced = get_configs_parallel(&words, ranks_from(0, 4), group, {.route = Route::device});
    RANK_CHECK(forced.report().route == Route::device);
    // And those of the host go on as before.
    const Config host = Tensor(tensor);
    RANK_CHECK(get_configs_parallel(&host, ranks_from(0, 4), group).report().route == Route::shm);
    wants(refused(group, &host, {.route = Route::device}), {"are on the host"});
    wants(refused(group, group.rank() == 3 ? &host : &device, {}, ErrorKind::argument), {"rank 3: the host"});
  });
}
