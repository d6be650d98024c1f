// SPDX-License-Identifier: Apache-2.0
// Signals to `muster run`, from other processes and from a terminal.
#include "tests/launch/launcher.hpp"

using namespace launched;

TEST_CASE("signals are forwarded") {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}) {
    CAPTURE(signal);
    // dash starts background commands with SIGINT ignored, so the rank itself waits in small steps.
    Launcher launcher(
        shell(2, "trap 'echo got; exit 0' " + std::to_string(signal) + "; echo $$; while :; do sleep 0.01; done"));
    CHECK(launcher.pids(2).size() == 2);
    ::kill(launcher.pid(), signal);
    CHECK(launcher.wait() == 0);
    CHECK(lines_of(launcher.out()).size() == 4);
  }
}

TEST_CASE("a signal that no rank handles ends the job with its status") {
  Launcher launcher(shell(2, "echo $$; exec sleep 100"));
  const auto pids = launcher.pids(2);
  ::kill(launcher.pid(), SIGTERM);
  CHECK(launcher.wait() == 128 + SIGTERM);
  for (const pid_t pid : pids) CHECK(!is_alive(pid));
}

TEST_CASE("ranks that ignore a terminating signal are killed after some time") {
  for (const int signal : {SIGTERM, SIGHUP}) {
    CAPTURE(signal);
    Launcher launcher(shell(3, "[ $RANK != 2 ] && trap '' TERM HUP; echo $$; while :; do sleep 0.02; done",
                            {"--kill-after", "0.5", "--grace", "60"}));
    const auto pids = launcher.pids(3);
    ::kill(launcher.pid(), signal);
    CHECK(launcher.wait() == 128 + signal);  // of rank 2, the first that failed
    CHECK(contains(launcher.err(), "2 of 3 ranks have not ended 0.5 s after SIG"));
    for (const pid_t pid : pids) CHECK(!is_alive(pid));
  }
}

TEST_CASE("SIGTSTP stops ranks and launcher, SIGCONT resumes them") {
  const TemporaryDirectory folder;
  const std::string go = folder / "go";
  Launcher launcher(shell(2, "echo $$; while [ ! -e " + go + " ]; do sleep 0.01; done"));
  const auto pids = launcher.pids(2);
  ::kill(launcher.pid(), SIGTSTP);
  CHECK(becomes_true(
      [&] { return state_of(pids[0]) == 'T' && state_of(pids[1]) == 'T' && state_of(launcher.pid()) == 'T'; }));
  ::kill(launcher.pid(), SIGCONT);
  CHECK(becomes_true([&] { return state_of(pids[0]) != 'T' && state_of(pids[1]) != 'T'; }));
  std::ofstream{go};
  CHECK(launcher.wait() == 0);
}

TEST_CASE("Ctrl-C at a terminal reaches each rank once") {
  Terminal terminal(shell(
      2,
      "trap 'echo interrupted' INT; echo ready; i=0; while [ $i -lt 30 ]; do sleep 0.02; i=$((i+1)); done; echo end"));
  terminal.read_until("ready", 2);
  terminal.type("\x03");
  terminal.read_until("end", 2);
  CHECK(terminal.wait() == 0);
  CHECK(terminal.times("interrupted") == 2);
}

TEST_CASE("a second Ctrl-C kills ranks that continue after the first") {
  Terminal terminal(shell(2, "trap 'echo interrupted' INT; echo $$; while :; do sleep 0.02; done"));
  terminal.read_until("\n", 2);
  const auto start = Clock::now();
  terminal.type("\x03");
  terminal.read_until("interrupted", 2);
  terminal.type("\x03");
  terminal.type_until("\x03", "interrupted again");
  CHECK(terminal.wait() == 128 + SIGKILL);
  CHECK(Clock::now() - start < 5s);
  CHECK(terminal.times("muster run: interrupted again: killing the ranks") == 1);
  CHECK(terminal.times("was killed by") == 0);
}

TEST_CASE("if the terminal of a launcher that leads its session is closed, the ranks end") {
  const TemporaryDirectory folder;
  Terminal terminal(
      shell(2, "trap 'echo gone > " + (folder / "$RANK") + "; exit 0' HUP; echo ready; while :; do sleep 0.02; done"));
  terminal.read_until("ready", 2);
  terminal.close();
  CHECK(terminal.wait() == 0);
  for (const char* rank : {"0", "1"}) CHECK(read_text(folder / rank) == "gone\n");
}
