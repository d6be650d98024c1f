// SPDX-License-Identifier: Apache-2.0
// Directories that programs create. Leftovers of dead writers are deleted, and other files are kept. A program that
// replaces a directory is killed at every call.

#include "src/checkpoint/model/output_directory.hpp"

#include <doctest/doctest.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <initializer_list>
#include <map>

#include "muster/log.hpp"
#include "src/os/directory.hpp"
#include "src/os/fault.hpp"
#include "src/os/publish.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;
namespace fs = std::filesystem;

namespace {

/// Runs `body` in a process. Returns the signal that ended it, or 0.
int signal_of_child(const std::function<void()>& body) {
  return Ranks(1, [&](int) { body(); }).wait().front().signal;
}

void write_model(const std::string& directory, std::string_view words) {
  fs::create_directories(directory);
  write_text(directory + "/model.safetensors", words);
  write_text(directory + "/config.json", words);
}

void replace_model(const std::string& out, std::string_view words) {
  OutputDirectory output(out, {.force = true});
  write_model(output.partial(), words);
  output.commit();
}

/// Leaves the files of a process that is killed while it writes to `out`.
std::string leave_one(const std::string& out) {
  CHECK(signal_of_child([&] {
          OutputDirectory output(out);
          write_text(output.partial() + "/model.safetensors", "half");
          ::kill(::getpid(), SIGKILL);
        }) == SIGKILL);
  for (const auto& entry : fs::directory_iterator(fs::path(out).parent_path()))
    if (entry.path().filename().string().starts_with(fs::path(out).filename().string() + ".partial-"))
      return entry.path();
  FAIL("nothing was left");
  return {};
}

/// Returns the name of `path` as another process would have made it.
std::string by_another(std::string path, const std::function<void(os::ProcessIdentity&)>& change) {
  const std::size_t at = path.rfind('@') + 1;
  os::ProcessIdentity writer = *os::parse_identity(path.substr(at));
  change(writer);
  return path.substr(0, at) + os::identity_text(writer);
}

struct Seen {
  Seen() {
    set_log_hook([this](LogLevel, std::string_view words) { warnings += words; }, LogLevel::warning);
  }
  ~Seen() { set_log_hook({}); }
  std::string warnings;
};

int nth = 0;
bool without_exchange = false;

// Kills this process at the nth call of any kind.
int kill_hook(std::string_view call, std::string_view) {
  if (--nth == 0) ::kill(::getpid(), SIGKILL);
  return without_exchange && call == "exchange" ? EINVAL : 0;
}

}  // namespace

TEST_CASE("the next writer removes the leftovers of a killed writer at once, before it requests space") {
  const TemporaryDirectory work;
  leave_one(work / "out");
  const OutputDirectory output(work / "out");
  CHECK(names_in(work.path()) == std::vector{fs::path(output.partial()).filename().string()});
}

TEST_CASE("a folder that only looks like an export's is kept, and so is one whose writer lives or is unknown") {
  const TemporaryDirectory work;
  const std::string left = leave_one(work / "out");
  // The start time differs by one second, so the PID belonged to another process.
  for (const std::string& name :
       {work / "out.partial-keep", work / "out.partial-0123456789abcdef", work / "out.partial-x@y",
        work / "out2.partial-0123456789abcdef@" + left.substr(left.rfind('@') + 1),
        by_another(left, [](auto& it) { it = os::own_identity(); }), by_another(left, [](auto& it) { it.host += "x"; }),
        by_another(left, [](auto& it) { it.boot[0] = it.boot[0] == '0' ? '1' : '0'; })}) {
    fs::create_directory(name);
    write_text(name + "/precious", "precious");
  }
  fs::remove_all(left);
  const auto before = names_in(work.path());
  Seen seen;
  { const OutputDirectory output(work / "out"); }
  CHECK(names_in(work.path()) == before);
  for (const char* words : {"cannot be checked from this host", "delete it or pass --stale-after"})
    CHECK(has(seen.warnings, words));
  // These folders have not changed for a second. Only a small enough age removes them.
  { const OutputDirectory output(work / "out", {.stale_after = std::chrono::hours(1)}); }
  CHECK(names_in(work.path()) == before);
  { const OutputDirectory output(work / "out", {.stale_after = std::chrono::seconds(0)}); }
  CHECK(names_in(work.path()).size() == before.size() - 2);
}

TEST_CASE("output kept on failure is released, and a process that can use it resumes it") {
  const TemporaryDirectory work;
  std::string kept;
  {
    OutputDirectory output(work / "out");
    output.keep_on_failure();
    write_text(output.partial() + "/half", "half");
  }
  CHECK(names_in(work.path()).size() == 1);
  const auto is_useful = [](const std::string& partial) { return fs::exists(partial + "/half"); };
  {
    const OutputDirectory output(work / "out", {}, is_useful);
    CHECK(read_text(output.partial() + "/half") == "half");
    CHECK(names_in(work.path()).size() == 1);
  }
  CHECK(names_in(work.path()).empty());
}

TEST_CASE("--force that is killed at any call leaves the old or the new output, with and without an atomic exchange") {
  for (const bool fallback : {false, true}) {
    const TemporaryDirectory work;
    write_model(work / "out", "old");
    int parked = 0;
    for (int call = 1;; ++call) {
      CAPTURE(call);
      const int signal = signal_of_child([&] {
        nth = call;
        without_exchange = fallback;
        os::set_fault_hook(kill_hook);
        replace_model(work / "out", "new");
      });
      if (!fs::exists(work / "out")) {
        ++parked;
        // The old output is stored under another name. A run without --force does not replace it: it first renames it
        // back.
        Seen seen;
        CHECK(has(words_of(ErrorKind::invalid_argument, [&] { const OutputDirectory output(work / "out"); }),
                  "already exists"));
        CHECK(has(seen.warnings, "is restored"));
      }
      const std::string words = read_text(work / "out/model.safetensors");
      CHECK((words == "old" || words == "new"));
      CHECK(read_text(work / "out/config.json") == words);
      if (words == "new") replace_model(work / "out", "old");
      { const OutputDirectory output(work / "out", {.force = true}); }
      CHECK(names_in(work.path()) == std::vector<std::string>{"out"});
      if (signal == 0) break;
      CHECK(signal == SIGKILL);
    }
    CHECK((parked > 0) == fallback);
  }
}

TEST_CASE("an earlier model is kept if another one has taken its name before it could be renamed back") {
  const TemporaryDirectory work;
  write_model(work / "out", "old");
  for (int call = 1; fs::exists(work / "out"); ++call) {
    CHECK(signal_of_child([&] {
            nth = call;
            without_exchange = true;
            os::set_fault_hook(kill_hook);
            replace_model(work / "out", "new");
          }) == SIGKILL);
    if (fs::exists(work / "out")) replace_model(work / "out", "old");
  }
  write_model(work / "out", "somebody's");
  const auto before = names_in(work.path());
  for (int i = 0; i < 2; ++i) {
    Seen seen;
    replace_model(work / "out", "newest");
    CHECK(has(seen.warnings, "which another program has made since"));
  }
  CHECK(names_in(work.path()) == before);
}

TEST_CASE("--force deletes weights and the files written with them, and nothing else") {
  const TemporaryDirectory work;
  const auto refused = [&](std::string_view words) {
    CHECK(has(words_of(ErrorKind::invalid_argument, [&] { check_output(work / "out", {.force = true}); }), words));
  };
  const auto make = [&](std::initializer_list<const char*> names) {
    OutputDirectory output(work / "out", {.force = true});
    write_model(output.partial(), "made");
    for (const char* name : names) {
      fs::create_directories(fs::path(output.partial() + "/" + name).parent_path());
      write_text(output.partial() + "/" + name, "made");
    }
    output.commit();
  };
  // In a model of another program, only the weights and config.json may be replaced, and no other file.
  write_model(work / "out", "old");
  check_output(work / "out", {.force = true});
  write_text(work / "out/tokenizer.json", "");
  refused("(\"tokenizer.json\")");
  fs::remove(work / "out/tokenizer.json");
  // A result of Muster is replaced by any other result, whatever files it adds.
  make({"README.md", "src/model.py"});
  make({});
  make({"README.md", "src/model.py"});
  for (const char* name : {"notes.txt", "src/train.py", "stray.safetensors", "LICENSE"}) {
    write_text(work / "out/" + name, "mine");
    refused(std::string("(\"") + name + "\")");
    refused("Move them away");
    fs::remove(work / "out/" + name);
    check_output(work / "out", {.force = true});
  }
  for (const char* name : {"README.md", "src/model.py", "config.json"}) {
    write_text(work / "out/" + name, "edited");
    refused(std::string("(\"") + name + "\")");
    write_text(work / "out/" + name, "made");
    check_output(work / "out", {.force = true});
  }
  fs::remove(work / "out/model.safetensors");
  refused("no model and no shards");
  fs::remove_all(work / "out");
  for (const char* weights : {"rank-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"}) {
    fs::create_directory(work / "out");
    check_output(work / "out", {.force = true});
    write_text(work / "out/" + weights, "");
    check_output(work / "out", {.force = true});
    fs::remove_all(work / "out");
  }
  fs::create_symlink("shards", work / "out");
  refused("it is not a directory");
}

TEST_CASE("new files and directories get the modes of those that they replace") {
  const TemporaryDirectory work;
  const auto mode_of = [](const std::string& path) { return os::rights_of(path)->mode; };
  write_model(work / "out", "old");
  fs::create_directory(work / "out/src");
  const std::map<std::string, std::uint32_t> modes = {
      {"", 02770}, {"/src", 0750}, {"/model.safetensors", 0640}, {"/config.json", 0660}};
  for (const auto& [name, mode] : modes) fs::permissions(work / "out" + name, fs::perms(mode));
  {
    OutputDirectory output(work / "out", {.force = true});
    CHECK((mode_of(output.partial()) & 0777) == 0770);
    write_model(output.partial(), "new");
    write_text(output.partial() + "/model-00001-of-00002.safetensors", "new");
    fs::create_directory(output.partial() + "/src");
    output.commit();
  }
  for (const auto& [name, mode] : modes) CHECK(mode_of(work / "out" + name) == mode);
  // A file with a new name is not more accessible than all of the old files.
  CHECK(mode_of(work / "out/model-00001-of-00002.safetensors") == 0640);
  os::PublishedFile file(work / "out/config.json");
  CHECK(mode_of(file.temporary()) == 0660);
  file.commit();
  CHECK(mode_of(work / "out/config.json") == 0660);
}

TEST_CASE("a rename that a server answers twice is complete") {
  const TemporaryDirectory work;
  // NFS does not support the flags. The plain rename is done, and its reply is lost.
  static std::string from;
  for (const int answer : {ENOENT, ENOTEMPTY}) {
    fs::create_directory(work / "from");
    write_text(work / "from/x", "x");
    from = work / "from";
    static int lost = 0;
    lost = answer;
    os::set_fault_hook([](std::string_view call, std::string_view to) {
      if (call == "rename") return EINVAL;
      if (call != "plain-rename") return 0;
      CHECK(::rename(from.c_str(), std::string(to).c_str()) == 0);
      return lost;
    });
    os::rename_to_new(work / "from", work / "to");
    os::set_fault_hook(nullptr);
    CHECK(read_text(work / "to/x") == "x");
    fs::create_directory(work / "from");
    CHECK(has(words_of(ErrorKind::invalid_argument, [&] { os::rename_to_new(work / "from", work / "to"); }),
              "already exists"));
    fs::remove_all(work / "from");
    fs::remove_all(work / "to");
  }
}

TEST_CASE("a directory with a long name, and the leftovers of it") {
  const TemporaryDirectory work;
  const std::string name(250, 'n');
  leave_one(work / name.substr(0, 70));
  CHECK(signal_of_child([&] {
          OutputDirectory output(work / name);
          ::kill(::getpid(), SIGKILL);
        }) == SIGKILL);
  CHECK(names_in(work.path()).size() == 2);
  OutputDirectory output(work / name);
  CHECK(names_in(work.path()).size() == 2);
  output.commit();
  CHECK(fs::is_directory(work / name));
}
