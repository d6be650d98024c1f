// SPDX-License-Identifier: Apache-2.0
// Names in a workspace: the parser restores every name that Muster creates, and accepts no other name.

#include <unistd.h>

#include "doctest/doctest.h"
#include "src/os/process.hpp"
#include "src/workspace/names.hpp"

using namespace muster;
using namespace muster::workspace;

namespace {

const std::string job(32, 'c');
const std::string random_word(16, '9');

os::ProcessIdentity somebody() {
  return {"host-1.example_x", "00112233aabbccdd", 4711, 123456, 4026531836};
}

}  // namespace

TEST_CASE("every kind of name is parsed to its parts") {
  const os::ProcessIdentity writer = somebody();
  const Name all[] = {
      {.kind = NameKind::mark},
      {.kind = NameKind::state, .job = job, .rank = 0, .world_size = 1, .step = 1},
      {.kind = NameKind::state, .job = job, .rank = 4095, .world_size = 4096, .step = UINT64_MAX},
      {.kind = NameKind::kept, .job = job, .rank = 3, .world_size = 8, .step = 12},
      {.kind = NameKind::exchange, .job = job, .rank = 3, .world_size = 8, .step = 12, .writer = writer},
      {.kind = NameKind::token, .job = job, .rank = 7, .random = random_word, .writer = writer},
      {.kind = NameKind::probe, .random = random_word, .writer = writer},
      {.kind = NameKind::growing, .random = random_word, .writer = writer},
      {.kind = NameKind::job, .job = job},
      {.kind = NameKind::meeting, .random = random_word},
  };
  for (const Name& name : all) {
    const std::string file = file_name(name);
    CAPTURE(file);
    CHECK(file.size() <= 255);
    const auto parsed = parse_name(file);
    REQUIRE(parsed.has_value());
    CHECK(*parsed == name);
    CHECK(file_name(*parsed) == file);
    // No prefix of it, and no longer text, is a name.
    for (std::size_t cut = 0; cut < file.size(); ++cut) {
      const auto part = parse_name(file.substr(0, cut));
      CHECK((!part || file_name(*part) == file.substr(0, cut)));
    }
    CHECK(!parse_name(file + "x"));
    CHECK(!parse_name("x" + file));
  }
}

TEST_CASE("names that Muster did not create are not parsed") {
  for (const std::string& name :
       {std::string(), std::string("state-"), "state-" + job + "-r0-of1-g1", "state-" + job + "-r1-of1-g1.h5",
        "state-" + job + "-r-1-of1-g1.h5", "state-" + job + "-r00-of1-g1.h5", "state-" + job + "-r0-of1-g01.h5",
        "state-" + job + "-r0-of1-g18446744073709551616.h5", "state-" + std::string(32, 'C') + "-r0-of1-g1.h5",
        "state-" + std::string(31, 'c') + "-r0-of1-g1.h5", "state-" + job + "-r99999999999-of1-g1.h5",
        ".growing-" + random_word + "@host", ".growing-" + random_word + "@a/b,0011223344556677,1,2,3",
        ".growing-" + random_word + "@,0011223344556677,1,2,3", std::string("job-"), std::string("muster-workspace"),
        std::string("model.safetensors"), std::string("\0x", 2)}) {
    CAPTURE(name);
    CHECK(!parse_name(name));
  }
}

TEST_CASE("fresh names differ, and identify this process") {
  const auto first = parse_name(growing_name());
  const auto second = parse_name(growing_name());
  REQUIRE(first);
  REQUIRE(second);
  CHECK(first->random != second->random);
  CHECK(*first->writer == os::own_identity());
  CHECK(parse_name(probe_name())->kind == NameKind::probe);
}

TEST_CASE("a step is common if each rank of one world has a state of it") {
  std::vector<Name> states;
  const auto add = [&](std::uint64_t step, int rank, int world_size) {
    states.push_back({.kind = NameKind::state, .job = job, .rank = rank, .world_size = world_size, .step = step});
  };
  for (const int rank : {0, 1}) add(1, rank, 2);
  add(2, 0, 2);
  add(3, 0, 2);
  add(3, 1, 3);  // of another world size: does not match the state above
  for (const int rank : {0, 1, 2}) add(4, rank, 3);
  CHECK(common_steps(states, 2) == std::set<std::uint64_t>{1});
  CHECK(common_steps(states, 3) == std::set<std::uint64_t>{4});
  CHECK(common_steps(states, 1).empty());
}

TEST_CASE("names of a file group") {
  CHECK(number_behind(numbered(round_prefix(2, 7, 3), 128), round_prefix(2, 7, 3)) == 128);
  CHECK(!number_behind(numbered(round_prefix(2, 7, 31), 128), round_prefix(2, 7, 3)));
  CHECK(number_behind(numbered(message_prefix(0, 1, 2, 3), 0), message_prefix(0, 1, 2, 3)) == 0);
  CHECK(!number_behind("g0.all-1-", all_prefix(0, 1)));
  const PulseName pulse{5, 6, 7, "gather: round 1"};
  const auto again = pulse_behind(pulse_name(1, 2, pulse), pulse_prefix(1, 2));
  REQUIRE(again);
  CHECK(again->number == 5);
  CHECK(again->progress == 6);
  CHECK(again->awaited == 7);
  CHECK(again->phase == "gather: round 1");
  // A phase is any static text, but a name contains no slash.
  CHECK(pulse_name(1, 2, {0, 0, 0, "a/b\n" + std::string(500, 'x')}).find('/') == std::string::npos);
  CHECK(pulse_name(1, 2, {0, 0, 0, std::string(500, 'x')}).size() <= 255);
  const auto member = parse_member_name(member_name(3, somebody()));
  REQUIRE(member);
  CHECK(member->rank == 3);
  CHECK(member->writer == somebody());
  using Kind = MeetingName::Kind;
  const std::string token(16, 'a');
  for (const MeetingName& name : {MeetingName{.kind = Kind::hello, .version = 1, .rank = 2, .size = 3, .token = token},
                                  MeetingName{.kind = Kind::call, .number = 4, .first_token = token},
                                  MeetingName{.kind = Kind::here, .rank = 2, .token = token, .first_token = token},
                                  MeetingName{.kind = Kind::told, .number = 3, .token = token, .first_token = token},
                                  MeetingName{.kind = Kind::said, .number = 1, .first_token = token}}) {
    MeetingName whole = name;
    whole.writer = somebody();
    const std::string file = meeting_file_name(whole);
    CAPTURE(file);
    const auto parsed = parse_meeting_name(file);
    REQUIRE(parsed);
    CHECK(meeting_file_name(*parsed) == file);
    CHECK(parsed->kind == whole.kind);
    CHECK(meeting_writer(file) == somebody());
    CHECK(!is_group_file(file));
  }
  for (const std::string& file :
       {member_name(3, somebody()), numbered(beat_prefix(1), 2), gone_name(1), pulse_name(1, 2, pulse),
        numbered(round_prefix(2, 7, 3), 128), numbered(all_prefix(1, 2), 3), numbered(message_prefix(0, 1, 2, {}), 3),
        failed_name(1), left_name(1, 2), growing_name(), probe_name()})
    CHECK_MESSAGE(is_group_file(file), file);
  for (const std::string file :
       {"notes.txt", "member-x", "g1.notes", "g1.failed.txt", "gone-home", "muster-workspace.json"}) {
    CHECK_MESSAGE(!is_group_file(file), file);
    CHECK(!meeting_writer(file));
  }
}

TEST_CASE("only the host of a process can prove whether it lives") {
  os::ProcessIdentity own = os::own_identity();
  CHECK(os::life_of(own) == os::Life::alive);
  CHECK(own.pid == ::getpid());
  os::ProcessIdentity other = own;
  other.start += 1;
  CHECK(os::life_of(other) == os::Life::dead);  // another process got its PID
  other = own;
  other.pid = 0x7ffffff0;
  CHECK(os::life_of(other) == os::Life::dead);
  for (auto change :
       {+[](os::ProcessIdentity& it) { it.host += "x"; }, +[](os::ProcessIdentity& it) { it.boot[0] ^= 1; },
        +[](os::ProcessIdentity& it) { ++it.pid_namespace; }, +[](os::ProcessIdentity& it) { it.pid = -1; }}) {
    other = own;
    other.pid = 0x7ffffff0;
    change(other);
    CHECK(os::life_of(other) == os::Life::unknown);
  }
}
