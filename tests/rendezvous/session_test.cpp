// SPDX-License-Identifier: Apache-2.0
// The state machine of the rendezvous over lines in memory: the answers of each side, and the causes of failures.

#include "src/rendezvous/session.hpp"

#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "doctest/doctest.h"
#include "src/base/fixed_string.hpp"
#include "tests/support/forked_ranks.hpp"

using namespace muster;
using namespace muster::rendezvous;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

/// One end of a line. The test script acts as the other end.
struct Script {
  std::deque<Message> incoming;
  std::optional<Line::End> end;  // reported when `incoming` is empty
  std::vector<Word> sent;
  std::vector<std::vector<std::byte>> bodies;
  bool takes = true;  // the other end accepts messages
  void comes(Word word, std::span<const std::byte> body = {}) {
    incoming.push_back({word, {body.begin(), body.end()}});
  }
};

class ScriptedLine final : public Line {
 public:
  explicit ScriptedLine(std::shared_ptr<Script> script) : script_(std::move(script)) {}
  void send(const OutgoingPointer& message) override {
    MessageHead head;
    std::memcpy(&head, message->bytes.data(), sizeof head);
    script_->sent.push_back(head.word);
    script_->bodies.emplace_back(message->bytes.begin() + sizeof head, message->bytes.end());
    is_drained_ = script_->takes;
  }
  void move() override {}
  [[nodiscard]] bool is_drained() const override { return is_drained_; }
  std::optional<Message> next(const MessageLimits& limits) override {
    if (script_->incoming.empty() || end_) return std::nullopt;
    Message message = std::move(script_->incoming.front());
    script_->incoming.pop_front();
    if (!parse_head({.word = message.word, .bytes = message.body.size()}, limits)) {
      end_ = End{.is_garbage = true, .words = "an invalid head"};
      return std::nullopt;
    }
    return message;
  }
  [[nodiscard]] std::optional<End> end() const override {
    return end_ ? end_ : script_->incoming.empty() ? script_->end : std::nullopt;
  }

 private:
  std::shared_ptr<Script> script_;
  std::optional<End> end_;
  bool is_drained_ = true;
};

class ScriptedTransport final : public Connector {
 public:
  std::vector<std::shared_ptr<Script>> scripts;
  std::optional<Error> arrival_fails;

  Token open() override { return token_of("job"); }
  std::vector<std::unique_ptr<Line>> arrivals() override {
    if (arrival_fails) throw Error(*arrival_fails);
    std::vector<std::unique_ptr<Line>> lines;
    for (const auto& script : std::exchange(scripts, {})) lines.push_back(std::make_unique<ScriptedLine>(script));
    return lines;
  }
  std::unique_ptr<Line> reach(Hello, Clock::time_point, std::string& reason) override {
    reason = "there is no line";
    if (scripts.empty()) return nullptr;
    const auto script = scripts.front();
    scripts.erase(scripts.begin());
    return std::make_unique<ScriptedLine>(script);
  }
  [[nodiscard]] milliseconds pause(int) const override { return 1ms; }
  void wait(std::span<Line* const>, milliseconds) override { std::this_thread::sleep_for(1ms); }
};

Hello hello_of(int rank, int size = 3) {
  Hello hello = own_hello(rank, size);
  hello.token = token_of("job");
  hello.pid = 1000 + rank;
  return hello;
}

std::span<const std::byte> bytes_of(const Hello& hello) {
  return std::as_bytes(std::span(&hello, 1));
}

Terms terms_of(int rank) {
  return {.call = "test", .place = "here", .hint = "look", .rank = rank, .size = 3, .deadline = Clock::now() + 300ms};
}

/// Returns the error of rank 0 in a group of three ranks with these lines.
Error root_error(
    const std::vector<std::shared_ptr<Script>>& scripts, const Session::Prepare& prepare = [] { return RoundPart{}; },
    std::optional<Error> arrival_fails = std::nullopt) {
  auto transport = std::make_unique<ScriptedTransport>();
  transport->scripts = scripts;
  transport->arrival_fails = std::move(arrival_fails);
  Session session(terms_of(0), std::move(transport));
  return error_of([&] { (void)session.round(prepare, Clock::now() + 300ms); });
}

std::shared_ptr<Script> rank_script(int rank, bool has_part = true) {
  auto script = std::make_shared<Script>();
  script->comes(Word::hello, bytes_of(hello_of(rank)));
  if (has_part) script->comes(Word::part);
  return script;
}

Error guest_error(
    const std::shared_ptr<Script>& script, const Session::Prepare& prepare = [] { return RoundPart{}; }) {
  auto transport = std::make_unique<ScriptedTransport>();
  transport->scripts = {script};
  return error_of([&] {
    Session session(terms_of(1), std::move(transport));
    (void)session.round(prepare, Clock::now() + 200ms);
  });
}

}  // namespace

TEST_CASE("rank 0 sends the parts of all ranks to each rank, and runs further rounds") {
  auto transport = std::make_unique<ScriptedTransport>();
  const auto first = rank_script(1);
  const auto second = rank_script(2);
  transport->scripts = {second, first};
  Session session(terms_of(0), std::move(transport));
  const auto members = session.round([] { return RoundPart{.payload = {std::byte{7}}}; }, Clock::now() + 1s);
  REQUIRE(members.size() == 3);
  CHECK(members[0].payload.size() == 1);
  CHECK(members[2].pid == 1002);
  CHECK(first->sent == std::vector{Word::heard, Word::all});
  first->comes(Word::part);
  second->comes(Word::part);
  CHECK(session.round([] { return RoundPart{}; }, Clock::now() + 1s).size() == 3);
}

TEST_CASE("a rank receives the parts that it needs in the first round, and later only that of rank 0") {
  const auto with_needs = [](int rank) {
    Terms terms = terms_of(rank);
    terms.needed = [](int of_rank) { return std::vector{0, of_rank}; };
    return terms;
  };
  const std::byte part{2};
  const auto script = rank_script(2, false);
  auto transport = std::make_unique<ScriptedTransport>();
  transport->scripts = {rank_script(1), script};
  script->comes(Word::part, std::span(&part, 1));
  const auto other = transport->scripts.front();
  Session root(with_needs(0), std::move(transport));
  CHECK(root.round([] { return RoundPart{.payload = {std::byte{7}}}; }, Clock::now() + 1s).size() == 3);
  other->comes(Word::part);
  script->comes(Word::part);
  CHECK(root.round([] { return RoundPart{.payload = {std::byte{8}}}; }, Clock::now() + 1s).size() == 3);
  REQUIRE(script->sent == std::vector{Word::heard, Word::all, Word::all});

  const auto received = std::make_shared<Script>();
  for (std::size_t i = 0; i < script->sent.size(); ++i) received->comes(script->sent[i], script->bodies[i]);
  auto guest_transport = std::make_unique<ScriptedTransport>();
  guest_transport->scripts = {received};
  Session guest(with_needs(2), std::move(guest_transport));
  const auto first = guest.round([] { return RoundPart{}; }, Clock::now() + 1s);
  REQUIRE(first.size() == 2);
  CHECK(first[0].payload == std::vector{std::byte{7}});
  CHECK(first[1].rank == 2);
  CHECK(first[1].pid == 1002);
  CHECK(first[1].payload == std::vector{part});
  const auto second = guest.round([] { return RoundPart{}; }, Clock::now() + 1s);
  REQUIRE(second.size() == 1);
  CHECK(second[0].payload == std::vector{std::byte{8}});
}

TEST_CASE("each way in which a rank ends the rendezvous, and the cause that all ranks throw") {
  struct Way {
    const char* name;
    std::function<void(Script&)> change;  // changes the messages of rank 2
    ErrorKind kind;
    std::optional<int> rank;
    const char* words;
  };
  const auto with_hello = [](const std::function<void(Hello&)>& change) {
    return [change](Script& script) {
      Hello hello = hello_of(2);
      change(hello);
      script.incoming.clear();
      script.comes(Word::hello, bytes_of(hello));
    };
  };
  const Way ways[] = {
      {"missing", [](Script& script) { script.incoming.clear(); }, ErrorKind::timeout, 2, "for rank 2 of 3 ranks"},
      {"no part", [](Script& script) { script.incoming.pop_back(); }, ErrorKind::timeout, 2, "does not respond"},
      {"version", with_hello([](Hello& hello) { put_text(hello.version, "0.0.1"); }), ErrorKind::version, 2, "0.0.1"},
      {"size", with_hello([](Hello& hello) { hello.size = 4; }), ErrorKind::rank_mismatch, 2, "one of 4 ranks"},
      {"double", with_hello([](Hello& hello) { hello.rank = 1; }), ErrorKind::rank_mismatch, 1, "two processes"},
      {"rank 0 twice", with_hello([](Hello& hello) { hello.rank = 0; }), ErrorKind::rank_mismatch, 0, "two processes"},
      {"out of range", with_hello([](Hello& hello) { hello.rank = 3; }), ErrorKind::rank_mismatch, 3, "cannot be one"},
      {"dead", [](Script& script) { script.end = Line::End{.words = "closed"}; }, ErrorKind::peer_lost, 2,
       "died or left"},
      {"dead before its part",
       [](Script& script) {
         script.incoming.pop_back();
         script.end = Line::End{.words = "closed"};
       },
       ErrorKind::timeout, 2, "does not respond"},
      {"two parts", [](Script& script) { script.comes(Word::part); }, ErrorKind::corrupt, 2, "twice"},
      {"garbage", [](Script& script) { script.comes(Word::all); }, ErrorKind::corrupt, 2, "not a message"},
      {"failure",
       [](Script& script) {
         const auto message = failure_message(Error(ErrorKind::out_of_space, "rank 2 has no memory", {.rank = 2}));
         script.incoming.pop_back();
         script.comes(Word::failure, std::span(message->bytes).subspan(sizeof(MessageHead)));
       },
       ErrorKind::out_of_space, 2, "has no memory"},
      {"takes nothing", [](Script& script) { script.takes = false; }, ErrorKind::timeout, 2, "did not receive"},
  };
  for (const Way& way : ways) {
    CAPTURE(way.name);
    const auto first = rank_script(1);
    const auto second = rank_script(2);
    way.change(*second);
    // Rank 0 must report the death even while another rank is missing.
    if (std::string_view(way.name) == "dead") first->incoming.pop_back();
    const Error error = root_error({first, second});
    CHECK_MESSAGE(error.kind() == way.kind, error.what());
    CHECK_MESSAGE(error.rank() == way.rank, error.what());
    CHECK_MESSAGE(says(error, way.words), error.what());
    CHECK(std::ranges::count(first->sent, Word::failure) == 1);
  }
}

TEST_CASE("a head is refused before its length is allocated: each word, at each side, from ranks and strangers") {
  constexpr std::uint64_t any = longest_part;
  constexpr std::uint64_t few = 8;  // the head of one part
  constexpr std::uint64_t hello = sizeof(Hello);
  struct Row {
    Word word;
    bool is_root, is_known;
    std::uint64_t least, most;
    std::uint32_t descriptors;
    bool is_on_trunk = false;  // refused on other connections
  };
  const std::uint64_t failure = failure_message(Error(ErrorKind::io, "x"))->bytes.size() - sizeof(MessageHead);
  const std::uint64_t all = 3 * (8 + 32 + 255 + any);
  constexpr std::uint64_t head = sizeof(MessageHead);
  const Row rows[] = {
      {Word::hello, true, false, hello, hello, 0},
      {Word::heard, false, true, hello, hello, 0},
      {Word::heard, false, false, hello, hello, 0},
      {Word::other_job, false, true, 0, 0, 0},
      {Word::other_job, false, false, 0, 0, 0},
      {Word::part, true, true, 0, any, 4},
      {Word::late, true, true, 0, 0, 0},
      {Word::all, false, true, few, all, 12},
      {Word::all, false, false, few, all, 12},
      {Word::failure, true, true, failure, failure, 0},
      {Word::failure, false, true, failure, failure, 0},
      {Word::failure, false, false, failure, failure, 0},
      {Word::through, true, true, 8 + head, 8 + head + any, 0, true},
      {Word::through, false, true, 8 + head, 4 * (1 + 3 + most_other_lines) + head + all, 0, true},
      {Word::through, false, false, 8 + head, 4 * (1 + 3 + most_other_lines) + head + all, 0, true},
      {Word::line_ended, true, true, sizeof(LineEnd), sizeof(LineEnd), 0, true},
      {Word::relay_card, false, true, sizeof(RelayCard), sizeof(RelayCard), 0},
      {Word::relay_card, false, false, sizeof(RelayCard), sizeof(RelayCard), 0},
  };
  for (std::uint32_t word = 0; word <= 11; ++word) {
    for (const auto& [is_root, is_known, is_trunk] : {std::array{true, true, true},
                                                      {true, false, true},
                                                      {false, true, true},
                                                      {false, false, true},
                                                      {true, true, false},
                                                      {true, false, false},
                                                      {false, true, false},
                                                      {false, false, false}}) {
      CAPTURE(word);
      CAPTURE(is_trunk);
      CAPTURE(is_root);
      CAPTURE(is_known);
      const auto row =
          std::ranges::find_if(rows, [&, root = is_root, known = is_known, trunk = is_trunk](const Row& it) {
            return it.word == static_cast<Word>(word) && it.is_root == root && it.is_known == known &&
                   (trunk || !it.is_on_trunk);
          });
      const bool is_allowed = row != std::end(rows);
      const Row limits = is_allowed ? *row : Row{};
      const auto takes = [&, root = is_root, known = is_known, trunk = is_trunk](std::uint64_t bytes,
                                                                                 std::uint32_t descriptors) {
        return parse_head({.word = static_cast<Word>(word), .descriptors = descriptors, .bytes = bytes},
                          {.size = 3, .is_root = root, .is_known = known, .is_trunk = trunk})
            .has_value();
      };
      CHECK(takes(limits.least, 0) == is_allowed);
      CHECK(takes(limits.most, limits.descriptors) == is_allowed);
      CHECK(!takes(limits.most + 1, 0));
      CHECK(!takes(UINT64_MAX, 0));
      if (limits.least != 0) CHECK(!takes(limits.least - 1, 0));
      CHECK(!takes(limits.most, limits.descriptors + 1));
    }
  }
}

TEST_CASE("a message that a relay passes on is taken apart, and any other bytes are refused") {
  const MessageLimits to_root{.size = 3, .is_root = true, .is_known = true};
  const std::array<std::uint32_t, 2> lines = {4, 0};
  const OutgoingPointer part = make_message(Word::part, std::array{std::byte{7}});
  std::vector<std::byte> bytes = carrier_of(lines, *part)->bytes;
  bytes.insert(bytes.end(), part->bytes.begin(), part->bytes.end());
  MessageHead head;
  std::memcpy(&head, bytes.data(), sizeof head);
  CHECK(head.word == Word::through);
  CHECK(head.bytes == bytes.size() - sizeof head);
  const std::span<const std::byte> body = std::span(bytes).subspan(sizeof head);
  const auto carried = parse_carried(body, 2);
  REQUIRE(carried);
  CHECK(carried->lines == std::vector<std::uint32_t>{4, 0});
  const auto inner = parse_whole(carried->bytes, to_root);
  REQUIRE(inner);
  CHECK(inner->word == Word::part);
  CHECK(inner->body == std::vector{std::byte{7}});
  CHECK(!parse_carried(body, 1));
  CHECK(!parse_carried({}, 2));
  CHECK(!parse_carried(std::vector<std::byte>(100), 2));
  CHECK(!parse_carried(body.first(10), 2));
  CHECK(!parse_whole(carried->bytes, {.size = 3}));
  CHECK(!parse_whole(carried->bytes.first(carried->bytes.size() - 1), to_root));
  CHECK(!parse_whole({}, to_root));
  // A message on a trunk contains no other one.
  CHECK(!parse_whole(bytes, {.size = 3, .is_root = true, .is_known = true, .is_trunk = false}));
}

TEST_CASE("a rank behind a relay names the relay if it is lost, and both it and rank 0 at the deadline") {
  const auto script_of = [](const std::string& reason, bool is_heard) {
    auto script = std::make_shared<Script>();
    RelayCard card{.relay = hello_of(2)};
    put_text(card.reason, reason);
    script->comes(Word::relay_card, std::as_bytes(std::span(&card, 1)));
    if (is_heard) script->comes(Word::heard, bytes_of(hello_of(0)));
    return script;
  };
  Error error = guest_error(script_of("", true));
  CHECK_MESSAGE((error.kind() == ErrorKind::timeout && error.rank() == 2 && error.pid() == 1002), error.what());
  CHECK_MESSAGE((says(error, "rank 0 (host ") && says(error, "or rank 2 (host ")), error.what());
  auto lost = script_of("", true);
  lost->end = Line::End{.words = "closed"};
  error = guest_error(lost);
  CHECK_MESSAGE((error.kind() == ErrorKind::peer_lost && error.rank() == 2), error.what());
  error = guest_error(script_of("Connection refused", false));
  CHECK_MESSAGE((error.kind() == ErrorKind::timeout && error.rank() == 0), error.what());
  CHECK_MESSAGE(says(error, "Connection refused, tried by rank 2 (host "), error.what());
  lost = script_of("Connection refused", false);
  lost->end = Line::End{.words = "closed"};
  CHECK(says(guest_error(lost), "there is no line"));
  error = guest_error(script_of("", false));
  CHECK_MESSAGE(says(error, "rank 2 (host "), error.what());
}

TEST_CASE("rank 0 ignores a hello that is older than the one that it has accepted from the same process") {
  const auto script_of = [](std::uint32_t attempt, bool has_part) {
    Hello hello = hello_of(2);
    hello.attempt = attempt;
    auto script = std::make_shared<Script>();
    script->comes(Word::hello, bytes_of(hello));
    if (has_part) script->comes(Word::part);
    return script;
  };
  auto transport = std::make_unique<ScriptedTransport>();
  const auto broken = script_of(2, false);
  const auto newest = script_of(3, true);
  const auto old = script_of(1, false);
  broken->end = Line::End{.words = "closed"};
  transport->scripts = {broken, newest, old, rank_script(1)};
  Session session(terms_of(0), std::move(transport));
  CHECK(session.round([] { return RoundPart{}; }, Clock::now() + 1s).size() == 3);
  CHECK(broken->sent == std::vector{Word::heard});
  CHECK(newest->sent == std::vector{Word::heard, Word::all});
  CHECK(old->sent.empty());
}

TEST_CASE("rank 0's own failures name rank 0, and it sends them to all ranks") {
  const auto first = rank_script(1, false);
  const Error error = root_error({first}, []() -> RoundPart { throw Error(ErrorKind::unsupported, "no pidfd"); });
  CHECK(error.kind() == ErrorKind::unsupported);
  CHECK(error.rank() == 0);
  CHECK(first->sent.back() == Word::failure);
  const Error lack = root_error(
      {}, [] { return RoundPart{}; }, Error(ErrorKind::io, "accept", {.os_error = EMFILE}));
  CHECK(lack.rank() == 0);
  CHECK(lack.os_error() == EMFILE);
}

TEST_CASE("strangers do not disturb the rendezvous: silent ones, malformed bytes, and ranks of other jobs") {
  auto transport = std::make_unique<ScriptedTransport>();
  const auto other = std::make_shared<Script>();
  Hello hello = hello_of(1);
  hello.token = token_of("another job");
  other->comes(Word::hello, bytes_of(hello));
  const auto garbage = std::make_shared<Script>();
  garbage->comes(Word::part);
  for (std::size_t i = 0; i < most_strangers + 40; ++i) transport->scripts.push_back(std::make_shared<Script>());
  transport->scripts.push_back(other);
  transport->scripts.push_back(garbage);
  transport->scripts.push_back(rank_script(2));
  transport->scripts.push_back(rank_script(1));
  Session session(terms_of(0), std::move(transport));
  CHECK(session.round([] { return RoundPart{}; }, Clock::now() + 1s).size() == 3);
  CHECK(other->sent == std::vector{Word::other_job});
}

TEST_CASE(
    "a rank names rank 0 if rank 0 is silent, lost or sends malformed bytes, and throws the failure that rank 0 "
    "sends") {
  const auto heard = [] {
    auto script = std::make_shared<Script>();
    script->comes(Word::heard, bytes_of(hello_of(0)));
    return script;
  };
  Error error = guest_error(std::make_shared<Script>());
  CHECK_MESSAGE((error.kind() == ErrorKind::timeout && error.rank() == 0 && says(error, "could not reach rank")),
                error.what());
  const auto silent = heard();
  error = guest_error(silent);
  CHECK_MESSAGE((error.kind() == ErrorKind::timeout && error.rank() == 0 && error.pid() == 1000), error.what());
  CHECK(silent->sent == std::vector{Word::part, Word::late, Word::failure});
  const auto lost = heard();
  lost->end = Line::End{.words = "closed"};
  error = guest_error(lost);
  CHECK_MESSAGE((error.kind() == ErrorKind::peer_lost && error.rank() == 0), error.what());
  const auto garbled = heard();
  garbled->comes(Word::part);
  error = guest_error(garbled);
  CHECK_MESSAGE((error.kind() == ErrorKind::corrupt && error.rank() == 0), error.what());
  const auto failed = heard();
  const auto message = failure_message(Error(ErrorKind::peer_lost, "rank 2 died", {.rank = 2}));
  failed->comes(Word::failure, std::span(message->bytes).subspan(sizeof(MessageHead)));
  error = guest_error(failed);
  CHECK_MESSAGE((error.kind() == ErrorKind::peer_lost && error.rank() == 2), error.what());
}

TEST_CASE("a rank that cannot prepare its part sends its failure to rank 0") {
  auto script = std::make_shared<Script>();
  script->comes(Word::heard, bytes_of(hello_of(0)));
  const Error error = guest_error(script, []() -> RoundPart { throw Error(ErrorKind::unsupported, "no pidfd"); });
  CHECK_MESSAGE((error.kind() == ErrorKind::unsupported && error.rank() == 1 && says(error, "no pidfd")), error.what());
  CHECK(script->sent == std::vector{Word::failure});
}
