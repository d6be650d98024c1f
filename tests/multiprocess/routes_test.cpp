// SPDX-License-Identifier: Apache-2.0
// Routes between real processes. A forced route is used and reported. If it is impossible, all ranks refuse it with the
// same message before any byte is moved, and the group remains usable.

#include <cstdlib>
#include <cstring>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/log.hpp"
#include "muster/merge_gather.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;

namespace {

constexpr Device cuda_1{Device::Kind::cuda, 1};

/// Returns ordinary memory with the label of a device. The error message shows whether a call takes it for host memory.
Config on(const Device& device, const Tensor& tensor) {
  return Tensor::borrow(TensorView(tensor.dtype(), tensor.shape(), tensor.data(), {}, device));
}

void refused(Group& group, const Config* value, const GatherOptions& options, const std::vector<std::string>& parts,
             ErrorKind kind = ErrorKind::unsupported) {
  fails_alike(group, kind, parts,
              [&] { (void)get_configs_parallel(value, ranks_from(0, group.size()), group, options); });
}

}  // namespace

TEST_CASE("a forced route is used and reported") {
  const TemporaryDirectory directory;
  run_ranks(3, [&](Group& group) {
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
    const MergeResult whole = merge_tensor_parallel(mine, merge::concat(0), ranks_from(0, 3), group);
    RANK_CHECK(whole.report().reason == "forced by MUSTER_ROUTE");
    // Different causes, one route.
    tells(gathered({.route = group.rank() == 1 ? Route::shm : Route::auto_}), Route::shm,
          group.rank() == 1 ? "forced by the caller" : "forced by MUSTER_ROUTE");
    const auto source = layers_of(2, [&](std::uint64_t) { return Config(mine); });
    const StreamReport stream = gather_each(source, ranks_from(0, 3), group, [](LayerPart&) {});
    RANK_CHECK(stream.route == Route::shm);
    RANK_CHECK(stream.reason == "forced by MUSTER_ROUTE");
    ::unsetenv("MUSTER_ROUTE");
  });
}

TEST_CASE("a forced route that is impossible is refused on all ranks with the possible routes") {
  run_ranks(3, [](Group& group) {
    const Config mine = pattern(DType::u8, {100}, 1);
    refused(group, &mine, {.route = Route::mpi},
            {"the route \"mpi\" is forced by the caller", "3 of the 3 ranks of the list [0, 1, 2]", "libmuster-mpi",
             "that all of them can use (shm)"});
    refused(group, &mine, {.route = Route::local}, {"\"local\" is forced by the caller", "lists of one rank"});
    refused(group, &mine, {.route = Route::workspace}, {"workspace.path is not set"});
    refused(group, &mine, {.route = Route::device},
            {"\"device\" is forced by the caller", "on the host", "rank 2: the host", "Force no route"});
    refused(group, nullptr, {.route = Route::device}, {"libmuster-cuda is not loaded"});
    {
      const Setting route("MUSTER_ROUTE", "local");
      error_of(ErrorKind::unsupported, {"\"local\" is forced by MUSTER_ROUTE"},
               [&] { (void)get_configs_parallel(&mine, ranks_from(0, 3), group); });
    }
    // One list is refused, beside a valid one.
    const std::vector<int> list = group.rank() == 2 ? std::vector{2} : std::vector{0, 1};
    fails_alike(group, ErrorKind::unsupported, {"the list [0, 1]"},
                [&] { (void)get_configs_parallel(&mine, list, group, {.route = Route::local}); });
    const auto stream = [&](Route route, const std::vector<std::string>& parts) {
      fails_alike(group, ErrorKind::unsupported, parts, [&] {
        (void)gather_each([] { return std::optional<Config>(); }, ranks_from(0, 3), group, [](LayerPart&) {},
                          {.route = route});
      });
    };
    stream(Route::mpi, {"gather_each", "\"mpi\" is forced by the caller", "that all of them can use (shm)"});
    stream(Route::device, {"gather_each needs tensors on the host"});
  });
}

TEST_CASE("tensors on devices, without a library that can copy them") {
  const TemporaryDirectory directory;
  run_ranks(3, [&](Group& group) {
    const Tensor tensor = pattern(DType::f32, {64}, 1);
    const Config device = on(cuda_1, tensor);
    const Config host = Tensor(tensor);
    const bool is_one = group.rank() == 1;
    // One rank with such tensors suffices; the other ranks need none.
    refused(group, is_one ? &device : nullptr, {},
            {"tensors of the list [0, 1, 2] are on devices", "libmuster-cuda is not loaded", "to the host first"});
    refused(group, is_one ? &device : &host, {},
            {"some tensors of the list [0, 1, 2] are on the host", "rank 0: the host", "rank 1: cuda:1",
             "rank 2: the host"},
            ErrorKind::invalid_argument);
    const Config both = Config::object({{"a", device}, {"b", host}});
    refused(group, is_one ? &both : nullptr, {}, {"rank 1: cuda:1 and the host"}, ErrorKind::invalid_argument);
    for (const Route route : {Route::shm, Route::local, Route::mpi})
      refused(group, &device, {.route = route}, {"which needs tensors on the host", "rank 0: cuda:1"});
    refused(group, &device, {.workspace = {.path = directory / "w"}},
            {"the route \"workspace\" is forced by workspace.path", "to the host first"});
    fails_alike(group, ErrorKind::unsupported, {"CPU tensors are needed", "rank 2: cuda:1"},
                [&] { (void)merge_tensor_parallel(device.as_tensor(), merge::concat(0), ranks_from(0, 3), group); });
    // In a stream they are detected when the layer arrives.
    int layer = 0;
    const auto source = [&]() -> std::optional<Config> { return layer++ == 2 && is_one ? device : host; };
    fails_alike(group, ErrorKind::unsupported,
                {"layer 2: its tensors are on cuda:1", "copy the tensors to the host in the source"},
                [&] { (void)gather_each(source, ranks_from(0, 3), group, [](LayerPart&) {}); });
    // A tensor without elements is not on a device.
    const Config empty = Tensor::borrow(TensorView(DType::f32, {0, 4}, nullptr, {}, cuda_1));
    const GatheredConfigs all = get_configs_parallel(&empty, ranks_from(0, 3), group);
    RANK_CHECK(all.report().route == Route::shm);
  });
}
