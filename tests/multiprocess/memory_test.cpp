// SPDX-License-Identifier: Apache-2.0
// Too little memory is an error on all ranks before the first byte is moved. The error has the needed and the available
// bytes. It never causes SIGBUS or a dead process, and the group remains usable.

#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>

#include "doctest/doctest.h"
#include "muster/gather_each.hpp"
#include "muster/process_group.hpp"
#include "muster/shared_arena.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;

namespace {

/// Runs a test in its own child process, which may change its environment, or report that it is skipped here.
void in_child(const std::function<void()>& body) {
  Ranks child(1, [&](int) { body(); });
  const Ended ended = child.wait().front();
  if (ended.words.starts_with("skipped: "))
    MESSAGE(ended.words);
  else
    CHECK_MESSAGE(ended.ok(), "status ", ended.exit_status, ", signal ", ended.signal, ": ", ended.words);
}

/// Runs ranks in such a child.
void in_ranks(int count, const std::function<void(Group&)>& body) {
  for (const Ended& ended : try_ranks(count, body))
    if (!ended.ok()) throw RankFailure("a rank ended with signal " + std::to_string(ended.signal) + ": " + ended.words);
}

/// In such a child: mounts a /dev/shm of `kib` that only the child and its own children see.
void shrink_dev_shm(int kib) {
  const std::string size = "size=" + std::to_string(kib) + "k";
  if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount("none", "/dev/shm", "tmpfs", 0, size.c_str()) != 0)
    throw RankFailure("skipped: no right to mount a small /dev/shm");
}

/// Runs ranks whose shared memory is in a /dev/shm of `kib`.
void over_posix(int kib, int count, const std::function<void(Group&)>& body) {
  in_child([&] {
    shrink_dev_shm(kib);
    const Setting shm("MUSTER_SHM", "posix");
    in_ranks(count, body);
  });
}

void set_limit(decltype(RLIMIT_AS) resource, rlim_t bytes) {
  const rlimit limit{bytes, RLIM_INFINITY};
  RANK_CHECK(::setrlimit(resource, &limit) == 0);
}

void go_on(Group& group) {
  gather_and_check(group, four, 1000, 0);
  merge_and_check(group, four, merge::stack(), patterns(DType::u8, {5000}, 0));
}

void expect_no_space(Group& group, const std::function<void()>& call, const char* limited_by) {
  error_of(ErrorKind::out_of_space, {"needed", limited_by}, call);
  go_on(group);
}

void expect_no_space(Group& group, std::int64_t bytes, const char* limited_by) {
  const Tensor mine = pattern(DType::u8, {bytes}, 1);
  expect_no_space(
      group, [&] { (void)get_tensors_parallel(mine, four, group); }, limited_by);
}

void expect_no_space(Group& group, const TensorView& mine, const Merge& merge, const char* limited_by) {
  expect_no_space(
      group, [&] { (void)merge_tensor_parallel(mine, merge, four, group); }, limited_by);
}

}  // namespace

TEST_CASE("/dev/shm of 1 MiB: a gather of 256 MiB works") {
  in_child([] {
    shrink_dev_shm(1024);
    in_ranks(4, [](Group& group) { gather_and_check(group, four, 64 << 20, 0); });
  });
}

TEST_CASE("/dev/shm of 2 MiB and POSIX memory forced: a clear error on all ranks") {
  // The space suffices for the group's control block, but not for a tensor.
  over_posix(2048, 4, [](Group& group) {
    const Tensor mine = pattern(DType::u8, {4 << 20}, 1);
    error_of(ErrorKind::out_of_space, {"needed", "/dev/shm"}, [&] { (void)get_tensors_parallel(mine, four, group); });
    gather_and_check(group, four, 1000, 0);
  });
}

TEST_CASE("/dev/shm of 8 MiB and POSIX memory forced: a stream cuts its budget to the available memory") {
  over_posix(8192, 4, [](Group& group) {
    const Model model = [](int, std::uint64_t layer) {
      return Config::object({{"w", pattern(DType::u8, {3000, 1000}, layer)}});
    };
    for (const std::uint64_t budget : {256_MiB, 1_MiB, 256_MiB})
      RANK_CHECK(stream_and_check(group, four, 6, model, {.memory_budget = budget}).part_bytes < 2_MiB);
  });
}

TEST_CASE("/dev/shm without space for a stream: a clear error on all ranks, and the group remains usable") {
  // The memory for so small an exchange exists already; a second control block does not fit.
  over_posix(152, 4, [](Group& group) {
    gather_and_check(group, four, 1000, 0);
    error_of(ErrorKind::out_of_space, {},
             [&] { gather_each([] { return std::nullopt; }, four, group, [](LayerPart&) {}); });
    gather_and_check(group, four, 1000, 0);
  });
}

TEST_CASE("/dev/shm without space for messages: all ranks receive the sender's error at once") {
  over_posix(64, 2, [](Group& group) {
    const Error error = error_of(ErrorKind::out_of_space, {"/dev/shm"}, [&] {
      if (group.rank() == 0) (void)group.receive(1, 1 << 20);
      if (group.rank() == 1) group.send(0, std::vector<std::byte>(100 << 10));
    });
    RANK_CHECK(error.rank() == 1);
  });
}

TEST_CASE("a group without enough space, or above a limit (RLIMIT_FSIZE), is an error, not SIGBUS or SIGXFSZ") {
  struct Case {
    const char* group;
    const char* shm;
    const char* words;
  };
  for (const Case& each : {Case{"local", "posix", "/dev/shm"}, Case{"local", "memfd", "RLIMIT_FSIZE"},
                           Case{"local", "posix", "RLIMIT_FSIZE"}, Case{"file", "memfd", "RLIMIT_FSIZE"}}) {
    CAPTURE(each.group);
    CAPTURE(each.words);
    in_child([&] {
      const Setting shm("MUSTER_SHM", each.shm);
      const Setting group("MUSTER_TEST_GROUP", each.group);
      if (std::string_view(each.words) == "/dev/shm")
        shrink_dev_shm(16);
      else
        set_limit(RLIMIT_FSIZE, 0);
      for (const Ended& ended : try_ranks(2, [](Group&) {}))
        if (ended.exit_status != 1 || ended.words.find(each.words) == std::string::npos)
          throw RankFailure("signal " + std::to_string(ended.signal) + ": " + ended.words);
    });
  }
}

TEST_CASE("a file size limit (RLIMIT_FSIZE) is an error of gathers and merges, not SIGXFSZ") {
  in_child([] {
    set_limit(RLIMIT_FSIZE, 16 << 20);
    in_ranks(4, [](Group& group) {
      expect_no_space(group, 32 << 20, "RLIMIT_FSIZE");
      const Tensor mine = pattern(DType::u8, {4 << 20}, 1);
      for (const Merge& merge : {merge::concat(0), merge::stack()}) expect_no_space(group, mine, merge, "RLIMIT_FSIZE");
    });
  });
}

TEST_CASE("a file size limit (RLIMIT_FSIZE) on a sender does not keep it from writing into the root's memory") {
  run_ranks(4, [](Group& group) {
    if (group.rank() == 2) set_limit(RLIMIT_FSIZE, 1 << 20);
    merge_and_check(group, four, merge::concat(0), patterns(DType::u8, {4 << 20}, 1));
    merge_and_check(group, four, merge::stack(), patterns(DType::u8, {5000}, 0));
  });
}

TEST_CASE(
    "an address space limit (RLIMIT_AS) on one rank is an error on all ranks, for gathers, merges and all_gatherv") {
  if (under_sanitizer) {
    MESSAGE("skipped: sanitizers need the address space");
    return;
  }
  const auto run = [](int victim, rlim_t limit, std::int64_t bytes, const auto& call) {
    run_ranks(4, [&](Group& group) {
      if (group.rank() == victim) set_limit(RLIMIT_AS, limit);
      // The tensor is not written, so it takes no memory on the other ranks.
      const Tensor much = Tensor::allocate(DType::u8, {bytes});
      RANK_CHECK(error_of(ErrorKind::out_of_space, {}, [&] { call(much, group); }).rank() == victim);
      go_on(group);
    });
  };
  // The rank cannot map the senders' memory, or cannot copy its own.
  for (const RootTensors own : {RootTensors::borrow, RootTensors::copy})
    run(0, 512 << 20, 250 << 20, [own](const Tensor& much, Group& group) {
      const bool has_much = (group.rank() == 0) == (own == RootTensors::copy);
      const Config mine = Config::object({{"w", has_much ? much : pattern(DType::u8, {1}, 0)}});
      (void)get_configs_parallel(&mine, four, group, {.root_tensors = own});
    });
  for (const int victim : {0, 2})
    for (const Merge& merge : {merge::concat(0), merge::sum()})
      run(victim, 700 << 20, 300 << 20,
          [&merge](const Tensor& much, Group& group) { (void)merge_tensor_parallel(much, merge, four, group); });
  run(2, 512 << 20, 100 << 20, [](const Tensor& much, Group& group) { (void)ProcessGroup(group).all_gatherv(much); });
}

TEST_CASE("merges of more than the machine's memory, of tensors that repeat one byte") {
  run_ranks(4, [](Group& group) {
    const std::byte byte{7};
    const TensorView huge(DType::u8, {std::int64_t{1} << 40}, &byte, {0});
    for (const Merge& merge : {merge::concat(0), merge::stack(), merge::sum()})
      expect_no_space(group, huge, merge, "available");
    // If the machine has 1 TiB, one list alone fits; otherwise neither list fits. The check must use the sum of the
    // lists.
    const bool is_first = group.rank() < 2;
    const std::vector<int> mine = is_first ? std::vector<int>{0, 1} : std::vector<int>{2, 3};
    expect_no_space(
        group, [&] { (void)merge_tensor_parallel(huge, merge::sum(), mine, group); }, "by 2 ranks");
    // One list that is too large is an error on all ranks, because an exchange is collective over the group.
    const Tensor small = pattern(DType::u8, {10}, 1);
    expect_no_space(
        group, [&] { (void)merge_tensor_parallel(is_first ? huge : small.view(), merge::concat(0), mine, group); },
        "available");
  });
}

TEST_CASE("sizes whose sum exceeds 63 bits are refused, without overflow") {
  run_ranks(4, [](Group& group) {
    const std::byte byte{7};
    const TensorView huge(DType::u8, {std::int64_t{1} << 59}, &byte, {0});
    const Error error = error_of([&] { (void)merge_tensor_parallel(huge, merge::concat(0), four, group); });
    RANK_CHECK(error.kind() == ErrorKind::out_of_space || error.kind() == ErrorKind::invalid_argument);
    go_on(group);
  });
}

TEST_CASE("a cgroup that is too small is an error on all ranks") {
  if (under_sanitizer) {
    MESSAGE("skipped: the sanitizers' own memory would fill the cgroup");
    return;
  }
  in_child([] {
    // Versions 1 and 2 use different names, and either may be read-only here.
    const std::string dir = "/sys/fs/cgroup/memory/muster-test-" + std::to_string(::getpid());
    const std::string unified = "/sys/fs/cgroup/muster-test-" + std::to_string(::getpid());
    struct Remove {
      std::string path;
      ~Remove() { ::rmdir(path.c_str()); }
    };
    std::string used;
    for (const auto& [path, limit] : {std::pair{dir, "/memory.limit_in_bytes"}, std::pair{unified, "/memory.max"}}) {
      if (::mkdir(path.c_str(), 0755) != 0) continue;
      std::ofstream file(path + limit);
      file << (192 << 20);
      file.close();
      std::ofstream procs(path + "/cgroup.procs");
      procs << ::getpid();
      procs.close();
      if (file.good() && procs.good()) {
        used = path;
        break;
      }
      ::rmdir(path.c_str());
    }
    if (used.empty()) throw RankFailure("skipped: no cgroup can be made here");
    const Remove remove{used};
    // 4 ranks hold 24 MiB each. The senders would need another 72 MiB in shared memory, twice.
    in_ranks(4, [](Group& group) { expect_no_space(group, 40 << 20, "cgroup"); });
    // The process leaves the cgroup, so that it is empty when it is removed.
    std::ofstream(used.substr(0, used.rfind('/')) + "/cgroup.procs") << ::getpid();
  });
}

TEST_CASE("an arena larger than the machine is refused with figures") {
  CHECK(has(words_of(ErrorKind::out_of_space, [] { const SharedArena arena(std::uint64_t{1} << 50); }),
            "needed 1125899906842624 bytes (1.0 PiB), available"));
}

TEST_CASE("a full arena says how much is free, and how much waits for leases") {
  SharedArena arena(1 << 20);
  const Tensor first = arena.allocate(DType::u8, {600000});
  CHECK(has(words_of(ErrorKind::out_of_space, [&] { (void)arena.allocate(DType::u8, {600000}); }),
            "needed 600000 bytes in one piece"));
}
